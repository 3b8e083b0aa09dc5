package stack

import (
	"context"
	"net/netip"
	"time"

	"abfleet/internal/fault"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
)

// unsafeEndpoint is the error of a role that listens where it should not, or not
// where it should.
func unsafeEndpoint(format string, args ...any) error {
	return fault.New(fault.EndpointUnsafe, "use browser",
		"something between the fleet and the programs in its configuration changes what they listen on; do not retry before that is mended", format, args...)
}

// endpoints checks what a role listens on beside its path sockets. A display and
// a VNC server listen on nothing, a browser on loopback addresses only, among
// them its debugging port if it has one.
func endpoints(ctx context.Context, live *proof.Live) error {
	addrs, err := live.Listening(ctx)
	if err != nil {
		return err
	}
	return allowed(live.Generation(), addrs)
}

func allowed(g proof.Generation, addrs []netip.AddrPort) error {
	missing := g.Listener != ""
	for _, addr := range addrs {
		if g.Role != proof.RoleChromium || !addr.Addr().IsLoopback() {
			return unsafeEndpoint("process %d of role %s listens on %s", g.Leader.PID, g.Role, addr)
		}
		missing = missing && addr.String() != g.Listener
	}
	if missing {
		return unsafeEndpoint("the browser does not listen on %s any more", g.Listener)
	}
	return nil
}

// portWait is how long a browser that shows a page may take to say which
// debugging port it has. It has done so long before, unless it never will. Tests
// shorten it.
var portWait = 10 * time.Second

// debuggingPort returns the address of the browser's debugging port, proven to be
// its own and the only one it listens on.
func (s *starting) debuggingPort(ctx context.Context, live *proof.Live) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, portWait, unsafeEndpoint("the browser has not opened a debugging port within %s", portWait))
	defer cancel()
	port := 0
	err := await(ctx, s.req.Profile, s.browser.child.Done(), func(context.Context) (err error) {
		port, err = role.DebuggingPort(s.req.Profile)
		return err
	})
	if err != nil {
		return "", err
	}
	addrs, err := live.Listening(ctx)
	if err != nil {
		return "", err
	}
	if len(addrs) != 1 || !addrs[0].Addr().IsLoopback() || int(addrs[0].Port()) != port {
		return "", unsafeEndpoint("the browser listens on %v, where localhost:%d alone is expected", addrs, port)
	}
	return addrs[0].String(), nil
}
