package e2e

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"abfleet/internal/doctor"
	"abfleet/internal/fault"
	"abfleet/tests/rig"
)

// TestFaultMissingPrograms protects people on a host that is not complete: the
// start names what is missing and how to get it, and doctor does too.
func TestFaultMissingPrograms(t *testing.T) {
	for _, missing := range []string{"/usr/lib/chromium/chromium", "/usr/bin/Xvnc"} {
		t.Run(missing[strings.LastIndex(missing, "/")+1:], func(t *testing.T) {
			w := boot(t, rig.Options{Name: "missing", Mask: []string{missing}})
			w.setup()
			w.must("identity", "create", "work")
			w.refused(fault.ProgramMissing, "identity", "login", "work")
			w.doctorFails(missing)
			if i := w.must("identity", "status", "work").Identity; i.Login.State != "stopped" {
				t.Errorf("the login browser is %s", i.Login.State)
			}
		})
	}
}

// doctorFails checks that a failing check of doctor speaks of text and says how
// to mend it.
func (w *world) doctorFails(text string) {
	w.t.Helper()
	answer, err := w.abf("doctor")
	if answer.Doctor == nil {
		w.fail(fmt.Errorf("doctor: %w", err))
	}
	for _, f := range answer.Doctor.Findings {
		if f.Status == string(doctor.StatusFailed) && strings.Contains(f.Text+f.Hint+f.Title, text) && f.Hint != "" {
			return
		}
	}
	w.t.Errorf("doctor does not fail about %s: %+v", text, answer.Doctor.Findings)
}

// TestFaultNoUserNamespaces protects the sandbox: where it cannot work, the
// start is refused.
func TestFaultNoUserNamespaces(t *testing.T) {
	w := boot(t, rig.Options{Name: "nouserns"})
	w.setup()
	w.sh(`mkdir -p ~/.config/systemd/user/abfleetd.service.d
		printf '[Service]\nRestrictNamespaces=yes\n' >~/.config/systemd/user/abfleetd.service.d/test.conf
		systemctl --user daemon-reload; systemctl --user restart abfleetd.service`)
	w.must("identity", "create", "work")
	w.refused(fault.UserNamespacesDenied, "identity", "login", "work")
	if len(w.browserPIDs()) != 0 {
		t.Error("a browser runs without its sandbox")
	}
}

// TestFaultHybridCgroup protects ownership: without unified cgroups nothing
// starts, and setup says so.
func TestFaultHybridCgroup(t *testing.T) {
	w := boot(t, rig.Options{Name: "hybrid", HybridCgroup: true})
	out, err := w.User(t.Context(), "abfleet", "setup", "--bin-dir", rig.BinDir, "--now", "--json").CombinedOutput()
	if err == nil || !strings.Contains(string(out), string(fault.CgroupUnsupported)) {
		t.Errorf("setup on a hybrid tree: %v %s", err, out)
	}
	w.doctorFails("cgroup")
}

// TestFaultFullDisk protects Profiles: a clone that does not fit is undone, and
// works once there is room.
func TestFaultFullDisk(t *testing.T) {
	w := boot(t, rig.Options{Name: "full"})
	state := w.UserHome() + "/.local/state/abfleet"
	w.sh("mkdir -p " + state)
	w.check(w.MountTmpfs(t.Context(), state, "64m"))
	if out, err := w.RootSh(t.Context(), fmt.Sprintf("chown %d:%d %s && chmod 700 %s", w.UID(), w.UID(), state, state)); err != nil {
		w.fail(fmt.Errorf("%w: %s", err, out))
	}
	w.setup()
	w.must("identity", "create", "work")
	w.must("identity", "login", "work", "--url", siteURL+"/form")
	w.must("identity", "save", "work")
	w.sh("dd if=/dev/zero of=" + state + "/filler bs=64k 2>/dev/null || true; truncate -s -128k " + state + "/filler")
	w.refused(fault.NoSpace, "session", "use", "alpha", "work")
	if len(w.browserPIDs()) != 0 {
		t.Error("a browser runs")
	}
	if out := w.sh("find " + state + "/identities -name '*.new' -o -name '*.removing' | head"); out != "" {
		t.Errorf("half a clone is left: %s", out)
	}
	w.sh("rm " + state + "/filler")
	w.must("session", "use", "alpha", "work")
}

