package e2e

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/sd"
	"abfleet/tests/rig"
)

// trees lists what the fleet has on the disk of its Identities.
func (w *world) trees() string {
	w.t.Helper()
	return w.sh(`cd ~/.local/state/abfleet/identities && find . -mindepth 1 -maxdepth 3`)
}

// TestUserActions protects what people are promised of the actions that only
// they have: a release keeps the login and waits for the agent, a switch and
// back finds the old browser's login, a rename changes nothing else, a deletion
// leaves nothing.
func TestUserActions(t *testing.T) {
	w := ready(t, rig.Options{Name: "actions"})
	w.must("identity", "create", "other")
	w.must("identity", "login", "other", "--url", siteURL+"/form")
	w.must("identity", "save", "other")
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")

	a.cookie("released")
	w.refused(fault.InvalidArgument, "session", "release", "alpha") // nobody can be asked
	// The release comes while the agent is at work, and waits for it.
	begun, done := a.sent(), make(chan error, 1)
	go func() {
		_, err := a.call("browser_wait_for", map[string]any{"time": 3})
		done <- err
	}()
	w.await("the call", begun)
	if s := w.must("session", "release", "alpha", "--yes").Session; s.State != "stopped" || s.LastExit == nil || !s.LastExit.Clean {
		t.Errorf("released: %+v", s)
	}
	if err := <-done; err != nil {
		t.Errorf("the agent's call was cut off by the release: %v", err)
	}
	w.refused(fault.SessionNotFound, "session", "show", "alpha")
	a.refused("browser_snapshot", nil, string(fault.IdentityNotSelected))
	if pids := w.browserPIDs(); len(pids) > 0 {
		t.Errorf("browsers run: %v", pids)
	}
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	a.hasCookie("released")

	a.cookie("switched")
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "other"})
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	if text := a.must("browser_evaluate", map[string]any{"function": "() => document.cookie"}); strings.Contains(text, "stamp=") {
		t.Errorf("another Identity has the cookies of the first: %s", text)
	}
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	a.hasCookie("switched")

	before := w.browserPIDs()
	a.cookie("restarted")
	w.must("identity", "limit", "work", "--memory-high", "3G", "--tasks-max", "2000")
	w.must("session", "restart", "alpha")
	if after := w.browserPIDs(); len(after) != 1 || after[0] == before[0] {
		t.Errorf("after a restart the browsers are %v, were %v", after, before)
	}
	a.hasCookie("restarted")
	slice := w.must("session", "show", "alpha").Session.Slice
	if limits := w.sh("systemctl --user show -P MemoryHigh -P TasksMax " + slice); limits != "3221225472\n2000" {
		t.Errorf("after a restart the limits of %s are %q", slice, limits)
	}

	// Its cookies reach the disk 30 s after they were set; from then on they
	// outlive a crash. A shorter life says what it may have cost.
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.must("browser_evaluate", map[string]any{"function": `() => { document.cookie = "outlives=yes; max-age=86400; path=/" }`})
	w.sh(`timeout 90 sh -c 'until grep -qa outlives ~/.local/state/abfleet/identities/*/profiles/*/Default/Cookies; do sleep 1; done'`)
	w.sh("kill -KILL " + strconv.Itoa(w.browserPIDs()[0]))
	w.must("session", "use", "alpha", "work")
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.mustContain("browser_evaluate", map[string]any{"function": "() => document.cookie"}, "outlives=yes")
	if s := w.must("session", "show", "alpha").Session; s.LastExit == nil || s.LastExit.Clean || !strings.Contains(s.LastExit.Detail, "SIGKILL") {
		t.Errorf("a crash is told as %+v", s.LastExit)
	}
	if out := w.sh("abfleet session show alpha"); !strings.Contains(out, "may be lost") {
		t.Errorf("nobody is told what a crash may cost:\n%s", out)
	}

	w.refused(fault.DuplicateIdentity, "identity", "rename", "work", "OTHER")
	id := w.must("identity", "rename", "work", "day job").Identity.ID
	a.mustContain("agent_browser_identities", nil, "day job")
	a.hasCookie("restarted")

	w.refused(fault.IdentityInUse, "identity", "delete", "day job", "--yes")
	w.must("session", "release", "alpha", "--yes")
	w.must("identity", "login", "day job")
	w.refused(fault.IdentityInUse, "identity", "delete", "day job", "--yes")
	w.must("identity", "stop", "day job")
	if !strings.Contains(w.trees(), id) {
		t.Errorf("no trees of %s:\n%s", id, w.trees())
	}
	w.must("identity", "delete", "day job", "--yes")
	if left := w.trees(); strings.Contains(left, id) || !strings.Contains(left, "snapshot") {
		t.Errorf("trees after the deletion of %s:\n%s", id, left)
	}
	w.refused(fault.IdentityNotFound, "identity", "status", id)
	a.refused("agent_browser_use_identity", map[string]any{"identity_id": id}, string(fault.IdentityNotFound))
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "other"})
	for _, event := range []audit.Type{audit.BindingReleased, audit.IdentityRenamed, audit.IdentityDeleted} {
		w.journal("MESSAGE_ID=" + sd.MessageID(string(event)))
	}
}

