package server

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/auth"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/tools"
)

const testToken = "0123456789012345678901234567890123456789012"

// fakeFleet answers from memory and remembers who asked.
type fakeFleet struct {
	mu         sync.Mutex
	identities []fleet.IdentityView
	sessions   []fleet.SessionView
	actors     []audit.Actor
	running    int
}

func (f *fakeFleet) record(actor audit.Actor) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.actors = append(f.actors, actor)
}

func (f *fakeFleet) CreateIdentity(_ context.Context, actor audit.Actor, name string) (fleet.IdentityView, error) {
	f.record(actor)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, view := range f.identities {
		if strings.EqualFold(view.Name, name) {
			return fleet.IdentityView{}, fault.New(fault.DuplicateIdentity, "create identity", "Choose another name", "the name is taken")
		}
	}
	view := fleet.IdentityView{ID: "id-" + name, Name: name, State: fleet.NeedsLogin, Login: fleet.LoginView{State: fleet.Stopped}, CreatedAt: time.Now(), UpdatedAt: time.Now()}
	f.identities = append(f.identities, view)
	return view, nil
}

func (f *fakeFleet) Identities(context.Context) ([]fleet.IdentityView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.identities, nil
}

func (f *fakeFleet) Identity(_ context.Context, ref string) (fleet.IdentityView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, view := range f.identities {
		if view.ID == ref || view.Name == ref {
			return view, nil
		}
	}
	return fleet.IdentityView{}, fault.New(fault.IdentityNotFound, "find identity", "List them with `abfleet identity list`", "there is no %q", ref)
}

func (f *fakeFleet) StartLogin(ctx context.Context, actor audit.Actor, ref, _ string) (fleet.IdentityView, error) {
	f.record(actor)
	return f.Identity(ctx, ref)
}

func (f *fakeFleet) StopLogin(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error) {
	f.record(actor)
	return f.Identity(ctx, ref)
}

func (f *fakeFleet) SaveIdentity(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error) {
	f.record(actor)
	return f.Identity(ctx, ref)
}

func (f *fakeFleet) RenameIdentity(ctx context.Context, actor audit.Actor, ref, name string) (fleet.IdentityView, error) {
	f.record(actor)
	view, err := f.Identity(ctx, ref)
	view.Name = name
	return view, err
}

func (f *fakeFleet) LimitIdentity(ctx context.Context, actor audit.Actor, ref string, limits config.Limits) (fleet.IdentityView, error) {
	f.record(actor)
	view, err := f.Identity(ctx, ref)
	view.Limits = limits
	return view, err
}

func (f *fakeFleet) DeleteIdentity(ctx context.Context, actor audit.Actor, ref string) (fleet.IdentityView, error) {
	f.record(actor)
	return f.Identity(ctx, ref)
}

func (f *fakeFleet) RestartSession(ctx context.Context, actor audit.Actor, session string) (fleet.SessionView, error) {
	f.record(actor)
	return f.Session(ctx, session)
}

func (f *fakeFleet) ReleaseSession(ctx context.Context, actor audit.Actor, session string, _ bool) (fleet.SessionView, error) {
	f.record(actor)
	return f.Session(ctx, session)
}

func (f *fakeFleet) ExamineSession(ctx context.Context, session string) (fleet.RecoveryView, error) {
	view, err := f.Session(ctx, session)
	return fleet.RecoveryView{SessionView: view, Examination: fleet.Examination{Vacant: true, Recoverable: true}}, err
}

func (f *fakeFleet) Operate(context.Context, string) (func(), error) { return func() {}, nil }

func (f *fakeFleet) UseIdentity(ctx context.Context, actor audit.Actor, session, ref string) (fleet.SessionView, error) {
	f.record(actor)
	identity, err := f.Identity(ctx, ref)
	if err != nil {
		return fleet.SessionView{}, err
	}
	view := fleet.SessionView{Session: session, IdentityID: identity.ID, IdentityName: identity.Name, State: fleet.Controllable, Wanted: fleet.WantedRunning}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sessions = append(f.sessions, view)
	return view, nil
}

func (f *fakeFleet) Sessions(context.Context) ([]fleet.SessionView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sessions, nil
}

func (f *fakeFleet) Session(_ context.Context, session string) (fleet.SessionView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, view := range f.sessions {
		if view.Session == session {
			return view, nil
		}
	}
	return fleet.SessionView{}, fault.New(fault.SessionNotFound, "find session", "", "there is no %q", session)
}

