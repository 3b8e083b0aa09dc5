package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/doctor"
	"abfleet/internal/fault"
)

func (a *app) viewCommand() *cobra.Command {
	var session, identity string
	cmd := &cobra.Command{
		Use: "view", Short: "Print the address of the page that shows a browser; keep it to yourself", Args: cobra.NoArgs,
		Long: "view prints the address of the page of this fleet, or with --session or --identity\nof one browser. The address holds the access token: who has it can use every browser.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if session != "" && identity != "" {
				return usageError{errors.New("view takes --session or --identity, not both")}
			}
			query := url.Values{}
			if session != "" {
				query.Set("session", session)
			}
			if identity != "" {
				query.Set("identity", identity)
			}
			answer, err := a.get(cmd.Context(), api.ViewPath, query)
			if err != nil {
				return err
			}
			if answer.View == nil {
				return incomplete("view")
			}
			// The link holds for the next start too; that it shows nothing now is
			// no failure.
			switch {
			case session != "":
				shown, err := a.get(cmd.Context(), api.SessionPath, query)
				if err != nil {
					return err
				}
				if answer.Session = shown.Session; answer.Session == nil {
					return incomplete("session")
				}
				a.notRunning("browser", session, answer.Session.State,
					"abfleet session use "+fault.Word(session)+" "+fault.Word(answer.Session.IdentityName))
			case identity != "":
				shown, err := a.get(cmd.Context(), api.IdentityPath, query)
				if err != nil {
					return err
				}
				if answer.Identity = shown.Identity; answer.Identity == nil {
					return incomplete("identity")
				}
				a.notRunning("login browser", answer.Identity.Name, answer.Identity.Login.State,
					"abfleet identity login "+fault.Word(answer.Identity.Name))
			}
			a.show(answer, func() { a.printf("%s\n", answer.View.URL) })
			return nil
		},
	}
	cmd.Flags().StringVar(&session, "session", "", "session whose Session Browser to show")
	cmd.Flags().StringVar(&identity, "identity", "", "Identity whose login browser to show")
	return cmd
}

// The states of a browser that the commands tell from the others.
const (
	stateStopped      = "stopped"
	stateControllable = "controllable"
)

// notRunning says of a browser that a link shows nothing of it, and what starts
// it.
func (a *app) notRunning(what, whose, state, start string) {
	if state != stateControllable {
		_, _ = fmt.Fprintf(a.errOut, "note: the %s of %s is %s\nhint: start it: %s\n", what, whose, state, a.ours(start))
	}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the versions of this command and of the service", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			answer := &api.Answer{OK: true}
			// A service that does not run is no failure here.
			if asked, err := a.get(cmd.Context(), api.VersionPath, nil); err == nil {
				answer.Version = asked.Version
			}
			if a.json {
				a.writeJSON(map[string]any{"ok": true, "command": api.Version, "service": answer.Version})
				return nil
			}
			a.printf("abfleet %s\n", api.Version)
			if answer.Version == nil {
				a.printf("abfleetd is not reachable\n")
			} else {
				a.printf("abfleetd %s, pid %d, since %s\n", answer.Version.Version, answer.Version.PID, when(answer.Version.StartedAt))
			}
			return nil
		},
	}
}

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Check this host, and say how to repair what is wrong", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			env := a.host()
			findings := doctor.Run(cmd.Context(), env, doctor.Checks())
			findings = append(findings, askDoctor(cmd.Context(), env.Socket, findings)...)
			for i := range findings {
				findings[i].Hint = a.ours(findings[i].Hint)
			}
			result := &api.Answer{OK: true, Doctor: &api.Doctor{OK: doctor.OK(findings), Findings: findings}}
			a.show(result, func() { a.findings(findings) })
			if !result.Doctor.OK {
				return errUnhealthy
			}
			return nil
		},
	}
}

// host is what doctor looks at: the state of the installed service, and the
// defaults where the configuration does not load, so that all else is checked.
func (a *app) host() *doctor.Env {
	assumed := *a
	configFile, home, _ := a.newSetup().installed()
	if assumed.config == "" {
		assumed.config = configFile
	}
	assumed.getenv = func(name string) string {
		value := a.getenv(name)
		switch {
		case name == "AGENT_BROWSER_FLEET_HOME" && home != "":
			// A service has none of a shell's environment.
			return home
		case name == "XDG_RUNTIME_DIR" && value == "":
			// It has a check of its own.
			return "/run/user/" + strconv.Itoa(os.Geteuid())
		}
		return value
	}
	cfg, err := assumed.load()
	if err != nil {
		cfg = config.Defaults(a.prefix, assumed.getenv)
	}
	if assumed.config == "" && a.prefix != "abfleet" && errors.Is(err, fs.ErrNotExist) {
		err = fault.New(fault.InvalidConfig, "load configuration", "Run: abfleet setup --now", "the fleet %s is not set up: there is no %s", a.prefix, a.configFile())
	}
	socket := cmp.Or(a.socket, a.getenv("AGENT_BROWSER_FLEET_SOCKET"), cfg.ControlSocket())
	env := doctor.NewEnv(cfg, socket)
	env.Getenv, env.ConfigError, env.Explain = a.getenv, err, a.explain
	return env
}

// doctorTimeout bounds the checks of the service.
var doctorTimeout = time.Minute

// askDoctor returns what the service finds that this process did not. It may see
// another host: its unit can have settings that this shell has not. A service
// that does not answer has failed its check here, and is not waited for again.
func askDoctor(ctx context.Context, socket string, here []api.Finding) []api.Finding {
	if slices.ContainsFunc(here, func(f api.Finding) bool { return f.Code == "service" && f.Status == doctor.StatusFailed }) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	answer, err := api.NewClient(socket).Get(ctx, api.DoctorPath, nil)
	if err != nil || answer.Doctor == nil {
		return nil
	}
	return onlyThere(here, answer.Doctor.Findings)
}

// onlyThere returns the failures that the service has and this process has not.
func onlyThere(here, there []api.Finding) []api.Finding {
	ok := make(map[string]bool)
	for _, f := range here {
		ok[f.Code] = f.Status == doctor.StatusOK
	}
	var more []api.Finding
	for _, f := range there {
		if f.Status == doctor.StatusFailed && ok[f.Code] {
			f.Title += " (inside the service)"
			more = append(more, f)
		}
	}
	return more
}

func (a *app) findings(findings []api.Finding) {
	for _, f := range findings {
		mark := map[string]string{doctor.StatusOK: "ok", doctor.StatusSkipped: "skip"}[f.Status]
		if f.Status == doctor.StatusFailed {
			mark = map[string]string{doctor.SeverityError: "FAIL", doctor.SeverityWarning: "warn"}[f.Severity]
		}
		a.printf("%-5s %s: %s\n", mark, f.Title, f.Text)
		if f.Hint != "" {
			a.printf("      hint: %s\n", f.Hint)
		}
	}
}

func incomplete(what string) error {
	return fault.New(fault.ServiceUnavailable, "read the answer of the service", "Check that service and CLI are of one release", "it holds no %s", what)
}

func (a *app) problem(p *api.Problem) {
	if p == nil {
		return
	}
	a.printf("problem (%s): %s\n", when(p.At), p.Message)
	if p.Hint != "" {
		a.printf("hint: %s\n", p.Hint)
	}
}

// table writes rows under a header, in columns.
func (a *app) table(header string, rows int, row func(int) string) {
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, header)
	for i := range rows {
		_, _ = fmt.Fprintln(w, row(i))
	}
	_ = w.Flush()
}

func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05")
}
