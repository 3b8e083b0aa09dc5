package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"

	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// Browser is one generation of a Session Browser or login browser that was
// controllable when it was handed out.
type Browser struct {
	f        *Fleet
	session  string
	identity identity
	runtime  runtime
}

func (f *Fleet) browser(session string, id *identity, r *runtime) *Browser {
	return &Browser{f: f, session: session, identity: *id, runtime: *r}
}

// Key differs between any two generations of any two browsers: what is cached
// about a Browser is cached under its Key. It tells nothing about the Stack.
func (b *Browser) Key() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", b.f.db.HostID(), b.runtime.Key, b.runtime.Value.Generation))
	return hex.EncodeToString(sum[:16])
}

// Session is the session's id, empty for a login browser.
func (b *Browser) Session() string { return b.session }

// IdentityID is the id of its Identity.
func (b *Browser) IdentityID() string { return b.identity.Key }

// Identity is the name of its Identity when the Browser was handed out.
func (b *Browser) Identity() string { return b.identity.Value.Name }

const opReach = "reach browser"

// current returns the stored evidence while this generation is still the one
// that is recorded as controllable.
func (b *Browser) current(ctx context.Context) (Evidence, error) {
	var r *runtime
	err := b.f.db.View(ctx, func(tx *store.Tx) (err error) {
		r, err = optional(runtimes.Get(tx, b.runtime.Key))
		return err
	})
	if err != nil {
		return nil, err
	}
	same := r != nil && r.Value.Generation == b.runtime.Value.Generation && !b.f.isQuarantined(r.Key)
	if same && r.Value.State == Stopped {
		return nil, fault.New(fault.BrowserStopped, opReach, "Use it again: a browser that ended is started anew", "it has ended")
	}
	if !same || r.Value.State != Controllable {
		return nil, fault.New(fault.BrowserNotControllable, opReach, "Use it again: a browser that ended is started anew", "this browser was stopped or replaced")
	}
	return r.Value.Evidence, nil
}

// Running returns nil if this very generation is proven to run now.
func (b *Browser) Running(ctx context.Context) error {
	ev, err := b.current(ctx)
	if err != nil {
		return err
	}
	obs, err := b.f.observe(ctx, ev)
	if err != nil {
		return b.f.failure(err, fault.BrowserNotControllable, opReach, "Try again", &b.runtime)
	}
	const again = "Use it again: a browser that ended is started anew"
	switch obs.State {
	case Controllable:
		return nil
	case Stopped, Ended:
		return fault.New(fault.BrowserStopped, opReach, again, "it has ended")
	}
	return fault.New(fault.BrowserNotControllable, opReach, again, "it is %s", obs.State)
}

// OpenCDP connects to this generation's browser; the connection carries raw
// NUL-delimited CDP messages. Ownership is proven first.
func (b *Browser) OpenCDP(ctx context.Context) (net.Conn, error) {
	ev, err := b.current(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := b.f.rt.OpenCDP(ctx, ev)
	if err != nil {
		return nil, b.f.failure(err, fault.BrowserNotControllable, opReach, "Use it again: a browser that ended is started anew", &b.runtime)
	}
	return conn, nil
}

// OpenViewer connects to this generation's display. Ownership is proven first.
func (b *Browser) OpenViewer(ctx context.Context) (Viewer, error) {
	ev, err := b.current(ctx)
	if err != nil {
		return Viewer{}, err
	}
	v, err := b.f.rt.OpenViewer(ctx, ev)
	if err != nil {
		return Viewer{}, b.f.failure(err, fault.BrowserNotControllable, "open viewer", "Use the browser again: one that ended is started anew", &b.runtime)
	}
	return v, nil
}
