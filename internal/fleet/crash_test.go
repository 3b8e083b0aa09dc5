package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// crashCase is one operation that a service may die in. before makes the
// situation, then op runs with the crash armed.
type crashCase struct {
	name   string
	before func(s *service)
	op     func(ctx context.Context, s *service) error
	// bound says which Identity each session may have afterwards.
	bound map[string][]string
	// broken says that session s may be left BROKEN: the person has to ask again.
	broken bool
}

func ignore[T any](_ T, err error) error { return err }

var crashCases = []crashCase{
	{
		name: "create identity",
		op: func(ctx context.Context, s *service) error {
			return ignore(s.CreateIdentity(ctx, user, "new"))
		},
	},
	{
		name: "start login",
		op:   func(ctx context.Context, s *service) error { return ignore(s.StartLogin(ctx, user, "a", "")) },
	},
	{
		name: "stop login",
		before: func(s *service) {
			s.must(ignore(s.StartLogin(context.Background(), user, "a", "")))
		},
		op: func(ctx context.Context, s *service) error { return ignore(s.StopLogin(ctx, user, "a")) },
	},
	{
		name: "save",
		before: func(s *service) {
			s.must(ignore(s.StartLogin(context.Background(), user, "a", "")))
		},
		op: func(ctx context.Context, s *service) error { return ignore(s.SaveIdentity(ctx, user, "a")) },
	},
	{
		name:  "first use",
		op:    func(ctx context.Context, s *service) error { return ignore(s.UseIdentity(ctx, agent, "new", "a")) },
		bound: map[string][]string{"new": {"", "a"}},
	},
	{
		name: "use after a stop",
		before: func(s *service) {
			s.must(ignore(s.StopSession(context.Background(), user, "s")))
		},
		op: func(ctx context.Context, s *service) error { return ignore(s.UseIdentity(ctx, agent, "s", "a")) },
	},
	{
		name: "use after a death",
		before: func(s *service) {
			s.h.rt.KillBrowsers(s.profileOf("s"))
		},
		op: func(ctx context.Context, s *service) error { return ignore(s.Browser(ctx, "s")) },
	},
	{
		name:  "switch",
		op:    func(ctx context.Context, s *service) error { return ignore(s.UseIdentity(ctx, agent, "s", "b")) },
		bound: map[string][]string{"s": {"a", "b"}},
	},
	{
		name: "switch from a stopped browser",
		before: func(s *service) {
			s.must(ignore(s.StopSession(context.Background(), user, "s")))
		},
		op:    func(ctx context.Context, s *service) error { return ignore(s.UseIdentity(ctx, agent, "s", "b")) },
		bound: map[string][]string{"s": {"a", "b"}},
	},
	{
		name: "switch that fails",
		before: func(s *service) {
			s.h.rt.Change(func() {
				s.h.rt.FailStart = func(req fleet.StartRequest) error { return fmt.Errorf("no start for %s", req.Profile) }
			})
		},
		op: func(ctx context.Context, s *service) error {
			err := ignore(s.UseIdentity(ctx, agent, "s", "b"))
			if dead, _ := s.died(); !dead && fault.CodeOf(err) == fault.BrowserStartFailed {
				return nil
			}
			return err
		},
	},
	{
		name: "stop",
		op:   func(ctx context.Context, s *service) error { return ignore(s.StopSession(ctx, user, "s")) },
	},
	{
		name: "restart",
		op:   func(ctx context.Context, s *service) error { return ignore(s.RestartSession(ctx, user, "s")) },
	},
	{
		name:  "release",
		op:    func(ctx context.Context, s *service) error { return ignore(s.ReleaseSession(ctx, user, "s", false)) },
		bound: map[string][]string{"s": {"", "a"}},
	},
	{
		name: "release of a BROKEN browser",
		before: func(s *service) {
			s.makeBroken("s")
		},
		op:     func(ctx context.Context, s *service) error { return ignore(s.ReleaseSession(ctx, user, "s", false)) },
		bound:  map[string][]string{"s": {"", "a"}},
		broken: true,
	},
	{
		name: "recovery by a login",
		before: func(s *service) {
			s.must(ignore(s.StartLogin(context.Background(), user, "a", "")))
			s.h.rt.Change(func() { s.h.rt.FailStop = func(string) error { return fmt.Errorf("populated") } })
			if _, err := s.StopLogin(context.Background(), user, "a"); err == nil {
				s.h.t.Fatal("the login stopped")
			}
			s.h.rt.Change(func() { s.h.rt.FailStop = nil })
		},
		op: func(ctx context.Context, s *service) error { return ignore(s.StartLogin(ctx, user, "a", "")) },
	},
	{
		name: "delete",
		before: func(s *service) {
			s.saved("c")
			s.use("new", "c")
			s.must(ignore(s.ReleaseSession(context.Background(), user, "new", false)))
		},
		op: func(ctx context.Context, s *service) error {
			err := ignore(s.DeleteIdentity(ctx, user, "c"))
			if fault.CodeOf(err) == fault.IdentityNotFound {
				return nil // the start finished it
			}
			return err
		},
	},
	{
		name: "rename",
		op: func(ctx context.Context, s *service) error {
			return ignore(s.RenameIdentity(ctx, user, "a", "A"))
		},
	},
	{
		name: "reconcile after a power cut",
		before: func(s *service) {
			s.h.rt.PowerCut()
		},
		op: func(ctx context.Context, s *service) error { return s.Reconcile(ctx) },
	},
}

