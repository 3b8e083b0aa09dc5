package holder

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
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// display makes the stage one of a role without a holder that runs a script.
func (s *stage) display(script string, args ...string) *stage {
	s.spec.Role = "display"
	s.spec.Holder = nil
	s.spec.Args = append([]string{"/bin/sh", "-c", script, "sh"}, args...)
	return s
}

// idleScript shows what only a process itself knows, and then waits until fd 9
// ends.
const idleScript = `
echo out; echo err >&2
umask >"$1/umask.new"; mv "$1/umask.new" "$1/umask"
read x <&9
`

// waitFile waits for a file to appear.
func waitFile(t testing.TB, path string) {
	t.Helper()
	in, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(in), "inotify")
	defer f.Close()
	if _, err := unix.InotifyAddWatch(in, filepath.Dir(path), unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	f.SetReadDeadline(time.Now().Add(testTimeout))
	buf := make([]byte, 4096)
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		if _, err := f.Read(buf); err != nil {
			t.Fatalf("%s does not appear: %v", path, err)
		}
	}
}

func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestDisplayRoleGetsWhatTheSpecSays(t *testing.T) {
	normal(t)
	s := newStage(t)
	fifo, work := s.path("fifo"), s.path("tmp")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	hold, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	s.display("exec 9<"+fifo+idleScript, s.path("run"))
	s.spec.NoFile, s.spec.Dir = 777, work
	s.spec.Env = []string{"A=1", "B=two words", "EMPTY=", "PATH=/usr/bin:/bin"}
	l, err := net.Listen("unix", s.path("stdout"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s.spec.Journal = s.path("stdout")
	cmd, pid := s.untidyService(hold)
	waitFile(t, s.path("run/umask"))

	file := func(name string) string { return read(t, "/proc/"+pid+"/"+name) }
	if got, want := file("environ"), strings.Join(s.spec.Env, "\x00")+"\x00"; got != want {
		t.Errorf("environment is %q, want %q", got, want)
	}
	if got := read(t, s.path("run/umask")); got != "0077\n" {
		t.Errorf("umask is %q", got)
	}
	if got, err := os.Readlink("/proc/" + pid + "/cwd"); got != work {
		t.Errorf("working directory is %s, %v", got, err)
	}
	if m := regexp.MustCompile(`Max open files +(\d+)`).FindStringSubmatch(file("limits")); m == nil || m[1] != "777" {
		t.Errorf("RLIMIT_NOFILE is %v", m)
	}
	for name, want := range map[string]string{"SigBlk": "0", "NoNewPrivs": "0", "Seccomp": "0"} {
		m := regexp.MustCompile(name + `:\s+0*(\w+)`).FindStringSubmatch(file("status"))
		if m == nil || m[1] != want {
			t.Errorf("%s is %v", name, m)
		}
	}
	ignored := regexp.MustCompile(`SigIgn:\s+(\w+)`).FindStringSubmatch(file("status"))
	if ignored == nil || strings.Trim(ignored[1], "0") != "" {
		t.Errorf("ignored signals: %v", ignored)
	}
	stat := strings.Fields(file("stat")[strings.LastIndexByte(file("stat"), ')')+1:])
	if stat[2] != pid || stat[3] != pid {
		t.Errorf("process group %s and session %s of pid %s", stat[2], stat[3], pid)
	}
	fds := descriptors(t, pid)
	for target, fd := range fds {
		switch {
		case (fd == "0" || fd == "10") && target == "/dev/null": // the shell moves its stdin when it reads
		case strings.HasPrefix(target, "socket:") && (fd == "1" || fd == "2"):
		case target == s.spec.RootFile, target == s.spec.LockFile, target == fifo:
		default:
			t.Errorf("descriptor %s is %s", fd, target)
		}
	}
	if fds["/dev/null"] == "" || fds[s.spec.RootFile] == "" || fds[s.spec.LockFile] == "" {
		t.Errorf("the evidence is not held: %v", fds)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	lines := make([]byte, len("abfleet-display\n\n6\n0\n0\n0\n0\nout\nerr\n"))
	conn.SetReadDeadline(time.Now().Add(testTimeout))
	if _, err := io.ReadFull(conn, lines); err != nil || string(lines) != "abfleet-display\n\n6\n0\n0\n0\n0\nout\nerr\n" {
		t.Errorf("the journal got %q, %v", lines, err)
	}

	// The service dies: the role goes on, and holds the lock.
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	other := newStage(t).display("exec cat")
	other.spec.LockFile = s.spec.LockFile
	if err := other.tryStart(); !errors.Is(err, ErrLockHeld) || !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("second holder of the lock: %v", err)
	}
	id, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(id, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	// The end of its input is what ends it.
	hold.Close()
	endOf(t, pidfd)
}

// descriptors lists a process's open files, by what they are.
func descriptors(t testing.TB, pid string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	fds := map[string]string{}
	for _, e := range entries {
		// One that is closed meanwhile is none.
		if target, err := os.Readlink("/proc/" + pid + "/fd/" + e.Name()); err == nil {
			fds[target] = e.Name()
		}
	}
	return fds
}

// untidyService starts the role from a process that has what a service should
// not have: ignored signals, variables of its own, and descriptors that are not
// close-on-exec. It returns that process and the role's pid.
func (s *stage) untidyService(junk *os.File) (*exec.Cmd, string) {
	s.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envHelper+"=spawn", "JUNK=x", "NOTIFY_SOCKET=/x", "LISTEN_FDS=1")
	cmd.ExtraFiles = []*os.File{junk, junk, junk}
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		s.t.Fatal(err)
	}
	if err := json.NewEncoder(in).Encode(s.spec); err != nil {
		s.t.Fatal(err)
	}
	answer, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(answer, "pid ") {
		s.t.Fatalf("answer is %q, %v", answer, err)
	}
	return cmd, strings.TrimSpace(strings.TrimPrefix(answer, "pid "))
}

// TestHolderKeepsNothingOfTheService: a descriptor that leaked into the helper
// stays neither with the holder nor with its program.
func TestHolderKeepsNothingOfTheService(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Args = []string{"/bin/sh", "-c", "exec cat <&3"}
	s.spec.Holder.CloseTimeout = 50 * time.Millisecond
	junk, err := os.CreateTemp(s.dir, "junk")
	if err != nil {
		t.Fatal(err)
	}
	defer junk.Close()
	cmd, pid := s.untidyService(junk)
	id, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	holder, err := unix.PidfdOpen(id, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(holder)
	for target := range descriptors(t, pid) {
		if target == junk.Name() {
			t.Errorf("the holder has %s", target)
		}
	}
	if err := unix.PidfdSendSignal(holder, unix.SIGWINCH, nil, 0); err != nil {
		t.Fatal(err)
	}
	endOf(t, holder)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// endOf waits for the end of a process.
func endOf(t testing.TB, pidfd int) {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(testTimeout/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n != 1 {
			t.Fatalf("the process goes on: %d, %v", n, err)
		}
		return
	}
}

func init() {
	// spawn is a service that starts one role and then waits to be killed.
	helpers["spawn"] = func() int {
		signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGPIPE, unix.SIGUSR1)
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		sp, err := Spawn(ctx, os.Getenv(envRole))
		if err != nil {
			fmt.Println(err)
			return 1
		}
		if os.Getenv("HALF") != "" {
			// Dies with a part of the Spec on the pipe.
			sp.pipe.Write([]byte{0, 0, 1, 0, '{'})
		}
		in := json.NewDecoder(os.Stdin)
		var spec Spec
		if os.Getenv("HALF") == "" && in.Decode(&spec) == nil {
			if err := sp.Release(spec); err != nil {
				fmt.Println(err)
				return 1
			}
			if err := sp.Ready(ctx); err != nil {
				fmt.Println(err)
				return 1
			}
		}
		fmt.Println("pid", sp.PID())
		<-sp.Done()
		return 0
	}
}

// TestServiceDiesBeforeRelease: the trampoline exits and has run nothing.
func TestServiceDiesBeforeRelease(t *testing.T) {
	normal(t)
	for _, half := range []string{"", "1"} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), envHelper+"=spawn", "HALF="+half)
		cmd.Stdin = strings.NewReader("")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		answer, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(answer, "pid ")))
		if err != nil {
			t.Fatalf("answer is %q", answer)
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(pidfd)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		endOf(t, pidfd)
	}
}

