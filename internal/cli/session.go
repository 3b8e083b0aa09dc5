package cli

import (
	"context"
	"fmt"
	"net/url"

	"github.com/spf13/cobra"

	"abfleet/internal/api"
	"abfleet/internal/fault"
)

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
					return fmt.Sprintf("%s\t%s\t%s\t%s", v.Session, v.IdentityName, state(&v), when(v.StartedAt))
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
				a.printf("%s\nIdentity: %s (%s)\nstate: %s\nwanted: %s\nstarted: %s\n", s.Session, s.IdentityName, s.IdentityID, state(s), s.Wanted, when(s.StartedAt))
				if exit := s.LastExit; exit != nil {
					clean, cost := "clean", ""
					if !exit.Clean {
						clean, cost = "unclean", "; logins in session cookies are lost, and what pages stored in its last 30 s may be lost"
					}
					a.printf("last end: %s, %s: %s%s\n", when(exit.At), clean, exit.Detail, cost)
				}
				if s.Slice != "" {
					a.printf("units: %s\n", s.Slice)
				}
				a.problem(s.Problem)
			})
			return nil
		},
	}
	restart := &cobra.Command{
		Use: "restart SESSION", Short: "Stop a Session Browser cleanly and start it again", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.session(cmd.Context(), api.RestartPath, api.SessionRequest{Session: args[0]}, func(s *api.Session) {
				a.printf("session %s was restarted, its browser is %s\n", s.Session, s.State)
			})
		},
	}
	var sure, loggedOut bool
	release := &cobra.Command{
		Use: "release SESSION", Short: "End a Session Browser for good: its Identity Binding goes, profile and login stay", Args: cobra.ExactArgs(1),
		Long: "release stops the Session Browser cleanly and removes the session's Identity Binding.\nThe profile stays with its login, for the next session that uses the Identity, this\none first. It waits for what an agent is doing in the browser.",
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.SessionPath, url.Values{"session": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Session == nil {
				return incomplete("session")
			}
			s := answer.Session
			err = a.confirm(opRelease, sure, fmt.Sprintf("Release session %s from Identity %s? Its browser is %s and ends; its login stays.", s.Session, s.IdentityName, s.State))
			if err != nil {
				return err
			}
			return a.release(cmd.Context(), s.Session, loggedOut)
		},
	}
	release.Flags().BoolVarP(&sure, "yes", "y", false, "do not ask")
	release.Flags().BoolVar(&loggedOut, "logged-out", false, "its login is lost: give its profile to no session before the Identity was saved anew")
	return group("session", "Manage Session Browsers", use, list, show, stop, restart, release)
}

// state is a session's state, with its place in the queue of starts.
func state(s *api.Session) string {
	if s.Queued == 0 {
		return s.State
	}
	return fmt.Sprintf("%s, start %d in the queue", s.State, s.Queued)
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

const opRelease = "release session browser"

func (a *app) release(ctx context.Context, session string, loggedOut bool) error {
	return a.session(ctx, api.ReleasePath, api.SessionRequest{Session: session, LoggedOut: loggedOut}, func(s *api.Session) {
		a.printf("session %s was released from Identity %s\n", s.Session, s.IdentityName)
	})
}

// recoverCommand shows the evidence about a browser whose cleanup is not proven,
// and releases it if the person wants that then.
func (a *app) recoverCommand() *cobra.Command {
	const op = "recover session browser"
	var sure bool
	cmd := &cobra.Command{
		Use: "recover SESSION", Short: "Show what is left of a Session Browser that is BROKEN or quarantined, and release it", Args: cobra.ExactArgs(1),
		Long: "recover shows the evidence about every process of the Session Browser, asks, and\nreleases the session: profile and login stay. A process is ended only if it is proven\nto be the browser's; where that is in doubt nothing is changed.",
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.RecoveryPath, url.Values{"session": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Session == nil || answer.Examination == nil {
				return incomplete("examination")
			}
			s, e := answer.Session, answer.Examination
			if !a.json {
				a.examination(s, e)
			}
			if !e.Recoverable {
				return fault.New(fault.BrowserStopUnproven, op,
					"End by hand what the evidence names if it is yours, then run it again", "the evidence is not enough to end what is left; nothing was changed")
			}
			err = a.confirm(op, sure, fmt.Sprintf("End what is left and release session %s from Identity %s? Its profile and login stay.", s.Session, s.IdentityName))
			if err != nil {
				return err
			}
			return a.release(cmd.Context(), s.Session, false)
		},
	}
	cmd.Flags().BoolVarP(&sure, "yes", "y", false, "do not ask")
	return cmd
}

func (a *app) examination(s *api.Session, e *api.Examination) {
	a.printf("%s\nIdentity: %s\nstate: %s\nunits: %s\n", s.Session, s.IdentityName, s.State, s.Slice)
	a.problem(s.Problem)
	if e.Vacant {
		a.printf("nothing of it is left\n")
	} else {
		a.printf("left: %s\n", e.Reason)
	}
	for _, r := range e.Roles {
		a.printf("%s: %s", r.Role, r.Verdict)
		if r.PID > 0 {
			a.printf(", process %d", r.PID)
		}
		a.printf("\n")
		for _, line := range r.For {
			a.printf("  + %s\n", line)
		}
		for _, line := range r.Against {
			a.printf("  - %s\n", line)
		}
	}
}
