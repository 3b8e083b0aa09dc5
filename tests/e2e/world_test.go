// Package e2e runs the whole product as its users do: in a rig with real
// systemd, real sandboxed Chromium as a normal user, real MCP clients and a
// real person's browser in front of the viewer page.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/fault"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

const (
	siteAddr = "127.0.0.1:8800"
	siteURL  = "http://" + siteAddr
	peersDir = "/opt/abfleet/peers"
)

// world is one booted machine with the product installed for its user.
type world struct {
	*rig.Rig
	t       *testing.T
	secrets []string // what no answer to an agent may contain
}

// boot starts a machine, installs the build in it and runs setup, unless
// bare: then only the programs are there.
func boot(t *testing.T, opts rig.Options) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("boots a rig and real browsers; run without -short")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "bin", "abfleetd")); err != nil {
		t.Fatal("no programs in bin/: run make build first")
	}
	opts.Binds = map[string]string{filepath.Join(root, "bin"): rig.BinDir}
	if _, err := os.Stat(filepath.Join(root, "tests/peers/node_modules")); err == nil {
		opts.Binds[filepath.Join(root, "tests/peers")] = peersDir
	}
	w := &world{Rig: rig.BootTest(t, opts), t: t}
	w.serveSite()
	return w
}

// serveSite shows the test site inside the rig. It keeps nothing, so a second
// boot of the same machine has the same outside world.
func (w *world) serveSite() {
	w.t.Helper()
	l, err := w.Listen(w.t.Context(), "tcp", siteAddr)
	w.check(err)
	server := &http.Server{Handler: site.Handler(site.Options{})}
	go server.Serve(l)
	w.t.Cleanup(func() { server.Close() })
}

func (w *world) check(err error) {
	if err != nil {
		w.t.Helper()
		w.fail(err)
	}
}

// fail ends the test with what the service logged.
func (w *world) fail(err error) {
	w.t.Helper()
	journal, jerr := w.Journal(context.WithoutCancel(w.t.Context()), "-n", "80", "--no-pager", "-o", "short-monotonic")
	if jerr != nil {
		journal = jerr.Error()
	}
	w.t.Fatalf("%v\njournal:\n%s", err, journal)
}

// abf runs an abfleet command as the user and returns what it answered; an
// error it reports is a *fault.Error.
func (w *world) abf(args ...string) (api.Answer, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 3*time.Minute)
	defer cancel()
	cmd := w.User(ctx, "abfleet", append(args, "--json")...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var answer api.Answer
	if len(bytes.TrimSpace(out)) == 0 {
		return answer, fmt.Errorf("abfleet %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	if jerr := json.Unmarshal(out, &answer); jerr != nil {
		return answer, fmt.Errorf("abfleet %s: %w: %s", strings.Join(args, " "), jerr, out)
	}
	if answer.Error != nil {
		return answer, answer.Error.Fault()
	}
	return answer, err
}

// must is abf for what has to work.
func (w *world) must(args ...string) api.Answer {
	w.t.Helper()
	answer, err := w.abf(args...)
	w.check(err)
	return answer
}

// refused checks that a command fails with the code and a hint.
func (w *world) refused(code fault.Code, args ...string) {
	w.t.Helper()
	_, err := w.abf(args...)
	if fault.CodeOf(err) != code || fault.HintOf(err) == "" {
		w.t.Errorf("abfleet %s: %v (code %s, hint %q), want %s and a hint", strings.Join(args, " "), err, fault.CodeOf(err), fault.HintOf(err), code)
	}
}

func (w *world) setup() {
	w.t.Helper()
	if out, err := w.User(w.t.Context(), "abfleet", "setup", "--bin-dir", rig.BinDir, "--now").CombinedOutput(); err != nil {
		w.fail(fmt.Errorf("setup: %w: %s", err, out))
	}
}

// sh runs a script as the user and returns its trimmed output.
func (w *world) sh(script string) string {
	w.t.Helper()
	out, err := w.Sh(w.t.Context(), script)
	if err != nil {
		w.fail(fmt.Errorf("%s: %w: %s", script, err, out))
	}
	return strings.TrimSpace(out)
}

func (w *world) controlSocket() string { return w.RuntimeDir() + "/abfleet/control.sock" }

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
	w       *world
	session *mcp.ClientSession
	answers []string // the text of every answer, for the leak check
	wrote   *atomic.Pointer[chan struct{}]
}

