package auth

import (
	"context"

	"abfleet/internal/audit"
)

type actorKey struct{}

// WithActor returns ctx with the Actor on whose behalf it runs.
func WithActor(ctx context.Context, actor audit.Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, actor)
}

// ActorFrom returns the Actor of a request that passed a door of this package.
func ActorFrom(ctx context.Context) (audit.Actor, bool) {
	actor, ok := ctx.Value(actorKey{}).(audit.Actor)
	return actor, ok
}
