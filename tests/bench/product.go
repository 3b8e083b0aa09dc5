package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

const (
	serviceUnit = "abfleetd.service"
	siteURL     = "http://127.0.0.1:8800"
)

// callWait bounds one tool call of any side, activationWait one first answer.
const (
	callWait       = time.Minute
	activationWait = 30 * time.Second
)

func controlSocket() string {
	return filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "abfleet", "control.sock")
}

// abfleet runs a command of the CLI.
func abfleet(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "abfleet", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("abfleet %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// install sets the product up for the rig's user and, unless identity is "",
// makes a saved Identity of that name.
func install(ctx context.Context, identity string) error {
	commands := [][]string{{"setup", "--bin-dir", rig.BinDir, "--now"}}
	if identity != "" {
		commands = append(commands, []string{"identity", "create", identity}, []string{"identity", "login", identity}, []string{"identity", "save", identity})
	}
	for _, c := range commands {
		if err := abfleet(ctx, c...); err != nil {
			return err
		}
	}
	return nil
}

// serveSite serves the pages that the browsers work on.
func serveSite() (io.Closer, error) {
	l, err := net.Listen("tcp", strings.TrimPrefix(siteURL, "http://"))
	if err != nil {
		return nil, err
	}
	server := &http.Server{Handler: site.Handler(site.Options{})}
	go server.Serve(l)
	return server, nil
}

// agent is the official Go MCP client over the control socket.
type agent struct {
	*mcp.ClientSession
	name string
}

// inSession adds the session to every request.
type inSession struct {
	http.RoundTripper
	name string
}

func (s inSession) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set(api.HeaderSession, s.name)
	return s.RoundTripper.RoundTrip(r)
}

// newAgent connects a client and gives its session a browser of the Identity.
func newAgent(ctx context.Context, session, identity string) (*agent, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", controlSocket())
	}}
	client := mcp.NewClient(&mcp.Implementation{Name: "bench", Version: "1"}, nil)
	s, err := client.Connect(ctx, &mcp.StreamableClientTransport{
		Endpoint: api.Base + api.MCPPath, HTTPClient: &http.Client{Transport: inSession{transport, session}}, DisableStandaloneSSE: true,
	}, nil)
	if err != nil {
		return nil, err
	}
	a := &agent{s, session}
	if _, _, err := a.call(ctx, "agent_browser_use_identity", map[string]any{"identity_id": identity}); err != nil {
		return nil, errors.Join(err, a.close(ctx))
	}
	return a, nil
}

// call implements side.
func (a *agent) call(ctx context.Context, tool string, args map[string]any) (string, float64, error) {
	ctx, cancel := context.WithTimeout(ctx, callWait)
	defer cancel()
	t := time.Now()
	result, err := a.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	took := since(t)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", tool, err)
	}
	var text strings.Builder
	for _, c := range result.Content {
		if tc, ok := c.(*mcp.TextContent); ok {
			text.WriteString(tc.Text)
		}
	}
	if result.IsError {
		return "", 0, fmt.Errorf("%s: %s", tool, text.String())
	}
	return text.String(), took, nil
}

// close ends the client and its Session Browser.
func (a *agent) close(ctx context.Context) error {
	return errors.Join(a.Close(), abfleet(ctx, "session", "stop", a.name))
}

// get asks over the unix socket, on a connection of its own, and returns the
// milliseconds to the end of the answer.
func get(ctx context.Context, socket, path string) ([]byte, float64, error) {
	ctx, cancel := context.WithTimeout(ctx, activationWait)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, api.Base+path, nil)
	if err != nil {
		return nil, 0, err
	}
	client := api.HTTPClient(socket)
	t := time.Now()
	response, err := client.Do(r)
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	took := since(t)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, body)
	}
	return body, took, err
}

// manager is the user's systemd.
type manager struct{ *systemd.Conn }