func spawn(t *testing.T) *Spawned {
	t.Helper()
	sp, err := Spawn(t.Context(), os.Getenv(envRole))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sp.Abort(); sp.Close() })
	return sp
}

func TestAbort(t *testing.T) {
	normal(t)
	sp := spawn(t)
	if sp.PIDFD() < 0 {
		t.Error("no pidfd")
	}
	sp.Abort()
	state, err := sp.Wait(t.Context())
	if err != nil || state.ExitCode() != 0 {
		t.Errorf("it ended with %v, %v", state, err)
	}
	if sp.Release(newStage(t).display("exec true").spec) == nil {
		t.Error("released after abort")
	}
	if err := sp.Ready(t.Context()); err == nil {
		t.Error("ready after abort")
	}
}

// TestTrampolineKeepsItsNumber: one that dies before its release stays there
// until it is aborted, so that its number in a scope and in a record is nobody
// else's.
func TestTrampolineKeepsItsNumber(t *testing.T) {
	normal(t)
	sp := spawn(t)
	stat := fmt.Sprintf("/proc/%d/stat", sp.PID())
	if err := unix.PidfdSendSignal(sp.PIDFD(), unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	if err := sp.Ready(t.Context()); err == nil {
		t.Error("ready after its death")
	}
	select {
	case <-sp.Done():
		t.Error("its number is free")
	case <-time.After(50 * time.Millisecond):
		if text := read(t, stat); !strings.Contains(text, ") Z ") {
			t.Errorf("it is %s", text)
		}
	}
	sp.Abort()
	if _, err := os.Stat(stat); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is not reaped: %v", err)
	}
}

