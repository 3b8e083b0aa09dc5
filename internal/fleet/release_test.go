package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// TestRelease protects what a person who releases a session is promised: the
// browser ends cleanly, the Binding goes, Profile and login stay, for this
// session first.
func TestRelease(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	profile := s.profileOf("s")
	s.must(h.rt.Put(profile, "cookie", "of s"))

	_, err := s.ReleaseSession(t.Context(), agent, "s", false)
	wantCode(t, "release by an agent", err, fault.Unauthorized)
	_, err = s.ReleaseSession(t.Context(), user, "nobody", false)
	wantCode(t, "release of no session", err, fault.SessionNotFound)

	v, err := s.ReleaseSession(t.Context(), user, "s", false)
	if err != nil || v.State != fleet.Stopped || v.IdentityName != "a" || v.LastExit == nil || !v.LastExit.Clean {
		t.Errorf("release: %+v %v", v, err)
	}
	if left := h.rt.Remains(); len(left) > 0 {
		t.Errorf("running: %v", left)
	}
	_, err = s.Session(t.Context(), "s")
	wantCode(t, "a released session", err, fault.SessionNotFound)
	_, err = s.Browser(t.Context(), "s")
	wantCode(t, "its browser", err, fault.IdentityNotSelected)
	if id, err := s.Identity(t.Context(), "a"); err != nil || id.Sessions != 0 || id.PreparedProfiles != 1 {
		t.Errorf("its Identity: %+v %v", id, err)
	}
	if !slices.Contains(s.types(), audit.BindingReleased) {
		t.Error("the release is not in the audit trail")
	}
	s.use("s", "a")
	if got, _ := h.rt.Get(s.profileOf("s"), "cookie"); s.profileOf("s") != profile || got != "of s" {
		t.Errorf("the session got another Profile, or its login is lost: %q", got)
	}
}

// TestReleaseWaits protects an operation that runs: a release neither closes
// the Profile under it nor lets another one begin.
func TestReleaseWaits(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	done, err := s.Operate(t.Context(), "s")
	s.must(err)

	hasty, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = s.ReleaseSession(hasty, user, "s", false)
	wantCode(t, "release by who does not wait", err, fault.Timeout)
	if _, err := s.Session(t.Context(), "s"); err != nil || len(h.rt.Remains()) != 1 {
		t.Errorf("a release that gave up changed something: %v", err)
	}

	released := make(chan error, 1)
	go func() {
		_, err := s.ReleaseSession(t.Context(), user, "s", false)
		released <- err
	}()
	// A second operation either came before the release or waits for it.
	second, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for {
		more, err := s.Operate(second, "s")
		if err != nil {
			break
		}
		more()
	}
	select {
	case err := <-released:
		t.Errorf("released during an operation: %v", err)
	default:
	}
	other, err := s.Operate(t.Context(), "t")
	if err != nil {
		t.Errorf("an operation of another session waits: %v", err)
	}
	other()
	done()
	s.must(<-released)
	after, err := s.Operate(t.Context(), "s")
	s.must(err)
	after()
}

