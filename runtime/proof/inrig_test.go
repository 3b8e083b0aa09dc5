package proof

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/tests/rig"
)

// helperArgs makes the test binary a stand-in for another program: a JSON list
// with a mode and its arguments.
const helperArgs = "ABF_TEST_HELPER"

func TestMain(m *testing.M) {
	if list := os.Getenv(helperArgs); list != "" {
		var args []string
		if err := json.Unmarshal([]byte(list), &args); err != nil {
			panic(err)
		}
		if err := helper(args[0], args[1:]); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// roleSpec is what a stand-in for a trampoline is told when it is released.
type roleSpec struct {
	Root, Lock string
	Args, Env  []string
	Exec       bool // become Args instead of staying as its parent
}

// helper runs one mode. Each says "ready" and stays until its standard input
// ends, so that nothing outlives a test that dies.
func helper(mode string, args []string) error {
	stdin := bufio.NewReader(os.Stdin)
	switch mode {
	case "listen": // socket, X lock file
		if _, err := net.Listen("unix", args[0]); err != nil {
			return err
		}
		if err := os.WriteFile(args[1], fmt.Appendf(nil, "%10d\n", os.Getpid()), 0o444); err != nil {
			return err
		}
	case "open": // files to keep open
		for _, name := range args {
			if _, err := unix.Open(name, unix.O_RDONLY, 0); err != nil {
				return err
			}
		}
	case "lock": // file to flock
		if err := flock(args[0]); err != nil {
			return err
		}
	case "signals": // file that gets a line with each signal
		all := make(chan os.Signal, 8)
		signal.Notify(all)
		signal.Reset(syscall.SIGURG) // the Go runtime sends it to itself
		go func() {
			for sig := range all {
				if err := os.WriteFile(args[0], []byte(sig.String()+"\n"), 0o600); err != nil {
					panic(err)
				}
			}
		}()
	case "ignore-term":
		signal.Ignore(syscall.SIGTERM)
	case "wait":
	case "browser", "orphan": // profile: a stand-in for Chromium
		host, _ := os.Hostname()
		lock := filepath.Join(args[0], "SingletonLock")
		os.Remove(lock)
		if err := os.Symlink(fmt.Sprintf("%s-%d", host, os.Getpid()), lock); err != nil {
			return err
		}
	case "role":
		line, err := stdin.ReadBytes('\n')
		if err != nil {
			return nil // not released: the trampoline goes
		}
		var spec roleSpec
		if err := json.Unmarshal(line, &spec); err != nil {
			return err
		}
		return becomeRole(spec, stdin)
	}
	fmt.Println("ready")
	if mode == "orphan" {
		// Its standard input ends with its parent, which it is to outlive.
		<-time.After(testTimeout)
		return nil
	}
	_, err := io.Copy(io.Discard, stdin)
	return err
}

func flock(name string) error {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT, 0o600)
	if err != nil {
		return err
	}
	return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
}

func becomeRole(spec roleSpec, stdin io.Reader) error {
	// Inherited by whatever the role becomes.
	root, err := unix.Open(spec.Root, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	if spec.Lock != "" {
		if err := flock(spec.Lock); err != nil {
			return err
		}
	}
	if spec.Exec {
		return syscall.Exec(spec.Args[0], spec.Args, spec.Env)
	}
	cmd := exec.Command(spec.Args[0], spec.Args[1:]...)
	cmd.Env = spec.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	// As in the real holder the root file is descriptor 5.
	cmd.ExtraFiles = []*os.File{null, null, os.NewFile(uintptr(root), spec.Root)}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	cmd.Stdout = os.Stdout
	if err := cmd.Start(); err != nil {
		return err
	}
	go cmd.Wait() // a browser that ended must not stay a zombie
	fmt.Println("started", cmd.Process.Pid)
	io.Copy(io.Discard, stdin)
	in.Close()
	return nil
}

// TestInRig runs the tests named TestRig* of this very binary against a real
// systemd, as the normal user of a rig.
func TestInRig(t *testing.T) {
	rig.TestInside(t, rig.Options{Name: "proof-rig"}, rig.InsideRun{How: "user", Tests: "^TestRig", Least: 10},
		rig.InsideRun{How: "root", Tests: "^TestRoot", Least: 1, AsRoot: true})
}

// program makes a copy of the test binary under another name, because programs
// are told by the name of their file.
var copies struct {
	sync.Mutex
	dir string
}

func programNamed(t *testing.T, name string) string {
	t.Helper()
	copies.Lock()
	defer copies.Unlock()
	if copies.dir == "" {
		dir, err := os.MkdirTemp("", "programs")
		if err == nil {
			err = os.Chmod(dir, 0o755) // for helpers of other users, too
		}
		if err != nil {
			t.Fatal(err)
		}
		copies.dir = dir
	}
	path := filepath.Join(copies.dir, name)
	if exists(path) {
		return path
	}
	data, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func helperEnv(args ...string) string {
	list, err := json.Marshal(args)
	if err != nil {
		panic(err)
	}
	return helperArgs + "=" + string(list)
}

func helperCommand(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv(args...))
	return cmd
}

// startHelper starts a helper, waits until it is ready, and ends it with the
// test.
func startHelper(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("helper said %q, %v", line, err)
	}
}
