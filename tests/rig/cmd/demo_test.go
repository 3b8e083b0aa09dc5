package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"abfleet/tests/rig"
)

// demoWait bounds one whole demo.
const demoWait = 3 * time.Minute

// TestDemoOnSystemd protects people who try the product on their own machine:
// the demo uses their user manager, whether they are the user or called sudo,
// and leaves nothing there; root alone is refused.
func TestDemoOnSystemd(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a rig and real browsers; run without -short")
	}
	rig.Require(t)
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "rig"), ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("cp", "-r", "../../../bin", dir).CombinedOutput(); err != nil {
		t.Fatalf("no programs: run make build first: %v: %s", err, out)
	}
	const inside = "/opt/demo"
	r := rig.BootTest(t, rig.Options{Name: "demo", Binds: map[string]string{dir: inside}})
	ctx, cancel := context.WithTimeout(t.Context(), demoWait)
	defer cancel()
	run := "cd " + inside + " && exec ./rig run"
	if _, err := r.RootSh(ctx, run); err == nil || !strings.Contains(err.Error(), "hint: run make run as the user who will use it") {
		t.Errorf("as root: %v", err)
	}
	for name, cmd := range map[string]*exec.Cmd{
		"user": r.User(ctx, "sh", "-c", run),
		"sudo": r.Root(ctx, "sh", "-c", "SUDO_USER="+filepath.Base(r.UserHome())+" && export SUDO_USER && "+run),
	} {
		said, err := untilUp(ctx, r, cmd)
		if err != nil || !strings.Contains(said, "The demo is gone.") {
			t.Fatalf("as %s: %v\n%s", name, err, said)
		}
		if strings.Contains(said, "state stays") || !strings.Contains(said, "all other state") {
			t.Errorf("as %s, it does not say that its state goes:\n%s", name, said)
		}
		out, err := r.Sh(ctx, `systemctl --user list-units --all --plain --no-legend 'abfleetdemo*'
			systemctl --user list-unit-files --plain --no-legend 'abfleetdemo*'
			find "$HOME" "$XDG_RUNTIME_DIR" -path '*/systemd/inaccessible' -prune -o -name '*abfleetdemo*' -print`)
		if err != nil || strings.TrimSpace(out) != "" {
			t.Errorf("as %s, it leaves: %v\n%s", name, err, out)
		}
	}
}

// untilUp runs a demo until it says that Ctrl-C ends it, does that, and returns
// all that it said.
func untilUp(ctx context.Context, r *rig.Rig, cmd *exec.Cmd) (string, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer read.Close()
	cmd.Stdout, cmd.Stderr = write, write
	err = cmd.Start()
	write.Close()
	if err != nil {
		return "", err
	}
	var said strings.Builder
	lines := bufio.NewScanner(io.TeeReader(read, &said))
	for lines.Scan() {
		if strings.Contains(lines.Text(), "Ctrl-C ends the demo.") {
			if out, err := r.RootSh(ctx, "pkill -INT -x rig"); err != nil {
				return said.String(), fmt.Errorf("%w: %s", err, out)
			}
		}
	}
	return said.String(), cmd.Wait()
}