// do runs one job and waits for it.
func (m manager) do(ctx context.Context, job func(context.Context, string, string, chan<- string) (int, error), unit string) error {
	done := make(chan string, 1)
	if _, err := job(ctx, unit, "replace", done); err != nil {
		return fmt.Errorf("%s: %w", unit, err)
	}
	select {
	case result := <-done:
		if result != "done" {
			return fmt.Errorf("%s: the job ended as %s", unit, result)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// down stops a service, so that the next connection starts it, however often
// that has been done.
func (m manager) down(ctx context.Context, unit string) error {
	return errors.Join(m.do(ctx, m.StopUnitContext, unit), m.ResetFailedUnitContext(ctx, unit))
}

// A no-op service: this program, activated by a socket.
const (
	noopUnits = "/.config/systemd/user/bench-noop"
	noopFlag  = "noop"
)

// serveNoop answers every request on the socket that systemd passed.
func serveNoop() error {
	f := os.NewFile(3, "socket")
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") }))
}

// benchActivation compares the first answer of the service, which is started by
// the connection, with that of a service that does nothing.
func benchActivation(b *bencher) error {
	if err := install(b, ""); err != nil {
		return err
	}
	conn, err := systemd.NewUserConnectionContext(b)
	if err != nil {
		return err
	}
	m := manager{conn}
	defer m.Close()
	socket := filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "bench-noop.sock")
	for suffix, text := range map[string]string{
		".socket":  "[Socket]\nListenStream=" + socket + "\nSocketMode=0600\n",
		".service": "[Service]\nExecStart=" + insideDir + "/bench -" + noopFlag + "\n",
	} {
		if err := os.WriteFile(os.Getenv("HOME")+noopUnits+suffix, []byte(text), 0o600); err != nil {
			return err
		}
	}
	if err := errors.Join(m.ReloadContext(b), m.do(b, m.StartUnitContext, "bench-noop.socket")); err != nil {
		return err
	}
	out := row{Name: "first answer, socket-activated", Peer: "no-op Go service", Limit: 3, Unit: "ms"}
	for range b.n {
		for _, s := range []struct {
			unit, socket string
			times        *[]float64
		}{{serviceUnit, controlSocket(), &out.Ours}, {"bench-noop.service", socket, &out.Other}} {
			if err := m.down(b, s.unit); err != nil {
				return err
			}
			_, took, err := get(b, s.socket, api.VersionPath)
			if err != nil {
				return err
			}
			*s.times = append(*s.times, took)
		}
	}
	return errors.Join(b.emit(out), m.do(b, m.StopUnitContext, "bench-noop.socket"), m.do(b, m.StopUnitContext, "bench-noop.service"))
}

// sessionCount is how many sessions the service's memory is divided by.
const sessionCount = 3

// benchService measures the memory of the service: just started, and with
// agents at work in running sessions.
func benchService(b *bencher) error {
	if err := install(b, "memory"); err != nil {
		return err
	}
	stopSite, err := serveSite()
	if err != nil {
		return err
	}
	defer stopSite.Close()
	conn, err := systemd.NewUserConnectionContext(b)
	if err != nil {
		return err
	}
	m := manager{conn}
	defer m.Close()
	idle := row{Name: "service memory, idle (PSS)", Unit: "MB", Ceiling: 25}
	for range b.n {
		if err := m.down(b, serviceUnit); err != nil {
			return err
		}
		size, err := serviceMemory(b)
		if err != nil {
			return err
		}
		idle.Ours = append(idle.Ours, size)
	}
	var agents []*agent
	for i := range sessionCount {
		a, err := newAgent(b, fmt.Sprintf("memory-%d", i), "memory")
		if err != nil {
			return err
		}
		agents = append(agents, a)
	}
	each := row{Name: "service memory per session (PSS)", Unit: "MB", Ceiling: 2}
	for range b.n {
		for _, a := range agents {
			_, _, err := a.call(b, "browser_navigate", map[string]any{"url": siteURL + "/elements?n=1000"})
			if err == nil {
				_, _, err = a.call(b, "browser_snapshot", nil)
			}
			if err != nil {
				return err
			}
		}
		size, err := serviceMemory(b)
		if err != nil {
			return err
		}
		each.Ours = append(each.Ours, (size-median(idle.Ours))/sessionCount)
	}
	for _, a := range agents {
		err = errors.Join(err, a.close(b))
	}
	return errors.Join(err, b.emit(idle), b.emit(each))
}

// serviceMemory asks the service for its process and returns that one's size.
func serviceMemory(ctx context.Context) (float64, error) {
	body, _, err := get(ctx, controlSocket(), api.VersionPath)
	if err != nil {
		return 0, err
	}
	var answer api.Answer
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, err
	}
	return memory(answer.Version.PID)
}
