package stack

import (
	"context"
	"time"

	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
)

// lastWordWait is how long the end of a browser may take that has begun: it
// loses its display or its holder, or its holder writes down how it ended.
const lastWordWait = time.Second

// Watch implements fleet.Runtime.
func (r *Runtime) Watch(ctx context.Context, ev fleet.Evidence) error {
	e, err := decode(ev)
	if err != nil {
		return err
	}
	var generations []proof.Generation
	for _, g := range e.generations() {
		generations = append(generations, *g)
	}
	if err := r.verifier.AwaitLoss(ctx, generations); err != nil {
		return err
	}
	r.awaitLastWord(ctx, e)
	return ctx.Err()
}

// awaitLastWord gives a browser that is about to end the time to do so, and its
// holder to tell how: whoever looks earlier sees a Stack in disorder.
func (r *Runtime) awaitLastWord(ctx context.Context, e evidence) {
	if e.Chromium == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lastWordWait)
	defer cancel()
	gone := make(chan struct{})
	go func() {
		if r.verifier.AwaitEnd(ctx, *e.Chromium) == nil {
			close(gone)
		}
	}()
	// That nothing is told is for Observe to say.
	_ = await(ctx, r.tempDir(e.Instance), gone, func(context.Context) error {
		if exit, err := holder.ReadExit(r.files(e.Instance).exit()); err != nil || exit.Generation != e.Generation {
			return role.ErrNotReady
		}
		return nil
	})
}
