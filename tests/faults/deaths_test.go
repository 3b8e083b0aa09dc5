package faults

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"abfleet/internal/api"
)

// answerTimeout bounds how long an operation may take whose roles die or hang: a
// start that runs out of its time, and the whole escalation of a stop after it.
const answerTimeout = 2 * time.Minute

// death is how a role goes.
type death struct {
	role, how, phase string
}

func (d death) String() string { return d.phase + "/" + d.role + "/" + d.how }

// deaths are all that there are on a kind of Stack.
func deaths(display string) []death {
	roles := []string{"holder", "browser"}
	switch display {
	case "xvnc":
		roles = append(roles, "display")
	case "xvfb":
		roles = append(roles, "display", "vnc")
	}
	var all []death
	for _, phase := range []string{"running", "starting", "stopping"} {
		for _, role := range roles {
			// The kernel takes all processes of a scope when its memory is out.
			for _, how := range []string{"KILL", "STOP", "whole scope"} {
				all = append(all, death{role, how, phase})
			}
		}
	}
	return all
}

// find returns a role's process of an instance, 0 while there is none.
func (w *world) find(role, instance string) int {
	w.t.Helper()
	for _, p := range w.processes() {
		is := map[string]bool{"holder": p.exe == "abfleet-role", "browser": p.profile != "", "display": p.exe == "Xvnc" || p.exe == "Xvfb", "vnc": p.exe == "x11vnc"}
		if p.instance == instance && is[role] {
			return p.pid
		}
	}
	return 0
}

// strike brings a death about.
func (w *world) strike(d death, pid int) {
	w.t.Helper()
	if d.how != "whole scope" {
		w.kill(d.how, pid)
		return
	}
	// What has ended already cannot be killed.
	_, _ = w.RootSh(w.t.Context(), fmt.Sprintf(`cg=$(sed -n 's/^0:://p' /proc/%d/cgroup) && case $cg in */abfleet-*.scope) echo 1 >/sys/fs/cgroup$cg/cgroup.kill ;; esac`, pid))
}

// roleDies has a role of session m die, and returns what is wrong after it, and
// whether it could be struck.
func (w *world) roleDies(d death) (wrong []string, reached bool) {
	w.t.Helper()
	s := w.use("m", "work")
	instance := w.must("GET", api.SessionPath+"?session="+s.Session, nil).Session.Instance
	stop := func() error { return w.post(api.StopSessionPath, api.SessionRequest{Session: "m"}) }
	use := func() error { return w.post(api.UsePath, api.SessionRequest{Session: "m", Identity: "work"}) }
	done := make(chan error, 1)
	pid := w.find(d.role, instance)
	if pid == 0 {
		w.t.Fatalf("no %s runs", d.role)
	}
	reached = true
	switch d.phase {
	case "running":
		w.strike(d, pid)
		go func() { done <- use() }()
	case "stopping":
		go func() { done <- stop() }()
		w.strike(d, pid)
	case "starting":
		w.check(stop())
		go func() { done <- use() }()
		for pid = 0; pid == 0 && reached; {
			if pid = w.find(d.role, instance); pid != 0 {
				w.strike(d, pid)
				break
			}
			select {
			case err := <-done: // it was faster
				done <- err
				reached = false
			default:
			}
		}
	}
	select {
	case err := <-done:
		if err != nil && died(err) {
			wrong = append(wrong, fmt.Sprintf("half state: the service died: %v", err))
		}
		if d.phase != "starting" && err != nil {
			wrong = append(wrong, fmt.Sprintf("half state: %v", err))
		}
		// A start that failed is not tried again by itself, and this is the
		// next use.
		if err := use(); err != nil {
			wrong = append(wrong, fmt.Sprintf("half state: the next use: %v", err))
		}
		wrong = append(wrong, w.wrong("")...)
		return append(wrong, w.bound("m", "work")...), reached
	case <-time.After(answerTimeout):
		return []string{"half state: no answer"}, reached
	}
}

// TestRoleDeaths protects a session from the deaths of its roles, at each phase:
// it is told in time, nothing is left, and the next use works, with the login.
func TestRoleDeaths(t *testing.T) {
	only := os.Getenv("ABF_DEATH") // as running/holder/KILL
	all := os.Getenv("ABF_FAULTS") == "all"
	displays := []string{"none"}
	if d := os.Getenv("ABF_DISPLAY"); d != "" {
		displays = []string{d}
	} else if all {
		displays = []string{"none", "xvnc", "xvfb"}
	}
	for _, display := range displays {
		t.Run(display, func(t *testing.T) {
			w := boot(t, "deaths-"+display, display)
			for i, d := range deaths(display) {
				if only != "" && d.String() != only || only == "" && !all && i%9 != 0 {
					continue
				}
				begin := time.Now()
				wrong, reached := w.roleDies(d)
				total.add(display+" "+d.phase+" "+d.how, reached, wrong)
				t.Logf("%s: struck %t, %s", d, reached, time.Since(begin).Round(time.Millisecond))
				if len(wrong) > 0 {
					t.Errorf("%s: %s\nagain: ABF_DISPLAY=%s ABF_DEATH='%s' go test ./tests/faults -run TestRoleDeaths\n%s",
						d, strings.Join(wrong, "\n"), display, d, w.journal())
					if !all {
						return
					}
				}
			}
		})
	}
}

