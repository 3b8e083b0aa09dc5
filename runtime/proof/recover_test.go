package proof

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
)

func TestParseUnixTable(t *testing.T) {
	table := `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 15896270 /run/user/1/rfb.sock
0000000000000000: 00000003 00000000 00000000 0001 03 15896271 /run/user/1/rfb.sock
0000000000000000: 00000002 00000000 00010000 0001 01    17 /run/user/1/rfb.sock
0000000000000000: 00000002 00000000 00010000 0005 01 18 /run/with space  two
0000000000000000: 00000002 00000000 00010000 0001 01 19 @/tmp/.X11-unix/X1
0000000000000000: 00000002 00000000 00010000 0001 01 20
0000000000000000: 00000002 00000000 00010000
`
	want := map[string][]string{
		"/run/user/1/rfb.sock": {"socket:[15896270]", "socket:[17]"},
		"/run/with space  two": {"socket:[18]"},
		"@/tmp/.X11-unix/X1":   {"socket:[19]"},
	}
	if got := parseUnixTable(table); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestHasFlock(t *testing.T) {
	const head = "pos:\t0\nflags:\t02100002\nmnt_id:\t29\nino:\t1794057\n"
	for info, want := range map[string]bool{
		head: false,
		head + "lock:\t1: FLOCK  ADVISORY  WRITE 58 fe:00:1794057 0 EOF\n": true,
		head + "lock:\t1: FLOCK  ADVISORY  WRITE 0 fe:00:1794057 0 EOF\n":  true, // whoever took it has died
		head + "lock:\t1: FLOCK  ADVISORY  READ 58 fe:00:1794057 0 EOF\n":  false,
		head + "lock:\t1: POSIX  ADVISORY  WRITE 58 fe:00:1794057 0 EOF\n": false,
		head + "lock:\t1: FLOCK\n": false,
	} {
		if got := hasFlock(info); got != want {
			t.Errorf("hasFlock(%q) = %v", info, got)
		}
	}
}

// The lock of a Profile proves a process only by its own open file: not by the
// file alone, a shared lock, or a lock on what was the lock file before.
func TestLockEvidence(t *testing.T) {
	lock := filepath.Join(t.TempDir(), "profile.lock")
	self := os.Getpid()
	check := func(when string, want Reason) {
		t.Helper()
		if err := lockEvidence(self, lock); ReasonOf(err) != want {
			t.Errorf("%s: %v, want %q", when, err, want)
		}
	}
	check("without a file", LockMissing)
	fd, err := unix.Open(lock, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	check("open and not locked", LockMissing)
	for _, c := range []struct {
		how  int
		want Reason
	}{{unix.LOCK_SH, LockMissing}, {unix.LOCK_EX, ""}} {
		if err := unix.Flock(fd, c.how|unix.LOCK_NB); err != nil {
			t.Fatal(err)
		}
		check(fmt.Sprintf("locked with %d", c.how), c.want)
	}
	if err := lockEvidence(os.Getppid(), lock); err == nil {
		t.Error("our lock proves another process")
	}
	if err := errors.Join(os.Rename(lock, lock+".old"), os.WriteFile(lock, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	check("with another file in its place", LockMissing)
	if err := errors.Join(os.Remove(lock), os.Symlink(lock+".old", lock)); err != nil {
		t.Fatal(err)
	}
	check("with a link in its place", LockMissing)
}

// Who listens on a Role's socket is told without reaching it.
func TestListenerEvidence(t *testing.T) {
	dir := t.TempDir()
	ours, nobodys := filepath.Join(dir, "ours"), filepath.Join(dir, "nobodys")
	l, err := net.Listen("unix", ours)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	self, other := os.Getpid(), helperCommand("wait")
	startHelper(t, other)
	for _, c := range []struct {
		pid     int
		sockets []string
		bound   bool
		want    Reason
	}{
		{self, []string{ours}, true, ""},
		{self, []string{ours, nobodys}, false, ""},
		{self, nil, false, ""},
		{other.Process.Pid, []string{ours}, false, ListenerDiffers},
		{other.Process.Pid, []string{nobodys}, false, ""},
		{deadPID(t), []string{nobodys}, false, PIDGone},
	} {
		if bound, err := listenerEvidence(c.pid, c.sockets); bound != c.bound || ReasonOf(err) != c.want {
			t.Errorf("process %d on %q: %v, %v", c.pid, c.sockets, bound, err)
		}
	}
	if err := listensAlone(self, ours); err != nil {
		t.Error(err)
	}
	if err := listensAlone(self, nobodys); ReasonOf(err) != ListenerDiffers {
		t.Errorf("a socket that nobody listens on: %v", err)
	}
	// Our own socket still listens, but who comes by its path gets a stranger.
	if err := os.Remove(ours); err != nil {
		t.Fatal(err)
	}
	startHelper(t, helperCommand("listen", ours, filepath.Join(dir, "lock")))
	if err := listensAlone(self, ours); ReasonOf(err) != ListenerDiffers {
		t.Errorf("a path that was taken over: %v", err)
	}
}

func TestDisplayToken(t *testing.T) {
	for want, args := range map[int][]string{
		100: {"Xvnc", ":100", "-auth", "/x"}, 7: {"x11vnc", "-display", ":7"},
		0: {"Xvnc", ":", ":x", ":07", ":1.0", "-display=:3", ":-1", "localhost:4"},
	} {
		if got := displayToken(args); got != want {
			t.Errorf("displayToken(%q) = %d", args, got)
		}
	}
}

// What environment and command line still say can only speak against a process.
func TestSpeaksOfAnother(t *testing.T) {
	run := t.TempDir()
	g := Generation{Root: filepath.Join(run, "ours", "root"), Display: 100}
	lost := Lost{Temp: "/var/tmp/ours"}
	for _, c := range []struct {
		name string
		env  []string
		args []string
		want Reason
	}{
		{"nothing", nil, nil, ""},
		{"all ours", []string{"DISPLAY=:100", "XAUTHORITY=" + run + "/ours/xauth", "TMPDIR=/var/tmp/ours", "HOME=" + run + "/ours"}, []string{"-auth", run + "/ours/xauth"}, ""},
		{"another display", []string{"DISPLAY=:10"}, nil, ScopeContradicts},
		{"another authority", []string{"XAUTHORITY=/home/x/.Xauthority"}, nil, ScopeContradicts},
		{"another temporary directory", []string{"TMPDIR=/var/tmp/other"}, nil, ScopeContradicts},
		{"the home of another instance", []string{"HOME=" + run + "/oursnot"}, nil, ScopeContradicts},
		{"another instance's socket", nil, []string{"-rfbunixpath", run + "/other/rfb.sock"}, ScopeContradicts},
		{"another instance's socket after a sign", nil, []string{"-rfbunixpath=" + run + "/other/rfb.sock"}, ScopeContradicts},
	} {
		cmd := exec.Command("/proc/self/exe", c.args...)
		cmd.Env = append(c.env, helperEnv("wait"))
		startHelper(t, cmd)
		if err := speaksOfAnother(cmd.Process.Pid, lost, g); ReasonOf(err) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// A Live wants the Profile's lock in the leader's own hands, and nobody else on
// its sockets. A Role that does not listen yet, or no more, can be stopped.
func TestRigLiveOwnsLockAndListener(t *testing.T) {
	b := newBench(t)
	p, _ := b.browser("browser")
	p.live()
	if err := errors.Join(os.Rename(b.lock, b.lock+".saved"), os.WriteFile(b.lock, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if l, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != LockMissing || l != nil {
		t.Errorf("with another lock file: %v", err)
	}
	if err := os.Rename(b.lock+".saved", b.lock); err != nil {
		t.Fatal(err)
	}
	p.live()

	d := b.display(137, "wait")
	l := d.live()
	listen(t, d.g.Sockets[0])
	if err := l.Signal(b.ctx, syscall.SIGTERM); ReasonOf(err) != ListenerDiffers {
		t.Errorf("with a stranger on its socket: %v", err)
	}
	if !alive(d.g.Leader.PID) {
		t.Error("a refused signal was sent")
	}
}

// A browser whose holder has died leads its own Generation once a recovery has
// said so, and is signalled like any other. A record that says so of a holder, or
// of a browser that has one, proves nothing.
func TestRigOrphanLeads(t *testing.T) {
	b := newBench(t)
	p, pid := b.browser("browser")
	m, _, err := observe(pid)
	if err != nil {
		t.Fatal(err)
	}
	g := p.g
	g.Browser = &g.Leader
	l, err := b.v.Live(b.ctx, g)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.SignalBrowser(b.ctx, syscall.SIGKILL); ReasonOf(err) == "" {
		t.Errorf("a holder passes for its browser: %v", err)
	}
	g.Leader, g.Browser = m, &m
	if err := WritePidfile(PidfilePath(g), g); err != nil {
		t.Fatal(err)
	}
	// The stand-in for a browser does not inherit the lock.
	if _, err := b.v.Live(b.ctx, g); ReasonOf(err) != LockMissing {
		t.Errorf("a browser without the lock leads: %v", err)
	}
	if !alive(pid) || !alive(p.g.Leader.PID) {
		t.Error("a refused signal was sent")
	}
}

// The pid of a dead role goes to somebody else's process: nothing that is done
// about the role reaches it. Only root can give out a number of its choice.
func TestRootPIDReuse(t *testing.T) {
	b := newBench(t)
	p := b.display(138, "wait")
	p.live()
	role := p.g.Leader.PID
	p.cmd.Process.Kill()
	p.end()
	// The rig's own /proc/sys may be mounted read-only.
	proc := t.TempDir()
	if err := unix.Mount("proc", proc, "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(proc, unix.MNT_DETACH) })
	signals := filepath.Join(t.TempDir(), "signals")
	var foreign *exec.Cmd
	for foreign == nil {
		if err := os.WriteFile(filepath.Join(proc, "sys/kernel/ns_last_pid"), fmt.Appendf(nil, "%d", role-1), 0); err != nil {
			t.Fatal(err)
		}
		cmd := helperCommand("signals", signals)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		startHelper(t, cmd)
		if cmd.Process.Pid == role {
			foreign = cmd
		}
		if b.ctx.Err() != nil {
			t.Fatalf("process %d never came again", role)
		}
	}
	m, _, err := observe(role)
	if err != nil || m.PGID != role || m.StartTime == p.g.Leader.StartTime {
		t.Fatalf("the foreign process is %+v, %v", m, err)
	}
	if _, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != StartTimeDiffers || !Ended(err) {
		t.Errorf("proof: %v", err)
	}
	if err := errors.Join(b.v.Wake(b.ctx, p.g), b.v.StopUnit(b.ctx, p.g), b.v.AwaitEnd(b.ctx, p.g)); err != nil {
		t.Error(err)
	}
	lost := Lost{Claim: b.claim(p), Roles: []Generation{p.g}}
	for _, records := range [][]Generation{{p.g}, nil} {
		lost.Claim.Generations = records
		found, err := b.v.Examine(b.ctx, lost)
		if err != nil || len(found) != 1 || found[0].Verdict != Gone {
			t.Errorf("examined as %+v, %v", found, err)
		}
	}
	if _, err := b.v.Reconstruct(b.ctx, lost, RoleDisplay, anotherScope(b)); !Ended(err) {
		t.Errorf("reconstructed: %v", err)
	}
	b.vacant(b.claim(p))
	if now, _, err := observe(role); err != nil || now != m {
		t.Errorf("the foreign process is %+v now, %v", now, err)
	}
	if got, err := os.ReadFile(signals); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it got signals: %s %v", got, err)
	}
}

// Every piece of evidence is needed: each that is missing or wrong alone leaves a
// display ambiguous, and nothing is written.
func TestRigReconstruct(t *testing.T) {
	const n = 139
	b := newBench(t)
	d := b.display(n, "listen", filepath.Join(b.dir, "rfb.sock"), xLock(n))
	t.Cleanup(func() { os.Remove(xLock(n)); os.Remove(xSocket(n)) })
	lost := func() Lost {
		base := Generation{Instance: b.instance, Role: RoleDisplay, Root: b.root, Sockets: d.g.Sockets}
		return Lost{Claim: Claim{Instance: b.instance, Slice: b.slice, Root: b.root, Sockets: d.g.Sockets}, Roles: []Generation{base}}
	}
	verdict := func(when string, want Verdict, against string) {
		t.Helper()
		found, err := b.v.Examine(b.ctx, lost())
		if err != nil || len(found) != 1 || found[0].Verdict != want || !strings.Contains(strings.Join(found[0].Against, "\n"), against) {
			t.Errorf("%s: %+v, %v, want %s with %q", when, found, err, want, against)
		}
	}
	// It has the lock, and nobody answers on the display.
	verdict("without an X socket", Doubtful, "nobody answers on "+xSocket(n))
	before, err := os.ReadFile(PidfilePath(d.g))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.v.Reconstruct(b.ctx, lost(), RoleDisplay, anotherScope(b)); ReasonOf(err) != Ambiguous {
		t.Errorf("reconstructed: %v", err)
	}
	if after, err := os.ReadFile(PidfilePath(d.g)); err != nil || string(after) != string(before) {
		t.Errorf("the pidfile is %s, %v", after, err)
	}
	listen(t, xSocket(n))
	verdict("with a stranger's X socket", Doubtful, fmt.Sprintf("process %d answers on", os.Getpid()))
	if _, err := new(Verifier).Examine(b.ctx, lost()); ReasonOf(err) != UnitUnknown {
		t.Errorf("without systemd: %v", err)
	}
}

// What is put into a new scope beside the leader is held and of its groups, or not
// put there: a number that was left to a stranger moves nobody.
func TestHoldOthers(t *testing.T) {
	child := func(pgid int) *exec.Cmd {
		cmd := exec.Command("sleep", "60")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: pgid}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return cmd
	}
	leader := child(0)
	h := heir{g: Generation{Leader: Member{PID: leader.Process.Pid, PGID: leader.Process.Pid}}}
	own, reaped, zombie := child(leader.Process.Pid), child(leader.Process.Pid), child(leader.Process.Pid)
	for _, c := range []*exec.Cmd{leader, own, reaped, zombie} {
		h.group = append(h.group, c.Process.Pid)
	}
	reaped.Process.Kill()
	reaped.Wait()
	zombie.Process.Kill()
	fd, err := pidfdOpen(zombie.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unit.Poll(t.Context(), []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		t.Fatal(err)
	}
	pids, release, err := h.holdOthers()
	release()
	if err != nil || !reflect.DeepEqual(pids, []int{own.Process.Pid}) {
		t.Errorf("held %v, %v, want %d alone", pids, err, own.Process.Pid)
	}
	h.group = append(h.group, child(0).Process.Pid)
	pids, release, err = h.holdOthers()
	release()
	if ReasonOf(err) != PGIDDiffers || pids != nil {
		t.Errorf("with a stranger's number: %v, %v", pids, err)
	}
}

// anotherScope names a scope that was never used.
func anotherScope(b *bench) unit.Scope {
	b.number++
	return unit.Scope{Name: fmt.Sprintf("abftest-%s-display-%dx.scope", b.instance, b.number), Slice: b.slice}
}
