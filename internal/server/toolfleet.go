package server

import (
	"context"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/auth"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/tools"
)

// ToolFleet is the fleet as tools see it: their session, their browser, and an
// actor that the channel vouched for.
type ToolFleet struct{ Fleet Fleet }

var _ tools.Fleet = ToolFleet{}

// Identities lists the Identities and what the session has now.
func (f ToolFleet) Identities(ctx context.Context, session string) (tools.IdentityList, error) {
	var list tools.IdentityList
	identities, err := f.Fleet.Identities(ctx)
	if err != nil {
		return list, err
	}
	for _, view := range identities {
		list.Identities = append(list.Identities, tools.Identity{ID: view.ID, Name: view.Name, State: string(view.State)})
	}
	bound, err := f.Fleet.Session(ctx, session)
	switch {
	case err == nil:
		list.Current, list.Running = bound.IdentityID, bound.State == fleet.Controllable
	case !fault.Is(err, fault.SessionNotFound) && !fault.Is(err, fault.IdentityNotSelected):
		return list, err
	}
	return list, nil
}

// UseIdentity binds the Identity to the session.
func (f ToolFleet) UseIdentity(ctx context.Context, session, ref string) (tools.Binding, error) {
	actor, err := agent(ctx)
	if err != nil {
		return tools.Binding{}, err
	}
	view, err := f.Fleet.UseIdentity(queueing(ctx), actor, session, ref)
	return tools.Binding{Identity: view.IdentityID}, err
}

// Browser returns the Session Browser, started again when it died.
func (f ToolFleet) Browser(ctx context.Context, session string) (tools.Browser, error) {
	browser, err := f.Fleet.Browser(queueing(ctx), session)
	if err != nil {
		// Not browser itself: an interface that holds a nil pointer is not nil.
		return nil, err
	}
	return browser, nil
}

// queueing has a client that asked for progress be told of its place in the
// queue of starts.
func queueing(ctx context.Context) context.Context {
	tell := tools.Progress(ctx)
	if tell == nil {
		return ctx
	}
	return fleet.WithProgress(ctx, func(place int) {
		tell(fmt.Sprintf("Waiting for a processor: start %d in the queue", place))
	})
}

// Operate keeps the Session Browser from being released.
func (f ToolFleet) Operate(ctx context.Context, session string) (done func(), err error) {
	return f.Fleet.Operate(ctx, session)
}

func agent(ctx context.Context) (audit.Actor, error) {
	actor, ok := auth.ActorFrom(ctx)
	if !ok {
		return actor, fault.New(fault.Unauthorized, "use the fleet", "", "nobody vouches for the caller")
	}
	return actor, nil
}
