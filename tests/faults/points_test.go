package faults

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/fault"
)

// operation is what the service dies in.
type operation struct {
	name string
	// prepare makes the situation, whatever the last run left.
	prepare func(w *world)
	do      func(w *world) error
	// outcome says what is wrong with what the operation left, beyond what holds
	// for everything.
	outcome func(w *world) []string
	// session is the one that it is about, "" for none.
	session string
	// login is a session and an Identity whose browser has to be logged in after
	// everything.
	login [2]string
	// displayed says that the operation is about the display.
	displayed bool
}

func (w *world) post(path string, body any) error {
	_, err := w.ask("POST", path, body)
	return err
}

// bound checks that a session has one of the Identities, "" for none.
func (w *world) bound(session string, names ...string) []string {
	w.t.Helper()
	has := ""
	if s := w.session(session); s != nil {
		has = s.IdentityName
	}
	for _, name := range names {
		if has == name {
			return nil
		}
	}
	return []string{fmt.Sprintf("lost: session %s is bound to %q, not to one of %q", session, has, names)}
}

// ready checks that an Identity is there and saved.
func (w *world) ready(name string) []string {
	w.t.Helper()
	if i := w.identity(name); i == nil || i.State != "READY" {
		return []string{fmt.Sprintf("lost: Identity %s is %+v", name, i)}
	}
	return nil
}

var operations = []operation{
	{
		name: "start",
		prepare: func(w *world) {
			w.use("s", "work")
			w.must("POST", api.StopSessionPath, api.SessionRequest{Session: "s"})
		},
		do:      func(w *world) error { return w.post(api.UsePath, api.SessionRequest{Session: "s", Identity: "work"}) },
		outcome: func(w *world) []string { return w.bound("s", "work") },
		session: "s", login: [2]string{"s", "work"},
	},
	{
		name:    "switch",
		prepare: func(w *world) { w.use("s", "work") },
		do:      func(w *world) error { return w.post(api.UsePath, api.SessionRequest{Session: "s", Identity: "other"}) },
		outcome: func(w *world) []string { return w.bound("s", "work", "other") },
		session: "s", login: [2]string{"s", "other"},
	},
	{
		name:    "save",
		prepare: func(w *world) { w.login("other") },
		do:      func(w *world) error { return w.post(api.SavePath, api.IdentityRequest{Identity: "other"}) },
		outcome: func(w *world) []string { return w.ready("other") },
		login:   [2]string{"s", "other"},
	},
	{
		name:    "release",
		prepare: func(w *world) { w.use("r", "work") },
		do:      func(w *world) error { return w.post(api.ReleasePath, api.SessionRequest{Session: "r"}) },
		outcome: func(w *world) []string { return w.bound("r", "work", "") },
		session: "r", login: [2]string{"r", "work"},
	},
	{
		name: "delete",
		prepare: func(w *world) {
			if w.identity("doomed") == nil {
				w.login("doomed")
				w.must("POST", api.SavePath, api.IdentityRequest{Identity: "doomed"})
				w.use("d", "doomed")
				w.must("POST", api.ReleasePath, api.SessionRequest{Session: "d"})
			}
		},
		do: func(w *world) error { return w.post(api.DeletePath, api.IdentityRequest{Identity: "doomed"}) },
		outcome: func(w *world) []string {
			if w.identity("doomed") == nil {
				return nil
			}
			return w.ready("doomed")
		},
	},
	{
		name:      "recover",
		displayed: true,
		prepare: func(w *world) {
			s := w.use("v", "work")
			if s.State == "controllable" {
				w.steal("v")
			}
			if err := w.post(api.StopSessionPath, api.SessionRequest{Session: "v"}); !fault.Is(err, fault.BrowserStopUnproven) {
				w.t.Fatalf("a stop after the scope was stolen: %v", err)
			}
		},
		do:      func(w *world) error { return w.post(api.ReleasePath, api.SessionRequest{Session: "v"}) },
		outcome: func(w *world) []string { return w.bound("v", "work", "") },
		session: "v", login: [2]string{"v", "work"},
	},
}

var thieves = 0

// steal has another program put a session's display into a scope of its own, so
// that PID 1's records prove it no more.
func (w *world) steal(session string) {
	w.t.Helper()
	instance := w.must("GET", api.SessionPath+"?session="+session, nil).Session.Instance
	for _, p := range w.processes() {
		if p.instance == instance && p.exe == "Xvnc" {
			thieves++
			w.sh(fmt.Sprintf(`busctl --user call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit 'ssa(sv)a(sa(sv))' \
				thief%d.scope fail 1 PIDs au 1 %d 0`, thieves, p.pid))
		}
	}
}

// point is one fault of an operation.
type point struct {
	op    operation
	kind  string // "write", "call" or "moment"
	n     int    // which one; a seed for a moment
	after bool
	what  string // for the reader
}

func (p point) String() string {
	when := "before"
	if p.after {
		when = "after"
	}
	return fmt.Sprintf("%s/%s/%d/%s", p.op.name, p.kind, p.n, when)
}

