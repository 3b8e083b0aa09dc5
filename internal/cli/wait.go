package cli

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/fault"
	"abfleet/units"
)

var (
	// waitLook is the time between two looks at a service that has not
	// answered.
	waitLook = time.Second
	// tellAfter is how long a command waits in silence, and tellAgain how
	// long for after each word. What starts and stops browsers takes seconds.
	tellAfter, tellAgain = 10 * time.Second, 30 * time.Second
	// readTimeout bounds a question to a service that is not starting; it
	// answers them from its state. Whatever does something takes as long as it
	// takes: cut off, nobody would know whether it was done.
	readTimeout = 30 * time.Second
	// failedAfter is how long a command waits while systemd tries a service
	// again and again that does not start.
	failedAfter = 15 * time.Second
	// pingTimeout is how long a service that is well may take for its version.
	pingTimeout = 5 * time.Second
	// explainTimeout bounds asking systemd why the service does not answer.
	explainTimeout = 5 * time.Second
)

// unitState is what systemd says of a unit, by property.
type unitState map[string]string

func lookAt(ctx context.Context, unit string) unitState {
	cmd := exec.CommandContext(ctx, "systemctl", "--user", "show",
		"--property=ActiveState,SubState,Result,StatusText,ExecMainCode,ExecMainStatus,ExecMainExitTimestamp", unit)
	// A child that keeps its output open is not waited for.
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return nil
	}
	state := make(unitState)
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		state[name] = value
	}
	return state
}

// failure is why the unit's last start or run failed and when, "" when it did
// not.
func (u unitState) failure() string {
	if u["ActiveState"] != "failed" && u["SubState"] != "auto-restart" {
		return ""
	}
	why := u["StatusText"]
	if why == "" {
		why = "it ended as " + u["Result"]
	}
	var last []string
	switch status := u["ExecMainStatus"]; u["ExecMainCode"] {
	case "1": // CLD_EXITED
		last = append(last, "exit status "+status)
	case "2", "3": // CLD_KILLED, CLD_DUMPED
		last = append(last, "signal "+status)
	}
	if at := u["ExecMainExitTimestamp"]; at != "" {
		last = append(last, at)
	}
	if len(last) > 0 {
		why += " (last tried: " + strings.Join(last, ", ") + ")"
	}
	return why
}

// serviceUnit is the name of the fleet's service.
func (a *app) serviceUnit() string { return units.Name(a.prefix, "abfleetd.service") }

// explain says why the service does not answer, where systemd knows it.
func (a *app) explain(err error) error {
	if code := fault.CodeOf(err); code != fault.ServiceUnavailable && code != fault.EffectUnknown || api.Answered(err) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), explainTimeout)
	defer cancel()
	if why := lookAt(ctx, a.serviceUnit()).failure(); why != "" {
		return a.doesNotStart(why)
	}
	return err
}

func (a *app) doesNotStart(why string) error {
	return fault.New(fault.ServiceUnavailable, "reach the service",
		"Repair that, then run: abfleet setup --now, which also lifts systemd's start limit; the journal may say more: journalctl --user -u "+a.serviceUnit(),
		"it does not start: %s", why)
}

// get asks the service for what it knows.
func (a *app) get(ctx context.Context, path string, query map[string][]string) (*api.Answer, error) {
	return a.ask(ctx, readTimeout, func(ctx context.Context, client *api.Client) (*api.Answer, error) {
		return client.Get(ctx, path, query)
	})
}

// post has the service do something.
func (a *app) post(ctx context.Context, path string, body any) (*api.Answer, error) {
	return a.ask(ctx, 0, func(ctx context.Context, client *api.Client) (*api.Answer, error) {
		return client.Post(ctx, path, body)
	})
}

// ask sends a request and looks, while it waits, at what it waits for.
func (a *app) ask(ctx context.Context, timeout time.Duration, request func(context.Context, *api.Client) (*api.Answer, error)) (*api.Answer, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { a.watch(ctx, client, timeout, cancel) })
	defer func() { cancel(nil); watching.Wait() }()
	answer, err := request(ctx, client)
	var given *fault.Error
	if cause := context.Cause(ctx); err != nil && errors.As(cause, &given) {
		return nil, given
	}
	return answer, err
}

// watch tells what a command waits for, until ctx ends, and gives up where
// waiting is of no use.
func (a *app) watch(ctx context.Context, client *api.Client, timeout time.Duration, giveUp context.CancelCauseFunc) {
	start := time.Now()
	tell := start.Add(tellAfter)
	ticker := time.NewTicker(waitLook)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		waited := time.Since(start)
		unit := lookAt(ctx, a.serviceUnit())
		if ctx.Err() != nil {
			return
		}
		// The request waits in the socket: no process has taken it.
		if why := unit.failure(); why != "" && waited > failedAfter {
			giveUp(a.doesNotStart(why))
			return
		}
		starting := unit["ActiveState"] == "activating"
		if timeout > 0 && waited > timeout && !starting {
			giveUp(fault.New(fault.ServiceUnavailable, "reach the service", "Look at it: systemctl --user status "+a.serviceUnit(),
				"no answer on %s within %s", client.Socket, timeout))
			return
		}
		if time.Now().Before(tell) {
			continue
		}
		tell = time.Now().Add(tellAgain)
		what := "works on it"
		if starting {
			what = "is starting"
			if status := unit["StatusText"]; status != "" {
				what += ": " + status
			}
		} else if !answers(ctx, client) {
			what = "does not answer; look at it: systemctl --user status " + a.serviceUnit()
		}
		if ctx.Err() == nil {
			_, _ = fmt.Fprintf(a.errOut, "abfleet: waiting for %v; the service %s\n", time.Since(start).Round(time.Second), what)
		}
	}
}

// answers reports whether the service still takes requests.
func answers(ctx context.Context, client *api.Client) bool {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	_, err := client.Get(ctx, api.VersionPath, nil)
	return err == nil
}