// makeBroken leaves the session's browser running and BROKEN.
func (s *service) makeBroken(session string) {
	s.h.t.Helper()
	s.h.rt.Change(func() { s.h.rt.FailStop = func(string) error { return fmt.Errorf("populated") } })
	if _, err := s.StopSession(context.Background(), user, session); err == nil {
		s.h.t.Fatalf("the browser of %s stopped", session)
	}
	s.h.rt.Change(func() { s.h.rt.FailStop = nil })
}

func (s *service) must(err error) {
	s.h.t.Helper()
	if err != nil {
		s.h.t.Fatal(err)
	}
}

// TestCrash protects everything from a service that is killed at any point: at
// each commit and each effect of every operation, before it and after it. The
// next run, whether it reconciles first or is used at once, finds every
// Binding, runs no Profile twice, leaves nothing half done and nothing
// running that nobody knows.
func TestCrash(t *testing.T) {
	var tally atomic.Int32
	stride := 1
	if testing.Short() {
		stride = 5
	}
	t.Cleanup(func() { t.Logf("%d deaths survived", tally.Load()) })
	for _, c := range crashCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for i, first := range []string{"reconcile", "use"} {
				for n := 1 + i%stride; ; n += stride {
					died, point := runCrash(t, c, n, first)
					if !died {
						if n < 3 && stride == 1 {
							t.Errorf("only %d fault points", n-1)
						}
						break
					}
					tally.Add(1)
					if t.Failed() {
						t.Fatalf("died at point %d, %s; then %s", n, point, first)
					}
				}
			}
		})
	}
}