// TestRecovery protects Explicit Runtime Recovery: only a person's release gets
// it, after the ordinary stop was tried; where ownership is ambiguous everything
// stays; and the Profile returns to allocation by that release alone.
func TestRecovery(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer func() { s.end() }()
	s.saved("a")
	s.use("s", "a")
	profile := s.profileOf("s")
	stuck := fault.New(fault.BrowserStopUnproven, "stop browser", "Look", "its scope was stolen")
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return stuck } })
	_, err := s.StopSession(t.Context(), user, "s")
	wantCode(t, "stop", err, fault.BrowserStopUnproven)

	// None of these may recover it.
	recoverable := true
	tried := false
	h.rt.Change(func() { h.rt.Reconstruct = func(string) bool { tried = true; return recoverable } })
	_, err = s.StopSession(t.Context(), user, "s")
	wantCode(t, "another stop", err, fault.BrowserStopUnproven)
	_, err = s.RestartSession(t.Context(), user, "s")
	wantCode(t, "restart", err, fault.BrowserStopUnproven)
	_, err = s.UseIdentity(t.Context(), user, "s", "a")
	wantCode(t, "the same Identity again", err, fault.BrowserNotControllable)
	_, err = s.Browser(t.Context(), "s")
	wantCode(t, "use by the agent", err, fault.BrowserNotControllable)
	s.end()
	s = h.start()
	s.must(s.Reconcile(t.Context()))
	if tried {
		t.Error("recovery was tried without a release")
	}

	recoverable = false
	if x, err := s.ExamineSession(t.Context(), "s"); err != nil || x.Examination.Recoverable || x.Examination.Vacant || x.State != fleet.Broken {
		t.Errorf("examined: %+v %v", x, err)
	}
	_, err = s.ReleaseSession(t.Context(), operator, "s", false)
	wantCode(t, "release of an ambiguous one", err, fault.BrowserStopUnproven)
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Broken || v.IdentityName != "a" || v.Problem == nil {
		t.Errorf("after it: %+v %v", v, err)
	}
	if wrong := fleet.Settled(s.store); len(wrong) > 0 {
		t.Errorf("after it: %v", wrong)
	}
	if id, err := s.Identity(t.Context(), "a"); err != nil || id.PreparedProfiles != 0 {
		t.Errorf("a BROKEN Profile is offered: %+v %v", id, err)
	}

	recoverable = true
	if x, err := s.ExamineSession(t.Context(), "s"); err != nil || !x.Examination.Recoverable || x.Examination.Vacant {
		t.Errorf("examined: %+v %v", x, err)
	}
	if _, err = s.ReleaseSession(t.Context(), operator, "s", false); err != nil {
		t.Fatalf("release: %v", err)
	}
	if left := h.rt.Remains(); len(left) > 0 {
		t.Errorf("running: %v", left)
	}
	h.rt.Change(func() { h.rt.FailStop = nil })
	if v := s.use("s", "a"); v.Problem != nil || s.profileOf("s") != profile {
		t.Errorf("after the recovery: %+v", v)
	}
	if !slices.Contains(s.types(), audit.RuntimeRecovered) {
		t.Error("the recovery is not in the audit trail")
	}
}

// TestReleaseOfWhatIsGone protects a person from a BROKEN browser whose processes
// ended: a release needs no recovery then.
func TestReleaseOfWhatIsGone(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	s.makeBroken("s")
	s.end()
	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Broken || len(h.rt.Remains()) > 0 {
		t.Errorf("cleaned at the start: %+v %v", v, err)
	}
	if _, err := s.ReleaseSession(t.Context(), user, "s", false); err != nil {
		t.Errorf("release: %v", err)
	}
	s.use("s", "a")
}

// TestReleaseOfAnOlderRecord protects a Profile from what runs on it although the
// record says that it is stopped, as after the restore of a copy: the release
// ends it by recovery, or is refused.
func TestReleaseOfAnOlderRecord(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	s.must(ignore(s.StopSession(t.Context(), user, "s")))
	s.end()
	old, err := os.ReadFile(h.cfg.StateFile())
	s.must(err)
	s = h.start()
	s.use("s", "a")
	s.end()
	s.must(os.WriteFile(h.cfg.StateFile(), old, 0o600))

	s = h.start()
	defer s.end()
	_, err = s.ReleaseSession(t.Context(), user, "s", false)
	wantCode(t, "release of what cannot be recovered", err, fault.BrowserStopUnproven)
	if _, err := s.Session(t.Context(), "s"); err != nil || len(h.rt.Remains()) != 1 {
		t.Errorf("after it: %v, running %v", err, h.rt.Remains())
	}
	h.rt.Change(func() { h.rt.Reconstruct = func(string) bool { return true } })
	if _, err := s.ReleaseSession(t.Context(), user, "s", false); err != nil || len(h.rt.Remains()) != 0 {
		t.Errorf("release: %v, running %v", err, h.rt.Remains())
	}
}

// TestInterruptedReleaseOfAnOlderRecord protects a Profile from the same when the
// copy was made in the middle of a release: what finishes it does not take the
// record's word either.
func TestInterruptedReleaseOfAnOlderRecord(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	s.must(ignore(s.StopSession(t.Context(), user, "s")))
	s.arm(2)
	_, _ = s.ReleaseSession(t.Context(), user, "s", false)
	if died, point := s.died(); !died || !strings.Contains(point, "after") {
		t.Fatalf("not killed behind the first write: %v %s", died, point)
	}
	s.end()
	old, err := os.ReadFile(h.cfg.StateFile())
	s.must(err)
	s = h.start()
	s.must(s.Reconcile(t.Context()))
	s.use("s", "a")
	s.end()
	s.must(os.WriteFile(h.cfg.StateFile(), old, 0o600))

	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	if _, err := s.Session(t.Context(), "s"); err != nil {
		t.Errorf("released while its browser runs: %v", err)
	}
}

