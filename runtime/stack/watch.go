package stack

import (
	"context"

	"abfleet/internal/fleet"
)

// Watch implements fleet.Runtime.
func (r *Runtime) Watch(ctx context.Context, ev fleet.Evidence) error {
	e, err := decode(ev)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	roles := e.generations()
	ended := make(chan error, len(roles))
	for _, g := range roles {
		go func() { ended <- r.verifier.AwaitEnd(ctx, *g) }()
	}
	return <-ended
}