func runCrash(t *testing.T, c crashCase, n int, first string) (died bool, point string) {
	t.Helper()
	ctx := t.Context()
	h := newTestHost(t)
	s := h.start()
	ids := map[string]string{"a": s.saved("a").ID, "b": s.saved("b").ID}
	s.use("s", "a")
	s.use("by", "b") // stands by, and is never to be disturbed
	by := mustBrowser(t, s, "by")
	s.must(h.rt.Put(s.profileOf("s"), "cookie", "of s"))
	before := s.profileOf("s")
	if c.before != nil {
		c.before(s)
	}
	s.arm(n)
	err := c.op(ctx, s)
	died, point = s.died()
	if !died && err != nil {
		t.Fatalf("%s without a crash: %v", c.name, err)
	}
	s.end()
	h.rt.Change(func() { h.rt.FailStart = nil })

	s = h.start()
	defer s.end()
	if first == "reconcile" {
		s.must(s.Reconcile(ctx))
		if c.name != "reconcile after a power cut" && mustBrowser(t, s, "by").Key() != by.Key() {
			t.Error("a session that was not concerned has another browser")
		}
	} else {
		for _, session := range []string{"s", "new"} {
			if b, err := s.Browser(ctx, session); err == nil {
				if !s.proven(b.EvidenceOf()) {
					t.Error("handed out without proof")
				}
			} else if code := fault.CodeOf(err); code != fault.IdentityNotSelected && !(c.broken && code == fault.BrowserNotControllable) ||
				session == "s" && !slices.Contains(c.bound["s"], "") {
				t.Errorf("%s: %v", session, err)
			}
		}
		s.must(s.Reconcile(ctx))
	}

	for _, wrong := range [][]string{h.rt.Violations(), fleet.StoreInvariants(s.store), fleet.Settled(s.store)} {
		for _, w := range wrong {
			t.Error(w)
		}
	}
	known := fleet.ControllableInstances(s.store)
	for _, instance := range h.rt.Remains() {
		if !known[instance] {
			t.Errorf("%s runs and nobody knows", instance)
		}
	}
	allowed := map[string][]string{"s": {"a"}, "by": {"b"}, "new": {""}}
	for session, names := range c.bound {
		allowed[session] = names
	}
	for session, names := range allowed {
		v, err := s.Session(ctx, session)
		if err != nil && fault.CodeOf(err) != fault.SessionNotFound {
			t.Fatal(err)
		}
		if !slices.Contains(names, strings.ToLower(v.IdentityName)) {
			t.Errorf("session %s is bound to %q, not one of %q", session, v.IdentityName, names)
		}
		if err != nil {
			continue
		}
		if c.broken && session == "s" && v.State == fleet.Broken {
			continue
		}
		if v.Wanted == fleet.WantedRunning && v.State != fleet.Controllable || v.Wanted == fleet.WantedStopped && v.State != fleet.Stopped {
			t.Errorf("session %s is %s and wanted %s", session, v.State, v.Wanted)
		}
		if v.IdentityName == "a" && session == "s" {
			if got, _ := h.rt.Get(before, "cookie"); s.profileOf("s") != before || got != "of s" {
				t.Errorf("session s lost its Profile: cookie %q", got)
			}
		}
	}
	for name, id := range ids {
		if v, err := s.Identity(ctx, name); err != nil || v.State != fleet.Ready || v.ID != id {
			t.Errorf("Identity %s: %+v %v", name, v, err)
		}
	}
	// It all goes on: the operation itself, and what the session needs next.
	if err := c.op(ctx, s); err != nil {
		switch fault.CodeOf(err) {
		case fault.DuplicateIdentity, fault.LoginNotRunning, fault.SessionNotFound: // it was done
		default:
			t.Errorf("the operation again: %v", err)
		}
	}
	s.use("s", "b")
	s.use("s", "a")
	mustBrowser(t, s, "s")
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
	return died, point
}

// TestSwitchDirection protects what a user gets from a switch that the service
// died in: the old Identity until its browser is gone, the new one from then
// on, and a stop by the user counts also across that.
func TestSwitchDirection(t *testing.T) {
	for _, c := range []struct {
		point   string
		stopped bool
		bound   string
		wanted  fleet.Wanted
	}{
		{"before record of display", false, "a", fleet.WantedRunning},
		{"before record of display", true, "a", fleet.WantedStopped},
		{"after start", false, "a", fleet.WantedRunning},
		{"before stop", false, "a", fleet.WantedRunning},
		{"after stop", false, "b", fleet.WantedRunning},
	} {
		h := newTestHost(t)
		s := h.start()
		s.saved("a")
		s.saved("b")
		s.use("s", "a")
		if c.stopped {
			s.must(ignore(s.StopSession(t.Context(), user, "s")))
		}
		s.armAt(c.point)
		if _, err := s.UseIdentity(t.Context(), agent, "s", "b"); err == nil {
			t.Fatalf("%s: not reached", c.point)
		}
		s.end()
		s = h.start()
		s.must(s.Reconcile(t.Context()))
		v, err := s.Session(t.Context(), "s")
		if err != nil || v.IdentityName != c.bound || v.Wanted != c.wanted {
			t.Errorf("%s, stopped %v: bound to %q, wanted %s: %v", c.point, c.stopped, v.IdentityName, v.Wanted, err)
		}
		s.end()
	}
}

