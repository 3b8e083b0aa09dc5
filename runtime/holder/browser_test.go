package holder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/runtime/profile"
)

// site sets a persistent cookie, a session cookie and something in
// localStorage, and shows the cookies it gets.
func site(t *testing.T) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/set", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "login", Value: "alice", MaxAge: 3600, Path: "/"})
		http.SetCookie(w, &http.Cookie{Name: "session", Value: "s1", Path: "/"})
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<script>localStorage.setItem('key','kept')</script>set")
	})
	mux.HandleFunc("/show", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, "<pre>%s</pre>", r.Header.Get("Cookie"))
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// open opens a page and waits until it has loaded.
func (p *peer) open(url string) string {
	p.t.Helper()
	_, session := p.page("about:blank")
	p.call(session, "Page.enable", nil, nil)
	p.call(session, "Page.navigate", map[string]any{"url": url}, nil)
	for {
		i := slices.IndexFunc(p.events, func(r reply) bool { return r.Session == session && r.Method == "Page.loadEventFired" })
		if i >= 0 {
			p.events = slices.Delete(p.events, i, i+1)
			return session
		}
		r := p.next()
		p.events = append(p.events, r)
	}
}

// shown is what the site sees in this browser.
func (p *peer) shown(url string) string {
	p.t.Helper()
	session := p.open(url + "/show")
	return string(p.eval(session, "document.body.innerText.trim() + '|' + localStorage.getItem('key')"))
}

func TestChromiumAnswersAndEndsCleanly(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	p := s.dial()
	_, session := p.page("about:blank")
	if got := string(p.eval(session, "6*7")); got != "42" {
		t.Errorf("6*7 is %s", got)
	}
	if fi, err := os.Lstat(s.spec.Holder.Socket); err != nil || fi.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v", fi.Mode(), err)
	}
	s.signal(unix.SIGWINCH)
	p.gone()
	e := s.ended()
	if e.Trigger != TriggerSignal || e.Detail != "SIGWINCH" || e.Step != stepClose || e.Code != 0 || !e.Clean || e.Generation != 7 || time.Since(e.At) > testTimeout {
		t.Errorf("exit is %+v", e)
	}
	if fi, err := os.Lstat(s.spec.Holder.ExitFile); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the exit record is %v, %v", fi.Mode(), err)
	}
	if _, err := os.Lstat(s.spec.Holder.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if _, _, err := Dial(ctx, s.spec.Holder.Socket, testKey); !errors.Is(err, unix.ENOENT) {
		t.Errorf("dial after the end: %v", err)
	}
}

// TestLoginSurvives: what a page has set the moment before is there after the
// next start, whatever ended the browser.
func TestLoginSurvives(t *testing.T) {
	normal(t)
	url := site(t)
	for name, c := range map[string]struct {
		end     func(s *stage)
		trigger string // "" when the holder cannot write a record
		step    string
	}{
		"SIGWINCH": {func(s *stage) { s.signal(unix.SIGWINCH) }, "signal", stepClose},
		"SIGTERM":  {func(s *stage) { s.signal(unix.SIGTERM) }, "signal", stepClose},
		"Close": {func(s *stage) {
			ctx, cancel := context.WithTimeout(s.t.(*testing.T).Context(), testTimeout)
			defer cancel()
			if err := Close(ctx, s.spec.Holder.Socket, testKey, "save identity"); err != nil {
				s.t.Error(err)
			}
		}, "close: save identity", stepClose},
		"a client's Browser.close": {func(s *stage) { s.dial().call("", "Browser.close", nil, nil) }, "browser exited", stepNone},
		"SIGKILL of the holder":    {func(s *stage) { s.signal(unix.SIGKILL) }, "", ""},
		"a stopped holder": {func(s *stage) {
			s.signal(unix.SIGSTOP)
			s.signal(unix.SIGWINCH)
			s.signal(unix.SIGCONT)
		}, "signal", stepClose},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t).browser().start()
			p := s.dial()
			browser := s.browserPID()
			p.open(url + "/set")
			pidfd, err := unix.PidfdOpen(browser, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(pidfd)
			c.end(s)
			endOf(t, pidfd)
			if c.trigger != "" {
				if e := s.ended(); e.Trigger != c.trigger || e.Step != c.step || !e.Clean || e.BrowserPID != browser {
					t.Errorf("exit is %+v", e)
				}
			} else {
				s.spawned.Wait(t.Context())
				if _, err := ReadExit(s.spec.Holder.ExitFile); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("there is an exit record: %v", err)
				}
			}
			if ok, why := profile.ExitedCleanly(s.path("profile")); !ok {
				t.Fatal("not clean: ", why)
			}
			s.again("--restore-last-session")
			if got, want := s.dial().shown(url), `"login=alice; session=s1|kept"`; got != want {
				t.Errorf("the site sees %s, want %s", got, want)
			}
		})
	}
}

