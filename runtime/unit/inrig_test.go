package unit

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"abfleet/tests/rig"
)

// helperMode makes the test binary a stand-in for a role: it does what its
// value says until its standard input ends, so it cannot outlive the test.
const helperMode = "ABF_TEST_HELPER"

func TestMain(m *testing.M) {
	if mode := os.Getenv(helperMode); mode != "" {
		os.Exit(helper(mode))
	}
	os.Exit(m.Run())
}

func helper(mode string) int {
	switch mode {
	case "ignore-term":
		signal.Ignore(syscall.SIGTERM)
	case "end-on-winch":
		winch := make(chan os.Signal, 1)
		signal.Notify(winch, syscall.SIGWINCH)
		go func() { <-winch; os.Exit(0) }()
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// TestInRig runs the tests named TestRig* of this very binary against a real
// systemd: all against the manager of the rig's normal user, and those that say
// what a manager is for once more against its PID 1, as root.
func TestInRig(t *testing.T) {
	rig.TestInside(t, rig.Options{Name: "unit"},
		rig.InsideRun{How: "user", Tests: "^TestRig", Least: 15},
		rig.InsideRun{How: "system", Tests: "^TestRig(ScopeIs|StopSlice|TakenName|ScopeGoes)", AsRoot: true, Least: 4})
}

func systemRun() bool { return rig.Inside() == "system" }

// dial returns a Manager for the manager that the run is for.
func dial(t *testing.T) *Manager {
	t.Helper()
	rig.NeedInside(t)
	m, err := Dial(t.Context(), Options{System: systemRun()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// child starts a stand-in for a role in its own session and waits until it
// runs. It is killed and reaped at the end of the test.
func child(t *testing.T, mode string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperMode+"="+mode)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
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
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("helper said %q: %v", line, err)
	}
	return cmd
}