// TestSystemd protects a start, a stop and a switch from a systemd and a D-Bus
// that lose things: signals, answers, connections, and themselves.
func TestSystemd(t *testing.T) {
	all := os.Getenv("ABF_FAULTS") == "all"
	w := boot(t, "systemd", "none")
	use := func(identity string) func() error {
		return func() error { return w.post(api.UsePath, api.SessionRequest{Session: "m", Identity: identity}) }
	}
	stop := func() error { return w.post(api.StopSessionPath, api.SessionRequest{Session: "m"}) }
	restartManager := func() error {
		_, err := w.RootSh(w.t.Context(), fmt.Sprintf("systemctl restart user@%d.service", w.UID()))
		return err
	}
	cuts := 0
	cut := func(after bool) func() {
		return func() {
			cuts = 0
			w.bus.arm(plan{n: 1, after: after, act: func() { cuts++; w.bus.cut() }})
		}
	}
	cutAt := func(member string) func() {
		return func() {
			if calls := w.bus.disarm(); cuts != 1 || len(calls) == 0 || calls[0] != member {
				t.Errorf("cut %d times at %v, want once at %s", cuts, calls, member)
			}
		}
	}
	for _, c := range []struct {
		name   string
		before func()
		do     func() error
		// fails says that the operation may fail, and must that it has to; what
		// must hold after it does all the same.
		fails, must, long bool
		after             func()
	}{
		{name: "JobRemoved lost", before: func() { w.bus.lose("JobRemoved") }, do: func() error { return errors.Join(stop(), use("work")(), use("other")()) }, after: func() {
			if w.bus.lose("") == 0 {
				t.Error("no signal was lost")
			}
		}},
		{name: "cut before StartTransientUnit", before: func() { w.check(stop()); cut(false)() }, do: use("work"), fails: true, after: cutAt("StartTransientUnit")},
		{name: "cut after StartTransientUnit", before: func() { w.check(stop()); cut(true)() }, do: use("work"), fails: true, after: cutAt("StartTransientUnit")},
		{name: "cut in a stop", before: cut(false), do: stop, fails: true, after: cutAt("StopUnit")},
		{name: "the next scope's name is taken", before: func() {
			s := w.use("m", "work")
			instance := w.must("GET", api.SessionPath+"?session="+s.Session, nil).Session.Instance
			was := w.sh(fmt.Sprintf("systemctl --user list-units --plain --no-legend 'abfleet-%s-chromium-*' | sed -n 's/.*-chromium-\\([0-9]*\\).*/\\1/p'", instance))
			w.check(stop())
			w.sh(fmt.Sprintf(`unit=abfleet-%s-chromium-$((%s + 1)).scope
				systemd-run --user -q --scope --unit=$unit sleep 20 >/dev/null 2>&1 </dev/null &
				until systemctl --user -q is-active $unit; do sleep 0.05; done`, instance, was))
		}, do: use("work"), must: true},
		{name: "daemon-reexec", long: true, do: func() error { w.sh("systemctl --user daemon-reexec"); return nil }},
		{name: "restart of the user's manager", do: restartManager, after: w.strangers},
		{name: "reloads during 30 starts", long: true, do: func() error {
			w.sh("systemd-run --user -q --unit=reloads sh -c 'while :; do systemctl --user daemon-reload; done'")
			defer w.sh("systemctl --user stop reloads.service")
			for range 30 {
				if err := errors.Join(stop(), use("work")()); err != nil {
					return err
				}
			}
			return nil
		}},
	} {
		if c.long && !all {
			continue
		}
		w.use("m", "work")
		if c.before != nil {
			c.before()
		}
		var wrong []string
		if err := c.do(); err != nil && !c.fails && !c.must || err == nil && c.must {
			wrong = append(wrong, fmt.Sprintf("half state: %v", err))
		}
		if c.after != nil {
			c.after()
		}
		w.bus.disarm()
		if err := use("work")(); err != nil {
			wrong = append(wrong, fmt.Sprintf("half state: the next use: %v", err))
		}
		wrong = append(append(wrong, w.wrong("")...), w.signedIn("m", "work")...)
		total.add("systemd: "+c.name, true, wrong)
		if len(wrong) > 0 {
			t.Errorf("%s: %s\n%s", c.name, strings.Join(wrong, "\n"), w.journal())
		}
	}
}
