package proof

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
	"abfleet/tests/rig"
)

const (
	xvnc     = "/usr/bin/Xvnc"
	xvfb     = "/usr/bin/Xvfb"
	x11vnc   = "/usr/bin/x11vnc"
	chromium = "/usr/lib/chromium/chromium"
)

// testTimeout bounds every wait of a test.
const testTimeout = 30 * time.Second

// bench is one Instance with its directories and its slice.
type bench struct {
	t        *testing.T
	ctx      context.Context
	v        *Verifier
	instance string
	slice    string
	dir      string // runtime directory of the Instance
	root     string
	profile  string
	lock     string
	number   uint64
}

var instances atomic.Int64

func newBench(t *testing.T) *bench {
	t.Helper()
	rig.NeedInside(t)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	t.Cleanup(cancel)
	root := os.Geteuid() == 0
	units, err := unit.Dial(ctx, unit.Options{System: root})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { units.Close() })
	id := fmt.Sprintf("proof%d", instances.Add(1))
	run := filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "abftest")
	if root {
		run = "/run/abftest"
	}
	home := t.TempDir()
	b := &bench{
		t: t, ctx: ctx, v: &Verifier{Units: units}, instance: id, slice: "abftest-" + id + ".slice",
		dir: filepath.Join(run, id), root: filepath.Join(run, id, "root"),
		profile: filepath.Join(home, "profile"), lock: filepath.Join(home, "profile.lock"),
	}
	for _, dir := range []string{run, b.dir, b.profile} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(b.root, []byte(id), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		if err := units.StopSlice(ctx, b.slice); err != nil {
			t.Error(err)
		}
	})
	return b
}

