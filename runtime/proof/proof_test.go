package proof

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	tail := " S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 100 200"
	for _, name := range []string{"sh", "a b", "x) S 1 1 1", "((", ")", ""} {
		s, err := parseStat([]byte("42 (" + name + ")" + tail + "\n"))
		if err != nil || s != (stat{State: 'S', PPID: 7, PGID: 42, StartTime: 987654}) {
			t.Errorf("program named %q: %+v, %v", name, s, err)
		}
	}
	for _, in := range []string{"", "42", "42 (sh)", "42 (sh) S 7 42", "42 )sh( S" + tail, strings.Replace("42 (sh)"+tail, "987654", "-1", 1), strings.Replace("42 (sh)"+tail, " S ", " SS ", 1), strings.Replace("42 (sh)"+tail, " S ", " \x00 ", 1)} {
		if s, err := parseStat([]byte(in)); err == nil {
			t.Errorf("parseStat(%q) = %+v", in, s)
		}
	}
	if s, err := readStat(os.Getpid()); err != nil || s.PPID != os.Getppid() || s.PGID != unix.Getpgrp() || s.StartTime == 0 || s.dead() {
		t.Errorf("own stat: %+v, %v", s, err)
	}
}

// Whatever a program calls itself, the numbers behind it stay the same.
func FuzzParseStat(f *testing.F) {
	f.Add([]byte("a) b"), []byte(" Z 7 42"))
	f.Add([]byte(""), []byte(")\x00 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"))
	f.Add([]byte(""), []byte("42 (sh) S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 100 200\n"))
	f.Fuzz(func(t *testing.T, name, raw []byte) {
		line := "42 (" + string(name) + ") Z 7 43 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 100 200\n"
		if s, err := parseStat([]byte(line)); err != nil || s != (stat{State: 'Z', PPID: 7, PGID: 43, StartTime: 987654}) {
			t.Errorf("program named %q: %+v, %v", name, s, err)
		}
		if s, err := parseStat(raw); err == nil && s.State == 0 {
			t.Errorf("accepted %q without a state", raw)
		}
	})
}

func TestParseUID(t *testing.T) {
	if uid, err := parseUID([]byte("Name:\tx\nUid:\t1500\t1500\t1500\t1500\nGid:\t1\t1\t1\t1\n")); err != nil || uid != 1500 {
		t.Errorf("got %d, %v", uid, err)
	}
	for _, in := range []string{"", "Uid:\n", "Uid:\t1\t1\t1\n", "Uid:\t1500\t0\t1500\t1500\n", "Uid:\tx\tx\tx\tx\n", "Uid:\t-1\t-1\t-1\t-1\n"} {
		if uid, err := parseUID([]byte(in)); err == nil {
			t.Errorf("parseUID(%q) = %d", in, uid)
		}
	}
	if uid, err := readUID(os.Getpid()); err != nil || uid != os.Getuid() {
		t.Errorf("own uid: %d, %v", uid, err)
	}
}

func TestParseSingleton(t *testing.T) {
	for in, want := range map[string]singleton{
		"host-42":       {"host", 42},
		"a-b-c-7":       {"a-b-c", 7},
		"host.x.org-12": {"host.x.org", 12},
	} {
		if got, ok := parseSingleton(in); !ok || got != want {
			t.Errorf("parseSingleton(%q) = %v, %v", in, got, ok)
		}
	}
	for _, in := range []string{"", "-", "-42", "host", "host-", "host-0", "host--x", "host-12x", "host-99999999999", "host- 5"} {
		if got, ok := parseSingleton(in); ok {
			t.Errorf("parseSingleton(%q) = %v", in, got)
		}
	}
}

func TestParseXLock(t *testing.T) {
	if pid := parseXLock([]byte("      1234\n")); pid != 1234 {
		t.Errorf("got %d", pid)
	}
	for _, in := range []string{"", "1234\n", "      1234", "      12x4\n", "          \n", "     -1234\n", "      1234\n\n", "9999999999\n"} {
		if pid := parseXLock([]byte(in)); pid != 0 {
			t.Errorf("parseXLock(%q) = %d", in, pid)
		}
	}
}

