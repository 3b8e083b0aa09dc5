package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"abfleet/internal/doctor"
	"abfleet/internal/fault"
	"abfleet/tests/rig"
)

// useRefused is refused for what an agent calls when it wants a browser.
func (c *client) useRefused(wants ...string) {
	c.w.t.Helper()
	c.refused("agent_browser_use_identity", map[string]any{"identity_id": "work"}, wants...)
}

// TestFaultMissingPrograms protects people on a host that is not complete: the
// start names what is missing and how to get it, to a person and to an agent,
// and doctor does too.
func TestFaultMissingPrograms(t *testing.T) {
	w := ready(t, rig.Options{Name: "missing"})
	a, b := w.agent("alpha"), w.agent("beta")
	b.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	w.must("session", "stop", "beta")
	for _, missing := range []string{"/usr/lib/chromium/chromium", "/usr/bin/Xvnc"} {
		w.rootSh("mv " + missing + " " + missing + ".away")
		w.refused(fault.ProgramMissing, "identity", "login", "work")
		w.doctorFails(missing)
		// To an agent without a browser, and to one that had one.
		a.useRefused(string(fault.ProgramMissing), missing)
		b.refused("browser_snapshot", nil, string(fault.ProgramMissing), missing)
		if i := w.must("identity", "status", "work").Identity; i.Login.State != "stopped" {
			t.Errorf("the login browser is %s", i.Login.State)
		}
		w.rootSh("mv " + missing + ".away " + missing)
	}
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	b.must("browser_snapshot", nil)
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
	w := ready(t, rig.Options{Name: "nouserns"})
	a := w.agent("alpha")
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	w.must("session", "stop", "alpha")
	w.sh(`mkdir -p ~/.config/systemd/user/abfleetd.service.d
		printf '[Service]\nRestrictNamespaces=yes\n' >~/.config/systemd/user/abfleetd.service.d/test.conf
		systemctl --user daemon-reload; systemctl --user restart abfleetd.service`)
	w.refused(fault.UserNamespacesDenied, "identity", "login", "work")
	a.useRefused(string(fault.UserNamespacesDenied))
	w.agent("beta").useRefused(string(fault.UserNamespacesDenied))
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
	w.setup()
	w.must("identity", "create", "work")
	w.must("identity", "login", "work", "--url", siteURL+"/form")
	w.must("identity", "save", "work")
	w.sh("dd if=/dev/zero of=" + state + "/filler bs=64k 2>/dev/null || true; truncate -s -128k " + state + "/filler")
	a := w.agent("alpha")
	w.refused(fault.NoSpace, "session", "use", "alpha", "work")
	a.useRefused(string(fault.NoSpace))
	if len(w.browserPIDs()) != 0 {
		t.Error("a browser runs")
	}
	if out := w.sh("find " + state + "/identities -name '*.new' -o -name '*.removing' | head"); out != "" {
		t.Errorf("half a clone is left: %s", out)
	}
	w.sh("rm " + state + "/filler")
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	a.must("browser_snapshot", nil)
}

// TestFaultCorruptState protects what the fleet knows: a damaged file is kept
// aside as it is, nothing starts on an empty state, everybody who asks is told
// why, and the way out that the person is told works as it is told.
func TestFaultCorruptState(t *testing.T) {
	w := ready(t, rig.Options{Name: "corrupt"})
	b := w.bridge("alpha")
	b.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	w.must("session", "stop", "alpha")
	w.sh(`systemctl --user stop abfleetd.service
		cd ~/.local/state/abfleet
		printf 'damage damage damage damage' | dd of=state.db bs=1 seek=8192 conv=notrunc 2>/dev/null
		dd if=/dev/zero of=state.db bs=4096 seek=3 count=4 conv=notrunc 2>/dev/null
		cp state.db ~/damaged`)
	kept := func() string {
		return w.sh(`cd ~/.local/state/abfleet && test ! -e state.db && cmp ~/damaged state.db.corrupt-* && echo state.db.corrupt-*`)
	}
	_, err := w.abf("identity", "list")
	if err == nil || !strings.Contains(err.Error(), string(fault.StateCorrupt)) || !strings.Contains(err.Error(), kept()) {
		t.Errorf("a damaged state: %v, want %s and %s", err, fault.StateCorrupt, kept())
	}
	b.refused("browser_snapshot", nil, "no effect", "abfleet doctor")
	kept()

	// What the person is told to do, as it stands there; the next command
	// starts the service.
	restore := regexp.MustCompile(`: (abfleet store restore .*)$`).FindStringSubmatch(fault.HintOf(err))
	if restore == nil {
		t.Fatalf("no way out in: %v\nhint: %s", err, fault.HintOf(err))
	}
	// A damaged state is told as that, and refused while a socket could start
	// the service on it; the refusal says what to stop.
	out := w.sh("until test $(systemctl --user is-active abfleetd.service) = failed; do sleep 0.05; done\n" +
		"if abfleet store check 2>&1; then echo sound; fi\nif " + restore[1] + " --yes 2>&1; then echo restored; fi")
	stop := regexp.MustCompile(`(?m)(systemctl --user stop .*)$`).FindStringSubmatch(out)
	if stop == nil || strings.Contains(out, "\nsound") || strings.Contains(out, "\nrestored") || strings.Count(out, string(fault.StateCorrupt)) != 1 || !strings.Contains(out, string(fault.StateInUse)) {
		t.Fatalf("check and restore beside a socket: %s", out)
	}
	out = w.sh(stop[1] + "\n" + restore[1] + " --yes")
	start := regexp.MustCompile(`(?m)(systemctl --user start .*)$`).FindStringSubmatch(out)
	if start == nil {
		t.Fatalf("no way on in: %s", out)
	}
	w.sh(start[1])
	if list := w.must("identity", "list").Identities; len(list) != 1 || list[0].State != "READY" {
		t.Errorf("the verified copy holds %+v", list)
	}
	b.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	b.must("browser_snapshot", nil)
	// With the service at work, on its own state.
	if out := w.sh("abfleet store check && abfleet store backup ~/mine.db && stat -c %a ~/mine.db && abfleet store check ~/mine.db"); strings.Count(out, "Bindings 1,") != 4 || !strings.Contains(out, "\n600\n") {
		t.Errorf("check and backup beside the service: %s", out)
	}
}