// running role of a bench.
type process struct {
	b   *bench
	g   Generation
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// spawn blocks a stand-in for the trampoline, scopes it, captures it and writes
// its pidfile.
func (b *bench) spawn(base Generation) *process {
	b.t.Helper()
	cmd := exec.Command(programNamed(b.t, "abfleet-role"))
	cmd.Env = append(os.Environ(), helperEnv("role"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	b.number++
	base.Instance, base.Number, base.Root = b.instance, b.number, b.root
	info, err := b.v.Units.StartScope(b.ctx, unit.Scope{
		Name: fmt.Sprintf("abftest-%s-%s-%d.scope", b.instance, base.Role, b.number), Slice: b.slice,
		PID: cmd.Process.Pid, TimeoutStop: 5 * time.Second,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	g, err := Capture(info, cmd.Process.Pid, base)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := WritePidfile(PidfilePath(g), g); err != nil {
		b.t.Fatal(err)
	}
	return &process{b: b, g: g, cmd: cmd, in: in, out: bufio.NewReader(out)}
}

// release lets the role go.
func (p *process) release(spec roleSpec) {
	p.b.t.Helper()
	spec.Root = p.b.root
	line, err := json.Marshal(spec)
	if err != nil {
		p.b.t.Fatal(err)
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		p.b.t.Fatal(err)
	}
}

// expect reads one line of the role.
func (p *process) expect(prefix string) string {
	p.b.t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, prefix) {
		p.b.t.Fatalf("the role said %q, %v; want %q", line, err, prefix)
	}
	return strings.TrimSpace(strings.TrimPrefix(line, prefix))
}

// browser starts a holder with a stand-in for Chromium and returns its pid.
func (b *bench) browser(mode string) (*process, int) {
	b.t.Helper()
	p := b.spawn(Generation{Role: RoleChromium, Profile: b.profile, LockFile: b.lock})
	program := programNamed(b.t, "chromium")
	p.release(roleSpec{Lock: b.lock, Args: []string{program, "--user-data-dir=" + b.profile}, Env: append(os.Environ(), helperEnv(mode, b.profile))})
	// Holder and browser share their output; either may be first.
	pid := 0
	for range 2 {
		if word := p.expect(""); word != "ready" {
			n, err := strconv.Atoi(strings.TrimPrefix(word, "started "))
			if err != nil {
				b.t.Fatalf("the role said %q", word)
			}
			pid = n
		}
	}
	return p, pid
}

// display starts a stand-in for Xvnc.
func (b *bench) display(n int, mode ...string) *process {
	b.t.Helper()
	rfb := filepath.Join(b.dir, "rfb.sock")
	p := b.spawn(Generation{Role: RoleDisplay, Display: n, Sockets: []string{rfb}})
	p.release(roleSpec{
		Args: []string{programNamed(b.t, "Xvnc"), ":" + strconv.Itoa(n), "-rfbport", "-1", "-rfbunixpath", rfb},
		Env:  append(os.Environ(), helperEnv(mode...)), Exec: true,
	})
	p.expect("ready")
	return p
}

func (p *process) live() *Live {
	p.b.t.Helper()
	l, err := p.b.v.Live(p.b.ctx, p.g)
	if err != nil {
		p.b.t.Fatal(err)
	}
	p.b.t.Cleanup(func() { l.Close() })
	return l
}

// again verifies the leader once more.
func (l *Live) again(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.verify(ctx)
}

// claim names everything of the bench.
func (b *bench) claim(ps ...*process) Claim {
	c := Claim{Instance: b.instance, Slice: b.slice, Root: b.root, Profile: b.profile, LockFile: b.lock}
	for _, p := range ps {
		c.Generations = append(c.Generations, p.g)
	}
	return c
}

func (b *bench) vacant(c Claim) *Vacant {
	b.t.Helper()
	n, err := b.v.Vacant(b.ctx, c)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// recheck asks again for what was proven vacant before.
func (b *bench) recheck(n *Vacant) error {
	_, err := b.v.Vacant(b.ctx, n.claim)
	return err
}

func (b *bench) notVacant(c Claim, when string, want Reason) {
	b.t.Helper()
	if n, err := b.v.Vacant(b.ctx, c); ReasonOf(err) != want || n != nil {
		b.t.Errorf("%s: %v, want %s", when, err, want)
	}
}

// end waits for a process by pidfd and reaps it.
func (p *process) end() {
	p.b.t.Helper()
	p.in.Close()
	p.cmd.Wait()
	if err := (unit.Cgroup{Path: p.g.Cgroup}).WaitEmpty(p.b.ctx); err != nil {
		p.b.t.Fatal(err)
	}
}

func TestRigRealDisplay(t *testing.T) {
	b := newBench(t)
	if _, err := os.Stat(xvnc); err != nil {
		t.Skipf("needs Xvnc: %v", err)
	}
	const n = 131
	rfb := filepath.Join(b.dir, "rfb.sock")
	start := func() *process {
		p := b.spawn(Generation{Role: RoleDisplay, Display: n, Sockets: []string{rfb}})
		p.release(roleSpec{
			Args: []string{xvnc, ":131", "-rfbport", "-1", "-rfbunixpath", rfb, "-SecurityTypes", "None", "-nolisten", "tcp", "-nolisten", "local"},
			Env:  []string{"HOME=" + os.Getenv("HOME"), "PATH=/usr/bin:/bin"}, Exec: true,
		})
		waitSocket(t, b.ctx, rfb)
		waitSocket(t, b.ctx, xSocket(n))
		return p
	}
	p := start()
	l := p.live()
	b.notVacant(b.claim(p), "while it runs", Populated)
	b.notVacant(Claim{Instance: b.instance, Display: n}, "by the display alone", DisplayLive)
	b.notVacant(Claim{Instance: b.instance, Root: b.root}, "by its root file alone", Elsewhere)
	b.notVacant(Claim{Instance: b.instance, Sockets: []string{rfb}}, "by its command line alone", Elsewhere)
	if err := ClearDisplay(n, p.g.Leader.PID); ReasonOf(err) != StillAlive {
		t.Errorf("clearing the display of a live server: %v", err)
	}
	for _, change := range []func(*Generation){
		func(g *Generation) { g.Display++ },
		func(g *Generation) { g.Sockets = []string{rfb + "x"} },
	} {
		g := p.g
		change(&g)
		if err := WritePidfile(PidfilePath(g), g); err != nil {
			t.Fatal(err)
		}
		if _, err := b.v.Live(b.ctx, g); ReasonOf(err) != SignatureDiffers {
			t.Errorf("another display or socket: %v", err)
		}
	}
	if err := WritePidfile(PidfilePath(p.g), p.g); err != nil {
		t.Fatal(err)
	}

	if err := l.Signal(b.ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := l.Wait(b.ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.Signal(b.ctx, syscall.SIGKILL); ReasonOf(err) != PIDGone || !Ended(err) {
		t.Errorf("signalling what has ended: %v", err)
	}
	p.end()
	b.vacant(b.claim(p))

	// A killed server leaves lock and socket behind.
	p = start()
	if err := p.live().Signal(b.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.end()
	n2 := b.vacant(b.claim(p))
	if !exists(xLock(n)) || !exists(xSocket(n)) {
		t.Fatal("the killed server left nothing behind")
	}
	if err := ClearDisplay(n, p.g.Leader.PID+1); err == nil {
		t.Error("cleared the display of another process")
	}
	if err := ClearDisplay(n, p.g.Leader.PID); err != nil || exists(xLock(n)) || exists(xSocket(n)) {
		t.Errorf("clearing the dead display: %v", err)
	}
	if err := b.recheck(n2); err != nil {
		t.Error(err)
	}
}

// A display that serves no VNC, and the x11vnc that does it for it: each is its
// own Role, found by its own signature wherever it is, and proven by it.
func TestRigRealVNCServer(t *testing.T) {
	for _, program := range []string{xvfb, x11vnc} {
		if _, err := os.Stat(program); err != nil {
			t.Skipf("needs %s: %v", program, err)
		}
	}
	b := newBench(t)
	const n = 137
	rfb, auth := filepath.Join(b.dir, "rfb.sock"), filepath.Join(b.dir, "xauth")
	env := []string{"HOME=" + b.dir, "PATH=/usr/bin:/bin"}
	display := b.spawn(Generation{Role: RoleDisplay, Display: n})
	display.release(roleSpec{Args: []string{xvfb, ":137", "-auth", auth, "-nolisten", "tcp", "-nolisten", "local"}, Env: env, Exec: true})
	waitSocket(t, b.ctx, xSocket(n))
	vnc := b.spawn(Generation{Role: RoleVNC, Display: n, Sockets: []string{rfb}})
	vnc.release(roleSpec{
		Args: []string{x11vnc, "-display", ":137", "-auth", auth, "-unixsock", rfb, "-rfbport", "0", "-noipv6", "-nopw", "-forever", "-norc", "-noshm"},
		Env:  env, Exec: true,
	})
	waitSocket(t, b.ctx, rfb)
	l := vnc.live()
	d := display.live()
	b.notVacant(b.claim(display, vnc), "while both run", Populated)
	b.notVacant(Claim{Instance: b.instance, Sockets: []string{rfb}}, "by the VNC server's command line alone", Elsewhere)
	b.notVacant(Claim{Instance: b.instance, Display: n}, "by the display alone", DisplayLive)

	// What the option leaves it listening on is told, and of whom.
	for {
		addrs, err := l.Listening(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(addrs) == 1 && addrs[0].String() == "[::]:5900" {
			break
		}
		select {
		case <-b.ctx.Done():
			t.Fatalf("x11vnc listens on %v", addrs)
		case <-time.After(20 * time.Millisecond):
		}
	}
	if addrs, err := d.Listening(b.ctx); err != nil || len(addrs) != 0 {
		t.Errorf("Xvfb listens on %v, %v", addrs, err)
	}

	for name, c := range map[string]struct {
		of     Generation
		change func(*Generation)
	}{
		"a VNC server of another display":            {vnc.g, func(g *Generation) { g.Display++ }},
		"a VNC server on another socket":             {vnc.g, func(g *Generation) { g.Sockets = []string{rfb + "x"} }},
		"a VNC server as a display":                  {vnc.g, func(g *Generation) { g.Role = RoleDisplay }},
		"a display of another number":                {display.g, func(g *Generation) { g.Display++ }},
		"a display that should serve VNC":            {display.g, func(g *Generation) { g.Sockets = []string{rfb} }},
		"a display as a VNC server that is not ours": {display.g, func(g *Generation) { g.Role = RoleVNC; g.Sockets = []string{rfb} }},
	} {
		c.change(&c.of)
		if err := WritePidfile(PidfilePath(c.of), c.of); err != nil {
			t.Fatal(err)
		}
		if _, err := b.v.Live(b.ctx, c.of); ReasonOf(err) != SignatureDiffers {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, g := range []Generation{display.g, vnc.g} {
		if err := WritePidfile(PidfilePath(g), g); err != nil {
			t.Fatal(err)
		}
	}

	if err := l.Signal(b.ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	vnc.end()
	if err := d.again(b.ctx); err != nil {
		t.Errorf("the display after its VNC server's end: %v", err)
	}
	b.notVacant(Claim{Instance: b.instance, Root: b.root}, "by the display's root file or authority alone", Elsewhere)
	if err := d.Signal(b.ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	display.end()
	b.vacant(b.claim(display, vnc))
}

func waitSocket(t *testing.T, ctx context.Context, path string) {
	t.Helper()
	for {
		if _, err := knock(path); err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("nobody listens on %s", path)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// A real browser below a stand-in for the holder: the SingletonLock, the command
// line and the inherited root file are Chromium's own.
func TestRigRealBrowser(t *testing.T) {
	b := newBench(t)
	if _, err := os.Stat(chromium); err != nil {
		t.Skipf("needs Chromium: %v", err)
	}
	p := b.spawn(Generation{Role: RoleChromium, Profile: b.profile, LockFile: b.lock})
	p.release(roleSpec{
		Lock: b.lock,
		Args: []string{chromium, "--headless=new", "--user-data-dir=" + b.profile, "--no-first-run", "--password-store=basic", "--disable-dev-shm-usage", "about:blank"},
		Env:  []string{"HOME=" + os.Getenv("HOME"), "PATH=/usr/bin:/bin", "TMPDIR=/var/tmp", "DBUS_SESSION_BUS_ADDRESS=disabled:", "DBUS_SYSTEM_BUS_ADDRESS=disabled:"},
	})
	pid, err := strconv.Atoi(p.expect("started "))
	if err != nil {
		t.Fatal(err)
	}
	l := p.live()
	var m Member
	for {
		// The lock appears some 100 ms after the start.
		if m, err = b.v.Browser(b.ctx, l, 0); err == nil {
			break
		}
		if ReasonOf(err) != SingletonDiffers {
			t.Fatal(err)
		}
		select {
		case <-b.ctx.Done():
			t.Fatal(err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	if m.PID != pid || m.PGID != pid {
		t.Errorf("browser is %+v, want process %d", m, pid)
	}
	p.g = l.Generation()
	if p.g.Browser == nil || *p.g.Browser != m {
		t.Errorf("record has %+v", p.g.Browser)
	}
	if err := WritePidfile(PidfilePath(p.g), p.g); err != nil {
		t.Fatal(err)
	}
	// Another service process finds it again by the record alone.
	again := p.live()
	if got, err := again.Browser(); err != nil || got != m {
		t.Errorf("found again: %+v, %v", got, err)
	}
	// Its children share its program, and are none of our members.
	for _, child := range childrenOf(t, pid) {
		if _, err := b.v.Browser(b.ctx, p.live(), child); err == nil {
			t.Errorf("child %d passes for the browser", child)
		}
	}
	c := b.claim(p)
	b.notVacant(c, "while it runs", Populated)
	b.notVacant(Claim{Instance: b.instance, Profile: b.profile, LockFile: b.lock}, "by its lock", LockHeld)
	b.notVacant(Claim{Instance: b.instance, Profile: b.profile}, "by its SingletonLock", SingletonLive)
	if who, what, held := new(Verifier).ProfileHolder(b.profile, ""); !held || who != pid {
		t.Errorf("profile held by %d, %q, %v", who, what, held)
	}

	if err := again.SignalBrowser(b.ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.in.Close()
	if err := again.Wait(b.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := again.Browser(); ReasonOf(err) != PIDGone {
		t.Errorf("the browser that has ended: %v", err)
	}
	p.end()
	// TERM leaves the SingletonLock behind; it names nobody any more.
	b.vacant(c)
}

func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	all, err := pids()
	if err != nil {
		t.Fatal(err)
	}
	var children []int
	for _, p := range all {
		if s, err := readStat(p); err == nil && s.PPID == pid {
			children = append(children, p)
		}
	}
	if len(children) == 0 {
		t.Error("the browser has no children")
	}
	return children
}

// Each piece of evidence alone keeps a signal from being sent.
func TestRigContradictionsRefuse(t *testing.T) {
	b := newBench(t)
	p, pid := b.browser("browser")
	l := p.live()
	if _, err := b.v.Browser(b.ctx, l, 0); err != nil {
		t.Fatal(err)
	}
	good := l.Generation()
	if good.Browser.PID != pid {
		t.Fatalf("browser is %+v, want %d", good.Browser, pid)
	}
	other := filepath.Join(filepath.Dir(b.dir), "elsewhere")
	if err := os.MkdirAll(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "root"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*Generation)
		want   Reason
	}{
		{"recycled pid", func(g *Generation) { g.Leader.StartTime-- }, StartTimeDiffers},
		{"no such pid", func(g *Generation) { g.Leader.PID = deadPID(t); g.Leader.PGID = g.Leader.PID }, PIDGone},
		{"our own pid", func(g *Generation) { g.Leader.PID = os.Getpid(); g.Leader.PGID = g.Leader.PID }, StartTimeDiffers},
		{"another user", func(g *Generation) { g.Leader.UID++ }, UIDDiffers},
		{"not a group leader", func(g *Generation) { g.Leader.PGID++ }, RecordIncomplete},
		{"another boot", func(g *Generation) { g.BootID = strings.Repeat("0", 36) }, BootDiffers},
		{"another invocation", func(g *Generation) { g.InvocationID = strings.Repeat("0", 32) }, InvocationDiffers},
		{"another cgroup directory", func(g *Generation) { g.CgroupID++ }, CgroupIDDiffers},
		{"another cgroup", func(g *Generation) { g.Cgroup = "/x/" + g.Unit }, CgroupDiffers},
		{"a unit that is not there", func(g *Generation) {
			g.Cgroup = filepath.Dir(g.Cgroup) + "/abftest-none-chromium-1.scope"
			g.Unit = "abftest-none-chromium-1.scope"
		}, CgroupDiffers},
		{"another instance", func(g *Generation) { g.Root = filepath.Join(other, "root") }, RootContradicts},
		{"a root that is not there", func(g *Generation) { g.Root = filepath.Join(b.dir, "root2") }, RootMissing},
		{"another role", func(g *Generation) { g.Role = RoleDisplay; g.Display = 1; g.Sockets = []string{"/s"} }, ""},
	} {
		g := good
		g.Browser = nil
		c.change(&g)
		if g.incomplete() == "" {
			if err := WritePidfile(PidfilePath(g), g); err != nil {
				t.Fatal(err)
			}
		}
		got, err := b.v.Live(b.ctx, g)
		if ReasonOf(err) != c.want {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		if got != nil {
			got.Close()
		}
	}
	os.Remove(filepath.Join(b.dir, "display.pid"))

	// Record and pidfile have to agree.
	for name, write := range map[string]func(path string) Reason{
		"no pidfile":     func(path string) Reason { return NoPidfile },
		"legacy pidfile": func(path string) Reason { os.WriteFile(path, []byte("1234\n"), 0o600); return PidfileLegacy },
		"partial": func(path string) Reason {
			os.WriteFile(path, []byte(`{"leader":{"pid":1234}}`), 0o600)
			return PidfilePartial
		},
		"older generation": func(path string) Reason {
			g := good
			g.Number++
			WritePidfile(path, g)
			return PidfileDiffers
		},
		"other browser": func(path string) Reason {
			g := good
			g.Browser = &Member{PID: 99, StartTime: 1, PGID: 99, UID: good.Leader.UID}
			WritePidfile(path, g)
			return PidfileDiffers
		},
		"open to others": func(path string) Reason {
			WritePidfile(path, good)
			os.Chmod(path, 0o644)
			return PidfileUnsafe
		},
	} {
		os.Remove(PidfilePath(good))
		want := write(PidfilePath(good))
		if _, err := b.v.Live(b.ctx, good); ReasonOf(err) != want {
			t.Errorf("%s: %v", name, err)
		}
		// A Live from before is no better.
		for _, err := range []error{l.Signal(b.ctx, syscall.SIGKILL), l.SignalBrowser(b.ctx, syscall.SIGKILL), l.again(b.ctx)} {
			if ReasonOf(err) != want {
				t.Errorf("%s, with an older proof: %v", name, err)
			}
		}
	}
	os.Remove(PidfilePath(good))
	if err := WritePidfile(PidfilePath(good), good); err != nil {
		t.Fatal(err)
	}

	// The browser has its own evidence; the leader stays provable without it.
	lock := filepath.Join(b.profile, "SingletonLock")
	target, err := os.Readlink(lock)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*Generation)
		want   Reason
	}{
		{"recycled browser pid", func(g *Generation) { g.Browser.StartTime-- }, StartTimeDiffers},
		{"browser gone", func(g *Generation) { g.Browser.PID = deadPID(t); g.Browser.PGID = g.Browser.PID }, PIDGone},
		{"leader as browser", func(g *Generation) { *g.Browser = g.Leader }, ParentDiffers},
		{"SingletonLock of another process", func(*Generation) { relink(t, lock, fmt.Sprintf("%s-%d", hostname(t), os.Getpid())) }, SingletonDiffers},
		{"SingletonLock of another process on another host", func(*Generation) { relink(t, lock, fmt.Sprintf("elsewhere-%d", os.Getpid())) }, SingletonDiffers},
		{"SingletonLock with the name that the host had before", func(*Generation) { relink(t, lock, fmt.Sprintf("elsewhere-%d", pid)) }, ""},
		{"SingletonLock removed, as a browser on its way out does", func(*Generation) { os.Remove(lock) }, ""},
		{"no browser recorded", func(g *Generation) { relink(t, lock, target); g.Browser = nil }, NoBrowser},
	} {
		g := good
		member := *good.Browser
		g.Browser = &member
		c.change(&g)
		if err := WritePidfile(PidfilePath(g), g); err != nil {
			t.Fatal(err)
		}
		got, err := b.v.Live(b.ctx, g)
		if err != nil {
			t.Errorf("%s: the leader was refused: %v", c.name, err)
			continue
		}
		if _, err := got.Browser(); ReasonOf(err) != c.want {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		if c.want != "" {
			if err := got.SignalBrowser(b.ctx, syscall.SIGKILL); ReasonOf(err) != c.want {
				t.Errorf("%s: signal gave %v", c.name, err)
			}
		}
		got.Close()
	}
	if err := WritePidfile(PidfilePath(good), good); err != nil {
		t.Fatal(err)
	}
	// Attaching wants the SingletonLock itself.
	os.Remove(lock)
	if _, err := b.v.Browser(b.ctx, p.live(), pid); ReasonOf(err) != NoBrowser && ReasonOf(err) != SingletonDiffers {
		t.Errorf("attached without a SingletonLock: %v", err)
	}
	// And it wants it to be of this host, as long as no browser is recorded.
	relink(t, lock, fmt.Sprintf("elsewhere-%d", pid))
	unrecorded := good
	unrecorded.Browser = nil
	fresh, err := b.v.Live(b.ctx, unrecorded)
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	for _, p := range []int{0, pid} {
		if _, err := b.v.Browser(b.ctx, fresh, p); ReasonOf(err) != SingletonDiffers {
			t.Errorf("attached by the SingletonLock of another host: %v", err)
		}
	}
	known, err := b.v.Live(b.ctx, good)
	if err != nil {
		t.Fatal(err)
	}
	defer known.Close()
	for _, p := range []int{0, pid} {
		if m, err := b.v.Browser(b.ctx, known, p); err != nil || m != *good.Browser {
			t.Errorf("the recorded browser after a change of the host's name: %+v, %v", m, err)
		}
	}
	relink(t, lock, target)

	// After all that both still live, and a good proof still works.
	if !alive(p.g.Leader.PID) || !alive(pid) {
		t.Fatal("a refused signal was sent")
	}
	if err := l.SignalBrowser(b.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.in.Close()
	if err := l.Wait(b.ctx); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := l.Signal(b.ctx, syscall.SIGKILL); ReasonOf(err) != Closed {
		t.Errorf("a closed proof: %v", err)
	}
}

func relink(t *testing.T, path, target string) {
	t.Helper()
	os.Remove(path)
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}

// Whoever has a process of the same user can put it into another scope. Then
// neither a new nor an older proof signals it, and the Instance is not vacant.
func TestRigStolenProcess(t *testing.T) {
	b := newBench(t)
	p := b.display(132, "wait")
	l := p.live()
	thief := newBench(t)
	if _, err := b.v.Units.StartScope(b.ctx, unit.Scope{Name: "abftest-" + thief.instance + "-display-1.scope", Slice: thief.slice, PID: p.g.Leader.PID}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != CgroupDiffers {
		t.Errorf("a new proof: %v", err)
	}
	if err := l.Signal(b.ctx, syscall.SIGKILL); ReasonOf(err) != CgroupDiffers {
		t.Errorf("an older proof: %v", err)
	}
	if !alive(p.g.Leader.PID) {
		t.Fatal("the process was signalled")
	}
	if err := (unit.Cgroup{Path: p.g.Cgroup}).WaitEmpty(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.notVacant(b.claim(p), "while it lives elsewhere", StillAlive)
	p.cmd.Process.Kill()
	p.cmd.Wait()
	b.vacant(b.claim(p))
}

// A display number is used again once it is free. Whoever has it then is no
// obstacle, as long as the record says that it is somebody else.
func TestRigDisplayOfAnotherInstance(t *testing.T) {
	const n = 135
	b, other := newBench(t), newBench(t)
	p := b.display(n, "wait")
	c := b.claim(p)
	c.Display = n
	if err := p.live().Signal(b.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.end()
	t.Cleanup(func() { os.Remove(xLock(n)); os.Remove(xSocket(n)) })
	if err := os.MkdirAll(filepath.Dir(xSocket(n)), 0o1777); err != nil {
		t.Fatal(err)
	}
	next := other.display(n, "listen", xSocket(n), xLock(n))
	b.vacant(c)
	other.notVacant(other.claim(next), "while it runs", Populated)
	other.notVacant(Claim{Instance: other.instance, Display: n}, "by the display alone", DisplayLive)

	for name, change := range map[string]func(*Claim){
		"a record that has it as a member": func(c *Claim) {
			c.Generations = append(slices.Clone(c.Generations), Generation{Leader: next.g.Leader})
		},
		"a claim without its slice": func(c *Claim) { c.Slice = "" },
		"a claim without its root":  func(c *Claim) { c.Root = "" },
	} {
		c := c
		change(&c)
		if err := displayFree(n, c); ReasonOf(err) != DisplayLive {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := b.v.Units.StartScope(b.ctx, unit.Scope{Name: "abftest-stray-" + other.instance + ".scope", Slice: "abftest-stray.slice", PID: next.g.Leader.PID}); err != nil {
		t.Fatal(err)
	}
	b.vacant(c)
	next.end()

	// Nor need it be one of a fleet.
	listen(t, xSocket(n))
	b.vacant(c)
	c.Generations = nil
	b.notVacant(c, "without a record of the server it had", DisplayLive)
}

// After a reboot the display number of before is anybody's.
func TestRigDisplayOfAnotherBoot(t *testing.T) {
	const n = 136
	b := newBench(t)
	p := b.display(n, "wait")
	if err := p.live().Signal(b.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.end()
	t.Cleanup(func() { os.Remove(xLock(n)); os.Remove(xSocket(n)) })
	c := b.claim(p)
	listen(t, xSocket(n))
	c.Generations = slices.Clone(c.Generations)
	for i := range c.Generations {
		c.Generations[i].BootID = "00000000-0000-0000-0000-000000000000"
	}
	b.vacant(c)
}

func TestRigProofSurvivesReloadAndReexec(t *testing.T) {
	b := newBench(t)
	p, pid := b.browser("browser")
	l := p.live()
	if _, err := b.v.Browser(b.ctx, l, 0); err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"daemon-reload", "daemon-reexec"} {
		if out, err := exec.CommandContext(b.ctx, "systemctl", "--user", verb).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", verb, err, out)
		}
		if err := l.again(b.ctx); err != nil {
			t.Errorf("after %s: %v", verb, err)
		}
		if m, err := l.Browser(); err != nil || m.PID != pid {
			t.Errorf("after %s: %+v, %v", verb, m, err)
		}
		p.live()
	}
}

func TestRigProcessThatIgnoresTerm(t *testing.T) {
	b := newBench(t)
	p := b.display(133, "ignore-term")
	l := p.live()
	if err := l.Signal(b.ctx, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(b.ctx, 100*time.Millisecond)
	defer cancel()
	if err := l.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting gave %v", err)
	}
	b.notVacant(b.claim(p), "after TERM", Populated)
	if err := l.Signal(b.ctx, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := l.Wait(b.ctx); err != nil {
		t.Fatal(err)
	}
	// Not reaped yet: a zombie is gone for every purpose of ours.
	if _, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != PIDGone {
		t.Errorf("a zombie: %v", err)
	}
	if err := (unit.Cgroup{Path: p.g.Cgroup}).WaitEmpty(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.vacant(b.claim(p))
}

// The holder is killed, the browser lives on: no process can be signalled, but
// systemd can stop the very invocation that was recorded.
func TestRigOrphanedBrowser(t *testing.T) {
	b := newBench(t)
	p, pid := b.browser("orphan")
	p.cmd.Process.Kill()
	p.cmd.Wait()
	if !alive(pid) {
		t.Fatal("the browser went with its holder")
	}
	if _, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != PIDGone {
		t.Errorf("proof of a dead leader: %v", err)
	}
	b.notVacant(b.claim(p), "with an orphan", Populated)
	for name, change := range map[string]func(*Generation){
		string(InvocationDiffers): func(g *Generation) { g.InvocationID = strings.Repeat("0", 32) },
		string(CgroupIDDiffers):   func(g *Generation) { g.CgroupID++ },
		string(BootDiffers):       func(g *Generation) { g.BootID = strings.Repeat("0", 36) },
	} {
		g := p.g
		change(&g)
		if err := b.v.StopUnit(b.ctx, g); string(ReasonOf(err)) != name {
			t.Errorf("stopping the unit of another record: %v, want %s", err, name)
		}
	}
	if !alive(pid) {
		t.Fatal("a refused stop stopped it")
	}
	if err := b.v.StopUnit(b.ctx, p.g); err != nil {
		t.Fatal(err)
	}
	b.vacant(b.claim(p))
	if err := b.v.StopUnit(b.ctx, p.g); err != nil {
		t.Errorf("stopping what is gone: %v", err)
	}
}

// Each thing that may be left of an Instance alone keeps it from being vacant.
func TestRigVacantNeedsEverythingGone(t *testing.T) {
	b := newBench(t)
	p, _ := b.browser("browser")
	full := b.claim(p)
	full.Display = 134
	full.Sockets = []string{filepath.Join(b.dir, "rfb.sock"), filepath.Join(b.dir, "cdp.sock")}
	if err := b.v.Units.StopSlice(b.ctx, b.slice); err != nil {
		t.Fatal(err)
	}
	p.cmd.Wait()
	proof := b.vacant(full)

	for _, c := range []struct {
		name string
		want Reason
		// left starts what is left and returns how to end it.
		left func(t *testing.T)
	}{
		{"flock held by another process", LockHeld, func(t *testing.T) { startHelper(t, helperCommand("lock", b.lock)) }},
		{"lock file replaced by a link", LockUnsafe, func(t *testing.T) {
			saved := b.lock + ".saved"
			if err := os.Rename(b.lock, saved); err != nil {
				t.Fatal(err)
			}
			relink(t, b.lock, saved)
			t.Cleanup(func() { os.Rename(saved, b.lock) })
		}},
		{"browser named by the SingletonLock", SingletonLive, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "chromium"))
			cmd.Env = append(os.Environ(), helperEnv("browser", b.profile))
			startHelper(t, cmd)
		}},
		{"browser on the profile, without a lock", Elsewhere, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "chromium"), "--user-data-dir="+b.profile)
			cmd.Env = append(os.Environ(), helperEnv("wait"))
			startHelper(t, cmd)
		}},
		{"display server with our VNC socket, not yet listening", Elsewhere, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "Xvnc"), ":999", "-rfbunixpath", filepath.Join(b.dir, "rfb.sock"))
			cmd.Env = append(os.Environ(), helperEnv("wait"))
			startHelper(t, cmd)
		}},
		{"VNC server with our socket, not yet listening", Elsewhere, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "x11vnc"), "-display", ":999", "-unixsock", filepath.Join(b.dir, "rfb.sock"))
			cmd.Env = append(os.Environ(), helperEnv("wait"))
			startHelper(t, cmd)
		}},
		{"display server with our X authority", Elsewhere, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "Xvfb"), ":999", "-auth", filepath.Join(b.dir, "xauth"))
			cmd.Env = append(os.Environ(), helperEnv("wait"))
			startHelper(t, cmd)
		}},
		{"role with our root file", Elsewhere, func(t *testing.T) {
			cmd := exec.Command(programNamed(t, "abfleet-role"))
			cmd.Env = append(os.Environ(), helperEnv("open", b.root))
			startHelper(t, cmd)
		}},
		{"listener on our socket", ListenerLive, func(t *testing.T) { listen(t, filepath.Join(b.dir, "cdp.sock")) }},
		{"X server that answers", DisplayLive, func(t *testing.T) { listen(t, xSocket(134)) }},
		{"X lock of a live process", DisplayLive, func(t *testing.T) {
			if err := os.WriteFile(xLock(134), fmt.Appendf(nil, "%10d\n", os.Getpid()), 0o444); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Remove(xLock(134)) })
		}},
		{"process in the slice", Populated, func(t *testing.T) {
			cmd := helperCommand("wait")
			startHelper(t, cmd)
			name := fmt.Sprintf("abftest-%s-stray-%d.scope", b.instance, cmd.Process.Pid)
			if _, err := b.v.Units.StartScope(b.ctx, unit.Scope{Name: name, Slice: b.slice, PID: cmd.Process.Pid}); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.left(t)
			if n, err := b.v.Vacant(b.ctx, full); ReasonOf(err) != c.want || n != nil {
				t.Errorf("got %v, want %s", err, c.want)
			}
			if err := b.recheck(proof); ReasonOf(err) != c.want {
				t.Errorf("an older proof: %v, want %s", err, c.want)
			}
		})
	}
	// The stray process's scope empties asynchronously to the end of its test.
	if err := b.v.Units.StopSlice(b.ctx, b.slice); err != nil {
		t.Fatal(err)
	}
	if err := b.recheck(proof); err != nil {
		t.Errorf("with everything gone again: %v", err)
	}
	// What is somebody else's does not count.
	stranger := exec.Command(programNamed(t, "Xvfb"), ":999", "-auth", filepath.Join(filepath.Dir(b.dir), "xauth"))
	stranger.Env = append(os.Environ(), helperEnv("wait"))
	startHelper(t, stranger)
	for _, args := range [][]string{{"--user-data-dir=" + b.profile + "2"}, {b.profile}} {
		cmd := exec.Command(programNamed(t, "chromium"), args...)
		cmd.Env = append(os.Environ(), helperEnv("wait"))
		startHelper(t, cmd)
	}
	grep := exec.Command(programNamed(t, "grep"), "--user-data-dir="+b.profile)
	grep.Env = append(os.Environ(), helperEnv("open", b.root))
	startHelper(t, grep)
	b.vacant(full)

	// Without systemd nothing is known.
	units, err := unit.Dial(b.ctx, unit.Options{})
	if err != nil {
		t.Fatal(err)
	}
	units.Close()
	for _, v := range []*Verifier{{Units: units}, {}} {
		if _, err := v.Vacant(b.ctx, full); ReasonOf(err) != UnitUnknown {
			t.Errorf("without systemd: %v", err)
		}
	}
}

func listen(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

// A trampoline that was captured but not released is nobody's role yet: it does
// not hold the root file, and no signal is sent to it.
func TestRigTrampolineIsNotYetLive(t *testing.T) {
	b := newBench(t)
	p := b.spawn(Generation{Role: RoleChromium, Profile: b.profile, LockFile: b.lock})
	if _, err := b.v.Live(b.ctx, p.g); ReasonOf(err) != RootMissing {
		t.Errorf("got %v", err)
	}
	b.notVacant(b.claim(p), "while it waits", Populated)
	p.in.Close()
	p.end()
	b.vacant(b.claim(p))
}

// Capture takes only a live process of ours that leads its group in its scope.
func TestRigCaptureRefuses(t *testing.T) {
	b := newBench(t)
	p := b.spawn(Generation{Role: RoleChromium, Profile: b.profile, LockFile: b.lock})
	info, err := b.v.Units.Info(b.ctx, p.g.Unit)
	if err != nil {
		t.Fatal(err)
	}
	base := Generation{Instance: b.instance, Role: RoleChromium, Number: 9, Root: b.root, Profile: b.profile, LockFile: b.lock}
	follower := helperCommand("wait")
	startHelper(t, follower)
	outsider := helperCommand("wait")
	outsider.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	startHelper(t, outsider)
	other := info
	other.CgroupID++
	for _, c := range []struct {
		name string
		info unit.Info
		pid  int
		base Generation
		want Reason
	}{
		{"dead process", info, deadPID(t), base, PIDGone},
		{"process 1", info, 1, base, UIDDiffers},
		{"process in our group", info, follower.Process.Pid, base, PGIDDiffers},
		{"process outside the scope", info, outsider.Process.Pid, base, CgroupDiffers},
		{"another cgroup directory", other, p.g.Leader.PID, base, CgroupIDDiffers},
		{"no root file", info, p.g.Leader.PID, Generation{Instance: b.instance, Role: RoleChromium, Number: 9, Profile: b.profile, LockFile: b.lock}, RecordIncomplete},
		{"unknown role", info, p.g.Leader.PID, Generation{Instance: b.instance, Role: "x", Number: 9, Root: b.root}, RecordIncomplete},
		{"all well", info, p.g.Leader.PID, base, ""},
	} {
		if g, err := Capture(c.info, c.pid, c.base); ReasonOf(err) != c.want {
			t.Errorf("%s: %v, %v", c.name, g, err)
		}
	}
	if fd, err := unix.PidfdOpen(p.g.Leader.PID, 0); err != nil {
		t.Error(err)
	} else {
		unix.Close(fd)
	}
}