// TestReconcileUnverified protects users from what a new run cannot prove: it
// is cleaned up or quarantined, and never handed out; a quarantine ends when
// looking works again.
func TestReconcileUnverified(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	b := mustBrowser(t, s, "s")
	s.end()

	s = h.start()
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Unverified {
		t.Errorf("before any look: %+v %v", v, err)
	}
	h.rt.Change(func() { h.rt.FailObserve = func(string) error { return fmt.Errorf("no bus") } })
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return fmt.Errorf("no bus") } })
	if err := s.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Quarantined || v.Problem == nil {
		t.Errorf("nothing to be proven: %+v %v", v, err)
	}
	if _, err := s.Browser(t.Context(), "s"); fault.CodeOf(err) != fault.BrowserNotControllable {
		t.Errorf("a quarantined browser: %v", err)
	}
	if running, quarantined := s.Counts(); running != 1 || quarantined != 1 {
		t.Errorf("counts %d %d", running, quarantined)
	}
	if !slices.Contains(s.types(), audit.RuntimeQuarantined) {
		t.Error("the quarantine is not in the audit trail")
	}
	h.rt.Change(func() { h.rt.FailObserve, h.rt.FailStop = nil, nil })
	if again := mustBrowser(t, s, "s"); again.Key() != b.Key() {
		t.Error("the browser was not taken over once it could be proven")
	}
	s.end()

	// Looking fails, stopping works: cleaned up, and started again as wanted.
	s = h.start()
	defer s.end()
	looks := 0
	h.rt.Change(func() {
		h.rt.FailObserve = func(string) error {
			if looks++; looks == 1 {
				return fmt.Errorf("no bus")
			}
			return nil
		}
	})
	if err := s.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := mustBrowser(t, s, "s"); again.Key() == b.Key() {
		t.Error("a browser that could not be observed was kept")
	}
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

// TestReconcileBesideAReplacement protects the browser that a session keeps when
// the service died in a switch and the replacement cannot be proven gone.
func TestReconcileBesideAReplacement(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.saved("b")
	s.use("s", "a")
	kept := mustBrowser(t, s, "s")
	s.armAt("after start")
	if _, err := s.UseIdentity(t.Context(), agent, "s", "b"); err == nil {
		t.Fatal("it switched")
	}
	s.end()
	h.rt.Change(func() {
		h.rt.FailStop = func(instance string) error {
			if instance != kept.InstanceOf() {
				return fmt.Errorf("populated")
			}
			return nil
		}
	})
	s = h.start()
	defer s.end()
	if err := s.Reconcile(t.Context()); err == nil {
		t.Error("nothing is said of the replacement")
	}
	if v, err := s.Session(t.Context(), "s"); err != nil || v.IdentityName != "a" || v.State != fleet.Controllable {
		t.Errorf("the browser that is kept: %+v %v", v, err)
	}
}

// TestReconcileUndecided protects browsers from a run that cannot look at them,
// because the service manager cannot be asked or because it is told to stop
// before it has looked: they are left alone, and the next run takes them over.
func TestReconcileUndecided(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	sessions := []string{"s", "t", "u"}
	keys := map[string]string{}
	for _, session := range sessions {
		s.use(session, "a")
		keys[session] = mustBrowser(t, s, session).Key()
	}
	s.end()
	for name, look := range map[string]func(s *service) error{
		"no manager": func(*service) error { return fmt.Errorf("%w: no answer", fleet.ErrUndecided) },
		"told to stop": func(s *service) error {
			s.Refuse()
			return context.Canceled
		},
	} {
		s = h.start()
		h.rt.Change(func() { h.rt.FailObserve = func(string) error { return look(s) } })
		h.rt.Change(func() {
			h.rt.FailStop = func(string) error {
				t.Errorf("%s: a browser is stopped", name)
				return nil
			}
		})
		if err := s.Reconcile(t.Context()); err == nil {
			t.Errorf("%s: all is said to be well", name)
		}
		h.rt.Change(func() { h.rt.FailObserve, h.rt.FailStop = nil, nil })
		s.end()
	}
	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	for _, session := range sessions {
		if mustBrowser(t, s, session).Key() != keys[session] {
			t.Errorf("the browser of %s was replaced", session)
		}
	}
}