func TestParseLocks(t *testing.T) {
	const table = "1: POSIX  ADVISORY  WRITE 11 08:01:77 0 EOF\n" +
		"2: FLOCK  ADVISORY  WRITE 22 08:01:77 0 EOF\n" +
		"2: -> FLOCK  ADVISORY  WRITE 33 08:01:77 0 EOF\n" +
		"3: FLOCK  ADVISORY  WRITE -1 08:01:78 0 EOF\n" +
		"4: FLOCK  ADVISORY  READ  44 00:2b:79 0 EOF\nshort\n"
	for _, c := range []struct {
		major, minor uint32
		inode        uint64
		want         int
	}{{8, 1, 77, 22}, {8, 1, 78, 0}, {0, 0x2b, 79, 44}, {8, 1, 79, 44}, {8, 1, 7, 0}} {
		if got := parseLocks(table, c.major, c.minor, c.inode); got != c.want {
			t.Errorf("%x:%x:%d is held by %d, want %d", c.major, c.minor, c.inode, got, c.want)
		}
	}
}

func TestCommandLineTokens(t *testing.T) {
	args := parseArgs([]byte("/usr/bin/Xvnc\x00:101\x00-rfbunixpath\x00/run/x/rfb.sock\x00\x00\x00"))
	if len(args) != 4 || rfbPath(args) != "/run/x/rfb.sock" {
		t.Errorf("%q", args)
	}
	if got := rfbPath([]string{"Xvnc", "-rfbunixpath=/a"}); got != "/a" {
		t.Errorf("got %q", got)
	}
	if got := rfbPath([]string{"Xvnc", "-rfbunixpath"}); got != "" {
		t.Errorf("got %q", got)
	}
	for line, want := range map[string]string{
		"x11vnc -unixsock /run/x/rfb.sock": "/run/x/rfb.sock",
		"x11vnc -unixsock /run/y/rfb.sock": "",
		"Xvfb :1 -auth /run/x/xauth":       "/run/x/xauth",
		"Xvfb :1 -auth /run/y/xauth":       "",
		"Xvfb :1 -auth /run/x/z/xauth":     "",
		"Xvfb :1 -auth":                    "",
	} {
		if got := ofInstance(strings.Fields(line), []string{"/run/x/rfb.sock"}, []string{"/run/x/root"}); got != want {
			t.Errorf("%s: of the instance by %q, want %q", line, got, want)
		}
	}
	for in, want := range map[string]string{
		"--user-data-dir=/p/a":    "/p/a",
		"--user-data-dir=/p/a/":   "/p/a",
		"--user-data-dir=":        "",
		"x--user-data-dir=/p/a":   "",
		"--user-data-dir=/p/a --": "/p/a --",
	} {
		if got := userDataDir([]string{"chromium", in}); got != want {
			t.Errorf("userDataDir(%q) = %q", in, got)
		}
	}
}

// sample is a complete Generation; nothing in it is real.
func sample(dir string) Generation {
	return Generation{
		Instance: "k3j2m4n5p6", Role: RoleChromium, Number: 3, Unit: "abftest-k3j2m4n5p6-chromium-3.scope",
		InvocationID: strings.Repeat("ab", 16), Cgroup: "/abftest-k3j2m4n5p6-chromium-3.scope", CgroupID: 77, BootID: "other-boot",
		Leader:  Member{PID: 4001, StartTime: 12, PGID: 4001, UID: os.Getuid()},
		Browser: &Member{PID: 4002, StartTime: 13, PGID: 4002, UID: os.Getuid()},
		Profile: filepath.Join(dir, "profile"), LockFile: filepath.Join(dir, "profile.lock"), Display: 101,
		Root: filepath.Join(dir, "root"), Sockets: []string{filepath.Join(dir, "cdp.sock")}, Listener: "127.0.0.1:1",
	}
}

func TestPidfileRoundTrip(t *testing.T) {
	g := sample(t.TempDir())
	path := PidfilePath(g)
	if filepath.Base(path) != "chromium.pid" || filepath.Dir(path) != filepath.Dir(g.Root) {
		t.Errorf("pidfile is %s", path)
	}
	if err := WritePidfile(path, g); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	got, err := ReadPidfile(path)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := json.Marshal(g)
	b, _ := json.Marshal(got)
	if string(a) != string(b) || g.contradicts(got) != "" {
		t.Errorf("wrote %s\nread  %s", a, b)
	}
}