// again starts the next generation on the same profile.
func (s *stage) again(extra ...string) {
	s.t.Helper()
	s.spec.Generation++
	s.spec.Args = slices.Insert(slices.Clone(s.spec.Args), 1, extra...)
	s.start()
}

// browserPID asks the holder.
func (s *stage) browserPID() int {
	s.t.Helper()
	p := s.dial()
	p.conn.Close()
	return p.hello.BrowserPID
}

// TestSnapshotKeepsLogins goes the way of an Identity: log in, close, capture,
// clone twice; both clones are logged in and independent.
func TestSnapshotKeepsLogins(t *testing.T) {
	normal(t)
	url := site(t)
	s := newStage(t).browser().start()
	p := s.dial()
	p.open(url + "/set")
	if _, err := profile.Capture(t.Context(), s.path("profile"), s.path("snapshot")); err == nil {
		t.Error("captured while the browser runs")
	}
	s.signal(unix.SIGWINCH)
	s.ended()
	r, err := profile.Capture(t.Context(), s.path("profile"), s.path("snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("snapshot: %+v", r)
	t.Cleanup(func() {
		if err := profile.Remove(context.Background(), s.path("snapshot")); err != nil {
			t.Error(err)
		}
	})
	const want = `"login=alice; session=s1|kept"`
	var clones []*stage
	for range 2 {
		c := newStage(t)
		if err := os.Remove(c.path("profile")); err != nil {
			t.Fatal(err)
		}
		if _, err := profile.Clone(t.Context(), s.path("snapshot"), c.path("profile")); err != nil {
			t.Fatal(err)
		}
		clones = append(clones, c.browser("--restore-last-session").start())
	}
	a, b := clones[0].dial(), clones[1].dial()
	if got := a.shown(url); got != want {
		t.Errorf("the first clone shows %s, want %s", got, want)
	}
	session := a.open(url + "/show")
	a.eval(session, "document.cookie='login=mallory; max-age=3600; path=/', localStorage.setItem('key','other')")
	if got := b.shown(url); got != want {
		t.Errorf("the second clone shows %s, want %s", got, want)
	}
}

func TestTwoClients(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	a, b := s.dial(), s.dial()
	a.call("", "Target.setDiscoverTargets", map[string]any{"discover": true}, nil)
	targetA, sessionA := a.page("data:text/html,<title>A</title>")
	targetB, sessionB := b.page("data:text/html,<title>B</title>")
	a.call(sessionA, "Runtime.enable", nil, nil)
	for i := range 200 {
		ia := a.send(sessionA, "Runtime.evaluate", map[string]any{"expression": fmt.Sprintf("console.log('a'), %d", i)})
		ib := b.send(sessionB, "Runtime.evaluate", map[string]any{"expression": fmt.Sprintf("console.log('b'), -%d", i+1)})
		for _, r := range []struct {
			got  reply
			want int
		}{{a.await(ia), i}, {b.await(ib), -i - 1}} {
			var v struct{ Result struct{ Value int } }
			if err := json.Unmarshal(r.got.Result, &v); err != nil || v.Result.Value != r.want {
				t.Fatalf("value is %s, want %d", r.got.Result, r.want)
			}
		}
	}
	for _, e := range a.events {
		if e.Session == "" && !strings.HasPrefix(e.Method, "Target.") || e.Session != "" && e.Session != sessionA {
			t.Errorf("a got %s of session %q", e.Method, e.Session)
		}
	}
	// b has enabled nothing.
	for _, e := range b.events {
		if e.Method != "Target.attachedToTarget" && e.Method != "Target.targetInfoChanged" {
			t.Errorf("b got %s", e.Method)
		}
	}
	if r := b.await(b.send(sessionA, "Runtime.evaluate", map[string]any{"expression": "1"})); r.Error == nil || r.Error.Code != codeNoSession {
		t.Errorf("b in a's session: %+v", r)
	}
	// a dies in the middle of a message.
	a.raw(`{"id":9999,"method":"Target.closeTarget","params":{"targetId":"` + targetB + `"`)
	a.conn.Close()
	var targets struct {
		TargetInfos []struct {
			TargetID string
			Attached bool
		}
	}
	deadline := time.Now().Add(testTimeout)
	for {
		b.call("", "Target.getTargets", nil, &targets)
		attached := false
		seenB := false
		for _, info := range targets.TargetInfos {
			attached = attached || info.TargetID == targetA && info.Attached
			seenB = seenB || info.TargetID == targetB
		}
		if !seenB {
			t.Fatal("half a message was carried out")
		}
		if !attached {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a's page session is still there")
		}
	}
	if got := string(b.eval(sessionB, "document.title")); got != `"B"` {
		t.Errorf("title is %s", got)
	}
}

// TestSlowClientIsCut: results that nobody reads cost the client that asked
// for them its connection, and no other client its answers.
func TestSlowClientIsCut(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	slow, quick := s.dial(), s.dial()
	_, ss := slow.page("about:blank")
	_, qs := quick.page("about:blank")
	const one = 900 << 10
	var worst time.Duration
	// The results come when the slow client's own renderer gets to them, so it
	// goes on asking until it is cut off.
	for deadline := time.Now().Add(testTimeout); time.Now().Before(deadline); {
		slow.conn.SetDeadline(deadline)
		m := fmt.Sprintf(`{"id":1,"method":"Runtime.evaluate","params":{"expression":"'x'.repeat(%d)"},"sessionId":%q}`, one, ss)
		if _, err := slow.conn.Write([]byte(m + "\x00")); err != nil {
			break // cut off already
		}
		start := time.Now()
		if got := string(quick.eval(qs, "1+1")); got != "2" {
			t.Fatalf("1+1 is %s", got)
		}
		worst = max(worst, time.Since(start))
	}
	slow.gone()
	t.Logf("slowest answer to the other client: %v", worst)
	if got := string(quick.eval(qs, "2+2")); got != "4" {
		t.Errorf("2+2 is %s", got)
	}
}

var pssLine = regexp.MustCompile(`(?m)^Pss:\s+(\d+) kB`)

// pss is the proportional memory of a process in bytes.
func pss(t testing.TB, pid int) int {
	t.Helper()
	m := pssLine.FindStringSubmatch(read(t, fmt.Sprintf("/proc/%d/smaps_rollup", pid)))
	if m == nil {
		t.Fatal("no Pss")
	}
	kb, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// TestLargeResults: they arrive whole, and the holder's memory is given back.
func TestLargeResults(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	p, other := s.dial(), s.dial()
	_, session := p.page("about:blank")
	_, so := other.page("about:blank")
	before := pss(t, s.spawned.PID())
	for _, size := range []int{20 << 20, 50 << 20} {
		id := p.send(session, "Runtime.evaluate", map[string]any{"expression": fmt.Sprintf("'x'.repeat(%d)+'end'", size), "returnByValue": true})
		// Nobody reads it for as long as Chromium takes to make it, and the
		// other client is served meanwhile.
		for range 20 {
			other.eval(so, "'y'.repeat(100000)")
		}
		var v struct{ Result struct{ Value string } }
		if err := json.Unmarshal(p.await(id).Result, &v); err != nil || len(v.Result.Value) != size+3 || !strings.HasSuffix(v.Result.Value, "xend") {
			t.Fatalf("%d bytes came for %d, %v", len(v.Result.Value), size, err)
		}
	}
	// A large message the other way.
	if got := string(p.eval(session, "'"+strings.Repeat("z", 30<<20)+"'.length")); got != fmt.Sprint(30<<20) {
		t.Errorf("length is %s", got)
	}
	const most = 8 << 20
	after := pss(t, s.spawned.PID())
	for deadline := time.Now().Add(testTimeout); after > most && time.Now().Before(deadline); {
		p.eval(session, "1") // something to wait for while the memory goes
		after = pss(t, s.spawned.PID())
	}
	t.Logf("memory of the holder: %.1f MB before, %.1f MB after", float64(before)/(1<<20), float64(after)/(1<<20))
	if before > 6<<20 || after > most {
		t.Error("that is too much")
	}
}

// TestNothingElseReachesChromium: the pair cannot be opened again, and no
// other process has inherited it or the evidence.
func TestNothingElseReachesChromium(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	p := s.dial()
	p.open("data:text/html,<p>a renderer")
	browser := s.browserPID()
	for fd := pipeInFD; fd <= pipeOutFD; fd++ {
		for _, pid := range []int{browser, s.spawned.PID()} {
			_, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), os.O_RDWR, 0)
			if pid == browser && !errors.Is(err, unix.ENXIO) {
				t.Errorf("descriptor %d of the browser: %v", fd, err)
			}
		}
	}
	pair := descriptorAt(t, browser, pipeInFD)
	if descriptorAt(t, browser, pipeOutFD) != pair {
		t.Error("the two descriptors are not one socket")
	}
	if got := descriptorAt(t, browser, rootFD); got != s.spec.RootFile {
		t.Errorf("descriptor %d is %s", rootFD, got)
	}
	if got := descriptorAt(t, browser, lockFD); got != s.spec.LockFile {
		t.Errorf("descriptor %d is %s", lockFD, got)
	}
	stat := read(t, fmt.Sprintf("/proc/%d/stat", browser))
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if fields[1] != strconv.Itoa(s.spawned.PID()) || fields[2] != strconv.Itoa(browser) || fields[3] != strconv.Itoa(browser) {
		t.Errorf("parent, group and session are %v", fields[1:4])
	}
	seen, renderers := 0, 0
	for _, pid := range family(t, browser) {
		seen++
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(cmdline), "--type=renderer") {
			renderers++
			st := read(t, fmt.Sprintf("/proc/%d/status", pid))
			if !strings.Contains(st, "Seccomp:\t2\n") {
				t.Errorf("renderer %d has no seccomp filter", pid)
			}
		}
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
			continue // not dumpable: nobody of this user can look, or gone
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
			if target == pair || target == s.spec.RootFile || target == s.spec.LockFile {
				t.Errorf("process %d has %s as descriptor %s", pid, target, e.Name())
			}
		}
	}
	if seen < 3 || renderers == 0 {
		t.Errorf("only %d children, %d renderers looked at", seen, renderers)
	}
	for target := range descriptors(t, strconv.Itoa(s.spawned.PID())) {
		if target == pair {
			t.Error("the holder has the browser's end of the pair")
		}
	}
}

