package unit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"abfleet/tests/rig"
)

var serial atomic.Int64

// scopeFor describes a scope with a name of its own.
func scopeFor(t *testing.T, pid int) Scope {
	n := serial.Add(1)
	return Scope{
		Name:        fmt.Sprintf("abftest-unit-chromium-%d.scope", n),
		Slice:       "abftest-unit.slice",
		Description: t.Name(),
		PID:         pid,
		TimeoutStop: 10 * time.Second,
	}
}

func start(t *testing.T, m *Manager, s Scope) Info {
	t.Helper()
	info, err := m.StartScope(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// until asks about a unit again and again until what it is told will do.
func until(t *testing.T, m *Manager, name string, will func(Info, error) bool) Info {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var last Info
	for {
		info, err := m.Info(ctx, name)
		if will(info, err) {
			return last
		}
		if err != nil {
			t.Fatal(err)
		}
		last = info
		select {
		case <-ctx.Done():
			t.Fatalf("%s is still %+v", name, last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// gone waits until systemd has unloaded a unit and returns what it was last.
func gone(t *testing.T, m *Manager, name string) Info {
	t.Helper()
	return until(t, m, name, func(_ Info, err error) bool { return errors.Is(err, ErrNotLoaded) })
}

// stopping waits until a unit is being stopped.
func stopping(t *testing.T, m *Manager, name string) {
	t.Helper()
	until(t, m, name, func(i Info, err error) bool { return err == nil && i.ActiveState == "deactivating" })
}

func systemctl(t *testing.T, args ...string) string {
	t.Helper()
	if !systemRun() {
		args = append([]string{"--user"}, args...)
	}
	out, err := exec.CommandContext(t.Context(), "systemctl", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("systemctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func TestRigScopeIsWhatWasAskedFor(t *testing.T) {
	m := dial(t)
	first := child(t, "block")
	before := start(t, m, scopeFor(t, first.Process.Pid))

	c := child(t, "end-on-winch")
	s := scopeFor(t, c.Process.Pid)
	s.KillSignal = syscall.SIGWINCH
	s.Requires, s.After = []string{before.Name}, []string{before.Name}
	info := start(t, m, s)

	if info.Name != s.Name || info.Slice != s.Slice || info.ActiveState != "active" || info.SubState != "running" || !info.Active() {
		t.Errorf("read back %+v", info)
	}
	if len(info.InvocationID) != 32 || info.InvocationID == before.InvocationID {
		t.Errorf("invocation ids %q and %q", before.InvocationID, info.InvocationID)
	}
	if info.CgroupID == 0 || info.CgroupID == before.CgroupID {
		t.Errorf("cgroup ids %d and %d", before.CgroupID, info.CgroupID)
	}
	if !strings.HasSuffix(info.ControlGroup, "/abftest.slice/abftest-unit.slice/"+s.Name) {
		t.Errorf("cgroup %s", info.ControlGroup)
	}
	if cg, err := OfPID(c.Process.Pid); err != nil || cg.Path != info.ControlGroup {
		t.Errorf("process is in %v, %v", cg, err)
	}
	if procs, err := info.Cgroup().Procs(); err != nil || !slices.Equal(procs, []int{c.Process.Pid}) {
		t.Errorf("cgroup has %v, %v", procs, err)
	}
	if id, err := info.Cgroup().ID(); err != nil || id != info.CgroupID {
		t.Errorf("cgroup id %d, %v", id, err)
	}
	if again, err := m.Info(t.Context(), s.Name); err != nil || again != info {
		t.Errorf("read again: %+v, %v", again, err)
	}

	show := systemctl(t, "show", s.Name, "-p", "CollectMode,KillSignal,SendSIGKILL,TimeoutStopUSec,OOMPolicy,Requires,After,Description,Transient,InvocationID")
	for _, want := range []string{
		"CollectMode=inactive-or-failed", "KillSignal=28", "SendSIGKILL=yes", "TimeoutStopUSec=10s", "OOMPolicy=continue",
		"Description=" + t.Name(), "Transient=yes", "InvocationID=" + info.InvocationID, before.Name,
	} {
		if !strings.Contains(show, want) {
			t.Errorf("systemd does not say %q:\n%s", want, show)
		}
	}

	// Stopping what it requires stops the scope first.
	if err := m.Stop(t.Context(), before.Name); err != nil {
		t.Fatal(err)
	}
	if info, err := m.Info(t.Context(), s.Name); err == nil && info.ActiveState == "active" {
		t.Errorf("%s outlives what it requires: %+v", s.Name, info)
	}
}

func TestRigStopSliceEmptiesTheTree(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	s := scopeFor(t, c.Process.Pid)
	s.Slice = "abftest-one.slice"
	info := start(t, m, s)
	slice, err := m.Info(t.Context(), s.Slice)
	if err != nil {
		t.Fatal(err)
	}
	if populated, err := slice.Cgroup().Populated(); err != nil || !populated {
		t.Errorf("slice populated: %v, %v", populated, err)
	}
	tree, err := slice.Cgroup().Subtree()
	if err != nil || !slices.Equal(tree, []Cgroup{slice.Cgroup(), info.Cgroup()}) {
		t.Errorf("slice has %v, %v", tree, err)
	}
	empty := make(chan error, 1)
	go func() { empty <- slice.Cgroup().WaitEmpty(t.Context()) }()
	if err := m.StopSlice(t.Context(), s.Slice); err != nil {
		t.Fatal(err)
	}
	if err := <-empty; err != nil {
		t.Error(err)
	}
	if populated, err := info.Cgroup().Populated(); err != nil || populated {
		t.Errorf("scope populated: %v, %v", populated, err)
	}
	gone(t, m, s.Name)
	for _, name := range []string{"abftest-never.slice", s.Slice} {
		if err := m.StopSlice(t.Context(), name); err != nil {
			t.Errorf("stopping %s, which is not there: %v", name, err)
		}
	}
	if err := m.Stop(t.Context(), "abftest-never-chromium-1.scope"); err != nil {
		t.Errorf("stopping a scope that is not there: %v", err)
	}
	if err := m.ResetFailed(t.Context(), "abftest-never-chromium-1.scope"); err != nil {
		t.Errorf("resetting a scope that is not there: %v", err)
	}
}

func TestRigTakenNameIsNotReused(t *testing.T) {
	m := dial(t)
	a, b := child(t, "block"), child(t, "block")
	s := scopeFor(t, a.Process.Pid)
	info := start(t, m, s)
	was, err := OfPID(b.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	s.PID = b.Process.Pid
	if _, err := m.StartScope(t.Context(), s); !errors.Is(err, ErrExists) {
		t.Errorf("second start gave %v", err)
	}
	if is, err := OfPID(b.Process.Pid); err != nil || is != was {
		t.Errorf("the second process was moved to %v, %v", is, err)
	}
	if again, err := m.Info(t.Context(), s.Name); err != nil || again != info {
		t.Errorf("the first scope is now %+v, %v", again, err)
	}
}

func TestRigDeadAndZombieProcesses(t *testing.T) {
	m := dial(t)
	reaped := exec.Command("/bin/true")
	if err := reaped.Run(); err != nil {
		t.Fatal(err)
	}
	dead := scopeFor(t, reaped.Process.Pid)
	if _, err := m.StartScope(t.Context(), dead); !errors.Is(err, ErrNoProcess) {
		t.Errorf("a reaped process gave %v", err)
	}
	for _, pid := range []int{0, -1} {
		if _, err := m.StartScope(t.Context(), scopeFor(t, pid)); !errors.Is(err, ErrNoProcess) {
			t.Errorf("process %d gave %v", pid, err)
		}
	}
	c := child(t, "block")
	c.Process.Kill()
	waitState(t, c.Process.Pid, "Z")
	zombie := scopeFor(t, c.Process.Pid)
	info, err := m.StartScope(t.Context(), zombie)
	if !errors.Is(err, ErrNotMember) && !errors.Is(err, ErrNoProcess) {
		t.Errorf("a zombie gave %+v, %v", info, err)
	}
	for _, s := range []Scope{dead, zombie} {
		gone(t, m, s.Name)
	}
}

// waitState waits until a child is in the given state, without reaping it.
func waitState(t *testing.T, pid int, state string) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := Poll(t.Context(), []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil || !bytes.Contains(data, []byte(") "+state+" ")) {
		t.Fatalf("process %d: %s, %v", pid, data, err)
	}
}

// A second StartTransientUnit on the same pid moves it silently; the first scope
// then empties and goes.
func TestRigStolenProcessIsNoticed(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	first := start(t, m, scopeFor(t, c.Process.Pid))
	second := start(t, m, scopeFor(t, c.Process.Pid))
	if cg, err := OfPID(c.Process.Pid); err != nil || cg.Path != second.ControlGroup {
		t.Errorf("process is in %v, %v", cg, err)
	}
	if _, err := m.verifyScope(t.Context(), Scope{Name: first.Name, Slice: first.Slice, PID: c.Process.Pid}); err == nil {
		t.Error("the first scope still verifies")
	}
	gone(t, m, first.Name)
}

func TestRigTwentyScopesAtOnce(t *testing.T) {
	m := dial(t)
	// Twenty at once through signals alone: no waiter may rely on asking again.
	saved := jobRecheck
	jobRecheck = time.Hour
	t.Cleanup(func() { jobRecheck = saved })
	const n = 20
	var wg sync.WaitGroup
	infos := make([]Info, n)
	for i := range n {
		c := child(t, "block")
		s := scopeFor(t, c.Process.Pid)
		wg.Go(func() {
			info, err := m.StartScope(t.Context(), s)
			if err != nil {
				t.Error(err)
				return
			}
			infos[i] = info
			if err := m.Stop(t.Context(), s.Name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ids := map[string]bool{}
	for _, info := range infos {
		ids[info.InvocationID] = true
		if populated, err := (Cgroup{Path: info.ControlGroup}).Populated(); err != nil || populated {
			t.Errorf("%s is populated: %v, %v", info.Name, populated, err)
		}
	}
	if len(ids) != n {
		t.Errorf("%d different invocations of %d", len(ids), n)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.jobs) != 0 {
		t.Errorf("%d waits are left", len(m.jobs))
	}
}

func TestRigReloadAndReexecDisturbNothing(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	info := start(t, m, scopeFor(t, c.Process.Pid))
	for _, verb := range []string{"daemon-reload", "daemon-reexec"} {
		// Scopes are started while systemd is away, and after.
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for round := 0; ; round++ {
				c := child(t, "block")
				s := scopeFor(t, c.Process.Pid)
				if _, err := m.StartScope(t.Context(), s); err != nil {
					t.Errorf("during %s: %v", verb, err)
					return
				}
				if err := m.Stop(t.Context(), s.Name); err != nil {
					t.Errorf("during %s: %v", verb, err)
					return
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		for range 2 {
			systemctl(t, verb)
		}
		close(stop)
		wg.Wait()
		if again, err := m.Info(t.Context(), info.Name); err != nil || again != info {
			t.Errorf("after %s the scope is %+v, %v", verb, again, err)
		}
		if err := m.Ping(t.Context()); err != nil {
			t.Errorf("after %s: %v", verb, err)
		}
	}
	// Signals come from the new owner of the name.
	saved := jobRecheck
	jobRecheck = time.Hour
	t.Cleanup(func() { jobRecheck = saved })
	if err := m.Stop(t.Context(), info.Name); err != nil {
		t.Fatal(err)
	}
	gone(t, m, info.Name)
}

// A manager with a new bus name may have sent signals that nobody heard.
func TestRigNewOwnerPutsWaitsInDoubt(t *testing.T) {
	m := dial(t)
	w := m.newJobWait("abftest-none-chromium-1.scope")
	defer m.dropJobWait(w)
	systemctl(t, "daemon-reexec")
	select {
	case <-w.kick:
		if !w.doubt {
			t.Error("woken without doubt")
		}
	case <-time.After(20 * time.Second):
		t.Error("the new owner was not noticed")
	}
}

// cutter is a bus address whose connections can be cut at a chosen moment.
type cutter struct {
	address string
	accept  atomic.Bool

	mu    sync.Mutex
	conns []net.Conn
	// onCall sees what the client sends before the bus does; true cuts the
	// connection after the bus got it, so that the answer is lost.
	onCall func([]byte) bool
}

func newCutter(t *testing.T) *cutter {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bus")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	x := &cutter{address: "unix:path=" + path}
	x.accept.Store(true)
	t.Cleanup(func() { l.Close(); x.cut() })
	bus := strings.TrimPrefix(os.Getenv("DBUS_SESSION_BUS_ADDRESS"), "unix:path=")
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			if !x.accept.Load() {
				client.Close()
				continue
			}
			server, err := net.Dial("unix", bus)
			if err != nil {
				client.Close()
				continue
			}
			x.mu.Lock()
			x.conns = append(x.conns, client, server)
			x.mu.Unlock()
			go func() { io.Copy(client, server); client.Close() }()
			go x.forward(client, server)
		}
	}()
	return x
}

func (x *cutter) forward(client, server net.Conn) {
	defer server.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		x.mu.Lock()
		cut := n > 0 && x.onCall != nil && x.onCall(buf[:n])
		if cut {
			// The answer must not overtake the cut.
			client.Close()
		}
		x.mu.Unlock()
		if n > 0 {
			if _, err := server.Write(buf[:n]); err != nil {
				return
			}
		}
		if cut {
			// The bus drops what a client sent that is gone already; so stay
			// until it has taken the message.
			io.Copy(io.Discard, server)
			return
		}
		if err != nil {
			return
		}
	}
}

func (x *cutter) cut() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, c := range x.conns {
		c.Close()
	}
	x.conns = nil
}

func (x *cutter) onNext(substring string, then func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.onCall = func(data []byte) bool {
		if !bytes.Contains(data, []byte(substring)) {
			return false
		}
		x.onCall = nil
		if then != nil {
			then()
		}
		return true
	}
}

// The answer to StartTransientUnit is lost: the scope is found and verified, and
// not made twice.
func TestRigLostAnswerToStart(t *testing.T) {
	rig.NeedInside(t)
	x := newCutter(t)
	m, err := Dial(t.Context(), Options{Address: x.address})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := child(t, "block")
	s := scopeFor(t, c.Process.Pid)
	lost := false
	x.onNext("StartTransientUnit", func() { lost = true })
	info, err := m.StartScope(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if !lost {
		t.Error("the connection was not cut")
	}
	if cg, err := OfPID(c.Process.Pid); err != nil || cg.Path != info.ControlGroup {
		t.Errorf("process is in %v, %v", cg, err)
	}
	if err := m.Stop(t.Context(), s.Name); err != nil {
		t.Error(err)
	}
}

// The connection breaks while a stop waits: no signal can come any more, the
// unit is asked instead. The process ignores TERM, so the job takes a second.
func TestRigConnectionCutWhileStopping(t *testing.T) {
	rig.NeedInside(t)
	saved := jobRecheck
	jobRecheck = time.Hour
	t.Cleanup(func() { jobRecheck = saved })
	x := newCutter(t)
	m, err := Dial(t.Context(), Options{Address: x.address})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	direct := dial(t)

	c := child(t, "ignore-term")
	s := scopeFor(t, c.Process.Pid)
	s.TimeoutStop = time.Second
	info := start(t, m, s)
	stopped := make(chan error, 1)
	go func() { stopped <- m.Stop(t.Context(), s.Name) }()
	stopping(t, direct, s.Name)
	// The bus cannot be reached until the job is over.
	x.accept.Store(false)
	x.cut()
	gone(t, direct, s.Name)
	x.accept.Store(true)
	if err := <-stopped; err != nil {
		t.Errorf("stop gave %v", err)
	}
	if populated, err := info.Cgroup().Populated(); err != nil || populated {
		t.Errorf("populated: %v, %v", populated, err)
	}
}

func TestRigCloseEndsEveryWait(t *testing.T) {
	m := dial(t)
	c := child(t, "ignore-term")
	s := scopeFor(t, c.Process.Pid)
	start(t, m, s)
	stopped := make(chan error, 1)
	go func() { stopped <- m.Stop(t.Context(), s.Name) }()
	stopping(t, m, s.Name)
	m.Close()
	if err := <-stopped; !errors.Is(err, ErrClosed) {
		t.Errorf("stop gave %v", err)
	}
	if _, err := m.Info(t.Context(), s.Name); !errors.Is(err, ErrClosed) {
		t.Errorf("info gave %v", err)
	}
}

// The scope of a browser that dies goes by itself.
func TestRigScopeGoesWithItsProcess(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	info := start(t, m, scopeFor(t, c.Process.Pid))
	c.Process.Kill()
	if last := gone(t, m, info.Name); last.Name != "" && last.InvocationID != info.InvocationID {
		t.Errorf("it was %+v", last)
	}
}

func TestRigWaitEmptyEndsWithItsContext(t *testing.T) {
	m := dial(t)
	c := child(t, "block")
	info := start(t, m, scopeFor(t, c.Process.Pid))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := info.Cgroup().WaitEmpty(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitEmpty gave %v", err)
	}
	c.Process.Kill()
	// A zombie does not count: nobody has reaped it yet.
	if err := info.Cgroup().WaitEmpty(t.Context()); err != nil {
		t.Error(err)
	}
}

// A stop that ran into its timeout is done for systemd, and leaves nothing only
// because SIGKILL followed.
func TestRigProcessThatIgnoresTermIsKilled(t *testing.T) {
	m := dial(t)
	c := child(t, "ignore-term")
	s := scopeFor(t, c.Process.Pid)
	s.TimeoutStop = 300 * time.Millisecond
	info := start(t, m, s)
	if err := m.Stop(t.Context(), s.Name); err != nil {
		t.Fatal(err)
	}
	if err := info.Cgroup().WaitEmpty(t.Context()); err != nil {
		t.Error(err)
	}
	gone(t, m, s.Name)
}

// A systemd that does not know an optional property still gets the scope, and is
// not asked again.
func TestRigUnknownPropertyIsLeftAway(t *testing.T) {
	m := dial(t)
	saved := optionalProperties
	optionalProperties = append(slices.Clone(saved), property{"AbftestUnknown", dbus.MakeVariant(true)})
	t.Cleanup(func() { optionalProperties = saved })
	c := child(t, "block")
	start(t, m, scopeFor(t, c.Process.Pid))
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.refused["AbftestUnknown"] || m.refused["OOMPolicy"] {
		t.Errorf("remembered %v", m.refused)
	}
}

func TestRigUnitThatNeverWas(t *testing.T) {
	m := dial(t)
	if _, err := m.Info(t.Context(), "abftest-never-chromium-1.scope"); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("a unit that never was gave %v", err)
	}
}
