package unit

import (
	"context"
	"errors"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/tests/rig"
)

func pidfd(t *testing.T, pid int) int {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// waiting starts a Wait.
func waiting(t *testing.T, ctx context.Context, e *Events) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- e.Wait(ctx) }()
	return done
}

// soon returns what a channel gives within a time in which it has to.
func soon[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s did not happen", what)
	}
	return v
}

func TestEventsTellTheEndOfAProcess(t *testing.T) {
	lives, dies := child(t, "block"), child(t, "block")
	e, err := NewEvents()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, c := range []int{lives.Process.Pid, dies.Process.Pid} {
		if err := e.AddProcess(pidfd(t, c)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := waiting(t, ctx, e)
	cancel()
	if err := soon(t, "the end of a cancelled wait", done); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled wait gave %v", err)
	}

	e, err = NewEvents()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, c := range []int{lives.Process.Pid, dies.Process.Pid} {
		if err := e.AddProcess(pidfd(t, c)); err != nil {
			t.Fatal(err)
		}
	}
	done = waiting(t, t.Context(), e)
	if err := dies.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := soon(t, "the end of the process", done); err != nil {
		t.Error(err)
	}
}

// Many who wait must not cost a thread each: a thread is memory, and the
// scheduler's limit ends the service.
func TestEventsNeedNoThreads(t *testing.T) {
	c := child(t, "block")
	threads := func() int {
		n, _ := runtime.ThreadCreateProfile(nil)
		return n
	}
	before := threads()
	var all []<-chan error
	for range 50 {
		e, err := NewEvents()
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		if err := e.AddProcess(pidfd(t, c.Process.Pid)); err != nil {
			t.Fatal(err)
		}
		all = append(all, waiting(t, t.Context(), e))
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, done := range all {
		if err := soon(t, "the end of the process", done); err != nil {
			t.Error(err)
		}
	}
	if after := threads(); after > before+20 {
		t.Errorf("50 waits took %d threads, %d before", after, before)
	}
}

// TestRigEventsTellAnEmptyCgroup protects who waits for a scope that its
// processes were moved out of: no process ends.
func TestRigEventsTellAnEmptyCgroup(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	info := start(t, m, scopeFor(t, c.Process.Pid))
	e, err := NewEvents()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := e.AddCgroup(info.Cgroup()); err != nil {
		t.Fatal(err)
	}
	done := waiting(t, t.Context(), e)
	start(t, m, scopeFor(t, c.Process.Pid)) // takes the process away
	if err := soon(t, "the emptying of the cgroup", done); err != nil {
		t.Error(err)
	}
	gone(t, m, info.Name)
	if err := e.AddCgroup(info.Cgroup()); !errors.Is(err, ErrEmpty) {
		t.Errorf("a cgroup that is gone: %v", err)
	}
}

// TestRigChanges protects who watches units: a change is told, also one that
// happened while the connection was cut, with nobody calling meanwhile; what is
// not watched, or no more, is not.
func TestRigChanges(t *testing.T) {
	rig.NeedInside(t)
	x := newCutter(t)
	m, err := Dial(t.Context(), Options{Address: x.address})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	direct := dial(t)
	scope := func() Scope { return scopeFor(t, child(t, "block").Process.Pid) }
	one, two, other := scope(), scope(), scope()
	for _, s := range []Scope{one, two, other} {
		start(t, direct, s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	changed, err := m.Changes(ctx, one.Name, two.Name)
	if err != nil {
		t.Fatal(err)
	}
	soon(t, "the first look", changed)
	if err := direct.Stop(t.Context(), other.Name); err != nil {
		t.Fatal(err)
	}
	// An answer comes after every signal that was sent before it.
	if err := m.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(changed) != 0 {
		t.Error("a unit that nobody watches was told")
	}
	if err := direct.Stop(t.Context(), one.Name); err != nil {
		t.Fatal(err)
	}
	soon(t, "the stop of the first unit", changed)
	gone(t, direct, one.Name)
	if err := m.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	for len(changed) > 0 {
		<-changed
	}

	x.accept.Store(false)
	x.cut()
	soon(t, "the cut", changed)
	if err := direct.Stop(t.Context(), two.Name); err != nil {
		t.Fatal(err)
	}
	for len(changed) > 0 {
		<-changed
	}
	x.accept.Store(true)
	soon(t, "what happened during the cut", changed)

	cancel()
	if err := m.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	for n := 1; n > 0; runtime.Gosched() {
		m.mu.Lock()
		n = len(m.watches)
		m.mu.Unlock()
	}
}

// TestRigWhichManagerThisIs protects the word for who stopped a browser: the run
// of systemd keeps its name over a reload and a re-exec.
func TestRigWhichManagerThisIs(t *testing.T) {
	m := dial(t)
	first, err := m.Started(t.Context())
	if err != nil || first == 0 {
		t.Fatalf("started at %d, %v", first, err)
	}
	for _, verb := range []string{"daemon-reload", "daemon-reexec"} {
		systemctl(t, verb)
		if again, err := m.Started(t.Context()); err != nil || again != first {
			t.Errorf("after %s it started at %d, %v; before at %d", verb, again, err, first)
		}
	}
	if stopping, err := m.Stopping(t.Context()); err != nil || stopping {
		t.Errorf("it goes down: %v, %v", stopping, err)
	}
}
