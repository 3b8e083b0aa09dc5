package stack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fleet"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// observeTimeout bounds the questions to a Stack's roles; a browser that takes
// longer to say its version is not controllable.
const observeTimeout = 5 * time.Second

// Observe says what is true of a recorded Stack now: controllable (its roles
// proven ours and answering on their private sockets), stopped (proven
// vacant), ended (the browser is gone, but something of the Stack is left), or
// unverified with the reason. Where systemd cannot be asked it is
// fleet.ErrUndecided.
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
	exit := r.exitReport(ctx, e)
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
	if x, ok := r.lastWord(e); ok && x.Ended() {
		// The holder may be there for a moment longer.
		state = fleet.Ended
	} else if e.Chromium != nil {
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