// TestReleaseUndecided protects a session from a release while systemd cannot be
// asked: the person is told, and nothing happens behind their back later.
func TestReleaseUndecided(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	h.rt.Change(func() {
		h.rt.FailStop = func(string) error { return fmt.Errorf("%w: connection closed", fleet.ErrUndecided) }
	})
	if _, err := s.ReleaseSession(t.Context(), user, "s", false); err == nil {
		t.Error("a release that proved nothing succeeded")
	}
	h.rt.Change(func() { h.rt.FailStop = nil })
	s.end()
	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Controllable {
		t.Errorf("after it: %+v %v", v, err)
	}
}

// TestReleaseFromMemoryQuarantine protects a Profile whose truth the store cannot take:
// a person's release is refused as long as that lasts, and works after.
func TestReleaseFromMemoryQuarantine(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	full := errors.New("no space left on device")
	h.rt.Change(func() {
		h.rt.FailStop = func(string) error {
			fleet.FailStore(s.Fleet, func() error { return full })
			return nil
		}
	})
	if _, err := s.StopSession(t.Context(), user, "s"); err == nil {
		t.Error("a stop that could not be recorded succeeded")
	}
	if _, err := s.ReleaseSession(t.Context(), user, "s", false); err == nil {
		t.Error("a release that could not be recorded succeeded")
	}
	h.rt.Change(func() { h.rt.FailStop = nil })
	fleet.FailStore(s.Fleet, nil)
	if _, err := s.ReleaseSession(t.Context(), user, "s", false); err != nil {
		t.Errorf("release in a whole world: %v", err)
	}
	s.use("s", "a")
}

// TestLoggedOut protects a session from a login that a person said is lost: its
// Profile is given to nobody before its Identity was saved anew, and is then a
// clone of that.
func TestLoggedOut(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	lost := s.profileOf("s")
	s.must(h.rt.Put(lost, "cookie", "expired"))
	if _, err := s.ReleaseSession(t.Context(), user, "s", true); err != nil {
		t.Fatal(err)
	}
	s.use("s", "a")
	if fresh := s.profileOf("s"); fresh == lost {
		t.Error("a logged-out Profile was allocated again")
	}
	if _, err := s.StartLogin(t.Context(), user, "a", ""); err != nil {
		t.Fatal(err)
	}
	s.must(h.rt.Put("/template", "cookie", "renewed"))
	if _, err := s.SaveIdentity(t.Context(), user, "a"); err != nil {
		t.Fatal(err)
	}
	s.use("t", "a")
	if got, _ := h.rt.Get(lost, "cookie"); s.profileOf("t") != lost || got != "renewed" {
		t.Errorf("after a new save: %s has cookie %q", s.profileOf("t"), got)
	}
}

// TestRestart protects a person's restart: the same Profile, another generation,
// wanted from then on also if it was stopped.
func TestRestart(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	b, profile := mustBrowser(t, s, "s"), s.profileOf("s")
	if v, err := s.RestartSession(t.Context(), user, "s"); err != nil || v.State != fleet.Controllable {
		t.Errorf("restart: %+v %v", v, err)
	}
	again := mustBrowser(t, s, "s")
	if again.Key() == b.Key() || s.profileOf("s") != profile {
		t.Error("the browser is the old one, or its Profile is not")
	}
	s.must(ignore(s.StopSession(t.Context(), user, "s")))
	if v, err := s.RestartSession(t.Context(), user, "s"); err != nil || v.State != fleet.Controllable || v.Wanted != fleet.WantedRunning {
		t.Errorf("restart of a stopped one: %+v %v", v, err)
	}
	_, err := s.RestartSession(t.Context(), user, "nobody")
	wantCode(t, "restart of no session", err, fault.SessionNotFound)
}