// TestLockIsTriedForAWhile: whoever looks whether a Profile is in use locks it
// for a moment, which must not end a start.
func TestLockIsTriedForAWhile(t *testing.T) {
	normal(t)
	s := newStage(t).display("exec cat")
	look, err := os.OpenFile(s.spec.LockFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(look.Fd()), unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(lockPatience/2, func() { look.Close() })
	if err := s.tryStart(); err != nil {
		t.Error(err)
	}
}

// TestDamagedSpec: what is not a complete, valid Spec runs nothing.
func TestDamagedSpec(t *testing.T) {
	normal(t)
	for name, c := range map[string]struct {
		data string
		want string // "" for silence
	}{
		"nothing":       {"", ""},
		"half a length": {"\x00\x00", ""},
		"half a spec":   {"\x00\x00\x00\x10{\"Role\"", ""},
		"too long":      {"\x7f\x00\x00\x00", "cannot read spec: its length is 2130706432 bytes"},
		"empty":         {"\x00\x00\x00\x00", "cannot read spec: its length is 0 bytes"},
		"not JSON":      {"\x00\x00\x00\x02{]", "cannot read spec: invalid character"},
		"no role":       {"\x00\x00\x00\x02{}", "cannot read spec: role and instance must be named"},
		"more":          {"\x00\x00\x00\x02{}x", "cannot read spec: something follows it"},
	} {
		t.Run(name, func(t *testing.T) {
			sp := spawn(t)
			if _, err := sp.pipe.WriteString(c.data); err != nil {
				t.Fatal(err)
			}
			sp.pipe.Close()
			err := sp.Ready(t.Context())
			if c.want == "" {
				c.want = "cannot see the role start: it ended before it reported"
			}
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("error is %v, want %s", err, c.want)
			}
			sp.Wait(t.Context())
		})
	}
}

