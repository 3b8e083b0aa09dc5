package vnc

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/coder/websocket"

	"abfleet/internal/fault"
)

const (
	// resolveTimeout bounds finding and opening the display. A browser that
	// has to be started first is not the gateway's to wait for.
	resolveTimeout = 10 * time.Second
	// explainTimeout bounds the question whether the browser still runs, asked
	// when a display went away. The viewer waits for the answer.
	explainTimeout = 3 * time.Second
	// subprotocol is what older noVNC versions ask for. Answering it unasked
	// makes newer ones abort.
	subprotocol = "binary"
)

// Target is the display of one running browser.
type Target struct {
	// Conn is a fresh connection to the display's RFB socket. The relay
	// closes it.
	Conn net.Conn
	// Password authenticates to the display.
	Password []byte
	// Running reports nil while the browser counts as running. It is asked
	// once, after the display went away, to tell the viewer which of the two
	// happened. May be nil.
	Running func(context.Context) error
}

// Gateway serves viewers over websockets. It authenticates nobody: it must
// stand behind middleware that has checked authority, Origin and cookie, and
// for that reason asks Resolve for nothing before a request reaches it.
type Gateway struct {
	// Resolve finds the display the request asks for; Selector reads the
	// request. Its errors are fault errors: invalid_argument and
	// invalid_session_id are answered by Deny, any other tells the viewer
	// over the websocket, so that a page can show it.
	Resolve func(context.Context, *http.Request) (Target, error)
	// Deny answers a request that is not upgraded, with the server's error
	// envelope. Required, like Resolve.
	Deny func(http.ResponseWriter, *http.Request, error)
	// Options tunes the relays.
	Options Options
	// Log gets one line for each viewer that ended for a reason; at debug level
	// for one that waits for a browser to run. May be nil.
	Log *slog.Logger

	mu      sync.Mutex
	viewers map[*viewer]struct{}
	closed  bool
}

type viewer struct {
	stop context.CancelCauseFunc
	done chan struct{}
}

// Selector reads what a viewer asks for: the session's browser, or the login
// browser of an Identity. Exactly one of the two is set.
func Selector(r *http.Request) (session, identity string, err error) {
	const op, hint = "open viewer", "Open the page with either ?session=NAME or ?identity=ID"
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return "", "", fault.New(fault.InvalidArgument, op, hint, "malformed query")
	}
	if len(query["session"])+len(query["identity"]) != 1 {
		return "", "", fault.New(fault.InvalidArgument, op, hint, "exactly one of session and identity is needed")
	}
	session, identity = query.Get("session"), query.Get("identity")
	if session == "" && identity == "" {
		return "", "", fault.New(fault.InvalidArgument, op, hint, "the name is empty")
	}
	return session, identity, nil
}

// ServeHTTP upgrades the request and relays until either side ends.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The request's own context is of no use after the upgrade.
	ctx, stop := context.WithCancelCause(context.WithoutCancel(r.Context()))
	defer stop(nil)
	v := &viewer{stop: stop, done: make(chan struct{})}
	if !g.enter(v) {
		g.Deny(w, r, fault.New(fault.ServiceUnavailable, "open viewer", "Try again in a few seconds", "the service is stopping"))
		return
	}
	defer g.leave(v)

	// Before the upgrade the client's going away still ends the request.
	resolving, cancel := context.WithTimeout(r.Context(), resolveTimeout)
	target, err := g.Resolve(resolving, r)
	cancel()
	if fault.Is(err, fault.InvalidArgument) || fault.Is(err, fault.InvalidSession) {
		g.Deny(w, r, err)
		return
	}
	ws, acceptErr := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{subprotocol}})
	if acceptErr != nil {
		// Accept has answered the request.
		if err == nil {
			_ = target.Conn.Close()
		}
		g.log(slog.LevelInfo, "viewer not upgraded", acceptErr)
		return
	}
	if err != nil {
		refusal := unresolved(err)
		_ = ws.Close(refusal.Code, refusal.Reason)
		// A page that waits for a browser to run asks again and again.
		level := slog.LevelInfo
		if refusal.Code == CloseBrowserStopped || refusal.Code == CloseNotFound {
			level = slog.LevelDebug
		}
		g.log(level, "viewer refused", refusal)
		return
	}
	err = relayWith(ctx, ws, target.Conn, target.Password, g.Options, func(e *End) *End {
		return explain(ctx, e, target.Running)
	})
	if err != nil {
		g.log(slog.LevelInfo, "viewer ended", err)
	}
}

// explain tells a stopped browser from a lost display.
func explain(ctx context.Context, e *End, running func(context.Context) error) *End {
	if e.Code != CloseDisplayGone || running == nil {
		return e
	}
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	if err := running(ctx); err != nil && ctx.Err() == nil {
		return end(CloseBrowserStopped, "the browser has stopped", errors.Join(e.Err, err))
	}
	return e
}

// unresolved puts a Resolve error in the viewer's words. The error's own text
// stays in the log: the sentence is shown by pages that need not know more.
func unresolved(err error) *End {
	switch fault.CodeOf(err) {
	case fault.Unauthorized, fault.InvalidToken, fault.BadOrigin, fault.UntrustedAuthority:
		return end(CloseNotAllowed, "not allowed", err)
	case fault.SessionNotFound, fault.IdentityNotFound, fault.NotFound:
		return end(CloseNotFound, "there is no such browser", err)
	case fault.IdentityNotSelected, fault.LoginNotRunning, fault.BrowserStopped:
		return end(CloseBrowserStopped, "the browser is not running", err)
	case fault.ViewerUnavailable:
		return end(CloseNoDisplay, "this fleet runs browsers without a display", err)
	default:
		return end(CloseUnavailable, "the browser cannot be shown at present", err)
	}
}

// Viewers reports how many viewers are connected or connecting.
func (g *Gateway) Viewers() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.viewers)
}

// Close tells every viewer that the service restarts, and waits until they are
// gone or ctx is done. No viewer is accepted afterwards. The http.Server's own
// shutdown does not know upgraded connections.
func (g *Gateway) Close(ctx context.Context) error {
	g.mu.Lock()
	g.closed = true
	var open []*viewer
	for v := range g.viewers {
		open = append(open, v)
	}
	g.mu.Unlock()
	restart := end(websocket.StatusServiceRestart, "the service is restarting", nil)
	for _, v := range open {
		v.stop(restart)
	}
	for _, v := range open {
		select {
		case <-v.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (g *Gateway) enter(v *viewer) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	if g.viewers == nil {
		g.viewers = make(map[*viewer]struct{})
	}
	g.viewers[v] = struct{}{}
	return true
}

func (g *Gateway) leave(v *viewer) {
	g.mu.Lock()
	delete(g.viewers, v)
	g.mu.Unlock()
	close(v.done)
}

func (g *Gateway) log(level slog.Level, message string, err error) {
	if g.Log != nil {
		g.Log.Log(context.Background(), level, message, "error", err)
	}
}