// TestQueue protects who waits for a processor: everybody gets a turn, in order,
// and the place is shown, and told to who asks.
func TestQueue(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	entered, release := make(chan string), make(chan struct{})
	h.rt.Change(func() {
		h.rt.FailStart = func(req fleet.StartRequest) error {
			entered <- req.Session
			<-release
			return nil
		}
	})
	done := make(chan error, 4)
	told := make(chan int, 10)
	begin := func(session string) {
		ctx := t.Context()
		if session == "s3" {
			ctx = fleet.WithProgress(ctx, func(place int) { told <- place })
		}
		go func() {
			_, err := s.UseIdentity(ctx, agent, session, "a")
			done <- err
		}()
	}
	begin("s0")
	<-entered
	begin("s1")
	<-entered
	for i, session := range []string{"s2", "s3"} {
		begin(session)
		for queued := 0; queued != i+1; {
			v, err := s.Session(t.Context(), session)
			if err != nil && fault.CodeOf(err) != fault.SessionNotFound {
				t.Fatal(err)
			}
			queued = v.Queued
			if t.Context().Err() != nil {
				t.Fatalf("%s has place %d in the queue", session, queued)
			}
		}
	}
	for _, next := range []string{"s2", "s3"} {
		release <- struct{}{}
		if got := <-entered; got != next {
			t.Errorf("%s was started before %s", got, next)
		}
		if next == "s2" {
			if first, then := <-told, <-told; first != 2 || then != 1 {
				t.Errorf("s3 was told of place %d, then of %d", first, then)
			}
		}
	}
	close(release)
	for range 4 {
		s.must(<-done)
	}
	if v, err := s.Session(t.Context(), "s3"); err != nil || v.Queued != 0 {
		t.Errorf("at the end: %+v %v", v, err)
	}
}

// TestRename protects names: no two Identities differ in case only, and nothing
// but the name changes.
func TestRename(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	a := s.saved("a")
	s.saved("b")
	s.use("s", "a")
	b := mustBrowser(t, s, "s")
	for _, taken := range []string{"b", "B", " b ", "\uff22"} {
		_, err := s.RenameIdentity(t.Context(), user, "a", taken)
		wantCode(t, "rename to "+taken, err, fault.DuplicateIdentity)
	}
	_, err := s.RenameIdentity(t.Context(), user, "a", "")
	wantCode(t, "rename to nothing", err, fault.InvalidName)
	_, err = s.RenameIdentity(t.Context(), user, "c", "d")
	wantCode(t, "rename of nobody", err, fault.IdentityNotFound)
	for _, name := range []string{"A", "work", "work"} {
		v, err := s.RenameIdentity(t.Context(), user, a.ID, name)
		if err != nil || v.ID != a.ID || v.Name != name || v.State != fleet.Ready {
			t.Errorf("rename to %s: %+v %v", name, v, err)
		}
	}
	if n := strings.Count(fmt.Sprint(s.types()), string(audit.IdentityRenamed)); n != 2 {
		t.Errorf("%d renames in the audit trail, want 2", n)
	}
	if v, err := s.Session(t.Context(), "s"); err != nil || v.IdentityName != "work" || mustBrowser(t, s, "s").Key() != b.Key() {
		t.Errorf("the session: %+v %v", v, err)
	}
	s.saved("a") // the old name is free
}

// TestLimit protects an Identity's own limits: they are what its browsers are
// started with, beside the configured ones, and what cannot be is refused.
func TestLimit(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Limits.TasksMax = 900
	s := h.start()
	defer s.end()
	s.saved("a")
	own := config.Limits{MemoryHigh: 2 << 30}
	if v, err := s.LimitIdentity(t.Context(), user, "a", own); err != nil || v.Limits != own {
		t.Errorf("%+v %v", v, err)
	}
	_, err := s.LimitIdentity(t.Context(), user, "a", config.Limits{CPUWeight: 20000})
	wantCode(t, "a weight beyond systemd's", err, fault.InvalidArgument)
	_, err = s.LimitIdentity(t.Context(), user, "b", own)
	wantCode(t, "limits of nobody", err, fault.IdentityNotFound)
	var got config.Limits
	h.rt.Change(func() { h.rt.FailStart = func(req fleet.StartRequest) error { got = req.Limits; return nil } })
	s.use("s", "a")
	if want := (config.Limits{MemoryHigh: 2 << 30, TasksMax: 900}); got != want {
		t.Errorf("started with %+v, want %+v", got, want)
	}
	if !slices.Contains(s.types(), audit.IdentityLimited) {
		t.Error("the change is not in the audit trail")
	}
}

