package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/tools/toolstest"
)

// client is an official MCP client that acts for one session. What it is told
// is checked for leaks when the test ends.
type client struct {
	w  *world
	do func(tool string, args map[string]any) (*mcp.CallToolResult, error)
}

// run calls a tool; the result of a tool that failed comes with an error.
func (c *client) run(tool string, args map[string]any) (*mcp.CallToolResult, string, error) {
	result, err := c.do(tool, args)
	if err != nil {
		c.w.agents.hear(err.Error())
		var rpc *jsonrpc.Error
		if errors.As(err, &rpc) {
			c.w.agents.hear(string(rpc.Data))
			err = fmt.Errorf("%w %s", err, rpc.Data)
		}
		return nil, "", err
	}
	var text strings.Builder
	for _, content := range result.Content {
		switch content := content.(type) {
		case *mcp.TextContent:
			text.WriteString(content.Text)
		case *mcp.ImageContent: // its data is a picture
		default:
			c.w.agents.hearJSON(content)
		}
	}
	c.w.agents.hear(text.String())
	c.w.agents.hearJSON(result.Meta)
	c.w.agents.hearJSON(result.StructuredContent)
	if result.IsError {
		return result, text.String(), errors.New(text.String())
	}
	if tool == "agent_browser_use_identity" {
		c.w.collect(c.w.t.Context())
	}
	return result, text.String(), nil
}

// call runs a tool and returns its text; an error answer is an error.
func (c *client) call(tool string, args map[string]any) (string, error) {
	_, text, err := c.run(tool, args)
	return text, err
}

func (c *client) must(tool string, args map[string]any) string {
	c.w.t.Helper()
	text, err := c.call(tool, args)
	if err != nil {
		c.w.fail(fmt.Errorf("%s: %w", tool, err))
	}
	return text
}

// mustContain is must with a look at the answer.
func (c *client) mustContain(tool string, args map[string]any, want string) string {
	c.w.t.Helper()
	text := c.must(tool, args)
	if !strings.Contains(text, want) {
		c.w.t.Fatalf("%s: no %q in:\n%s", tool, want, text)
	}
	return text
}

// refused checks that a tool fails, and that its answer has a hint and says all
// of that.
func (c *client) refused(tool string, args map[string]any, wants ...string) {
	c.w.t.Helper()
	text, err := c.call(tool, args)
	if err == nil {
		c.w.t.Errorf("%s is not refused:\n%s", tool, text)
		return
	}
	if !strings.Contains(strings.ToLower(err.Error()), "hint") {
		c.w.t.Errorf("%s: no hint in: %v", tool, err)
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			c.w.t.Errorf("%s: no %q in: %v", tool, want, err)
		}
	}
}

// picture is the client's screenshot.
func (c *client) picture() image.Image {
	c.w.t.Helper()
	result, _, err := c.run("browser_take_screenshot", map[string]any{})
	c.w.check(err)
	for _, content := range result.Content {
		if img, ok := content.(*mcp.ImageContent); ok {
			picture, err := png.Decode(bytes.NewReader(img.Data))
			c.w.check(err)
			return picture
		}
	}
	c.w.fail(fmt.Errorf("no image in the answer: %+v", result.Content))
	return nil
}

// paint gives the client's page a background, for a person to see.
func (c *client) paint(color string) {
	c.w.t.Helper()
	c.must("browser_evaluate", map[string]any{"function": fmt.Sprintf("() => { document.body.style.background = %q }", color)})
}

// headers adds the session to every request, as the DSH bundle does, and tells
// when a request is with the service.
type headers struct {
	http.RoundTripper
	session string
	wrote   *atomic.Pointer[chan struct{}] // closed, once, after the next request is written
}

func (h headers) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) {
		if ch := h.wrote.Swap(nil); ch != nil {
			close(*ch)
		}
	}}))
	r.Header.Set(api.HeaderSession, h.session)
	return h.RoundTripper.RoundTrip(r)
}

// agent is the official Go MCP client over the unix socket.
type agent struct {
	client
	http  *http.Client
	wrote *atomic.Pointer[chan struct{}]
}

// sent returns a channel that is closed when the next call has been written.
func (a *agent) sent() <-chan struct{} {
	ch := make(chan struct{})
	a.wrote.Store(&ch)
	return ch
}

func (w *world) agent(session string) *agent {
	w.t.Helper()
	w.overhear()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return w.Dial(ctx, "unix", w.controlSocket())
	}}
	a := &agent{wrote: new(atomic.Pointer[chan struct{}])}
	a.http = &http.Client{Transport: headers{transport, session, a.wrote}}
	s, err := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, nil).Connect(w.t.Context(), &mcp.StreamableClientTransport{
		Endpoint: "http://abfleet" + api.MCPPath, HTTPClient: a.http, DisableStandaloneSSE: true,
	}, nil)
	w.check(err)
	w.t.Cleanup(func() { s.Close() })
	a.client = client{w, func(tool string, args map[string]any) (*mcp.CallToolResult, error) {
		return s.CallTool(w.t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	}}
	return a
}