func TestPidfilesThatAuthoriseNothing(t *testing.T) {
	dir := t.TempDir()
	g := sample(dir)
	whole, err := json.Marshal(g)
	if err != nil {
		t.Fatal(err)
	}
	path := PidfilePath(g)
	for _, c := range []struct {
		name, content string
		want          Reason
	}{
		{"legacy", "4001\n", PidfileLegacy},
		{"legacy with group", "4001 4001\n", PidfileLegacy},
		{"empty", "", PidfilePartial},
		{"truncated", string(whole[:len(whole)/2]), PidfilePartial},
		{"two records", string(whole) + string(whole), PidfilePartial},
		{"array", "[4001]", PidfilePartial},
		{"null", "null", PidfilePartial},
		{"large", strings.Repeat(" ", maxPidfile+1) + string(whole), PidfilePartial},
	} {
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPidfile(path); ReasonOf(err) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// Every piece of evidence is required.
	var fields map[string]any
	if err := json.Unmarshal(whole, &fields); err != nil {
		t.Fatal(err)
	}
	for name := range fields {
		if slices.Contains([]string{"browser", "display", "sockets", "listener"}, name) {
			continue // not known to every chromium Generation
		}
		part := map[string]any{}
		for k, v := range fields {
			if k != name {
				part[k] = v
			}
		}
		data, _ := json.Marshal(part)
		if _, err := parsePidfile(data); ReasonOf(err) != PidfilePartial {
			t.Errorf("without %s: %v", name, err)
		}
		var g Generation
		json.Unmarshal(data, &g)
		if err := WritePidfile(path, g); ReasonOf(err) != RecordIncomplete {
			t.Errorf("wrote one without %s: %v", name, err)
		}
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPidfile(path); ReasonOf(err) != PidfileUnsafe {
		t.Errorf("open to the group: %v", err)
	}
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPidfile(path); ReasonOf(err) != NoPidfile {
		t.Errorf("missing: %v", err)
	}
	os.Chmod(path+".real", 0o600)
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPidfile(path); ReasonOf(err) != PidfileUnsafe {
		t.Errorf("symbolic link: %v", err)
	}
}

func FuzzPidfile(f *testing.F) {
	whole, _ := json.Marshal(sample("/run/user/1500/abfleet/k3j2m4n5p6"))
	f.Add(whole)
	f.Add([]byte("4001\n"))
	f.Add([]byte(`{"leader":{"pid":1,"pgid":1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		g, err := parsePidfile(data)
		if err != nil {
			if ReasonOf(err) == "" {
				t.Errorf("no reason: %v", err)
			}
			return
		}
		if g.incomplete() != "" || g.Leader.PID < 2 || g.Leader.PGID != g.Leader.PID {
			t.Errorf("accepted %+v", g)
		}
	})
}

func TestRecordsThatContradict(t *testing.T) {
	g := sample("/d")
	for name, change := range map[string]func(*Generation){
		"instance": func(o *Generation) { o.Instance = "other" }, "role": func(o *Generation) { o.Role = RoleDisplay },
		"generation": func(o *Generation) { o.Number++ }, "unit": func(o *Generation) { o.Unit = "x.scope" },
		"invocation id": func(o *Generation) { o.InvocationID = strings.Repeat("cd", 16) },
		"cgroup":        func(o *Generation) { o.CgroupID++ }, "boot id": func(o *Generation) { o.BootID = "x" },
		"leader":  func(o *Generation) { o.Leader.StartTime++ },
		"browser": func(o *Generation) { b := *o.Browser; b.PID++; o.Browser = &b },
		"profile": func(o *Generation) { o.Profile = "/other" }, "display": func(o *Generation) { o.Display++ },
		"root": func(o *Generation) { o.Root = "/other" }, "listener": func(o *Generation) { o.Listener = "127.0.0.1:2" },
	} {
		o := g
		change(&o)
		if got := g.contradicts(o); got != name {
			t.Errorf("a changed %s was told as %q", name, got)
		}
	}
	o := g
	o.Browser, o.Listener = nil, ""
	if got := g.contradicts(o); got != "" {
		t.Errorf("a browser that only one record knows contradicts: %q", got)
	}
}

// Evidence of another boot is refused before anything else is looked at, and
// only a Verifier makes a Live.
func TestOtherBootIsRefused(t *testing.T) {
	var v Verifier
	if _, err := v.Live(t.Context(), sample(t.TempDir())); ReasonOf(err) != BootDiffers || !Ended(err) {
		t.Errorf("got %v", err)
	}
	if err := v.StopUnit(t.Context(), sample(t.TempDir())); ReasonOf(err) != BootDiffers {
		t.Errorf("got %v", err)
	}
	if _, err := v.Live(t.Context(), Generation{}); ReasonOf(err) != RecordIncomplete {
		t.Errorf("got %v", err)
	}
}

func TestAlive(t *testing.T) {
	if !alive(os.Getpid()) || !alive(1) || alive(0) || alive(-1) {
		t.Error("wrong about ourselves, process 1 or no process")
	}
	cmd := exec.Command("/bin/true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if alive(cmd.Process.Pid) {
		t.Error("a zombie is alive")
	}
	cmd.Wait()
	if alive(cmd.Process.Pid) {
		t.Error("a reaped process is alive")
	}
}

// deadPID returns the number of a process that has ended.
func deadPID(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("/bin/true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func hostname(t *testing.T) string {
	t.Helper()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	return host
}

func TestProfileHolder(t *testing.T) {
	profile := filepath.Join(t.TempDir(), "profile")
	lock := profile + ".lock"
	if err := os.Mkdir(profile, 0o700); err != nil {
		t.Fatal(err)
	}
	free := func(when string) {
		t.Helper()
		if pid, what, held := new(Verifier).ProfileHolder(profile, lock); held {
			t.Errorf("%s: held by %d, %s", when, pid, what)
		}
	}
	held := func(when string, want int) {
		t.Helper()
		pid, what, held := new(Verifier).ProfileHolder(profile, lock)
		if !held || pid != want || what == "" {
			t.Errorf("%s: held %v by %d, %q; want %d", when, held, pid, what, want)
		}
	}
	free("no lock file, no SingletonLock")

	f, err := os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	free("lock file that nobody holds")
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	held("flock", os.Getpid())
	f.Close()
	free("flock given back")

	// Whoever holds it while we look must not notice: looking twice works.
	a, err := probeFlock(lock)
	if err != nil || a.held || !a.exists {
		t.Errorf("%+v, %v", a, err)
	}

	singleton := filepath.Join(profile, "SingletonLock")
	point := func(target string) {
		t.Helper()
		os.Remove(singleton)
		if err := os.Symlink(target, singleton); err != nil {
			t.Fatal(err)
		}
	}
	point(fmt.Sprintf("%s-%d", hostname(t), deadPID(t)))
	free("SingletonLock of a dead process")
	point(fmt.Sprintf("%s-%d", hostname(t), os.Getpid()))
	free("SingletonLock whose number a program that is no browser has now")
	point(fmt.Sprintf("other-%s-%d", hostname(t), os.Getpid()))
	free("SingletonLock of the host's earlier name, with a free lock file")
	os.Remove(lock)
	held("SingletonLock of another host, without a lock file", 0)
	point("nonsense")
	held("SingletonLock that cannot be understood", 0)

	// The numbers of what lives when a host is back from a power cut.
	browser := func(uid int, args ...string) int {
		t.Helper()
		cmd := exec.Command(programNamed(t, "chromium"), args...)
		cmd.Env = append(os.Environ(), helperEnv("wait"))
		if uid != os.Geteuid() {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		}
		startHelper(t, cmd)
		return cmd.Process.Pid
	}
	self := os.Geteuid()
	lives := func(pid int) string { return fmt.Sprintf("%s-%d", hostname(t), pid) }
	point(lives(browser(self, "--type=renderer", "--lang=en-US")))
	free("SingletonLock whose number a browser's child has now")
	point(lives(browser(self, "--type=renderer --lang=en-US")))
	free("SingletonLock whose number a browser's child with a title has now")
	point(lives(browser(self, "--user-data-dir="+t.TempDir())))
	free("SingletonLock whose number a browser with another profile has now")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(profile, link); err != nil {
		t.Fatal(err)
	}
	pid := browser(self, "--user-data-dir="+link)
	point(lives(pid))
	held("SingletonLock of a browser that knows the profile by a link", pid)
	pid = browser(self, "https://example.org/?--type=renderer")
	point(lives(pid))
	held("SingletonLock of a browser whose profile cannot be seen", pid)
	if self == 0 {
		const nobody = 65534
		point(lives(browser(nobody, "--user-data-dir="+profile)))
		free("what another user says of our profile")
	}
	os.Remove(singleton)
	os.Remove(singleton)
	if err := os.Symlink("/etc/passwd", lock); err != nil {
		t.Fatal(err)
	}
	held("lock file that is a link", 0)
}

// displayDir points the X paths to a directory of the test.
func displayDir(t *testing.T) {
	t.Helper()
	saved := xTmp
	t.Cleanup(func() { xTmp = saved })
	// A short path: it has to fit a socket address.
	dir, err := os.MkdirTemp("", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	xTmp = dir
	if err := os.Mkdir(filepath.Join(dir, ".X11-unix"), 0o777); err != nil {
		t.Fatal(err)
	}
}

// staleDisplay leaves the files of display n as a killed X server does.
func staleDisplay(t *testing.T, n, pid int) {
	t.Helper()
	if err := os.WriteFile(xLock(n), fmt.Appendf(nil, "%10d\n", pid), 0o444); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", xSocket(n))
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestClearDisplay(t *testing.T) {
	displayDir(t)
	dead := deadPID(t)
	const n = 7
	if err := ClearDisplay(n, dead); err != nil {
		t.Errorf("nothing there: %v", err)
	}
	staleDisplay(t, n, dead)
	if err := displayFree(n, Claim{}); err != nil {
		t.Errorf("files of a dead server: %v", err)
	}
	if err := ClearDisplay(n, dead); err != nil {
		t.Errorf("stale files: %v", err)
	}
	if exists(xLock(n)) || exists(xSocket(n)) || exists(xTempLock(n)) {
		t.Error("files are left")
	}

	refused := func(name string, pid int, want Reason) {
		t.Helper()
		lock, socket, temp := exists(xLock(n)), exists(xSocket(n)), exists(xTempLock(n))
		if err := ClearDisplay(n, pid); ReasonOf(err) != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
		if exists(xLock(n)) != lock || exists(xSocket(n)) != socket || exists(xTempLock(n)) != temp {
			t.Errorf("%s: files were touched", name)
		}
	}
	staleDisplay(t, n, dead)
	refused("our process lives", os.Getpid(), StillAlive)
	refused("no process", 0, RecordIncomplete)
	os.Remove(xLock(n))
	os.WriteFile(xLock(n), fmt.Appendf(nil, "%10d\n", dead+100000), 0o444)
	refused("another process's lock", dead, DisplayLockDiffers)
	os.Remove(xLock(n))
	os.WriteFile(xLock(n), []byte("x"), 0o444)
	refused("a lock that names nobody", dead, DisplayLockDiffers)
	os.Remove(xLock(n))
	os.Symlink("/etc/passwd", xLock(n))
	refused("a lock that is a link", dead, DisplayLockDiffers)
	os.Remove(xLock(n))
	refused("a socket without a lock", dead, DisplayLockDiffers)
	os.Remove(xSocket(n))

	staleDisplay(t, n, dead)
	os.WriteFile(xTempLock(n), nil, 0o644)
	refused("a server that is starting", dead, DisplayBusy)
	os.Remove(xTempLock(n))
	os.Remove(xSocket(n))
	l, err := net.Listen("unix", xSocket(n))
	if err != nil {
		t.Fatal(err)
	}
	refused("somebody answers", dead, DisplayLive)
	l.Close()
	abstract, err := net.Listen("unix", "@"+xSocket(n))
	if err != nil {
		t.Fatal(err)
	}
	refused("somebody answers on the abstract socket", dead, DisplayLive)
	abstract.Close()
}

func TestDisplayFree(t *testing.T) {
	displayDir(t)
	const n = 8
	if err := displayFree(n, Claim{}); err != nil {
		t.Errorf("nothing there: %v", err)
	}
	os.WriteFile(xLock(n), fmt.Appendf(nil, "%10d\n", os.Getpid()), 0o444)
	if err := displayFree(n, Claim{}); ReasonOf(err) != DisplayLive {
		t.Errorf("lock of a live process: %v", err)
	}
	os.Remove(xLock(n))
	os.WriteFile(xLock(n), []byte("x"), 0o444)
	if err := displayFree(n, Claim{}); ReasonOf(err) != DisplayLockDiffers {
		t.Errorf("lock of nobody: %v", err)
	}
	os.Remove(xLock(n))
	l, err := net.Listen("unix", xSocket(n))
	if err != nil {
		t.Fatal(err)
	}
	if err := displayFree(n, Claim{}); ReasonOf(err) != DisplayLive {
		t.Errorf("a server of ours: %v", err)
	}
	l.Close()
}

// A display that another user's X server serves now is not ours, by the
// kernel's word; it must not keep our Profile from being used.
func TestForeignDisplayIsLeftAlone(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it starts a server of another user")
	}
	displayDir(t)
	const n, uid = 9, 65534
	for _, dir := range []string{xTmp, filepath.Dir(xSocket(n))} {
		if err := os.Chmod(dir, 0o1777); err != nil {
			t.Fatal(err)
		}
	}
	cmd := helperCommand("listen", xSocket(n), xLock(n))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	startHelper(t, cmd)
	if err := displayFree(n, Claim{}); err != nil {
		t.Errorf("another user's display: %v", err)
	}
	if err := ClearDisplay(n, deadPID(t)); ReasonOf(err) != DisplayLive {
		t.Errorf("clearing it gave %v", err)
	}
}

func TestNotListening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := notListening(path); err != nil {
		t.Errorf("nothing there: %v", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if err := notListening(path); ReasonOf(err) != ListenerLive || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("listener: %v", err)
	}
	// As a server leaves it that ends before it gives its socket a mode.
	closed := func() {
		t.Helper()
		if err := os.Chmod(path, 0); err != nil {
			t.Fatal(err)
		}
	}
	closed()
	if err := notListening(path); ReasonOf(err) != ListenerLive || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("listener on a closed socket: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	closed()
	if err := notListening(path); err != nil {
		t.Errorf("socket that nobody serves: %v", err)
	}
}

func TestHoldsRoot(t *testing.T) {
	run := t.TempDir()
	ours, theirs := filepath.Join(run, "aaa", "root"), filepath.Join(run, "bbb", "root")
	for _, p := range []string{ours, theirs} {
		os.Mkdir(filepath.Dir(p), 0o700)
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, want rootFD) {
		t.Helper()
		if got, err := holdsRoot(os.Getpid(), ours); err != nil || got != want {
			t.Errorf("%s: %v, %v; want %v", when, got, err, want)
		}
	}
	check("nothing open", rootNone)
	f, err := os.Open(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	check("open", rootHeld)
	g, err := os.Open(theirs)
	if err != nil {
		t.Fatal(err)
	}
	check("another instance's open too", rootOther)
	g.Close()
	// The same path, but another file by now.
	os.Remove(ours)
	if err := os.WriteFile(ours, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check("a file that was replaced", rootNone)
	os.Remove(ours)
	os.Symlink(theirs, ours)
	if got, err := holdsRoot(os.Getpid(), ours); err == nil {
		t.Errorf("a root that is a link: %v", got)
	}
}

func TestRefusalKeepsItsCause(t *testing.T) {
	err := error(refuse(Unreadable, "x: %w", unix.EACCES))
	if !errors.Is(err, unix.EACCES) || ReasonOf(err) != Unreadable || ReasonOf(unix.EACCES) != "" {
		t.Errorf("%v", err)
	}
}
