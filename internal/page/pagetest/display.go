package pagetest

import (
	"fmt"
	"net"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// The display numbers tried, away from those that browsers of the fleet use.
const (
	firstDisplay = 170
	lastDisplay  = 199
)

// Display starts an X server for a headful Chromium and ends it with the test.
// It returns the DISPLAY, and skips the test where there is no Xvfb.
func Display(t testing.TB) string {
	t.Helper()
	program, err := exec.LookPath("Xvfb")
	if err != nil {
		t.Skipf("no X server here: %v", err)
	}
	for n := firstDisplay; n <= lastDisplay; n++ {
		if startDisplay(t, program, n) {
			return fmt.Sprintf(":%d", n)
		}
	}
	t.Fatalf("no X display from %d to %d can be had", firstDisplay, lastDisplay)
	return ""
}

// startDisplay reports whether our own server serves display n.
func startDisplay(t testing.TB, program string, n int) bool {
	cmd := exec.Command(program, fmt.Sprintf(":%d", n), "-screen", "0", "1280x800x24", "-nolisten", "tcp", "-nolisten", "local")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		cmd.Wait()
		close(exited)
	}()
	stop := func() {
		cmd.Process.Signal(syscall.SIGTERM)
		<-exited
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); {
		select {
		case <-exited: // the number is taken
			return false
		case <-tick.C:
		}
		conn, err := net.Dial("unix", fmt.Sprintf("/tmp/.X11-unix/X%d", n))
		if err != nil {
			continue
		}
		conn.Close()
		select {
		case <-exited: // it was another server's socket
			return false
		case <-time.After(100 * time.Millisecond):
		}
		t.Cleanup(stop)
		return true
	}
	stop()
	return false
}