// post sends a JSON-RPC message without the client library, which would give a
// canceled call up before the service has ended it.
func (a *agent) post(ctx context.Context, message map[string]any) (string, error) {
	message["jsonrpc"] = "2.0"
	body, err := json.Marshal(message)
	if err != nil {
		return "", err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://abfleet"+api.MCPPath, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json, text/event-stream")
	r.Header.Set(api.HeaderClient, "by hand")
	response, err := a.http.Do(r)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	a.w.agents.hear(string(answer))
	return string(answer), err
}

// bridge is the official JavaScript client over the stdio bridge.
type bridge struct {
	client
	in  io.Writer
	out *json.Decoder
}

// bridge starts one; env is added to the environment of the bridge.
func (w *world) bridge(session string, env ...string) *bridge {
	w.t.Helper()
	w.overhear()
	cmd := w.User(context.WithoutCancel(w.t.Context()), "node", peersDir+"/client.mjs", "abfleet", "mcp", "--session", session)
	cmd.Env = append(cmd.Env, env...)
	in, err := cmd.StdinPipe()
	w.check(err)
	out, err := cmd.StdoutPipe()
	w.check(err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	w.check(cmd.Start())
	w.t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil && !w.t.Failed() {
			w.t.Errorf("bridge: %v: %s", err, stderr.String())
		}
	})
	b := &bridge{in: in, out: json.NewDecoder(out)}
	b.client = client{w, b.callTool}
	var ready struct{ Ready bool }
	if err := b.out.Decode(&ready); err != nil || !ready.Ready {
		w.fail(fmt.Errorf("bridge: %w: %s", err, stderr.String()))
	}
	// Every client lists the tools before it uses them.
	tools, err := b.ask(map[string]any{"list": true})
	w.check(err)
	w.agents.hear(string(tools))
	return b
}

// ask writes one request and returns the result of its answer.
func (b *bridge) ask(request map[string]any) (json.RawMessage, error) {
	line, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if _, err := b.in.Write(append(line, '\n')); err != nil {
		return nil, err
	}
	var answer struct {
		Error  *jsonrpc.Error
		Result json.RawMessage
	}
	if err := b.out.Decode(&answer); err != nil {
		return nil, err
	}
	if answer.Error != nil {
		return nil, answer.Error
	}
	return answer.Result, nil
}

func (b *bridge) callTool(tool string, args map[string]any) (*mcp.CallToolResult, error) {
	raw, err := b.ask(map[string]any{"name": tool, "arguments": args})
	if err != nil {
		return nil, err
	}
	var result mcp.CallToolResult
	return &result, json.Unmarshal(raw, &result)
}

// overheard is everything that agents were told in a test, and what they must
// not be told.
type overheard struct {
	once sync.Once

	mu      sync.Mutex
	answers []string
	secrets map[string][]string // by kind
}

func (o *overheard) hear(answer string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answers = append(o.answers, answer)
}

// hearJSON hears a value of an answer that is not text. Its line feeds are made
// real ones: an escaped one would be part of the word behind it.
func (o *overheard) hearJSON(value any) {
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		panic(err)
	}
	o.hear(strings.ReplaceAll(text.String(), `\n`, "\n"))
}

// collect notes what the machine has now that no agent may be told: what units,
// directories and sockets say of running browsers, and what the journal says
// of those that were, or never came to be.
func (w *world) collect(ctx context.Context) {
	w.t.Helper()
	out, err := w.RootSh(ctx, fmt.Sprintf(`
		list() { while read -r word; do echo "$1 $word"; done; }
		cd %s/.local/state/abfleet && ls -d identities/*/profiles/* | sed "s,.*/,," | list profile
		ls %[2]s/abfleet | grep -E '^[a-z0-9]{10}$' | list instance
		find /sys/fs/cgroup -name 'abfleet-*' | sed 's,.*/,,' | list unit
		ss -ltnH | awk '{print $4}' | grep -v '%[3]s$' | sed 's,.*:,,' | list port
		journalctl -q -F ABF_INSTANCE | list instance
		journalctl -q -F ABF_PROFILE | list profile
		journalctl -q -F _SYSTEMD_USER_UNIT | grep '^abfleet' | list unit`, w.UserHome(), w.RuntimeDir(), siteAddr))
	w.check(err)
	w.agents.mu.Lock()
	defer w.agents.mu.Unlock()
	for line := range strings.Lines(out) {
		kind, secret, _ := strings.Cut(strings.TrimSpace(line), " ")
		if !slices.Contains(w.agents.secrets[kind], secret) {
			w.agents.secrets[kind] = append(w.agents.secrets[kind], secret)
		}
	}
}

// overhear has the test fail when an answer to any agent of this machine names
// an endpoint, a port, a unit, a Profile or an Instance.
func (w *world) overhear() {
	w.agents.once.Do(func() {
		w.agents.secrets = make(map[string][]string)
		w.t.Cleanup(func() {
			select {
			case <-w.Exited():
			default:
				w.collect(context.WithoutCancel(w.t.Context()))
			}
			w.agents.check(w.t)
		})
	})
}

func (o *overheard) check(t *testing.T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, kind := range []string{"instance", "profile", "unit", "port"} {
		if len(o.secrets[kind]) == 0 {
			t.Errorf("the leak check knows no %s: %v", kind, o.secrets)
		}
	}
	if len(o.answers) == 0 {
		t.Error("the leak check heard no answer")
	}
	var names, ports []string
	for kind, secrets := range o.secrets {
		if kind == "port" {
			ports = append(ports, secrets...)
		} else {
			names = append(names, secrets...)
		}
	}
	// A port is a word: its digits may stand in a longer number.
	port := regexp.MustCompile(`\b(` + strings.Join(ports, "|") + `)\b`)
	for _, answer := range o.answers {
		found := toolstest.LeakCheck(answer, names...)
		if len(ports) > 0 {
			found = append(found, port.FindAllString(answer, -1)...)
		}
		if found != nil {
			t.Errorf("an answer to an agent contains %q:\n%s", found, answer)
		}
	}
}
