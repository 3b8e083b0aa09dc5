package stack

import (
	"context"

	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
)

// Watch implements fleet.Runtime.
func (r *Runtime) Watch(ctx context.Context, ev fleet.Evidence) error {
	e, err := decode(ev)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	for _, g := range []*proof.Generation{e.Display, e.Chromium} {
		if g != nil {
			go func() { ended <- r.verifier.AwaitEnd(ctx, *g) }()
		}
	}
	return <-ended
}
