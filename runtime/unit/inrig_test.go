package unit

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"abfleet/tests/rig"
)

// inRig marks the run of this test binary inside the rig. Its value says which
// manager the tests are for: "user" or "system".
const inRig = "ABF_IN_RIG"

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
	if os.Getenv(inRig) != "" {
		t.Skip("this is the run inside the rig")
	}
	rig.Require(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const inside = "/opt/abfleet/test"
	r := rig.BootTest(t, rig.Options{Name: "unit", Binds: map[string]string{filepath.Dir(self): inside}})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	program := filepath.Join(inside, filepath.Base(self))
	for _, run := range []struct {
		manager, tests string
		command        func(context.Context, string, ...string) *exec.Cmd
		least          int
	}{
		{"user", "^TestRig", r.User, 15},
		{"system", "^TestRig(ScopeIs|StopSlice|TakenName|ScopeGoes)", r.Root, 4},
	} {
		t.Run(run.manager, func(t *testing.T) {
			cmd := run.command(ctx, program, "-test.run="+run.tests, "-test.v", "-test.timeout=4m")
			cmd.Env = append(cmd.Env, inRig+"="+run.manager)
			out, err := cmd.CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				journal, _ := r.Journal(context.WithoutCancel(ctx), "-b", "--no-pager", "-n", "30")
				t.Fatalf("inside the rig: %v\n%s", err, journal)
			}
			if n := strings.Count(string(out), "--- PASS: TestRig"); n < run.least {
				t.Errorf("only %d tests ran inside the rig", n)
			}
		})
	}
}

// needRig skips a test outside the rig, where TestInRig runs it.
func needRig(t *testing.T) {
	t.Helper()
	if os.Getenv(inRig) == "" {
		t.Skip("runs inside the rig, started by TestInRig")
	}
}

func systemRun() bool { return os.Getenv(inRig) == "system" }

// dial returns a Manager for the manager that the run is for.
func dial(t *testing.T) *Manager {
	t.Helper()
	needRig(t)
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