// TestFaultCorruptState protects what the fleet knows: a damaged file is kept
// aside, never overwritten, and nothing starts on an empty state.
func TestFaultCorruptState(t *testing.T) {
	w := ready(t, rig.Options{Name: "corrupt"})
	w.sh(`systemctl --user stop abfleetd.service
		cd ~/.local/state/abfleet; cp state.db before
		printf 'damage damage damage damage' | dd of=state.db bs=1 seek=8192 conv=notrunc 2>/dev/null
		dd if=/dev/zero of=state.db bs=4096 seek=3 count=4 conv=notrunc 2>/dev/null`)
	_, err := w.abf("identity", "list")
	if err == nil {
		t.Fatal("the service answers on a damaged state")
	}
	kept := w.sh(`cd ~/.local/state/abfleet; ls | grep corrupt`)
	if kept == "" {
		t.Errorf("the damaged file is not kept: %s", w.sh("ls -la ~/.local/state/abfleet"))
	}
	if out := w.sh("journalctl --user -u abfleetd.service --no-pager | grep -c " + string(fault.StateCorrupt) + " || true; systemctl --user status abfleetd.service --no-pager | head -20 || true"); !strings.Contains(out, "corrupt") && strings.HasPrefix(out, "0") {
		t.Errorf("nobody says why: %s", out)
	}
	w.sh(`systemctl --user stop abfleetd.service abfleetd-control.socket abfleetd-web.socket; systemctl --user reset-failed
		cd ~/.local/state/abfleet; rm -f state.db; cp state.db.copy state.db
		systemctl --user start abfleetd.service`)
	if list := w.must("identity", "list").Identities; len(list) != 1 || list[0].State != "READY" {
		t.Errorf("the verified copy holds %+v", list)
	}
}

// TestFaultPortTaken protects the page's port from being shared.
func TestFaultPortTaken(t *testing.T) {
	w := boot(t, rig.Options{Name: "port"})
	l, err := w.Listen(t.Context(), "tcp", "127.0.0.1:21212")
	w.check(err)
	defer l.Close()
	out, err := w.User(t.Context(), "abfleet", "setup", "--bin-dir", rig.BinDir, "--port", "21212", "--now", "--json").CombinedOutput()
	if err == nil || !strings.Contains(string(out), string(fault.PortTaken)) {
		t.Errorf("setup on a taken port: %v %s", err, out)
	}
}

// TestFaultKill protects against a service that dies at any moment of a start
// or a stop: afterwards no process is left that is not recorded, the Binding
// is there, and the next use works. ABF_ROUNDS sets how often it is tried.
func TestFaultKill(t *testing.T) {
	rounds := 6
	if n, err := strconv.Atoi(os.Getenv("ABF_ROUNDS")); err == nil {
		rounds = n
	}
	w := ready(t, rig.Options{Name: "kill"})
	w.must("session", "use", "alpha", "work")
	for i := range rounds {
		args := []string{"session", "stop", "alpha"}
		if i%2 == 1 {
			args = []string{"session", "use", "alpha", "work"}
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.abf(args...) // it may fail, or be cut off: that is the point
		}()
		delay := time.Duration(i*97%600) * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), delay)
		<-ctx.Done()
		cancel()
		w.sh("systemctl --user kill --signal=KILL abfleetd.service || true")
		<-done
		w.sh("systemctl --user reset-failed 2>/dev/null || true")
		s := w.must("session", "use", "alpha", "work").Session
		if s.State != "controllable" {
			t.Fatalf("round %d, killed after %s of %v: the session is %+v", i, delay, args, s)
		}
		if pids := w.browserPIDs(); len(pids) != 1 {
			t.Fatalf("round %d, killed after %s of %v: browsers %v", i, delay, args, pids)
		}
	}
	w.must("session", "stop", "alpha")
	if out := w.sh(`systemctl --user list-units --plain --no-legend 'abfleet-*.scope'; ls "$XDG_RUNTIME_DIR/abfleet" | grep -vE '^control.sock$' || true`); out != "" {
		t.Errorf("left behind: %s", out)
	}
}
