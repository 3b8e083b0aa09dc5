package stack

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// observeTimeout bounds the questions to a Stack's roles; a browser that takes
// longer to say its version is not controllable.
const observeTimeout = 5 * time.Second

// Observe says what is true of a recorded Stack now: controllable (its roles
// proven ours and answering on their private sockets), stopped (proven
// vacant), ended (no process is left in the browser's scope, but something of
// the Stack is), or unverified with the reason. Where systemd cannot be asked it
// is fleet.ErrUndecided.
func (r *Runtime) Observe(ctx context.Context, ev fleet.Evidence) (fleet.Observation, error) {
	e, err := decode(ev)
	if err != nil {
		return fleet.Observation{}, err
	}
	answer, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	notControllable := r.controllable(answer, e)
	if notControllable == nil {
		return fleet.Observation{State: fleet.Controllable}, nil
	}
	exit := r.exitReport(e)
	_, notVacant := r.verifier.Vacant(ctx, r.claim(e))
	switch {
	case notVacant == nil:
		return fleet.Observation{State: fleet.Stopped, Exit: exit}, nil
	case unasked(notControllable) || unasked(notVacant):
		// That there are processes says nothing of whether they are in order.
		return fleet.Observation{}, fmt.Errorf("%w: %w", fleet.ErrUndecided, errors.Join(notControllable, notVacant))
	case ctx.Err() != nil:
		return fleet.Observation{}, fmt.Errorf("%w: %w", context.Cause(ctx), notControllable)
	}
	state := fleet.Unverified
	if e.Chromium != nil {
		if populated, err := (unit.Cgroup{Path: e.Chromium.Cgroup}).Populated(); err == nil && !populated {
			state = fleet.Ended
		}
	}
	return fleet.Observation{State: state, Reason: notControllable.Error(), Exit: exit}, nil
}

func (r *Runtime) controllable(ctx context.Context, e evidence) error {
	viewer, err := e.viewer()
	if err != nil {
		return err
	}
	for _, g := range e.generations() {
		if err := r.prove(ctx, g); err != nil {
			return err
		}
	}
	if viewer != nil {
		if err := role.RFBReady(ctx, r.files(e.Instance).rfb(), viewer.Leader.PID); err != nil {
			return err
		}
	}
	conn, err := r.dialHolder(ctx, e)
	if err != nil {
		return err
	}
	c := cdp.New(conn)
	defer c.Close()
	return c.Root().Call(ctx, "Browser.getVersion", nil, nil)
}

// exitReport tells how the recorded browser ended, if its holder left word.
func (r *Runtime) exitReport(e evidence) *fleet.ExitReport {
	exit, err := holder.ReadExit(r.files(e.Instance).exit())
	if err != nil || exit.Generation != e.Generation {
		return nil
	}
	return &fleet.ExitReport{Clean: exit.Clean, Trigger: trigger(exit.Trigger), OOMKills: exit.OOMKills, At: exit.At, Detail: describe(exit)}
}

// trigger translates the holder's word for what ended a browser into the
// fleet's.
func trigger(t string) string {
	word, _, _ := strings.Cut(t, ":")
	switch word {
	case holder.TriggerClose:
		return "stop"
	case holder.TriggerSignal:
		return "signal"
	case holder.TriggerBrowser:
		return "browser"
	}
	return "unknown"
}
