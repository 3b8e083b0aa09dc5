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

func (a *app) identityCommand() *cobra.Command {
	create := &cobra.Command{
		Use: "create NAME", Short: "Create an Identity, to log in with next", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.identity(cmd.Context(), api.IdentitiesPath, api.CreateIdentity{Name: args[0]}, func(i *api.Identity) {
				a.printf("created Identity %s (%s)\nnext: abfleet identity login %s\n", i.Name, i.ID, fault.Word(i.Name))
			})
		},
	}
	var start string
	login := &cobra.Command{
		Use: "login IDENTITY", Short: "Start the login browser of an Identity and print the page that shows it", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.post(cmd.Context(), api.LoginPath, api.IdentityRequest{Identity: args[0], URL: start})
			if err != nil {
				return err
			}
			if answer.Identity == nil {
				return incomplete("identity")
			}
			view, err := a.get(cmd.Context(), api.ViewPath, url.Values{"identity": {answer.Identity.ID}})
			if err != nil {
				return err
			}
			answer.View = view.View
			a.show(answer, func() {
				a.printf("log in here: %s\nthen save it: abfleet identity save %s\n", answer.View.URL, fault.Word(answer.Identity.Name))
			})
			return nil
		},
	}
	login.Flags().StringVar(&start, "url", "", "page to open first")
	save := &cobra.Command{
		Use: "save IDENTITY", Short: "Close the login browser and keep its login as the Template Snapshot", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.identity(cmd.Context(), api.SavePath, api.IdentityRequest{Identity: args[0]}, func(i *api.Identity) {
				a.printf("saved Identity %s, it is %s\nnext: abfleet session use SESSION %s\n", i.Name, i.State, fault.Word(i.Name))
			})
		},
	}
	stop := &cobra.Command{
		Use: "stop IDENTITY", Short: "Close the login browser without saving; its profile stays", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			before, err := a.get(cmd.Context(), api.IdentityPath, url.Values{"identity": {args[0]}})
			if err != nil {
				return err
			}
			return a.identity(cmd.Context(), api.StopLoginPath, api.IdentityRequest{Identity: args[0]}, func(i *api.Identity) {
				if before.Identity != nil && before.Identity.Login.State == stateStopped {
					a.printf("no login browser of %s was running\n", i.Name)
					return
				}
				a.printf("stopped the login browser of %s\n", i.Name)
			})
		},
	}
	list := &cobra.Command{
		Use: "list", Short: "List the Identities", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			answer, err := a.get(cmd.Context(), api.IdentitiesPath, nil)
			if err != nil {
				return err
			}
			a.show(answer, func() {
				a.table("NAME\tSTATE\tLOGIN\tSESSIONS\tSAVED\tID", len(answer.Identities), func(i int) string {
					v := answer.Identities[i]
					return fmt.Sprintf("%s\t%s\t%s\t%d\t%s\t%s", v.Name, v.State, v.Login.State, v.Sessions, when(v.SnapshotAt), v.ID)
				})
			})
			return nil
		},
	}
	status := &cobra.Command{
		Use: "status IDENTITY", Short: "Show one Identity", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.IdentityPath, url.Values{"identity": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Identity == nil {
				return incomplete("identity")
			}
			a.show(answer, func() {
				i := answer.Identity
				a.printf("%s (%s)\nstate: %s\nlogin browser: %s\nsessions: %d\nsaved: %s\n", i.Name, i.ID, i.State, i.Login.State, i.Sessions, when(i.SnapshotAt))
				if i.Login.Unsaved {
					a.printf("the last login is not saved yet: abfleet identity save %s\n", fault.Word(i.Name))
				}
				a.problem(i.Problem)
				a.problem(i.Login.Problem)
			})
			return nil
		},
	}
	return group("identity", "Manage Identities: reusable logins", create, login, save, stop, list, status)
}

func (a *app) sessionCommand() *cobra.Command {
	use := &cobra.Command{
		Use: "use SESSION IDENTITY", Short: "Bind an Identity to a session and start its Session Browser", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.session(cmd.Context(), api.UsePath, api.SessionRequest{Session: args[0], Identity: args[1]}, func(s *api.Session) {
				a.printf("session %s uses Identity %s, its browser is %s\n", s.Session, s.IdentityName, s.State)
			})
		},
	}
	stop := &cobra.Command{
		Use: "stop SESSION", Short: "Stop a Session Browser; its Profile and Identity stay bound", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.session(cmd.Context(), api.StopSessionPath, api.SessionRequest{Session: args[0]}, func(s *api.Session) {
				a.printf("session %s is %s\n", s.Session, s.State)
			})
		},
	}
	list := &cobra.Command{
		Use: "list", Short: "List the sessions that have an Identity", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			answer, err := a.get(cmd.Context(), api.SessionsPath, nil)
			if err != nil {
				return err
			}
			a.show(answer, func() {
				a.table("SESSION\tIDENTITY\tSTATE\tSTARTED", len(answer.Sessions), func(i int) string {
					v := answer.Sessions[i]
					return fmt.Sprintf("%s\t%s\t%s\t%s", v.Session, v.IdentityName, v.State, when(v.StartedAt))
				})
			})
			return nil
		},
	}
	show := &cobra.Command{
		Use: "show SESSION", Short: "Show one session", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.SessionPath, url.Values{"session": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Session == nil {
				return incomplete("session")
			}
			a.show(answer, func() {
				s := answer.Session
				a.printf("%s\nIdentity: %s (%s)\nstate: %s\nwanted: %s\nstarted: %s\n", s.Session, s.IdentityName, s.IdentityID, s.State, s.Wanted, when(s.StartedAt))
				if exit := s.LastExit; exit != nil {
					clean := "unclean"
					if exit.Clean {
						clean = "clean"
					}
					a.printf("last end: %s, %s %s\n", when(exit.At), clean, exit.Detail)
				}
				if s.Slice != "" {
					a.printf("units: %s\n", s.Slice)
				}
				a.problem(s.Problem)
			})
			return nil
		},
	}
	return group("session", "Manage Session Browsers", use, list, show, stop)
}

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

// identity posts a request whose answer is an Identity.
func (a *app) identity(ctx context.Context, path string, body any, text func(*api.Identity)) error {
	answer, err := a.post(ctx, path, body)
	if err != nil {
		return err
	}
	if answer.Identity == nil {
		return incomplete("identity")
	}
	a.show(answer, func() { text(answer.Identity) })
	return nil
}

// session posts a request whose answer is a session.
func (a *app) session(ctx context.Context, path string, body any, text func(*api.Session)) error {
	answer, err := a.post(ctx, path, body)
	if err != nil {
		return err
	}
	if answer.Session == nil {
		return incomplete("session")
	}
	a.show(answer, func() { text(answer.Session) })
	return nil
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