// TestReconcileBroken protects the rule that a start of the service cleans a
// BROKEN browser and never makes it READY.
func TestReconcileBroken(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return fmt.Errorf("populated") } })
	if _, err := s.StopSession(t.Context(), user, "s"); fault.CodeOf(err) != fault.BrowserStopUnproven {
		t.Errorf("stop: %v", err)
	}
	s.end()
	for _, stuck := range []bool{true, false} {
		if !stuck {
			h.rt.Change(func() { h.rt.FailStop = nil })
		}
		s = h.start()
		if err := s.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Broken {
			t.Errorf("stuck %v: %+v %v", stuck, v, err)
		}
		if left := len(h.rt.Remains()); (left == 1) != stuck {
			t.Errorf("stuck %v: %d left running", stuck, left)
		}
		if _, err := s.Browser(t.Context(), "s"); fault.CodeOf(err) != fault.BrowserNotControllable {
			t.Errorf("stuck %v: %v", stuck, err)
		}
		s.end()
	}
}

// TestRandom protects the same invariants over sequences nobody thought of:
// operations of several sessions, deaths of browsers and of the service, power
// cuts and failures of the world, in any order.
func TestRandom(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHost(rt, shortDir(t))
		s := h.start()
		defer func() { s.end() }()
		ctx := context.Background()
		names := []string{"a", "b"}
		for _, name := range append(names, "doomed") {
			s.saved(name)
		}
		sessions := []string{"s", "t"}
		bound, released := map[string]bool{}, map[string]bool{}
		broken := fmt.Errorf("the world is broken")
		steps := rapid.IntRange(1, 25).Draw(rt, "steps")
		for range steps {
			session := rapid.SampledFrom(sessions).Draw(rt, "session")
			name := rapid.SampledFrom(append(names, "doomed")).Draw(rt, "identity")
			op := rapid.SampledFrom([]string{
				"use", "use", "use", "browser", "stop", "login", "save", "stop login",
				"restart browser", "release", "logged out", "rename", "delete",
				"kill", "close", "power cut", "restart", "crash", "heal",
				"fail start", "fail stop", "fail observe", "fail tree", "unclean",
			}).Draw(rt, "op")
			var err error
			switch op {
			case "use":
				if _, err = s.UseIdentity(ctx, agent, session, name); err == nil {
					bound[session] = true
				}
			case "browser":
				var b *fleet.Browser
				if b, err = s.Browser(ctx, session); err == nil && !s.proven(b.EvidenceOf()) {
					rt.Fatalf("handed out without proof")
				}
			case "stop":
				_, err = s.StopSession(ctx, user, session)
			case "restart browser":
				_, err = s.RestartSession(ctx, user, session)
			case "release", "logged out":
				released[session] = true
				_, err = s.ReleaseSession(ctx, user, session, op == "logged out")
			case "rename":
				_, err = s.RenameIdentity(ctx, user, name, strings.ToUpper(name))
			case "delete":
				_, err = s.DeleteIdentity(ctx, user, "doomed")
			case "login":
				_, err = s.StartLogin(ctx, user, name, "")
			case "save":
				_, err = s.SaveIdentity(ctx, user, name)
			case "stop login":
				_, err = s.StopLogin(ctx, user, name)
			case "kill":
				if p := fleet.ProfileOf(s.store, session); p != "" {
					h.rt.KillBrowsers(p)
				}
			case "close":
				h.rt.CloseBrowsers("/template")
			case "power cut":
				h.rt.PowerCut()
			case "restart", "crash":
				if op == "crash" {
					s.arm(rapid.IntRange(1, 12).Draw(rt, "point"))
					switch rapid.SampledFrom([]string{"use", "use", "release", "delete", "save"}).Draw(rt, "crash in") {
					case "use":
						_, uerr := s.UseIdentity(ctx, agent, session, name)
						bound[session] = bound[session] || uerr == nil
					case "release":
						released[session] = true
						_, _ = s.ReleaseSession(ctx, user, session, false)
					case "delete":
						_, _ = s.DeleteIdentity(ctx, user, "doomed")
					case "save":
						_, _ = s.SaveIdentity(ctx, user, name)
					}
				}
				s.end()
				s = h.start()
				if rapid.Bool().Draw(rt, "reconcile") {
					_ = s.Reconcile(ctx) // fails as the world does
				}
				if _, serr := s.Session(ctx, session); serr == nil {
					bound[session] = true
				}
			case "heal":
				h.rt.Change(func() {
					h.rt.FailStart, h.rt.FailStop, h.rt.FailObserve, h.rt.FailTree, h.rt.UncleanStop = nil, nil, nil, nil, nil
				})
			case "fail start":
				h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return broken } })
			case "fail stop":
				h.rt.Change(func() { h.rt.FailStop = func(string) error { return broken } })
			case "fail observe":
				h.rt.Change(func() { h.rt.FailObserve = func(string) error { return broken } })
			case "fail tree":
				h.rt.Change(func() { h.rt.FailTree = func(string, string) error { return broken } })
			case "unclean":
				h.rt.Change(func() { h.rt.UncleanStop = func(string) bool { return true } })
			}
			// A failed first use may have bound the session before it failed.
			if err != nil && fault.CodeOf(err) == "" {
				rt.Fatalf("%s: an error without a code: %v", op, err)
			}
			for _, x := range sessions {
				_, serr := s.Session(ctx, x)
				if bound[x] && serr != nil && !released[x] {
					rt.Fatalf("%s: the Binding of %s is lost: %v", op, x, serr)
				}
				if bound[x] = serr == nil; bound[x] && op == "use" && x == session {
					released[x] = false // what was left of a release has ended
				}
			}
			for _, w := range append(h.rt.Violations(), fleet.StoreInvariants(s.store)...) {
				rt.Fatalf("%s: %s", op, w)
			}
			for _, x := range names {
				if v, ierr := s.Identity(ctx, x); ierr != nil || v.State != fleet.Ready {
					rt.Fatalf("%s: Identity %s is %s: %v", op, x, v.State, ierr)
				}
			}
		}
		// When the world is whole again, one start repairs everything but
		// what only a person may end.
		h.rt.Change(func() {
			h.rt.FailStart, h.rt.FailStop, h.rt.FailObserve, h.rt.FailTree, h.rt.UncleanStop = nil, nil, nil, nil, nil
		})
		s.end()
		s = h.start()
		if err := s.Reconcile(ctx); err != nil {
			rt.Fatalf("reconcile in a whole world: %v", err)
		}
		for _, w := range append(fleet.Settled(s.store), h.rt.Violations()...) {
			rt.Fatalf("at the end: %s", w)
		}
		known := fleet.ControllableInstances(s.store)
		for _, instance := range h.rt.Remains() {
			if !known[instance] {
				rt.Fatalf("%s runs and nobody knows", instance)
			}
		}
		for _, x := range sessions {
			v, err := s.Session(ctx, x)
			if err != nil {
				continue
			}
			if v.State != fleet.Broken && (v.Wanted == fleet.WantedRunning) != (v.State == fleet.Controllable) {
				rt.Fatalf("session %s is %s and wanted %s", x, v.State, v.Wanted)
			}
			if v.State == fleet.Broken {
				if _, err := s.ReleaseSession(ctx, user, x, false); err != nil {
					rt.Fatalf("release of a BROKEN browser in a whole world: %v", err)
				}
			}
			for _, name := range names {
				if _, err := s.UseIdentity(ctx, user, x, name); err != nil {
					rt.Fatalf("use at the end: %v", err)
				}
			}
		}
	})
}
