package cli

import (
	"cmp"
	"context"
	"fmt"
	"net/url"

	"github.com/spf13/cobra"

	"abfleet/internal/api"
	"abfleet/internal/config"
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
	rename := &cobra.Command{
		Use: "rename IDENTITY NAME", Short: "Give an Identity another name", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.identity(cmd.Context(), api.RenamePath, api.IdentityRequest{Identity: args[0], Name: args[1]}, func(i *api.Identity) {
				a.printf("renamed to %s (%s)\n", i.Name, i.ID)
			})
		},
	}
	var given api.Limits
	limit := &cobra.Command{
		Use: "limit IDENTITY", Short: "Show or set what each browser of an Identity may take", Args: cobra.ExactArgs(1),
		Long: "limit sets limits of the Stack's slice, from the next start of each browser on: bytes\nwith K, M, G or T, or infinity. default goes back to the configuration. Without a flag\nit shows what is set.",
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.IdentityPath, url.Values{"identity": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Identity == nil {
				return incomplete("identity")
			}
			limits := answer.Identity.Limits
			if err := changeLimits(&limits, given); err != nil {
				return usageError{err}
			}
			show := func(i *api.Identity) {
				for _, l := range limitList(&i.Limits) {
					a.printf("%s: %s\n", l.name, cmp.Or(*l.value, "default"))
				}
			}
			if given == (api.Limits{}) {
				a.show(answer, func() { show(answer.Identity) })
				return nil
			}
			return a.identity(cmd.Context(), api.LimitsPath, api.LimitsRequest{Identity: answer.Identity.ID, Limits: limits}, show)
		},
	}
	for _, l := range limitList(&given) {
		limit.Flags().StringVar(l.value, l.name, "", l.about)
	}
	var sure bool
	remove := &cobra.Command{
		Use: "delete IDENTITY", Short: "Delete an Identity that nothing uses, with its login and its profiles on the disk", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := a.get(cmd.Context(), api.IdentityPath, url.Values{"identity": {args[0]}})
			if err != nil {
				return err
			}
			if answer.Identity == nil {
				return incomplete("identity")
			}
			i := answer.Identity
			err = a.confirm("delete identity", sure, fmt.Sprintf("Delete Identity %s with its login, saved %s, and all its profiles? Nothing brings them back.", i.Name, when(i.SnapshotAt)))
			if err != nil {
				return err
			}
			return a.identity(cmd.Context(), api.DeletePath, api.IdentityRequest{Identity: i.ID}, func(i *api.Identity) {
				a.printf("deleted Identity %s\n", i.Name)
			})
		},
	}
	remove.Flags().BoolVarP(&sure, "yes", "y", false, "do not ask")
	return group("identity", "Manage Identities: reusable logins", create, login, save, stop, list, status, rename, limit, remove)
}

// namedLimit is one limit with what its flag is called.
type namedLimit struct {
	name, about string
	value       *string
}

func limitList(l *api.Limits) []namedLimit {
	return []namedLimit{
		{"memory-high", "above it the kernel takes memory back", &l.MemoryHigh},
		{"memory-max", "at it the kernel kills", &l.MemoryMax},
		{"tasks-max", "processes and threads", &l.TasksMax},
		{"cpu-weight", "share of a busy processor, 1 to 10000", &l.CPUWeight},
	}
}

// changeLimits sets those that were given.
func changeLimits(limits *api.Limits, given api.Limits) error {
	list := limitList(limits)
	for i, l := range limitList(&given) {
		switch *l.value {
		case "":
		case "default":
			*list[i].value = ""
		default:
			var checked config.Limit
			if err := checked.UnmarshalText([]byte(*l.value)); err != nil {
				return fmt.Errorf("--%s: %w", l.name, err)
			}
			*list[i].value = *l.value
		}
	}
	return nil
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