func (f *fakeFleet) SessionUnits(context.Context, string) (fleet.SessionUnits, error) {
	return fleet.SessionUnits{Instance: "inst", Slice: "abfleet-inst.slice"}, nil
}

func (f *fakeFleet) StopSession(ctx context.Context, actor audit.Actor, session string) (fleet.SessionView, error) {
	f.record(actor)
	return f.Session(ctx, session)
}

func (f *fakeFleet) Browser(_ context.Context, session string) (*fleet.Browser, error) {
	return nil, fault.New(fault.IdentityNotSelected, "use browser", "Call agent_browser_use_identity", "session %q has no Identity", session)
}

func (f *fakeFleet) RunningBrowser(_ context.Context, session string) (*fleet.Browser, error) {
	return nil, fault.New(fault.IdentityNotSelected, "reach session browser", "", "session %q has no Identity", session)
}

func (f *fakeFleet) LoginBrowser(context.Context, string) (*fleet.Browser, error) {
	return nil, fault.New(fault.LoginNotRunning, "use login browser", "", "it is not running")
}

func (f *fakeFleet) Counts() (int, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running, 0
}

// hang is a tool that waits for its context and tells what ended it.
type hang struct {
	started chan tools.Caller
	ended   chan error
	stuck   chan struct{} // for the tool that ignores its context
}

// rig is a Server with its listeners.
type rig struct {
	*Server
	fleet  *fakeFleet
	hang   *hang
	socket string
	web    string
}

func newRig(t *testing.T, change func(*Deps)) *rig {
	t.Helper()
	h := &hang{started: make(chan tools.Caller, 16), ended: make(chan error, 16), stuck: make(chan struct{})}
	server := mcp.NewServer(&mcp.Implementation{Name: "abfleet", Version: "test"}, &mcp.ServerOptions{Capabilities: &mcp.ServerCapabilities{}})
	wait := func(ctx context.Context, _ *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		caller, _ := tools.CallerFrom(ctx)
		h.started <- caller
		<-ctx.Done()
		h.ended <- context.Cause(ctx)
		return nil, ctx.Err()
	}
	schema := json.RawMessage(`{"type":"object"}`)
	server.AddTool(&mcp.Tool{Name: "wait", InputSchema: schema}, wait)
	server.AddTool(&mcp.Tool{Name: "look", InputSchema: schema, Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true}}, wait)
	server.AddTool(&mcp.Tool{Name: "stuck", InputSchema: schema}, func(ctx context.Context, _ *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		h.started <- tools.Caller{}
		<-h.stuck
		return &mcp.CallToolResult{}, nil
	})
	server.AddTool(&mcp.Tool{Name: "quick", InputSchema: schema}, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		caller, _ := tools.CallerFrom(ctx)
		actor, _ := auth.ActorFrom(ctx)
		if token := req.Params.GetProgressToken(); token != nil {
			_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Message: "half", Progress: 0.5})
		}
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: caller.Session + "/" + caller.Client + "/" + string(actor.Kind)}}}, nil
	})
	t.Cleanup(func() { close(h.stuck) })

	f := &fakeFleet{}
	a, err := auth.New(auth.Options{Token: testToken, Deny: Deny})
	if err != nil {
		t.Fatal(err)
	}
	deps := Deps{Fleet: f, Auth: a, Token: testToken, Log: slog.New(slog.DiscardHandler), MCP: server}
	if change != nil {
		change(&deps)
	}
	s, err := New(t.Context(), deps)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Server: s, fleet: f, hang: h, socket: filepath.Join(t.TempDir(), "control.sock")}
	control, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.web = "http://" + web.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.ServeControl(control) })
	serving.Go(func() { _ = s.ServeWeb(web) })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = s.Stop(ctx)
		serving.Wait()
	})
	return r
}

// headers adds headers to every request.
type headers struct {
	http.RoundTripper
	set http.Header
}

func (h headers) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for name, values := range h.set {
		r.Header[name] = values
	}
	return h.RoundTripper.RoundTrip(r)
}

// connect returns a client session of the SDK.
func (r *rig) connect(t *testing.T, session, client string, opts *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	set := http.Header{api.HeaderSession: {session}}
	if client != "" {
		set.Set(api.HeaderClient, client)
	}
	c := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, opts)
	cs, err := c.Connect(t.Context(), &mcp.StreamableClientTransport{
		Endpoint:             api.Base + api.MCPPath,
		DisableStandaloneSSE: true,
		HTTPClient: &http.Client{Transport: headers{&http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", r.socket)
			},
		}, set}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cs.Close() })
	return cs
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("%s did not happen", what)
		panic("unreachable")
	}
}
