// Package e2e runs the whole product as its users do: in a rig with real
// systemd, real sandboxed Chromium as a normal user, real MCP clients and a
// real person's browser in front of the viewer page.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

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
	t      *testing.T
	agents overheard
	site   visits
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
	server := &http.Server{Handler: w.site.handler(site.Handler(site.Options{}))}
	go server.Serve(l)
	w.t.Cleanup(func() { server.Close() })
}

// visits lets a test wait until a page has asked the site for an address.
type visits struct {
	mu      sync.Mutex
	waiting map[string]chan struct{}
}

// seen returns a channel that is closed when the address is asked for.
func (v *visits) seen(path string) <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.waiting == nil {
		v.waiting = make(map[string]chan struct{})
	}
	ch := make(chan struct{})
	v.waiting[path] = ch
	return ch
}

func (v *visits) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v.mu.Lock()
		if ch := v.waiting[r.URL.RequestURI()]; ch != nil {
			delete(v.waiting, r.URL.RequestURI())
			close(ch)
		}
		v.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

// await waits for something that has to happen soon.
func (w *world) await(what string, ch <-chan struct{}) {
	w.t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	select {
	case <-ch:
	case <-deadline.C:
		w.fail(fmt.Errorf("%s did not happen", what))
	}
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

// rootSh is sh as the machine's root.
func (w *world) rootSh(script string) string {
	w.t.Helper()
	out, err := w.RootSh(w.t.Context(), script)
	if err != nil {
		w.fail(fmt.Errorf("%s: %w: %s", script, err, out))
	}
	return strings.TrimSpace(out)
}

func (w *world) controlSocket() string { return w.RuntimeDir() + "/abfleet/control.sock" }

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
