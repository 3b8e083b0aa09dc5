package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/auth"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/vnc"
)

var (
	// headerTimeout bounds reading a request's header, bodyTimeout reading
	// the whole request, idleTimeout an unused connection, webTimeout the
	// answer to a browser. The control socket's calls have limits of their own.
	headerTimeout = 10 * time.Second
	bodyTimeout   = 30 * time.Second
	idleTimeout   = time.Minute
	webTimeout    = 2 * time.Minute
	// drainGrace is how long calls in flight may finish by themselves when
	// the service stops.
	drainGrace = time.Second
	// maxHeader caps a request's header, in bytes.
	maxHeader = 32 << 10
)

// Fleet is what the server needs of the fleet.
type Fleet interface {
	CreateIdentity(ctx context.Context, actor audit.Actor, name string) (fleet.IdentityView, error)
	Identities(ctx context.Context) ([]fleet.IdentityView, error)
	Identity(ctx context.Context, ref string) (fleet.IdentityView, error)
	StartLogin(ctx context.Context, actor audit.Actor, ref, url string) (fleet.IdentityView, error)
	StopLogin(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error)
	SaveIdentity(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error)
	RenameIdentity(ctx context.Context, actor audit.Actor, ref, name string) (fleet.IdentityView, error)
	LimitIdentity(ctx context.Context, actor audit.Actor, ref string, limits config.Limits) (fleet.IdentityView, error)
	DeleteIdentity(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error)
	UseIdentity(ctx context.Context, actor audit.Actor, session, ref string) (fleet.SessionView, error)
	Sessions(ctx context.Context) ([]fleet.SessionView, error)
	Session(ctx context.Context, session string) (fleet.SessionView, error)
	SessionUnits(ctx context.Context, session string) (fleet.SessionUnits, error)
	StopSession(ctx context.Context, actor audit.Actor, session string) (fleet.SessionView, error)
	RestartSession(ctx context.Context, actor audit.Actor, session string) (fleet.SessionView, error)
	ReleaseSession(ctx context.Context, actor audit.Actor, session string, loggedOut bool) (fleet.SessionView, error)
	ExamineSession(ctx context.Context, session string) (fleet.RecoveryView, error)
	Operate(ctx context.Context, session string) (done func(), err error)
	Browser(ctx context.Context, session string) (*fleet.Browser, error)
	RunningBrowser(ctx context.Context, session string) (*fleet.Browser, error)
	LoginBrowser(ctx context.Context, ref string) (*fleet.Browser, error)
	Counts() (running, quarantined int)
}

// Deps is what a Server is made of. All but Doctor and Attended are required.
type Deps struct {
	Fleet Fleet
	Auth  *auth.Auth
	// Token is what view links carry to the page.
	Token string
	Log   *slog.Logger
	// MCP has its tools registered already.
	MCP *mcp.Server
	// Doctor runs the checks as this process sees the host.
	Doctor func(context.Context) []api.Finding
	// CopyState writes a checked copy of the state to an absolute path where
	// nothing is yet.
	CopyState func(ctx context.Context, path string) error
	// IdleExit is how long the service stays without work; 0 means for ever.
	IdleExit time.Duration
	// Attended is told when there has been no connection for a while, viewers not
	// counted, and when one comes again, which waits for it. It may be nil.
	Attended func(bool)
}

// Server serves both doors of the service.
type Server struct {
	deps    Deps
	mcp     *endpoint
	gateway *vnc.Gateway
	started time.Time
	idle    *idle

	mu      sync.Mutex // guards the fields that follow
	serving []serving
	webAddr net.Addr
	stopped bool
}

// serving is one listener and what answers on it.
type serving struct {
	gate *gate
	http *http.Server
}

// New returns a Server that serves nothing yet.
func New(ctx context.Context, deps Deps) (*Server, error) {
	s := &Server{deps: deps, started: time.Now()}
	var err error
	if s.mcp, err = newEndpoint(ctx, deps.MCP, deps.Log); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "set up the tools", "")
	}
	s.gateway = &vnc.Gateway{Resolve: s.resolveViewer, Deny: Deny, Log: deps.Log}
	s.idle = newIdle(deps.IdleExit, s.busy)
	s.idle.attended = deps.Attended
	return s, nil
}

// busy reports whether there is a Stack or a viewer to stay for.
func (s *Server) busy() bool {
	running, quarantined := s.deps.Fleet.Counts()
	return running > 0 || quarantined > 0 || s.gateway.Viewers() > 0
}

// ServeControl answers on a unix socket until Stop.
func (s *Server) ServeControl(listener net.Listener) error {
	return s.serve(listener, "control", auth.RequirePeer(s.controlRoutes(), Deny), 0, auth.PeerContext)
}

// ServeWeb answers on a loopback TCP socket until Stop.
func (s *Server) ServeWeb(listener net.Listener) error {
	s.mu.Lock()
	if s.webAddr == nil {
		s.webAddr = listener.Addr()
	}
	s.mu.Unlock()
	return s.serve(listener, "web", s.webRoutes(), webTimeout, nil)
}

func (s *Server) serve(listener net.Listener, name string, handler http.Handler, writeTimeout time.Duration, connContext func(context.Context, net.Conn) context.Context) error {
	gate := newGate(listener)
	server := &http.Server{
		Handler:           s.recovered(handler),
		ConnContext:       connContext,
		ConnState:         s.idle.connState,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout, // net/http lifts it once the body is read
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.deps.Log.With("listener", name).Handler(), slog.LevelDebug),
	}
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return listener.Close()
	}
	s.serving = append(s.serving, serving{gate, server})
	s.mu.Unlock()
	s.idle.watch(gate)
	if err := server.Serve(gate); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// recovered answers a panic of a handler and says so in the journal; net/http
// would close the connection and leave the caller to guess.
func (s *Server) recovered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			reason := recover()
			if reason == nil {
				return
			}
			if reason == http.ErrAbortHandler {
				panic(reason)
			}
			s.deps.Log.Error("a request failed badly", "path", r.URL.Path, "panic", reason, "stack", stack())
			Deny(w, r, fault.New(fault.Internal, "answer "+r.URL.Path, "Look at the service's journal: journalctl --user -u abfleetd", "unexpected failure"))
		}()
		next.ServeHTTP(w, r)
	})
}

// Idle returns a channel that is closed when there was nothing to do for
// IdleExit. Connections then wait for the next service: Stop must follow.
func (s *Server) Idle() <-chan struct{} { return s.idle.done }

// Stop stops accepting, lets calls in flight finish for a moment, ends the rest
// with an answer that says whether they may have had an effect, tells viewers
// that the service restarts, and closes everything by ctx's deadline.
// Connections made meanwhile wait in systemd's socket for the next service.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	all := s.serving
	s.mu.Unlock()
	s.idle.stop()
	for _, one := range all {
		one.gate.hold()
		one.http.SetKeepAlivesEnabled(false)
	}
	drained := s.mcp.calls.stop()
	viewers := make(chan error, 1)
	go func() { viewers <- s.gateway.Close(ctx) }()

	grace := time.NewTimer(drainGrace)
	defer grace.Stop()
	select {
	case <-drained:
	case <-grace.C:
		s.mcp.calls.cancelAll()
		select {
		case <-drained:
		case <-ctx.Done():
		}
	case <-ctx.Done():
		s.mcp.calls.cancelAll()
	}
	var errs []error
	errs = append(errs, <-viewers)
	for _, one := range all {
		if err := one.http.Shutdown(ctx); err != nil {
			errs = append(errs, err, one.http.Close())
		}
	}
	return errors.Join(errs...)
}