// sent returns a channel that is closed when the next call has been written.
func (a *agent) sent() <-chan struct{} {
	ch := make(chan struct{})
	a.wrote.Store(&ch)
	return ch
}

func (w *world) agent(session string) *agent {
	w.t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return w.Dial(ctx, "unix", w.controlSocket())
	}}
	wrote := new(atomic.Pointer[chan struct{}])
	client := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, nil)
	s, err := client.Connect(w.t.Context(), &mcp.StreamableClientTransport{
		Endpoint: "http://abfleet" + api.MCPPath, HTTPClient: &http.Client{Transport: headers{transport, session, wrote}}, DisableStandaloneSSE: true,
	}, nil)
	w.check(err)
	w.t.Cleanup(func() { s.Close() })
	return &agent{w: w, session: s, wrote: wrote}
}

// call runs a tool and returns its text; an error answer is an error.
func (a *agent) call(tool string, args map[string]any) (string, error) {
	result, err := a.session.CallTool(a.w.t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		a.answers = append(a.answers, err.Error())
		return "", err
	}
	var text strings.Builder
	for _, c := range result.Content {
		if tc, ok := c.(*mcp.TextContent); ok {
			text.WriteString(tc.Text)
		}
	}
	a.answers = append(a.answers, text.String())
	if result.IsError {
		return text.String(), errors.New(text.String())
	}
	return text.String(), nil
}

func (a *agent) must(tool string, args map[string]any) string {
	a.w.t.Helper()
	text, err := a.call(tool, args)
	if err != nil {
		a.w.fail(fmt.Errorf("%s: %w", tool, err))
	}
	return text
}

// mustContain is must with a look at the answer.
func (a *agent) mustContain(tool string, args map[string]any, want string) string {
	a.w.t.Helper()
	text := a.must(tool, args)
	if !strings.Contains(text, want) {
		a.w.t.Fatalf("%s: no %q in:\n%s", tool, want, text)
	}
	return text
}

// ref finds the reference of the first snapshot line that contains text.
func ref(t *testing.T, snapshot, text string) string {
	t.Helper()
	for line := range strings.Lines(snapshot) {
		if !strings.Contains(line, text) {
			continue
		}
		if _, rest, ok := strings.Cut(line, "[ref="); ok {
			r, _, _ := strings.Cut(rest, "]")
			return r
		}
	}
	t.Fatalf("no %q with a ref in:\n%s", text, snapshot)
	return ""
}

// loginByHand makes an Identity the way a person does: login browser in the
// viewer page, keyboard and mouse over RFB, save.
func (w *world) loginByHand(name string) {
	w.t.Helper()
	w.must("identity", "create", name)
	login := w.must("identity", "login", name, "--url", siteURL+"/login")
	p := w.newPerson()
	p.open(login.View.URL + "")
	p.live()
	p.screen(site.UserField)
	p.clickScreen(site.UserField)
	p.typeText(site.DefaultUser)
	p.clickScreen(site.PasswordField)
	p.typeText(site.DefaultPassword)
	p.press("Enter", 13, "\r")
	p.gone(site.SubmitButton)
	w.must("identity", "save", name)
}

// browserPID is the one process of the service's user that runs Chromium's
// browser role in a fleet scope.
func (w *world) browserPIDs() []int {
	w.t.Helper()
	var pids []int
	for _, f := range strings.Fields(w.sh(`for d in /proc/[0-9]*; do
		test "$(readlink $d/exe 2>/dev/null)" = /usr/lib/chromium/chromium || continue
		case "$(tr '\0' ' ' <$d/cmdline 2>/dev/null)" in *--type=*) continue;; esac
		if grep -q -e -chromium- $d/cgroup 2>/dev/null; then echo ${d#/proc/}; fi; done`)) {
		pid, err := strconv.Atoi(f)
		w.check(err)
		pids = append(pids, pid)
	}
	return pids
}
