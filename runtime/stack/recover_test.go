package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// verdictsOf tells what an examination says of each role.
func (w *world) verdictsOf(req fleet.RecoverRequest) map[string]string {
	w.t.Helper()
	x, err := w.Examine(w.t.Context(), req)
	if err != nil {
		w.t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range x.Roles {
		got[f.Role] = f.Verdict
		w.t.Logf("%s: %s, process %d, for %q, against %q", f.Role, f.Verdict, f.PID, f.For, f.Against)
	}
	if x.Recoverable == slices.Contains([]string{got[proof.RoleDisplay], got[proof.RoleChromium]}, fleet.VerdictAmbiguous) {
		w.t.Errorf("recoverable is %v (%s)", x.Recoverable, x.Reason)
	}
	return got
}

// killModeNone has systemd give up a scope while its processes live, which it
// also does by itself (systemd#36781): it makes a scope of that name around them,
// stops it, and kills nothing. It returns the Generation as if it had been
// started there.
func (w *world) killModeNone(g proof.Generation, name string, pids ...int) proof.Generation {
	w.t.Helper()
	args := []string{"--user", "--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
		"StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", "4", "KillMode", "s", "none", "Slice", "s", w.cfg.Slice(g.Instance),
		"CollectMode", "s", "inactive-or-failed", "PIDs", "au", fmt.Sprint(len(pids))}
	for _, pid := range pids {
		args = append(args, fmt.Sprint(pid))
	}
	if out, err := exec.Command("busctl", append(args, "0")...).CombinedOutput(); err != nil {
		w.t.Fatalf("%v\n%s", err, out)
	}
	info, err := w.units.Info(w.t.Context(), name)
	for err == nil && info.ActiveState != "active" || errors.Is(err, unit.ErrNotLoaded) {
		if w.t.Context().Err() != nil {
			w.t.Fatal("the scope never becomes active")
		}
		info, err = w.units.Info(w.t.Context(), name)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	browser := g.Browser
	g.Browser = nil
	g, err = proof.Capture(info, g.Leader.PID, g)
	if err != nil {
		w.t.Fatal(err)
	}
	g.Browser = browser
	if err := proof.WritePidfile(proof.PidfilePath(g), g); err != nil {
		w.t.Fatal(err)
	}
	if out, err := exec.Command("systemctl", "--user", "stop", name).CombinedOutput(); err != nil {
		w.t.Fatalf("%v\n%s", err, out)
	}
	if populated, err := info.Cgroup().Populated(); err != nil || !populated {
		w.t.Fatalf("the scope that was given up has no processes: %v", err)
	}
	return g
}

// TestRecover protects people's browsers from faults after which no record proves
// them: each is stopped after all, cleanly where its holder lives, with its last
// cookie, and nothing of it is left.
func TestRecover(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const reconstructible, proven = fleet.VerdictReconstructible, fleet.VerdictProven
	dir := w.cfg.TemplateDir("identity-1")
	removePidfiles := func(e evidence) {
		for _, g := range e.generations() {
			if err := os.Remove(proof.PidfilePath(*g)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name              string
		do                func(e *evidence) fleet.Evidence
		display, chromium string
		unclean           bool
		backend           string // kind of display; Xvnc if empty
	}{
		{"the display's scope was stolen", func(e *evidence) fleet.Evidence {
			if _, err := w.units.StartScope(t.Context(), unit.Scope{Name: "thief.scope", Slice: "thief.slice", PID: e.Display.Leader.PID}); err != nil {
				t.Fatal(err)
			}
			return e.encode()
		}, reconstructible, proven, false, ""},
		{"systemd gave up the display's scope", func(e *evidence) fleet.Evidence {
			g := w.killModeNone(*e.Display, w.cfg.UnitPrefix+"-"+e.Instance+"-display-9000.scope", e.Display.Leader.PID)
			e.Display = &g
			return e.encode()
		}, reconstructible, proven, false, ""},
		{"systemd gave up the browser's scope, and the key is lost", func(e *evidence) fleet.Evidence {
			g := w.killModeNone(*e.Chromium, w.cfg.UnitPrefix+"-"+e.Instance+"-chromium-9000.scope", e.Chromium.Leader.PID, e.Chromium.Browser.PID)
			e.Chromium, e.Key = &g, strings.Repeat("0", 32)
			return e.encode()
		}, proven, reconstructible, false, ""},
		{"the record is lost", func(e *evidence) fleet.Evidence { return nil }, reconstructible, reconstructible, false, ""},
		{"the record and the pidfiles are lost", func(e *evidence) fleet.Evidence { removePidfiles(*e); return nil }, reconstructible, reconstructible, false, ""},
		{"all is lost of an Xvfb with its x11vnc", func(e *evidence) fleet.Evidence { removePidfiles(*e); return nil }, reconstructible, reconstructible, false, config.DisplayXvfb},
		{"all is lost of a headless browser", func(e *evidence) fleet.Evidence { removePidfiles(*e); return nil }, fleet.VerdictGone, reconstructible, false, config.DisplayNone},
		{"the scope of an x11vnc was stolen", func(e *evidence) fleet.Evidence {
			if _, err := w.units.StartScope(t.Context(), unit.Scope{Name: "vncthief.scope", Slice: "thief.slice", PID: e.VNC.Leader.PID}); err != nil {
				t.Fatal(err)
			}
			return e.encode()
		}, proven, proven, false, config.DisplayXvfb},
		{"the record is lost and the pidfiles are legacy", func(e *evidence) fleet.Evidence {
			for rl, pid := range map[string]int{role.NameDisplay: e.Display.Leader.PID, role.NameChromium: e.Chromium.Leader.PID} {
				if err := os.WriteFile(w.files(e.Instance).pidfile(rl), fmt.Appendf(nil, "%d\n", pid), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			return nil
		}, reconstructible, reconstructible, false, ""},
		{"the record is garbage", func(e *evidence) fleet.Evidence { return fleet.Evidence(`"x"`) }, reconstructible, reconstructible, false, ""},
		{"the record has an empty ControlGroup", func(e *evidence) fleet.Evidence {
			g := *e.Chromium
			g.Cgroup = ""
			e.Chromium = &g
			return e.encode()
		}, proven, reconstructible, false, ""},
		{"the record is of another boot", func(e *evidence) fleet.Evidence {
			d, c := *e.Display, *e.Chromium
			d.BootID, c.BootID = "00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000000"
			e.Display, e.Chromium = &d, &c
			for _, g := range []proof.Generation{d, c} {
				if err := proof.WritePidfile(proof.PidfilePath(g), g); err != nil {
					t.Fatal(err)
				}
			}
			return e.encode()
		}, reconstructible, reconstructible, false, ""},
		{"systemd gave up the scope of a hung browser whose holder was killed", func(e *evidence) fleet.Evidence {
			if err := syscall.Kill(e.Chromium.Browser.PID, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			g := w.killModeNone(*e.Chromium, w.cfg.UnitPrefix+"-"+e.Instance+"-chromium-9001.scope", e.Chromium.Leader.PID, e.Chromium.Browser.PID)
			e.Chromium = &g
			if err := syscall.Kill(g.Leader.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(10 * time.Second); startOf(t, g.Leader.PID) != ""; {
				if time.Now().After(deadline) {
					t.Fatal("a killed holder does not end")
				}
			}
			return e.encode()
		}, proven, reconstructible, true, ""},
	} {
		w.cfg.Display = config.DisplayXvnc
		if c.backend != "" {
			w.cfg.Display = c.backend
		}
		ev := w.start("rrrrrrrrra", dir)
		want := strings.ReplaceAll(c.name, " ", "-")
		w.setCookie(ev, want)
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		was := e
		req := fleet.RecoverRequest{Instance: e.Instance, Profile: e.Profile, Evidence: c.do(&e)}
		t.Log(c.name)
		got := w.verdictsOf(req)
		if got[proof.RoleDisplay] != c.display || got[proof.RoleChromium] != c.chromium {
			t.Errorf("%s: examined as %v, want display %s, chromium %s", c.name, got, c.display, c.chromium)
		}
		if vnc := got[proof.RoleVNC]; vnc != fleet.VerdictGone && c.backend != config.DisplayXvfb || vnc != reconstructible && c.backend == config.DisplayXvfb {
			t.Errorf("%s: the VNC server is %s", c.name, vnc)
		}
		begin := time.Now()
		// The less time a stop has, the sooner it gives up what cannot be asked.
		ctx, cancel := context.WithTimeout(t.Context(), w.cfg.StopTimeout+cleanupTimeout/3)
		report, err := w.Recover(ctx, req)
		cancel()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		t.Logf("%s: recovered in %s: %+v", c.name, time.Since(begin), report)
		if report.Clean == c.unclean {
			t.Errorf("%s: the report is %+v", c.name, report)
		}
		pids := []int{was.Chromium.Browser.PID}
		for _, g := range was.generations() {
			pids = append(pids, g.Leader.PID)
		}
		for _, pid := range pids {
			if startOf(t, pid) != "" {
				t.Errorf("%s: process %d lives", c.name, pid)
			}
		}
		if x, err := w.Examine(t.Context(), req); err != nil || !x.Vacant || !x.Recoverable {
			t.Errorf("%s: examined afterwards: %+v %v", c.name, x, err)
		}
		if was.Display != nil && leavesFiles(t, was.Display.Display) {
			t.Errorf("%s: display %d leaves files", c.name, was.Display.Display)
		}
		if again, err := w.Recover(t.Context(), fleet.RecoverRequest{Instance: e.Instance, Profile: e.Profile}); err != nil || again.Clean {
			t.Errorf("%s: with neither a record nor a browser it is said to have ended as %+v, %v", c.name, again, err)
		}
		ev, err = w.Start(t.Context(), fleet.StartRequest{Instance: e.Instance, Generation: 2, Profile: e.Profile})
		if err != nil {
			t.Fatalf("%s: start afterwards: %v", c.name, err)
		}
		if got := w.cookie(ev); got != want {
			t.Errorf("%s: the cookie is %q", c.name, got)
		}
		if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
			t.Fatalf("%s: stop afterwards: %v", c.name, err)
		}
	}
}

// leavesFiles reports whether display n has files of a server that has ended. Other
// tests may use the number meanwhile: a server makes its lock first and removes it
// last.
func leavesFiles(t *testing.T, n int) bool {
	t.Helper()
	owner := func() (pid int) {
		lock, err := os.ReadFile(role.XLock(n))
		if err == nil {
			_, err = fmt.Sscan(string(lock), &pid)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return pid
	}
	before := owner()
	_, err := os.Lstat(role.XSocket(n))
	after := owner()
	if before != 0 && before == after {
		return startOf(t, before) == ""
	}
	return err == nil && before == 0 && after == 0
}

// standIn runs a shell under the name of another program, which tells programs
// apart, and with its arguments. It counts every signal that it can.
type standIn struct {
	t     *testing.T
	cmd   *exec.Cmd
	start string // of its process, for telling it from one that has its number later
	count string // file that gets a line with each signal
}

// newStandIn starts one that has the files open from descriptor 3 on, and runs
// the script first.
func newStandIn(t *testing.T, program, script string, files []string, args ...string) *standIn {
	t.Helper()
	dir := t.TempDir()
	shell, err := os.ReadFile("/bin/bash")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, program)
	if err := os.WriteFile(path, shell, 0o755); err != nil {
		t.Fatal(err)
	}
	s := &standIn{t: t, count: filepath.Join(dir, "signals")}
	script = `for s in HUP INT QUIT USR1 USR2 TERM CONT WINCH; do trap "echo $s >>'` + s.count + `'" $s; done
` + script + `
echo ready
while :; do read -r _ || exit; done`
	s.cmd = exec.Command(path, append([]string{"-c", script}, args...)...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s.cmd.ExtraFiles = append(s.cmd.ExtraFiles, f)
	}
	in, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		s.cmd.Process.Kill()
		s.cmd.Wait()
	})
	if _, err := fmt.Fscanln(out); err != nil && err.Error() != "expected newline" {
		t.Fatal(err)
	}
	s.start = startOf(t, s.pid())
	return s
}

func (s *standIn) pid() int { return s.cmd.Process.Pid }

// end ends it before its test does.
func (s *standIn) end() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// unharmed checks that it is the same process, and was never signalled.
func (s *standIn) unharmed(when string) {
	s.t.Helper()
	if got := startOf(s.t, s.pid()); got != s.start {
		s.t.Errorf("%s: process %d started at %q, not %q", when, s.pid(), got, s.start)
	}
	if got, err := os.ReadFile(s.count); !errors.Is(err, os.ErrNotExist) {
		s.t.Errorf("%s: process %d got signals: %s %v", when, s.pid(), got, err)
	}
}

// startOf tells when a process that has not ended was started, or "".
func startOf(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if fields[0] == "Z" {
		return ""
	}
	return fields[19]
}

// TestAmbiguityChangesNothing protects everybody's processes from a recovery that
// is not sure: any doubt is an error with its reason, and neither a process nor a
// scope nor a pidfile is touched. The browser's own holder would be asked with its
// key, so the record is lost here.
func TestAmbiguityChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ev := w.start("rrrrrrrrrb", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	f := w.files(e.Instance)
	req := fleet.RecoverRequest{Instance: e.Instance, Profile: e.Profile}
	members := []int{e.Display.Leader.PID, e.Chromium.Leader.PID, e.Chromium.Browser.PID}
	state := func() string {
		t.Helper()
		var b strings.Builder
		for _, pid := range members {
			cg, err := unit.OfPID(pid)
			fmt.Fprintln(&b, pid, startOf(t, pid), cg.Path, err)
		}
		for _, rl := range []string{role.NameDisplay, role.NameChromium} {
			st, err := os.Stat(f.pidfile(rl))
			if err != nil {
				t.Fatal(err)
			}
			data, err := os.ReadFile(f.pidfile(rl))
			fmt.Fprintf(&b, "%s %s %v\n", st.ModTime(), data, err)
		}
		return b.String()
	}
	number := fmt.Sprintf(":%d", e.Display.Display)
	singleton := filepath.Join(e.Profile, "SingletonLock")
	relink := func(target string) (undo func()) {
		was, err := os.Readlink(singleton)
		if err == nil {
			err = errors.Join(os.Remove(singleton), os.Symlink(target, singleton))
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := errors.Join(os.Remove(singleton), os.Symlink(was, singleton)); err != nil {
				t.Fatal(err)
			}
		}
	}
	move := func(name, slice string, pids ...int) {
		if _, err := w.units.StartScope(t.Context(), unit.Scope{Name: name, Slice: slice, PID: pids[0], Others: pids[1:]}); err != nil {
			t.Fatal(err)
		}
	}
	home := func() {
		move(w.cfg.UnitPrefix+"-"+e.Instance+"-display-"+nonce()+".scope", w.cfg.Slice(e.Instance), e.Display.Leader.PID)
	}
	var extra []*standIn
	beside := func(program, script string, files []string, args ...string) *standIn {
		s := newStandIn(t, program, script, files, args...)
		extra = append(extra, s)
		return s
	}
	for _, c := range []struct {
		name, reason string
		do           func() (undo func())
	}{
		{"two displays", "is not the only one", func() func() {
			return beside("Xvnc", "", []string{f.root()}, number, "-rfbunixpath", f.rfb()).end
		}},
		{"two browsers without a holder", "is not the only one", func() func() {
			return beside("chromium", "", []string{f.root(), e.Profile + ".lock"}, "--user-data-dir="+e.Profile).end
		}},
		{"a stranger has the root file open", "holds " + f.root(), func() func() {
			return beside("tail", "", []string{f.root()}).end
		}},
		{"a stranger has the Profile's lock file open", ".lock open", func() func() {
			return beside("editor", "", []string{e.Profile + ".lock"}).end
		}},
		{"a part of a browser in another group", "runs chromium on", func() func() {
			return beside("chromium", "", nil, "--type=renderer", "--user-data-dir="+e.Profile).end
		}},
		{"a VNC server on our socket that does not listen yet", "runs Xvnc on", func() func() {
			return beside("Xvnc", "", nil, ":4321", "-rfbunixpath", f.rfb()).end
		}},
		{"the SingletonLock names another process", "SingletonLock", func() func() {
			return relink("elsewhere-1")
		}},
		{"the pidfile names another process", "is recorded as", func() func() {
			s := beside("sleep", "", nil)
			data, err := os.ReadFile(f.pidfile(role.NameDisplay))
			if err != nil {
				t.Fatal(err)
			}
			var g proof.Generation
			if err := json.Unmarshal(data, &g); err != nil {
				t.Fatal(err)
			}
			fmt.Sscan(s.start, &g.Leader.StartTime)
			g.Leader.PID, g.Leader.PGID = s.pid(), s.pid()
			if err := proof.WritePidfile(f.pidfile(role.NameDisplay), g); err != nil {
				t.Fatal(err)
			}
			return func() {
				s.end()
				if err := os.WriteFile(f.pidfile(role.NameDisplay), data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"the root file was replaced", "in no proven process group", func() func() {
			if err := errors.Join(os.Rename(f.root(), f.root()+".saved"), os.WriteFile(f.root(), nil, 0o400)); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := os.Rename(f.root()+".saved", f.root()); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"the X lock names another process", "-lock does not name", func() func() {
			lock := role.XLock(e.Display.Display)
			data, err := os.ReadFile(lock)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Rename(lock, lock+".saved"), os.WriteFile(lock, fmt.Appendf(nil, "%10d\n", os.Getpid()), 0o444)); err != nil {
				t.Fatal(err, data)
			}
			return func() {
				if err := os.Rename(lock+".saved", lock); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"the display is in a scope that holds another program", "holds process", func() func() {
			s := beside("sleep", "", nil)
			move("shared.scope", "shared.slice", s.pid(), e.Display.Leader.PID)
			return func() { s.end(); home() }
		}},
		{"the display is in another Stack's slice", "of another Stack", func() func() {
			other := w.cfg.Slice("zzzzzzzzzz")
			move(w.cfg.UnitPrefix+"-zzzzzzzzzz-display-1.scope", other, e.Display.Leader.PID)
			return func() {
				home()
				if err := w.units.StopSlice(t.Context(), other); err != nil {
					t.Error(err)
				}
			}
		}},
		{"the display is in a scope of another role", "of another role", func() func() {
			move(w.cfg.UnitPrefix+"-"+e.Instance+"-chromium-77.scope", w.cfg.Slice(e.Instance), e.Display.Leader.PID)
			return home
		}},
	} {
		extra = nil
		undo := c.do()
		before := state()
		t.Log(c.name)
		got := w.verdictsOf(req)
		if got[proof.RoleDisplay] != fleet.VerdictAmbiguous && got[proof.RoleChromium] != fleet.VerdictAmbiguous {
			t.Errorf("%s: examined as %v", c.name, got)
		}
		_, err := w.Recover(t.Context(), req)
		if !fault.Is(err, fault.BrowserStopUnproven) || !errors.Is(err, &proof.Refusal{Reason: proof.Ambiguous}) || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: %v, want %q", c.name, err, c.reason)
		}
		if after := state(); after != before {
			t.Errorf("%s: before\n%s\nafter\n%s", c.name, before, after)
		}
		for _, s := range extra {
			s.unharmed(c.name)
		}
		undo()
	}
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State == fleet.Stopped {
		t.Errorf("the browser after all that: %+v %v", obs, err)
	}
	if report, err := w.Recover(t.Context(), req); err != nil || !report.Clean {
		t.Errorf("without any doubt: %+v %v", report, err)
	}
}

// TestRecoverUndecided protects a Stack from a recovery that cannot ask systemd.
func TestRecoverUndecided(t *testing.T) {
	w := newWorld(t)
	ev := w.start("rrrrrrrrrc", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	cut, err := New(t.Context(), w.cfg, w.log)
	if err != nil {
		t.Fatal(err)
	}
	cut.Close()
	for _, known := range []fleet.Evidence{nil, ev} {
		req := fleet.RecoverRequest{Instance: e.Instance, Profile: e.Profile, Evidence: known}
		if x, err := cut.Examine(t.Context(), req); !errors.Is(err, fleet.ErrUndecided) {
			t.Errorf("examined without systemd: %+v %v", x, err)
		}
		if _, err := cut.Recover(t.Context(), req); !errors.Is(err, fleet.ErrUndecided) {
			t.Errorf("recovered without systemd: %v", err)
		}
	}
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Controllable {
		t.Errorf("the browser after it: %+v %v", obs, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Recover(ctx, fleet.RecoverRequest{Instance: e.Instance, Profile: e.Profile}); err == nil {
		t.Error("recovered after the end of its context")
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}
