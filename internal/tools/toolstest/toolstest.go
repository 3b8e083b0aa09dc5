// Package toolstest helps to test tools: a fleet whose Session Browsers are real
// Chromiums without Stacks around them, a client that calls tools as an agent
// does, and a check of what answers may not contain. It is imported by tests
// only.
package toolstest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/coder/websocket"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/fault"
	"abfleet/internal/page/pagetest"
	"abfleet/internal/tools"
)

// forbidden is what no answer to an agent contains: ways into browsers, and the
// names under which the fleet keeps them.
var forbidden = []*regexp.Regexp{
	regexp.MustCompile(`wss?://\S*/devtools/\S*`),
	regexp.MustCompile(`/devtools/(browser|page)\S*`),
	regexp.MustCompile(`remote-debugging-\w+`),
	regexp.MustCompile(`DevToolsActivePort`),
	regexp.MustCompile(`\b[\w-]+\.sock\b`),
	regexp.MustCompile(`\babfleet[\w-]*\.(service|socket|slice|scope)\b`),
	regexp.MustCompile(`\bsession-?\w*\.scope\b|\b\w+-(display|chromium)-\d+\b`),
	regexp.MustCompile(`\S*/identities/\S*/profiles/\S*`),
	regexp.MustCompile(`--user-data-dir\S*`),
}

// LeakCheck returns what a text to an agent should not contain: what looks like
// an endpoint, unit or profile, and every one of the secrets (instance names,
// profile ids, ports of the fleet under test).
func LeakCheck(text string, secrets ...string) []string {
	var found []string
	for _, re := range forbidden {
		found = append(found, re.FindAllString(text, -1)...)
	}
	for _, s := range secrets {
		if s != "" && strings.Contains(text, s) {
			found = append(found, s)
		}
	}
	return found
}

// Fleet is a tools.Fleet with one READY Identity, "id-1" or "Shop", and one
// Chromium that all sessions share.
type Fleet struct {
	t  testing.TB
	b  *pagetest.Browser
	mu sync.Mutex
	// bound is the generation of each bound session's browser.
	bound map[string]int
	conns []net.Conn
	// operating counts the calls that use a browser.
	operating int
	// Opened counts the connections made to the browser.
	Opened int
}

// NewFleet starts the Chromium, or skips the test.
func NewFleet(t testing.TB) *Fleet {
	return &Fleet{t: t, b: pagetest.Start(t, pagetest.Options{Port: true}), bound: make(map[string]int)}
}

// Identities lists the one Identity.
func (f *Fleet) Identities(_ context.Context, session string) (tools.IdentityList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := tools.IdentityList{Identities: []tools.Identity{{ID: "id-1", Name: "Shop", State: "READY"}}}
	if f.bound[session] > 0 {
		list.Current, list.Running = "id-1", true
	}
	return list, nil
}

// UseIdentity binds the session. Doing it again gives the session a browser of
// a new generation.
func (f *Fleet) UseIdentity(_ context.Context, session, ref string) (tools.Binding, error) {
	if ref != "id-1" && ref != "Shop" {
		return tools.Binding{}, fault.New(fault.IdentityNotFound, "use identity", "list them with agent_browser_identities", "there is no identity %q", ref)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bound[session]++
	return tools.Binding{Identity: "id-1"}, nil
}

// Operate counts the calls that use the session's browser.
func (f *Fleet) Operate(context.Context, string) (func(), error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.operating++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.operating--
	}, nil
}

// Operating is how many calls use a browser now.
func (f *Fleet) Operating() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.operating
}

// Browser is the session's browser.
func (f *Fleet) Browser(_ context.Context, session string) (tools.Browser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.bound[session] == 0 {
		return nil, fault.NotSelected("find session browser")
	}
	return &browser{fleet: f, key: fmt.Sprintf("%s/%d", session, f.bound[session])}, nil
}

// Disconnect breaks all connections to the browser, as its death would.
func (f *Fleet) Disconnect() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

type browser struct {
	fleet *Fleet
	key   string
}

func (b *browser) Key() string { return b.key }

// OpenCDP connects by websocket and speaks NUL-delimited frames on the returned
// connection.
func (b *browser) OpenCDP(ctx context.Context) (net.Conn, error) {
	ws, _, err := websocket.Dial(ctx, b.fleet.b.WebSocketURL(b.fleet.t), &websocket.DialOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil, err
	}
	ws.SetReadLimit(-1)
	ours, theirs := net.Pipe()
	go func() {
		defer ws.CloseNow()
		in := bufio.NewReader(ours)
		for {
			msg, err := in.ReadBytes(0)
			if err != nil {
				return
			}
			if err := ws.Write(context.Background(), websocket.MessageText, msg[:len(msg)-1]); err != nil {
				return
			}
		}
	}()
	go func() {
		defer ours.Close()
		for {
			_, r, err := ws.Reader(context.Background())
			if err != nil {
				return
			}
			msg, err := io.ReadAll(r)
			if err != nil {
				return
			}
			if _, err := ours.Write(append(msg, 0)); err != nil {
				return
			}
		}
	}()
	b.fleet.mu.Lock()
	b.fleet.conns = append(b.fleet.conns, ours)
	b.fleet.Opened++
	b.fleet.mu.Unlock()
	return theirs, nil
}

// Client calls the tools of one host as one caller.
type Client struct {
	t       testing.TB
	session *mcp.ClientSession
}

// Connect serves list from a new Host to a new client, which calls as caller
// does. Every answer is checked with LeakCheck.
func Connect(t testing.TB, host *tools.Host, list ...tools.Tool) *Client {
	t.Helper()
	server := mcp.NewServer(&mcp.Implementation{Name: "test"}, &mcp.ServerOptions{Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}}})
	host.Register(server, list...)
	here, there := mcp.NewInMemoryTransports()
	serving, err := server.Connect(t.Context(), there, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { serving.Close() })
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), here, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return &Client{t: t, session: session}
}

// Tools lists the tools.
func (c *Client) Tools() []*mcp.Tool {
	c.t.Helper()
	r, err := c.session.ListTools(c.t.Context(), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	return r.Tools
}

// Call calls a tool; isError says whether it answered an error. Images are the
// picture blocks.
func (c *Client) Call(ctx context.Context, name string, args any) (text string, isError bool, images []*mcp.ImageContent) {
	c.t.Helper()
	r, err := c.session.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		c.t.Fatalf("%s: %v", name, err)
	}
	for _, block := range r.Content {
		switch b := block.(type) {
		case *mcp.TextContent:
			text += b.Text
		case *mcp.ImageContent:
			images = append(images, b)
		default:
			c.t.Errorf("%s: a block of type %T", name, b)
		}
	}
	if bad := LeakCheck(text); len(bad) > 0 {
		c.t.Errorf("%s: the answer contains %q:\n%s", name, bad, text)
	}
	return text, r.IsError, images
}

// CallError calls a tool that the client gives up, and returns why.
func (c *Client) CallError(ctx context.Context, name string, args any) error {
	_, err := c.session.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args})
	return err
}
