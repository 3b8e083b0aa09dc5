package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"abfleet/internal/fleet"
	"abfleet/runtime/unit"
)

// watching has a Stack watched; the channel gets what Watch returns.
func (w *world) watching(ev fleet.Evidence) (<-chan error, context.CancelFunc) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Watch(ctx, ev) }()
	return done, cancel
}

// TestWatch protects what the fleet tells about a Stack that nobody uses: any
// end of a part of it is noticed at once, and what Observe says then names the
// cause.
func TestWatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const robber = "robber.scope"
	cases := []struct {
		name    string
		end     func(e evidence) error
		trigger string // "" where no holder is left to tell
		signal  string
	}{
		{"SIGKILL of the browser", func(e evidence) error { return syscall.Kill(e.Chromium.Browser.PID, syscall.SIGKILL) }, fleet.TriggerSignal, "SIGKILL"},
		{"SIGSEGV of the browser", func(e evidence) error { return syscall.Kill(e.Chromium.Browser.PID, syscall.SIGSEGV) }, fleet.TriggerSignal, "SIGSEGV"},
		{"SIGKILL of the holder", func(e evidence) error { return syscall.Kill(e.Chromium.Leader.PID, syscall.SIGKILL) }, "", ""},
		{"SIGKILL of the display", func(e evidence) error { return syscall.Kill(e.Display.Leader.PID, syscall.SIGKILL) }, fleet.TriggerBrowser, ""},
		{"stop of the slice", func(e evidence) error {
			return exec.Command("systemctl", "--user", "stop", w.cfg.Slice(e.Instance)).Run()
		}, fleet.TriggerOperator, ""},
		{"a scope that another one robbed", func(e evidence) error {
			_, err := w.units.StartScope(t.Context(), unit.Scope{Name: robber, Slice: "foreign.slice", PID: e.Display.Leader.PID, KillSignal: syscall.SIGTERM, TimeoutStop: time.Second})
			return err
		}, "", ""},
	}
	ev := w.start("wwwwwwwwww", w.cfg.TemplateDir("identity-1"))
	for i, c := range cases {
		done, cancel := w.watching(ev)
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.end(e); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		begin := time.Now()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s: Watch says %v", c.name, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s was not noticed", c.name)
		}
		t.Logf("%s was noticed after %s", c.name, time.Since(begin))
		cancel()
		obs, err := w.Observe(t.Context(), ev)
		if err != nil || obs.State == fleet.Controllable {
			t.Errorf("after %s: %+v %v", c.name, obs, err)
		}
		if x := obs.Exit; c.trigger != "" && (x == nil || x.Trigger != c.trigger || x.Signal != c.signal) {
			t.Errorf("after %s the end is %+v, want %s %s", c.name, x, c.trigger, c.signal)
		}
		// What was robbed is not ours to stop any more.
		if err := w.units.Stop(t.Context(), robber); err != nil {
			t.Fatal(err)
		}
		ev = w.restart(ev, uint64(i)+2)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
	done, cancel := w.watching(ev)
	defer cancel()
	if err := <-done; err != nil {
		t.Errorf("Watch of a stopped Stack: %v", err)
	}
}

// TestWatchBesideASilentManager protects what the kernel tells from a systemd that
// does not answer: the end of a browser is noticed nevertheless.
func TestWatchBesideASilentManager(t *testing.T) {
	w := newWorld(t)
	ev := w.start("wwwwwwwwwx", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("busctl", "--user", "call", "org.freedesktop.DBus", "/", "org.freedesktop.DBus",
		"GetConnectionUnixProcessID", "s", "org.freedesktop.systemd1").Output()
	var manager int
	if err == nil {
		_, err = fmt.Sscanf(string(out), "u %d", &manager)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(manager, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	wake := func() { syscall.Kill(manager, syscall.SIGCONT) }
	defer wake()
	done, cancel := w.watching(ev)
	defer cancel()
	if err := syscall.Kill(e.Chromium.Browser.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Watch says %v", err)
		}
	case <-time.After(unit.CallTimeout / 2):
		t.Error("the end of a browser waits for systemd")
	}
	wake()
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestWatchKeeps protects the service: a Stack that is in order is left alone
// whatever systemd does around it, and watching it costs no process, no file and
// no goroutine for longer than it is watched.
func TestWatchKeeps(t *testing.T) {
	w := newWorld(t)
	ev := w.start("vvvvvvvvvv", w.cfg.TemplateDir("identity-1"))
	files := func() string {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, e := range entries {
			to, _ := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
			list = append(list, e.Name()+" "+to)
		}
		return strings.Join(list, "\n")
	}
	// The first one makes what stays.
	first, cancel := w.watching(ev)
	cancel()
	<-first
	before, goroutines := files(), runtime.NumGoroutine()
	var all []<-chan error
	var cancels []context.CancelFunc
	for range 10 {
		done, cancel := w.watching(ev)
		all, cancels = append(all, done), append(cancels, cancel)
	}
	for _, args := range []string{"daemon-reload", "daemon-reexec", "set-property --runtime " + w.cfg.Slice("vvvvvvvvvv") + " CPUWeight=50"} {
		if out, err := exec.Command("systemctl", append([]string{"--user"}, strings.Fields(args)...)...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", args, err, out)
		}
	}
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	// A renderer comes and goes: the cgroup changes and does not empty.
	if err := syscall.Kill(renderer(t, e), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Controllable {
		t.Errorf("after a killed renderer: %+v %v", obs, err)
	}
	for i, done := range all {
		select {
		case err := <-done:
			t.Errorf("Watch ended with %v", err)
		default:
		}
		cancels[i]()
		if err := <-done; !errors.Is(err, context.Canceled) && err != nil {
			t.Errorf("a cancelled Watch ended with %v", err)
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > goroutines && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
	if after := files(); after != before {
		t.Errorf("open files:\n%s\nbefore:\n%s", after, before)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// renderer returns a renderer process of the Stack's browser.
func renderer(t *testing.T, e evidence) int {
	t.Helper()
	pids, err := (unit.Cgroup{Path: e.Chromium.Cgroup}).Procs()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(cmdline), "--type=renderer") {
			return pid
		}
	}
	t.Fatal("no renderer")
	return 0
}
