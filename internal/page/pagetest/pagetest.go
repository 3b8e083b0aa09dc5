// Package pagetest starts a real, sandboxed, headless Chromium for the tests of
// the page engine and of the tools above it. It is imported by tests only.
package pagetest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Program is the Chromium that tests run: the browser itself, not the wrapper.
const Program = "/usr/lib/chromium/chromium"

// uid is the throwaway user that Chromium runs as when the test is root, whose
// Chromium would refuse its sandbox. It needs no entry in the user database.
const uid = 61234

// startTimeout bounds the start of Chromium on a loaded machine.
const startTimeout = 60 * time.Second

// Browser is one running Chromium.
type Browser struct {
	cmd    *exec.Cmd
	dir    string
	pipe   net.Conn
	stderr *limited
	exited chan struct{}
	once   sync.Once
}

// Options vary Start.
type Options struct {
	// Flags are added to the command line.
	Flags []string
	// Env is added to the environment, such as "DISPLAY=:7".
	Env []string
	// Headful leaves out --headless=new.
	Headful bool
	// Port also opens the classic debugging port: see Browser.WebSocketURL.
	Port bool
}

// Start starts Chromium with its debugging pipe on a socketpair and a fresh
// profile, and ends it with the test. It skips the test where there is no
// Chromium.
func Start(t testing.TB, o Options) *Browser {
	t.Helper()
	b, err := Launch(o)
	if os.IsNotExist(err) {
		t.Skipf("no Chromium here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Stop()
		if t.Failed() {
			t.Logf("Chromium said:\n%s", b.stderr.String())
		}
	})
	return b
}

// Launch is Start for callers that have no test yet, such as TestMain; they must
// Stop the Browser themselves. Without a Chromium the error satisfies
// os.IsNotExist.
func Launch(o Options) (*Browser, error) {
	if _, err := os.Stat(Program); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("/tmp", "abfpt")
	if err != nil {
		return nil, err
	}
	b := &Browser{dir: dir, stderr: &limited{}, exited: make(chan struct{})}
	if err := b.start(o); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	return b, nil
}

func (b *Browser) start(o Options) error {
	args := []string{
		"--user-data-dir=" + filepath.Join(b.dir, "p"), "--remote-debugging-pipe",
		"--no-first-run", "--no-default-browser-check", "--password-store=basic",
		"--disable-blink-features=AutomationControlled", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--window-size=1280,800",
		"--disable-features=MediaRouter,OptimizationHints,Translate",
		"--allow-pre-commit-input", // as in runtime/role
	}
	if !o.Headful {
		args = append(args, "--headless=new", "--disable-gpu")
	}
	if o.Port {
		args = append(args, "--remote-debugging-port=0")
	}
	args = append(append(args, o.Flags...), "about:blank")
	for _, d := range []string{"", "p", "h", "t"} {
		d = filepath.Join(b.dir, d)
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
		if os.Geteuid() == 0 {
			if err := os.Chown(d, uid, uid); err != nil {
				return err
			}
		}
	}
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "cdp"), os.NewFile(uintptr(fds[1]), "cdp")
	defer theirs.Close()
	b.pipe, err = net.FileConn(ours)
	ours.Close()
	if err != nil {
		return err
	}
	b.cmd = exec.Command(Program, args...)
	b.cmd.Dir = b.dir
	b.cmd.ExtraFiles = []*os.File{theirs, theirs}
	b.cmd.Stderr = b.stderr
	b.cmd.Env = append([]string{
		"HOME=" + filepath.Join(b.dir, "h"), "TMPDIR=" + filepath.Join(b.dir, "t"), "PATH=/usr/bin:/bin",
		"LANG=C.UTF-8", "DBUS_SESSION_BUS_ADDRESS=disabled:", "DBUS_SYSTEM_BUS_ADDRESS=disabled:",
	}, o.Env...)
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		b.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := b.cmd.Start(); err != nil {
		b.pipe.Close()
		return fmt.Errorf("start Chromium: %w", err)
	}
	go func() {
		b.cmd.Wait()
		close(b.exited)
	}()
	return nil
}

// Pipe is the debugging pipe: NUL-delimited CDP for one client.
func (b *Browser) Pipe() net.Conn { return b.pipe }

// PID is the browser process.
func (b *Browser) PID() int { return b.cmd.Process.Pid }

// WebSocketURL is the browser's websocket debugger URL; Start needs
// Options.Port for it.
func (b *Browser) WebSocketURL(t testing.TB) string {
	t.Helper()
	file := filepath.Join(b.dir, "p", "DevToolsActivePort")
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); <-tick.C {
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		port, path, ok := strings.Cut(strings.TrimSpace(string(data)), "\n")
		if _, err := strconv.Atoi(port); ok && err == nil {
			return "ws://127.0.0.1:" + port + path
		}
	}
	t.Fatalf("Chromium wrote no port within %v", startTimeout)
	return ""
}

// Stop ends Chromium by closing its pipe, by force when that takes too long,
// and removes what it wrote. Calling it again does nothing.
func (b *Browser) Stop() {
	b.once.Do(func() {
		b.pipe.Close()
		select {
		case <-b.exited:
		case <-time.After(5 * time.Second):
		}
		syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
		<-b.exited
		os.RemoveAll(b.dir)
	})
}

// limited keeps the first 64 KiB written to it.
type limited struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if room := 64<<10 - l.buf.Len(); room > 0 {
		l.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (l *limited) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}