// TestRestoreOlder protects a browser from a state that is older than it: it is
// neither ended nor given away nor joined by a second one on its Profile, and a
// session that the state does not know works again once it chose an Identity.
func TestRestoreOlder(t *testing.T) {
	w := ready(t, rig.Options{Name: "older"})
	w.must("session", "use", "alpha", "work")
	w.sh("abfleet store backup ~/mine.db")
	w.must("session", "restart", "alpha")
	w.must("session", "use", "beta", "work")
	running := w.browserPIDs()
	out := w.sh(`systemctl --user stop abfleetd-control.socket abfleetd-web.socket abfleetd.service
		abfleet store restore ~/mine.db --yes
		systemctl --user start abfleetd-control.socket abfleetd-web.socket`)
	if strings.Count(out, "no record names") != 1 {
		t.Errorf("one Profile has no record any more: %s", out)
	}
	if s, err := w.abf("session", "use", "alpha", "work"); err == nil {
		t.Errorf("a browser of another generation was given to its session: %+v", s.Session)
	}
	w.refused(fault.SessionNotFound, "session", "show", "beta")
	if s := w.must("session", "use", "beta", "work").Session; s.State != "controllable" {
		t.Errorf("beta: %+v", s)
	}
	after := w.browserPIDs()
	for _, pid := range running {
		if !slices.Contains(after, pid) {
			t.Errorf("browser %d was ended", pid)
		}
	}
	if len(after) != len(running)+1 {
		t.Errorf("browsers %v, before %v", after, running)
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
	w := ready(t, rig.Options{Name: "kill"})
	use, stop := []string{"session", "use", "alpha", "work"}, []string{"session", "stop", "alpha"}
	// The moments, by what is seen of the browser on disk.
	moments := []struct {
		args []string
		file string // of the browser
		gone bool
	}{
		{use, "root", false}, {stop, "cdp.sock", true}, {use, "display.pid", false},
		{stop, "exit.json", false}, {use, "chromium.pid", false}, {use, "cdp.sock", false},
	}
	rounds := len(moments)
	if n, err := strconv.Atoi(os.Getenv("ABF_ROUNDS")); err == nil {
		rounds = n
	}
	w.must(use...)
	cutOff := 0
	for i := range rounds {
		m := moments[i%len(moments)]
		if m.args[1] == "use" {
			w.must(stop...)
		}
		before := w.servicePID()
		done := make(chan error, 1)
		go func() {
			_, err := w.abf(m.args...)
			done <- err
		}()
		found := func() bool {
			dir := w.RuntimeDir() + "/abfleet"
			if m.file == "exit.json" {
				dir = w.UserHome() + "/.local/state/abfleet/tmp"
			}
			paths, err := filepath.Glob(w.Path(dir) + "/??????????/" + m.file)
			w.check(err)
			return len(paths) > 0 != m.gone
		}
		for !found() && len(done) == 0 {
			runtime.Gosched()
		}
		w.sh("kill -KILL " + before)
		if err := <-done; err != nil {
			t.Logf("round %d, %s of %v: %v", i, m.file, m.args, err)
			cutOff++
		}
		s := w.must(use...).Session
		if s.State != "controllable" {
			t.Fatalf("round %d, killed at %s of %v: the session is %+v", i, m.file, m.args, s)
		}
		if pids := w.browserPIDs(); len(pids) != 1 {
			t.Fatalf("round %d, killed at %s of %v: browsers %v", i, m.file, m.args, pids)
		}
		if after := w.servicePID(); after == "0" || after == before {
			t.Fatalf("round %d: the service was process %s and is %s", i, before, after)
		}
	}
	// A round may come too late, when the machine is busy. Most must not.
	if cutOff*2 < rounds {
		t.Errorf("only %d of %d commands were cut off", cutOff, rounds)
	}
	w.must(stop...)
	if out := w.sh(`systemctl --user list-units --plain --no-legend 'abfleet-*.scope'; ls "$XDG_RUNTIME_DIR/abfleet" | grep -vE '^control.sock$' || true`); out != "" {
		t.Errorf("left behind: %s", out)
	}
}
