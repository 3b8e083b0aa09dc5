package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page"
	"abfleet/internal/safefs"
)

// DefaultSnapshotBytes caps one snapshot in an answer. A page of 1,000
// elements is about this large, and models read no further with profit.
const DefaultSnapshotBytes = 45 << 10

// attachTimeout bounds connecting the page engine to a browser that is proven
// to run.
const attachTimeout = 20 * time.Second

// Tool is one tool of a catalog.
type Tool struct {
	Name, Title, Description string
	// Schema is the JSON Schema of the arguments, sent as it is.
	Schema json.RawMessage
	// ReadOnly tools change nothing, so that an interrupted call of theirs
	// took no effect.
	ReadOnly bool
	// Run does the call. What it returns becomes the Error section.
	Run func(ctx context.Context, c *Call) error
}

// Host serves tools on browsers. It keeps one page engine per session, for as
// long as the browser's generation lives.
type Host struct {
	opts Options

	mu       sync.Mutex
	sessions map[string]*session
}

// session is what is kept for one session.
type session struct {
	mu     sync.Mutex // held while an engine is looked up or attached
	key    string     // generation of engine
	engine *page.Browser

	shownMu sync.Mutex
	shown   map[string]string // page header last shown, by client
}

// NewHost returns a Host for the fleet in o.
func NewHost(o Options) *Host {
	if o.Snapshot == "" {
		o.Snapshot = SnapshotFile
	}
	if o.SnapshotBytes == 0 {
		o.SnapshotBytes = DefaultSnapshotBytes
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
	return &Host{opts: o, sessions: make(map[string]*session)}
}

// Close lets go of all browsers; they run on.
func (h *Host) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		s.mu.Lock()
		if s.engine != nil {
			s.engine.Close()
		}
		s.mu.Unlock()
	}
	h.sessions = make(map[string]*session)
}

// Register adds tools to a server.
func (h *Host) Register(server *mcp.Server, tools ...Tool) {
	yes := true
	for _, t := range tools {
		destructive := !t.ReadOnly
		server.AddTool(&mcp.Tool{
			Name: t.Name, Description: t.Description, InputSchema: t.Schema,
			Annotations: &mcp.ToolAnnotations{Title: t.Title, ReadOnlyHint: t.ReadOnly, DestructiveHint: &destructive, OpenWorldHint: &yes},
		}, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return h.run(ctx, t, req), nil
		})
	}
}

// run does one call and puts its answer together, whatever happens in it.
func (h *Host) run(ctx context.Context, t Tool, req *mcp.CallToolRequest) (result *mcp.CallToolResult) {
	c := &Call{Args: req.Params.Arguments, host: h, tool: t}
	defer func() {
		if p := recover(); p != nil {
			slog.Error("a tool panicked", "tool", t.Name, "panic", p)
			result = c.result(fault.New(fault.Internal, "run "+t.Name, "report this; the browser is not affected", "%v", p))
		}
	}()
	caller, err := h.opts.Caller(ctx, req)
	if err == nil {
		c.Caller = caller
		err = t.Run(ctx, c)
	}
	if err == nil {
		err = c.finish(ctx)
	}
	return c.result(c.interrupted(ctx, err))
}

func (h *Host) session(name string) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.sessions[name]
	if s == nil {
		s = &session{shown: make(map[string]string)}
		h.sessions[name] = s
	}
	return s
}

// engine returns the page engine of the caller's Session Browser: the one at
// hand while its connection lives, else a new one on whatever generation the
// fleet proves to be running.
func (h *Host) engine(ctx context.Context, caller Caller) (*page.Browser, error) {
	s := h.session(caller.Session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engine != nil {
		select {
		case <-s.engine.Done():
			s.engine.Close()
			s.engine = nil
		default:
			return s.engine, nil
		}
	}
	browser, err := h.opts.Fleet.Browser(ctx, caller.Session)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	conn, err := browser.OpenCDP(ctx)
	if err != nil {
		return nil, err
	}
	engine, err := page.Attach(ctx, cdp.New(conn), page.Options{KeepPage: true})
	if err != nil {
		return nil, err
	}
	if s.key != browser.Key() {
		s.shownMu.Lock()
		clear(s.shown)
		s.shownMu.Unlock()
	}
	s.key, s.engine = browser.Key(), engine
	return engine, nil
}

// Forget drops the caller's tool state: its current tab and what it was shown.
func (h *Host) Forget(caller Caller) {
	s := h.session(caller.Session)
	s.shownMu.Lock()
	delete(s.shown, caller.Client)
	s.shownMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engine != nil {
		s.engine.Client(caller.Client).Forget()
	}
}

// Fleet is the fleet the Host serves.
func (h *Host) Fleet() Fleet { return h.opts.Fleet }

// save writes a file into the session's output directory and returns its path.
func (h *Host) save(caller Caller, name string, data []byte) (string, error) {
	dir := h.opts.OutputDir(caller.Session)
	if err := safefs.EnsureDir(filepath.Dir(dir)); err != nil {
		return "", err
	}
	if err := safefs.EnsureDir(dir); err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		// Two files in one millisecond.
		ext := filepath.Ext(name)
		return h.save(caller, strings.TrimSuffix(name, ext)+"-2"+ext, data)
	}
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(path)
		return "", err
	}
	return path, nil
}

// stamp is the time as it stands in file names: ISO 8601 without what some file
// systems refuse.
func (h *Host) stamp() string {
	t := h.opts.Now().UTC().Format("2006-01-02T15:04:05.000Z")
	return strings.NewReplacer(":", "-", ".", "-").Replace(t)
}

// file resolves a file name given by a caller: a relative path below the
// session's output directory, and nothing else.
func (h *Host) file(caller Caller, name string) (string, error) {
	dir := h.opts.OutputDir(caller.Session)
	path := name
	if !filepath.IsAbs(path) {
		path = filepath.Join(dir, path)
	}
	path = filepath.Clean(path)
	if rel, err := filepath.Rel(dir, path); err != nil || rel == "." || !filepath.IsLocal(rel) {
		return "", fault.New(fault.FileAccessDenied, "write file", "give a relative file name", "%s is outside the allowed root %s", name, dir)
	}
	return path, nil
}

// saveAs writes to a path that file returned.
func (h *Host) saveAs(caller Caller, path string, data []byte) error {
	dir := h.opts.OutputDir(caller.Session)
	if err := safefs.EnsureDir(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := safefs.EnsureDir(dir); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	rel, err := filepath.Rel(dir, path)
	if err != nil {
		return err
	}
	if err := root.MkdirAll(filepath.Dir(rel), 0o700); err != nil {
		return fmt.Errorf("output directory: %w", err)
	}
	return root.WriteFile(rel, data, 0o600)
}