func TestRoleSaysWhyItDoesNotStart(t *testing.T) {
	normal(t)
	for name, c := range map[string]struct {
		spoil func(s *stage) error
		step  Step
		errno error
	}{
		"no directory": {func(s *stage) error { s.spec.Dir = s.path("missing"); return nil }, StepDir, unix.ENOENT},
		"no root file": {func(s *stage) error { return os.Remove(s.spec.RootFile) }, StepRoot, unix.ENOENT},
		"root is a link": {func(s *stage) error {
			return errors.Join(os.Rename(s.spec.RootFile, s.path("x")), os.Symlink(s.path("x"), s.spec.RootFile))
		}, StepRoot, unix.ELOOP},
		"root is a fifo": {func(s *stage) error {
			return errors.Join(os.Remove(s.spec.RootFile), unix.Mkfifo(s.spec.RootFile, 0o600))
		}, StepRoot, nil},
		"root is foreign":      {func(s *stage) error { s.spec.RootFile = "/etc/passwd"; return nil }, StepRoot, nil},
		"lock is a link":       {func(s *stage) error { return os.Symlink(s.path("x"), s.spec.LockFile) }, StepLock, unix.ELOOP},
		"no place for lock":    {func(s *stage) error { s.spec.LockFile = s.path("missing/lock"); return nil }, StepLock, unix.ENOENT},
		"no program":           {func(s *stage) error { s.spec.Args[0] = s.path("missing"); return nil }, "", unix.ENOENT},
		"program not runnable": {func(s *stage) error { s.spec.Args[0] = s.spec.RootFile; return nil }, "", unix.EACCES},
	} {
		for _, role := range []string{"display", "chromium"} {
			t.Run(role+" "+name, func(t *testing.T) {
				s := newStage(t)
				step := c.step
				if role == "display" {
					s.display("exec cat")
					if step == "" {
						step = StepExec
					}
				} else {
					s.spec.Args = []string{"/bin/cat"}
					if step == "" {
						step = StepBrowser
					}
				}
				if err := c.spoil(s); err != nil {
					t.Fatal(err)
				}
				err := s.tryStart()
				var re *RoleError
				if !errors.As(err, &re) || re.Step != step || c.errno != nil && !errors.Is(err, c.errno) {
					t.Errorf("error is %v, want step %s, %v", err, step, c.errno)
				}
				if errors.Is(err, ErrLockHeld) {
					t.Error("the lock is said to be held")
				}
				s.spawned.Wait(t.Context())
				if _, err := os.Lstat(s.path("run/cdp.sock")); err == nil {
					t.Error("a socket is left")
				}
			})
		}
	}
	for name, spoil := range map[string]func(s *stage) error{
		"file in the socket's place": func(s *stage) error { return os.WriteFile(s.path("run/cdp.sock"), nil, 0o600) },
		"link in the socket's place": func(s *stage) error { return os.Symlink("/x", s.path("run/cdp.sock")) },
		"open directory":             func(s *stage) error { return os.Chmod(s.path("run"), 0o750) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			s.spec.Args = []string{"/bin/cat"}
			if err := spoil(s); err != nil {
				t.Fatal(err)
			}
			var re *RoleError
			if err := s.tryStart(); !errors.As(err, &re) || re.Step != StepSocket {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestReleaseChecksTheSpec(t *testing.T) {
	normal(t)
	long := "/" + strings.Repeat("x", maxSocketPath)
	for name, spoil := range map[string]func(s *Spec){
		"no role":            func(s *Spec) { s.Role = "" },
		"no program":         func(s *Spec) { s.Args = nil },
		"relative program":   func(s *Spec) { s.Args = []string{"chromium"} },
		"no root":            func(s *Spec) { s.RootFile = "" },
		"relative lock":      func(s *Spec) { s.LockFile = "x" },
		"bad environment":    func(s *Spec) { s.Env = []string{"=x"} },
		"NUL":                func(s *Spec) { s.Env = []string{"A=\x00"} },
		"long socket":        func(s *Spec) { s.Holder.Socket = long },
		"short key":          func(s *Spec) { s.Holder.Key = "short" },
		"no exit file":       func(s *Spec) { s.Holder.ExitFile = "" },
		"negative timeout":   func(s *Spec) { s.Holder.CloseTimeout = -1 },
		"too much of a spec": func(s *Spec) { s.Args = append(s.Args, strings.Repeat("x", maxSpec)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			s.spec.Args = []string{"/bin/cat"}
			spoil(&s.spec)
			sp := spawn(t)
			if err := sp.Release(s.spec); err == nil {
				t.Error("released")
			}
		})
	}
}

func TestRoleHelperByHand(t *testing.T) {
	normal(t)
	out, err := exec.Command(os.Getenv(envRole), "--help").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "abfleetd") {
		t.Errorf("it says %q, %v", out, err)
	}
}

func TestReadyHasADeadline(t *testing.T) {
	normal(t)
	sp := spawn(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := sp.Ready(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v", err)
	}
	select {
	case <-sp.Done():
		t.Error("the trampoline did not wait")
	default:
	}
}
