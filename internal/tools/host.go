package tools

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page"
)

// DefaultSnapshotBytes caps one snapshot in an answer. A page of 1,000
// elements is about this large, and models read no further with profit.
const DefaultSnapshotBytes = 45 << 10

const (
	// attachTimeout bounds connecting the page engine to a browser that is
	// proven to run.
	attachTimeout = 20 * time.Second
	// callTimeout bounds a call of a Tool that names no timeout of its own. The
	// engine's own limits are all shorter.
	callTimeout = 2 * time.Minute
	// maxClients is how many clients of one session are remembered. The one
	// unused for longest is forgotten, as if it had called browser_close.
	maxClients = 256
	// pulseEvery and pulseWait are how often a browser is asked for a sign of
	// life while a call is at work, and how long it may take to give it.
	pulseEvery = 2 * time.Second
	pulseWait  = 5 * time.Second
)

// errHung ends a call whose browser gives no sign of life.
var errHung = errors.New("the browser is not answering")

// Tool is one tool of a catalog.
type Tool struct {
	Name, Title, Description string
	// Schema is the JSON Schema of the arguments, sent as it is.
	Schema json.RawMessage
	// ReadOnly tools change nothing, so that an interrupted call of theirs
	// took no effect.
	ReadOnly bool
	// Timeout bounds a call; 0 is two minutes.
	Timeout time.Duration
	// Run does the call. What it returns becomes the Error section.
	Run func(ctx context.Context, c *Call) error
}

// Host serves tools on browsers. It keeps one page engine per session, for as
// long as the browser's generation lives.
type Host struct {
	opts Options

	saved atomic.Uint64 // files written

	mu       sync.Mutex
	sessions map[string]*session
	tools    map[string]bool // names registered
}

// session is what is kept for one session while a call uses it or its engine
// lives.
type session struct {
	calls int // that use it; guarded by the Host's mu
	// turn is held while an engine is looked up or attached.
	turn   chan struct{}
	key    string // generation of engine
	engine *page.Browser
	// doubted says that the session may have another browser by now or need
	// one, although the connection to the old one has not ended yet.
	doubted atomic.Bool

	mu      sync.Mutex
	clients map[string]*client
}

// client is what is kept for one client of a session.
type client struct {
	used  time.Time
	shown string // the page header it was shown last
}

// NewHost returns a Host for the fleet in o.
func NewHost(o Options) *Host {
	if o.Snapshot == "" {
		o.Snapshot = SnapshotFile
	}
	switch {
	case o.SnapshotBytes == 0:
		o.SnapshotBytes = DefaultSnapshotBytes
	case o.SnapshotBytes < 0:
		o.SnapshotBytes = 0 // how the engine says no cap
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Caller == nil {
		o.Caller = func(ctx context.Context, _ *mcp.CallToolRequest) (Caller, error) {
			c, ok := CallerFrom(ctx)
			if !ok {
				return c, fault.New(fault.InvalidSession, "run tool", "connect through `abfleet mcp --session NAME`", "the channel names no session")
			}
			return c, nil
		}
	}
	return &Host{opts: o, sessions: make(map[string]*session), tools: make(map[string]bool)}
}

// Close lets go of all browsers; they run on.
func (h *Host) Close() {
	h.mu.Lock()
	sessions := h.sessions
	h.sessions = make(map[string]*session)
	h.mu.Unlock()
	for _, s := range sessions {
		s.turn <- struct{}{}
		if s.engine != nil {
			s.engine.Close()
		}
		<-s.turn
	}
}

// Register adds tools to a server.
func (h *Host) Register(server *mcp.Server, tools ...Tool) {
	yes := true
	for _, t := range tools {
		h.mu.Lock()
		h.tools[t.Name] = true
		h.mu.Unlock()
		destructive := !t.ReadOnly
		server.AddTool(&mcp.Tool{
			Name: t.Name, Description: t.Description, InputSchema: t.Schema,
			Annotations: &mcp.ToolAnnotations{Title: t.Title, ReadOnlyHint: t.ReadOnly, DestructiveHint: &destructive, OpenWorldHint: &yes},
		}, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return h.run(ctx, t, req), nil
		})
	}
}

func (h *Host) has(tool string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tools[tool]
}