func descriptorAt(t testing.TB, pid, fd int) string {
	t.Helper()
	target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd))
	if err != nil {
		t.Fatal(err)
	}
	return target
}

// family lists the descendants of a process.
func family(t testing.TB, pid int) []int {
	t.Helper()
	var all []int
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range tasks {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // a thread that has ended
		}
		for _, f := range strings.Fields(string(data)) {
			child, err := strconv.Atoi(f)
			if err != nil {
				t.Fatal(err)
			}
			all = append(append(all, child), family(t, child)...)
		}
	}
	return all
}

func TestBrowserThatDiesIsRecorded(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	p := s.dial()
	browser := s.browserPID()
	if err := unix.Kill(browser, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.gone()
	if e := s.ended(); e.Trigger != TriggerBrowser || e.Step != stepNone || e.Signal != "SIGKILL" || e.Code != -1 || e.Clean {
		t.Errorf("exit is %+v", e)
	}
	// The record of one generation is not left to the next.
	s.again()
	if _, err := ReadExit(s.spec.Holder.ExitFile); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the old record: %v", err)
	}
	s.dial()
}

// TestHungBrowserIsKilled: the steps escalate, and the profile stays locked
// until the browser process is gone, with the holder dead too.
func TestHungBrowserIsKilled(t *testing.T) {
	normal(t)
	s := newStage(t).browser()
	s.spec.Holder.CloseTimeout = 100 * time.Millisecond
	s.start()
	browser := s.browserPID()
	if err := unix.Kill(browser, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// A browser that does not answer can still be asked to close.
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if err := Close(ctx, s.spec.Holder.Socket, testKey, "hung"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Dial(ctx, s.spec.Holder.Socket, testKey); !errors.Is(err, ErrEnded) {
		t.Errorf("dial while it closes: %v", err)
	}
	if e := s.ended(); e.Trigger != "close: hung" || e.Step != stepKill || e.Signal != "SIGKILL" || e.Clean {
		t.Errorf("exit is %+v", e)
	}

	s.again()
	browser = s.browserPID()
	pidfd, err := unix.PidfdOpen(browser, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if err := unix.Kill(browser, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.signal(unix.SIGKILL)
	s.spawned.Wait(t.Context())
	second := newStage(t).browser()
	second.spec.LockFile = s.spec.LockFile
	if err := second.tryStart(); !errors.Is(err, ErrLockHeld) {
		t.Errorf("a second browser beside a hung one: %v", err)
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	endOf(t, pidfd)
	third := newStage(t).browser()
	third.spec.LockFile = s.spec.LockFile
	third.start()
}

func TestSignalsThatMeanNothing(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	p := s.dial()
	for _, sig := range []syscall.Signal{unix.SIGCONT, unix.SIGHUP, unix.SIGPIPE, unix.SIGUSR1, unix.SIGQUIT, unix.SIGSTOP, unix.SIGCONT} {
		s.signal(sig)
	}
	_, session := p.page("about:blank")
	if got := string(p.eval(session, "1")); got != "1" {
		t.Errorf("1 is %s", got)
	}
}

// TestHungBrowserKeepsTheDoorOpen: clients of a browser that does not answer
// take their places with them when they give up, and asking for the stop works
// beside any number that wait.
func TestHungBrowserKeepsTheDoorOpen(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Args = []string{"/bin/sh", "-c", "exec cat <&3 >/dev/null"}
	s.spec.Holder.CloseTimeout = 50 * time.Millisecond
	s.start()
	dial := func(patience time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, _, err := Dial(ctx, s.spec.Holder.Socket, testKey)
		return err
	}
	for range maxPeers {
		if err := dial(5 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a browser that does not answer: %v", err)
		}
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		err := dial(50 * time.Millisecond)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if !errors.Is(err, ErrBusy) || time.Now().After(deadline) {
			t.Fatalf("after all have given up: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxPeers + 1 {
		go Dial(ctx, s.spec.Holder.Socket, testKey)
	}
	deadline = time.Now().Add(20 * time.Second) // a busy machine dials slowly
	for !errors.Is(dial(50*time.Millisecond), ErrBusy) {
		if time.Now().After(deadline) {
			t.Fatal("there is no limit")
		}
	}
	if err := Close(ctx, s.spec.Holder.Socket, testKey, "hung"); err != nil {
		t.Errorf("close beside as many as it serves: %v", err)
	}
	if e := s.ended(); e.Trigger != "close: hung" || e.Step != stepPair {
		t.Errorf("exit is %+v", e)
	}
}

func TestPeersAreChecked(t *testing.T) {
	normal(t)
	s := newStage(t).browser().start()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if _, _, err := Dial(ctx, s.spec.Holder.Socket, testKey[1:]+"x"); !errors.Is(err, ErrRefused) {
		t.Errorf("with another key: %v", err)
	}
	if err := Close(ctx, s.spec.Holder.Socket, "", "x"); !errors.Is(err, ErrRefused) {
		t.Errorf("close without a key: %v", err)
	}
	// As many as it serves, and none more. The two that were refused may
	// still count when the first of these come.
	var conns []net.Conn
	for range maxPeers + 2 {
		c, err := net.Dial("unix", s.spec.Holder.Socket)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	if _, _, err := Dial(ctx, s.spec.Holder.Socket, testKey); !errors.Is(err, ErrBusy) {
		t.Errorf("one too many: %v", err)
	}
	for _, c := range conns {
		c.Close()
	}
	for {
		conn, _, err := Dial(ctx, s.spec.Holder.Socket, testKey)
		if err == nil {
			conn.Close()
			break
		}
		if !errors.Is(err, ErrBusy) {
			t.Fatal(err)
		}
	}
	mine, err := cgroupOf(os.Getpid())
	if err != nil {
		t.Skip("no unified cgroup hierarchy here: ", err)
	}
	for cgroup, want := range map[string]error{mine: nil, mine + "x": ErrRefused} {
		c := newStage(t).browser()
		c.spec.Holder.PeerCgroup = cgroup
		c.start()
		conn, _, err := Dial(ctx, c.spec.Holder.Socket, testKey)
		if !errors.Is(err, want) {
			t.Errorf("from cgroup %s: %v", cgroup, err)
		}
		if err == nil {
			conn.Close()
		}
	}
}

func init() {
	// stage runs a browser until its input ends.
	helpers["stage"] = func() int {
		spec := Spec{}
		if err := json.Unmarshal([]byte(os.Getenv("SPEC")), &spec); err != nil {
			fmt.Println(err)
			return 1
		}
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		sp, err := Spawn(ctx, os.Getenv(envRole))
		if err == nil {
			err = sp.Release(spec)
		}
		if err == nil {
			err = sp.Ready(ctx)
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("ready")
		os.Stdin.Read(make([]byte, 1))
		if err := Close(ctx, spec.Holder.Socket, spec.Holder.Key, "end of test"); err != nil {
			fmt.Println(err)
			return 1
		}
		<-sp.Done()
		return 0
	}
}

// TestTwoUsersAreKeptApart: another user is refused even with the key.
func TestTwoUsersAreKeptApart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("two users need root, which runs this test after the others")
	}
	os.Setenv("TMPDIR", userDir)
	s := newStage(t).browser()
	for _, name := range []string{"", "run", "run/root", "tmp", "profile"} {
		if err := os.Lchown(s.path(name), testUID, testUID); err != nil {
			t.Fatal(err)
		}
	}
	spec, err := json.Marshal(s.spec)
	if err != nil {
		t.Fatal(err)
	}
	cmd := asUser(userDir, filepath.Join(userDir, "holder.test"), envHelper+"=stage", "SPEC="+string(spec))
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer in.Close()
	answer := make([]byte, 100)
	n, err := out.Read(answer)
	if err != nil || string(answer[:n]) != "ready\n" {
		t.Fatalf("answer is %q, %v", answer[:n], err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if _, _, err := Dial(ctx, s.spec.Holder.Socket, testKey); !errors.Is(err, ErrRefused) {
		t.Errorf("root with the key: %v", err)
	}
	other := exec.Command("/bin/sh", "-c", `test -e "$1"`, "sh", s.spec.Holder.Socket)
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testUID + 1, Gid: testUID + 1}}
	if err := other.Run(); err == nil {
		t.Error("another user sees the socket")
	}
}