// points lists every write and every call of an operation, from a run without a
// fault, and how long that took.
func (w *world) points(op operation) ([]point, time.Duration) {
	w.t.Helper()
	op.prepare(w)
	w.sh("cd ~/" + faultDir + " && rm -f writes && echo count >arm")
	w.bus.arm(plan{})
	begin := time.Now()
	if err := op.do(w); err != nil {
		w.t.Fatalf("%s without a fault: %v\n%s", op.name, err, w.journal())
	}
	took := time.Since(begin)
	calls := w.bus.disarm()
	writes, err := strconv.Atoi(w.sh("cd ~/" + faultDir + " && rm -f arm && cat writes | wc -l"))
	w.check(err)
	var all []point
	for n := range writes {
		all = append(all, point{op, "write", n + 1, false, "store write"}, point{op, "write", n + 1, true, "store write"})
	}
	for n, call := range calls {
		all = append(all, point{op, "call", n + 1, false, call}, point{op, "call", n + 1, true, call})
	}
	return all, took
}

// fault runs an operation in which the service dies at the point, and returns
// what is wrong after its next start, and whether it died at all.
func (w *world) fault(p point, took time.Duration) (wrong []string, reached bool) {
	w.t.Helper()
	p.op.prepare(w)
	pid, others := w.service(), w.bindings(p.op.session)
	// struck waits for a death that is under way, and reports whether there is one.
	struck := func() bool { return false }
	switch p.kind {
	case "write":
		when := "before"
		if p.after {
			when = "after"
		}
		w.sh(fmt.Sprintf("cd ~/%s && rm -f writes && echo %s %d >arm.new && mv arm.new arm", faultDir, when, p.n))
	case "call":
		w.bus.arm(plan{n: p.n, after: p.after, act: func() { w.kill("KILL", pid) }})
	case "moment":
		wait := time.Duration(rand.New(rand.NewPCG(uint64(p.n), 1)).Int64N(int64(took)))
		killed := make(chan struct{})
		timer := time.AfterFunc(wait, func() { w.kill("KILL", pid); close(killed) })
		struck = func() bool {
			if timer.Stop() {
				return false
			}
			<-killed
			return true
		}
	}
	err := p.op.do(w)
	w.bus.disarm()
	w.sh("cd ~/" + faultDir + " && rm -f arm")
	if err != nil && !died(err) {
		struck()
		return []string{fmt.Sprintf("half state: the operation failed without a death: %v", err)}, true
	}
	reached = struck() || died(err)
	broken := ""
	if p.op.displayed {
		broken = p.op.session
	}
	wrong = append(w.wrong(broken), p.op.outcome(w)...)
	if now := w.bindings(p.op.session); !maps.Equal(now, others) {
		wrong = append(wrong, fmt.Sprintf("lost: the other sessions have %v, had %v", now, others))
	}
	if len(wrong) > 0 {
		return wrong, reached
	}
	// It all goes on.
	if err := p.op.do(w); err != nil {
		switch fault.CodeOf(err) {
		case fault.SessionNotFound, fault.IdentityNotFound, fault.LoginNotRunning: // it was done
		default:
			return []string{fmt.Sprintf("half state: the operation again: %v", err)}, reached
		}
	}
	if login := p.op.login; login[0] != "" {
		wrong = w.signedIn(login[0], login[1])
	}
	return wrong, reached
}

// TestFaultPoints protects everything from a service that dies: at each store
// write and each call of systemd of every operation, before it and after it. The
// short cut takes some of the points; ABF_FAULTS=all takes them all, on both
// kinds of Stack, and further moments.
func TestFaultPoints(t *testing.T) {
	only := os.Getenv("ABF_FAULT") // as switch/write/7/after, or the start of that
	all := os.Getenv("ABF_FAULTS") == "all"
	displays := []string{"none"}
	if d := os.Getenv("ABF_DISPLAY"); d != "" {
		displays = []string{d}
	} else if all {
		displays = []string{"xvnc", "none"}
	}
	for _, display := range displays {
		t.Run(display, func(t *testing.T) {
			w := boot(t, "faults-"+display, display)
			by := w.session("by")
			var points []point
			took := map[string]time.Duration{}
			for _, op := range operations {
				if op.displayed && display == "none" {
					t.Logf("%s: not here: a Stack without a display can be closed through its holder whatever PID 1 says", op.name)
					continue
				}
				found, d := w.points(op)
				took[op.name] = d
				t.Logf("%s: %d points in %s", op.name, len(found), d.Round(time.Millisecond))
				if len(found) < 4 {
					t.Errorf("%s has %d points only: %v", op.name, len(found), found)
				}
				points = append(points, found...)
				for seed := range moments(all, display) {
					points = append(points, point{op, "moment", seed + 1, true, "any moment"})
				}
			}
			const short = 36
			for i, p := range points {
				switch {
				case only != "" && !strings.HasPrefix(p.String(), only):
					continue
				case only == "" && !all && len(points) > short && i*short/len(points) == (i+1)*short/len(points):
					continue // evenly
				}
				wrong, reached := w.fault(p, took[p.op.name])
				total.add(display+" "+p.op.name+" "+p.kind, reached, wrong)
				t.Logf("%s (%s): reached %t, wrong %d", p, p.what, reached, len(wrong))
				if len(wrong) > 0 {
					t.Errorf("%s (%s): %s\nagain: ABF_DISPLAY=%s ABF_FAULT=%s go test ./tests/faults -run TestFaultPoints\n%s",
						p, p.what, strings.Join(wrong, "\n"), display, p, w.journal())
					if t.Failed() && !all {
						return
					}
				}
			}
			if now := w.session("by"); now == nil || now.StartedAt != by.StartedAt {
				t.Errorf("a session that was never concerned: %+v, was %+v", now, by)
			}
		})
	}
}

// moments is how many further moments of each operation are tried.
func moments(all bool, display string) int {
	if all && display == "none" {
		return 25
	}
	return 1
}