// TestStolenScope protects a session from a program that takes its display away
// from PID 1's records: nothing is ended without proof, everybody is told, and a
// person who sees the evidence gets the session back with its login.
func TestStolenScope(t *testing.T) {
	w := ready(t, rig.Options{Name: "stolen"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.cookie("stolen")
	w.sh(`busctl --user call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit 'ssa(sv)a(sa(sv))' \
		thief.scope fail 1 PIDs au 1 $(pgrep -u "$(id -u)" -x Xvnc) 0`)
	w.refused(fault.BrowserStopUnproven, "session", "stop", "alpha")
	if s := w.must("session", "show", "alpha").Session; s.State != "BROKEN" || s.Problem == nil || s.IdentityName != "work" {
		t.Errorf("the session is %+v", s)
	}
	a.refused("browser_snapshot", nil, string(fault.BrowserNotControllable), "abfleet recover")
	a.refused("agent_browser_use_identity", map[string]any{"identity_id": "work"}, string(fault.BrowserNotControllable))
	w.sh("systemctl --user restart abfleetd.service")
	if out, err := w.Sh(t.Context(), "abfleet recover alpha"); err == nil || !strings.Contains(out, "display: reconstructible") {
		t.Errorf("without a person, recover says %v\n%s", err, out)
	}
	if s := w.must("session", "show", "alpha").Session; s.State != "BROKEN" {
		t.Errorf("after a start of the service the session is %+v", s)
	}
	if out := w.sh("abfleet recover alpha --yes"); !strings.Contains(out, "was released") {
		t.Errorf("recover says\n%s", out)
	}
	if left := w.sh(`pgrep -u "$(id -u)" -x Xvnc || true`); left != "" {
		t.Errorf("displays run: %s", left)
	}
	w.must("session", "use", "alpha", "work")
	a.hasCookie("stolen")
}

// TestOperationsPage protects who reads docs/OPERATIONS.md at night: the commands
// of its story of a session do what it says, for a session with that name.
func TestOperationsPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, story, found := strings.Cut(string(page), "## The story of one session\n")
	story, _, _ = strings.Cut(story, "\n## ")
	w := ready(t, rig.Options{Name: "operations"})
	w.must("identity", "create", "other")
	w.must("identity", "login", "other", "--url", siteURL+"/form")
	w.must("identity", "save", "other")
	if !found {
		t.Fatal("the page has no story")
	}
	w.must("session", "use", "my-session", "work")
	s := w.must("session", "show", "my-session").Session
	unit := w.sh("systemctl --user list-units --plain --no-legend 'abfleet-" + s.Instance + "-chromium-*.scope' | awk '{print $1}'")
	fill := strings.NewReplacer("<instance>", s.Instance, "<id>", w.sh("systemctl --user show -P InvocationID "+unit), "UNIT", unit)
	ran := 0
	for line := range strings.Lines(story) {
		command, isCommand := strings.CutPrefix(line, "    ")
		command, _, _ = strings.Cut(command, " #")
		command = fill.Replace(strings.TrimSpace(command))
		switch {
		case !isCommand, strings.Contains(command, " -f "):
			continue // text, or a command that follows until it is told to stop
		case strings.HasPrefix(command, "systemd-cgtop "):
			command = strings.Replace(command, "cgtop", "cgtop -b -n 1", 1)
		case strings.HasPrefix(command, "abfleet recover"):
			w.must("session", "use", "my-session", "other") // it was released above
			command += " --yes"
		case strings.HasPrefix(command, "abfleet session release"), strings.HasPrefix(command, "abfleet identity delete"):
			command += " --yes"
		case strings.Contains(command, "session_browser.ended"):
			w.sh("kill -KILL " + strconv.Itoa(w.browserPIDs()[0]))
			w.must("session", "use", "my-session", "work")
			w.journal("ABF_SESSION=my-session", "ABF_EVENT=session_browser.ended")
		}
		out := w.sh(command)
		if out == "" || strings.Contains(out, "-- No entries --") {
			t.Errorf("%s says nothing", command)
		}
		t.Logf("%s\n%s", command, out)
		ran++
	}
	if ran < 12 {
		t.Errorf("the page has %d commands", ran)
	}
	for _, event := range []string{"session_browser.started", "session_browser.stopped", "binding.released", "identity.renamed", "identity.deleted"} {
		if line := w.journal("ABF_EVENT="+event, "ABF_ACTOR=operator"); line["ABF_IDENTITY"] == "" {
			t.Errorf("%s: %v", event, line)
		}
	}
}
