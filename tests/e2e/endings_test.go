package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/fleet"
	"abfleet/internal/sd"
	"abfleet/tests/rig"
)

// scope is the scope of a session's role that runs, and the leader of it.
func (w *world) scope(session, role string) (name string, pid int) {
	w.t.Helper()
	slice := w.must("session", "show", session).Session.Slice
	out := w.sh(`for u in $(systemctl --user list-units --plain --no-legend '` + strings.TrimSuffix(slice, ".slice") + "-" + role + `-*.scope' | awk '{print $1}'); do
		echo $u $(head -n 1 /sys/fs/cgroup$(systemctl --user show -P ControlGroup $u)/cgroup.procs); done`)
	name, first, ok := strings.Cut(out, " ")
	pid, err := strconv.Atoi(first)
	if !ok || err != nil {
		w.fail(fmt.Errorf("session %s has no one %s scope: %q", session, role, out))
	}
	return name, pid
}

// browserOf is the browser process of a session: the child of its holder.
func (w *world) browserOf(session string) string {
	w.t.Helper()
	_, holder := w.scope(session, "chromium")
	return w.sh(fmt.Sprintf("pgrep -P %d -x chromium", holder))
}

// ended waits for the event that tells of the end of a session's browser, and
// checks what is known of it then without anything having used it.
func (w *world) ended(session string, event audit.Type, actor audit.Kind, says string) api.Session {
	w.t.Helper()
	line := w.journal("ABF_SESSION="+session, "MESSAGE_ID="+sd.MessageID(string(event)))
	if line["ABF_ACTOR"] != string(actor) || !strings.Contains(line["MESSAGE"], says) {
		w.t.Errorf("the end of %s is told by %s as %q, want %s and %q", session, line["ABF_ACTOR"], line["MESSAGE"], actor, says)
	}
	s := w.must("session", "show", session).Session
	if s.State != string(fleet.Stopped) || s.LastExit == nil {
		w.t.Errorf("session %s is %+v", session, s)
		s.LastExit = &api.Exit{}
	}
	if out := w.sh("systemctl --user list-units --plain --no-legend '" + strings.TrimSuffix(s.Slice, ".slice") + "*'"); out != "" {
		w.t.Errorf("of session %s is left: %s", session, out)
	}
	return *s
}

// TestEndings protects who asks what became of a browser: every end is recorded
// when it comes, with who or what brought it, and without anybody's asking. A
// browser that died is still wanted, one that an operator stopped is not, until
// it is used again.
func TestEndings(t *testing.T) {
	w := ready(t, rig.Options{Name: "endings"})
	use := func(session string) {
		t.Helper()
		w.must("session", "use", session, "work")
	}

	use("killed")
	w.sh("kill -KILL " + w.browserOf("killed"))
	if s := w.ended("killed", audit.SessionEnded, audit.KindSystem, "SIGKILL"); s.LastExit.Signal != "SIGKILL" || s.LastExit.Clean || s.Wanted != string(fleet.WantedRunning) {
		t.Errorf("a killed browser: %+v, %+v", s, s.LastExit)
	}

	use("dark")
	_, display := w.scope("dark", "display")
	w.sh(fmt.Sprintf("kill -KILL %d", display))
	if s := w.ended("dark", audit.SessionEnded, audit.KindSystem, "by itself"); s.Wanted != string(fleet.WantedRunning) {
		t.Errorf("a browser without its display: %+v", s)
	}

	// Pages may die; the browser stays.
	use("kept")
	before := w.browserOf("kept")
	w.sh("pkill -KILL -u $(id -u) -f 'type=rendere[r]'")
	w.agent("kept").must("browser_tabs", map[string]any{"action": "new", "url": siteURL + "/form"})
	if after := w.browserOf("kept"); after != before || w.must("session", "show", "kept").Session.LastExit != nil {
		t.Errorf("after the death of its renderers the browser is %s, was %s", after, before)
	}

	stop := func(session, unit string) {
		t.Helper()
		w.sh("systemctl --user stop " + unit)
		if s := w.ended(session, audit.SessionStopped, audit.KindOperator, "operator"); s.LastExit.Trigger != fleet.TriggerOperator || !s.LastExit.Clean || s.Wanted != string(fleet.WantedStopped) {
			t.Errorf("%s, stopped by an operator: %+v, %+v", session, s, s.LastExit)
		}
	}
	use("sliced")
	stop("sliced", w.must("session", "show", "sliced").Session.Slice)
	use("scoped")
	name, _ := w.scope("scoped", "display")
	stop("scoped", name)

	// While the service is down, and until it is asked for something.
	use("alone")
	slice := w.must("session", "show", "alone").Session.Slice
	w.sh("systemctl --user stop abfleetd.service")
	stop("alone", slice+"; systemctl --user start abfleetd.service")
	// What an operator stopped stays so when everything is started again.
	w.sh("systemctl --user restart abfleetd.service")
	for session, state := range map[string]fleet.State{"sliced": fleet.Stopped, "alone": fleet.Stopped, "kept": fleet.Controllable} {
		if s := w.must("session", "show", session).Session; s.State != string(state) {
			t.Errorf("after a restart of the service %s is %s", session, s.State)
		}
	}
	w.agent("alone").must("browser_snapshot", nil)
	if s := w.must("session", "show", "alone").Session; s.Wanted != string(fleet.WantedRunning) || s.State != string(fleet.Controllable) {
		t.Errorf("after its next use: %+v", s)
	}
}

// TestShutdownIsNoWish protects what is wanted from the ends that the host
// brings: a logout and a poweroff close browsers in order, are told as that
// whether the service saw them or not, and what was wanted runs again.
func TestShutdownIsNoWish(t *testing.T) {
	home := t.TempDir()
	w := ready(t, rig.Options{Name: "shutdown", Home: home})
	back := func(when string) {
		t.Helper()
		s := w.must("session", "show", "alpha").Session
		if s.Wanted != string(fleet.WantedRunning) || s.LastExit == nil || s.LastExit.Trigger != fleet.TriggerShutdown || !s.LastExit.Clean {
			t.Errorf("after %s: %+v, %+v", when, s, s.LastExit)
		}
		if s = w.must("session", "use", "alpha", "work").Session; s.State != string(fleet.Controllable) {
			t.Errorf("after %s and a use: %+v", when, s)
		}
	}
	w.must("session", "use", "alpha", "work")
	w.relogin()
	back("a logout")
	// A service that is not there when it happens.
	w.sh("systemctl --user stop abfleetd.service abfleetd-control.socket abfleetd-web.socket")
	w.relogin()
	back("a logout without the service")
	w.check(w.Poweroff(t.Context()))
	w.check(w.Close())
	w = boot(t, rig.Options{Name: "shutdown", Home: home})
	back("a poweroff")
}