// run does one call and puts its answer together, whatever happens in it.
func (h *Host) run(ctx context.Context, t Tool, req *mcp.CallToolRequest) (result *mcp.CallToolResult) {
	c := &Call{host: h, tool: t, args: req.Params.Arguments}
	defer func() {
		if p := recover(); p != nil {
			slog.Error("a tool panicked", "tool", t.Name, "panic", p, "stack", string(debug.Stack()))
			c.sections = pageSections{}
			result = c.result(fault.New(fault.Internal, "run "+t.Name, "report this; the browser is not affected", "the tool has a fault of its own"))
		}
	}()
	limit := t.Timeout
	if limit == 0 {
		limit = callTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ctx, c.stop = context.WithCancelCause(ctx)
	defer func() {
		c.stop(nil)
		if c.check != nil {
			c.check.Stop() // what it holds can be large
		}
		if c.done != nil {
			c.done()
		}
	}()
	caller, err := h.opts.Caller(ctx, req)
	if err == nil {
		c.Caller, c.session = caller, h.enter(caller.Session)
		defer h.leave(caller.Session, c.session)
		err = t.Run(withProgress(ctx, req), c)
		c.acted = c.acted || err == nil && c.began
	}
	if ferr := c.finish(ctx, err != nil); err == nil {
		err = ferr
	}
	if err != nil && (errors.Is(context.Cause(ctx), errHung) || fault.Is(err, fault.Timeout)) {
		c.Rebound()
	}
	return c.result(c.interrupted(ctx, err))
}

// enter returns what is kept for a session, for a call that leaves it again.
func (h *Host) enter(name string) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.sessions[name]
	if s == nil {
		s = &session{turn: make(chan struct{}, 1), clients: make(map[string]*client)}
		h.sessions[name] = s
	}
	s.calls++
	return s
}

func (h *Host) leave(name string, s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.calls--
	h.drop(name, s)
}

// drop forgets a session that no call uses and that has no living engine. The
// caller holds h.mu.
func (h *Host) drop(name string, s *session) {
	if h.sessions[name] != s || s.calls > 0 || s.engine != nil && !ended(s.engine) {
		return
	}
	if s.engine != nil {
		s.engine.Close()
	}
	delete(h.sessions, name)
}

// bury drops a session when its engine ends, if no call does.
func (h *Host) bury(name string, s *session, engine *page.Browser) {
	<-engine.Done()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(name, s)
}

// client returns what is kept for a client, and the key of one that had to make
// room for it.
func (s *session) client(key string, now time.Time) (c *client, evicted string, full bool) {
	if c = s.clients[key]; c == nil {
		if full = len(s.clients) >= maxClients; full {
			var oldest *client
			for k, o := range s.clients {
				if oldest == nil || o.used.Before(oldest.used) {
					oldest, evicted = o, k
				}
			}
			delete(s.clients, evicted)
		}
		c = &client{shown: freshHeader}
		s.clients[key] = c
	}
	c.used = now
	return c, evicted, full
}

// freshHeader is what a new client knows without being told: one blank page.
const freshHeader = "\n- Page URL: about:blank"

// showHeader reports whether the client was shown another header last, and
// remembers this one.
func (s *session) showHeader(key, header string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, _, _ := s.client(key, now)
	changed := c.shown != header
	c.shown = header
	return changed
}

// lock takes the session's turn, unless ctx ends first.
func (s *session) lock(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fault.Wrap(context.Cause(ctx), fault.Canceled, "connect to Session Browser", "")
	}
}

// engine returns the page engine of the caller's Session Browser: the one at
// hand while its connection lives, else a new one on whatever generation the
// fleet proves to be running.
func (h *Host) engine(ctx context.Context, s *session, caller Caller) (*page.Browser, error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer func() { <-s.turn }()
	if s.engine != nil && ended(s.engine) {
		s.engine.Close()
		s.engine = nil
	}
	if s.engine == nil || s.doubted.Load() {
		if err := h.attach(ctx, s, caller.Session); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	_, evicted, full := s.client(caller.Client, h.opts.Now())
	s.mu.Unlock()
	if full {
		s.engine.Client(evicted).Forget()
	}
	return s.engine, nil
}

func ended(engine *page.Browser) bool {
	select {
	case <-engine.Done():
		return true
	default:
		return false
	}
}

// attach connects to the browser that the fleet says the session has. The
// caller has the turn.
func (h *Host) attach(ctx context.Context, s *session, name string) (err error) {
	s.doubted.Store(false)
	defer func() {
		if err != nil {
			s.doubted.Store(true)
		}
	}()
	browser, err := h.opts.Fleet.Browser(ctx, name)
	if err != nil {
		return err
	}
	if s.engine != nil {
		if s.key == browser.Key() && !ended(s.engine) {
			return nil
		}
		s.engine.Close()
		s.engine = nil
	}
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	conn, err := browser.OpenCDP(ctx)
	if err != nil {
		return err
	}
	engine, err := page.Attach(ctx, cdp.New(conn), page.Options{KeepPage: true})
	if err != nil {
		return err
	}
	if s.key != browser.Key() {
		s.mu.Lock()
		clear(s.clients)
		s.mu.Unlock()
	}
	s.key, s.engine = browser.Key(), engine
	go h.bury(name, s, engine)
	return nil
}

// forget drops a client's tool state: its current tab and what it was shown.
func (s *session) forget(ctx context.Context, key string) error {
	s.mu.Lock()
	delete(s.clients, key)
	s.mu.Unlock()
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer func() { <-s.turn }()
	if s.engine != nil {
		s.engine.Client(key).Forget()
	}
	return nil
}