// TestDelete protects an Identity in use from being deleted, and the disk and
// the store from anything of one that is.
func TestDelete(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer func() { s.end() }()
	a := s.saved("a")
	s.saved("b")
	s.use("s", "a")
	s.use("t", "b")

	_, err := s.DeleteIdentity(t.Context(), agent, "a")
	wantCode(t, "deletion by an agent", err, fault.Unauthorized)
	_, err = s.DeleteIdentity(t.Context(), user, "nobody")
	wantCode(t, "deletion of nobody", err, fault.IdentityNotFound)
	_, err = s.DeleteIdentity(t.Context(), user, "a")
	wantCode(t, "deletion under a session", err, fault.IdentityInUse)
	s.must(ignore(s.StopSession(t.Context(), user, "s")))
	_, err = s.DeleteIdentity(t.Context(), user, "a")
	wantCode(t, "deletion under a stopped session", err, fault.IdentityInUse)
	s.must(ignore(s.ReleaseSession(t.Context(), user, "s", false)))
	s.must(ignore(s.StartLogin(t.Context(), user, "a", "")))
	_, err = s.DeleteIdentity(t.Context(), user, "a")
	wantCode(t, "deletion under a login", err, fault.IdentityInUse)
	s.must(ignore(s.StopLogin(t.Context(), user, "a")))

	// A directory that cannot be removed: it is not usable any more, and the
	// next start finishes it.
	h.rt.Change(func() {
		h.rt.FailTree = func(op, dir string) error {
			if op == "remove tree" && strings.Contains(dir, "profiles") {
				return errors.New("input/output error")
			}
			return nil
		}
	})
	if _, err = s.DeleteIdentity(t.Context(), user, "a"); err == nil {
		t.Error("a directory stays and the deletion succeeded")
	}
	if v, err := s.Identity(t.Context(), "a"); err != nil || v.State != fleet.Deleting {
		t.Errorf("half deleted: %+v %v", v, err)
	}
	for name, op := range map[string]func() error{
		"use":    func() error { return ignore(s.UseIdentity(t.Context(), agent, "s", "a")) },
		"switch": func() error { return ignore(s.UseIdentity(t.Context(), agent, "t", a.ID)) },
		"login":  func() error { return ignore(s.StartLogin(t.Context(), user, "a", "")) },
		"save":   func() error { return ignore(s.SaveIdentity(t.Context(), user, "a")) },
		"rename": func() error { return ignore(s.RenameIdentity(t.Context(), user, "a", "c")) },
	} {
		wantCode(t, name+" of a half deleted one", op(), fault.IdentityNotFound)
	}
	h.rt.Change(func() { h.rt.FailTree = nil })
	s.end()
	s = h.start()
	s.must(s.Reconcile(t.Context()))
	_, err = s.Identity(t.Context(), "a")
	wantCode(t, "a deleted one", err, fault.IdentityNotFound)
	for _, tree := range h.rt.Trees() {
		if strings.Contains(tree, a.ID) {
			t.Errorf("%s stays", tree)
		}
	}
	if wrong := append(fleet.StoreInvariants(s.store), fleet.Settled(s.store)...); len(wrong) > 0 {
		t.Error(wrong)
	}
	if !slices.Contains(s.types(), audit.IdentityDeleted) {
		t.Error("the deletion is not in the audit trail")
	}
	mustBrowser(t, s, "t")
	if fresh := s.saved("a"); fresh.ID == a.ID {
		t.Error("an id was used again")
	}
}

// TestDeleteAgainstUse protects both sides of a race: either the session is
// bound and the Identity stays, or the Identity is gone and the session is not
// bound.
func TestDeleteAgainstUse(t *testing.T) {
	for range 20 {
		h := newTestHost(t)
		s := h.start()
		s.saved("a")
		used := make(chan error, 1)
		go func() {
			_, err := s.UseIdentity(t.Context(), agent, "s", "a")
			used <- err
		}()
		_, derr := s.DeleteIdentity(t.Context(), user, "a")
		uerr := <-used
		if (derr == nil) == (uerr == nil) {
			t.Errorf("delete: %v, use: %v", derr, uerr)
		}
		if wrong := append(fleet.StoreInvariants(s.store), h.rt.Violations()...); len(wrong) > 0 {
			t.Error(wrong)
		}
		s.end()
	}
}
