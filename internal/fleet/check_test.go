package fleet_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/store"
)

// restore puts a copy in the place of the state file, as abfleet store restore does.
func (h *host) restore(from string) {
	h.t.Helper()
	accept := func(store.Summary) error { return nil }
	amend := func(tx *store.Tx) error {
		return fleet.AmendRestored(tx, h.cfg.ProfileDir, func(dir string) (bool, error) { return slices.Contains(h.rt.Trees(), dir), nil })
	}
	if _, err := store.Restore(context.Background(), h.cfg.StateFile(), from, fleet.CheckStore, accept, amend); err != nil {
		h.t.Fatal(err)
	}
}

// TestRestoredUnfinished protects the logins in a Profile that was not finished
// yet when the copy was made that is restored now.
func TestRestoredUnfinished(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return errors.New("no") } })
	for _, session := range []string{"s", "t"} {
		if _, err := s.UseIdentity(t.Context(), agent, session, "a"); err == nil {
			t.Fatal("started")
		}
	}
	backup := filepath.Join(h.cfg.Home, "backup.db")
	s.must(s.store.CopyTo(t.Context(), backup))
	h.rt.Change(func() { h.rt.FailStart = nil })
	s.use("s", "a")
	profile := s.profileOf("s")
	s.must(h.rt.Put(profile, "cookie", "of s"))
	s.must(ignore(s.StopSession(t.Context(), user, "s")))
	s.end()
	h.restore(backup)
	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	s.use("s", "a")
	if got, err := h.rt.Get(s.profileOf("s"), "cookie"); err != nil || got != "of s" || s.profileOf("s") != profile {
		t.Errorf("the login is %q, %v", got, err)
	}
	s.use("t", "a") // has no directory still
}

// TestRestoredOlder protects browsers from a restored state that is older than
// they are: whose record names an earlier generation is left alone and given to
// nobody, and who has no record does not keep others from working.
func TestRestoredOlder(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("work")
	s.use("alpha", "work")
	backup := h.cfg.Home + "/backup.db"
	if err := s.store.CopyTo(t.Context(), backup); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RestartSession(t.Context(), user, "alpha"); err != nil {
		t.Fatal(err)
	}
	s.use("beta", "work")
	running := h.rt.Running()
	if len(running) != 2 {
		t.Fatalf("%v run", running)
	}
	s.end()
	h.restore(backup)

	s = h.start()
	// What could not be ended is an error of Reconcile; the rest goes on.
	_ = s.Reconcile(t.Context())
	if got := h.rt.Running(); strings.Join(got, " ") != strings.Join(running, " ") {
		t.Errorf("after the start %v run, before %v", got, running)
	}
	v, err := s.Session(t.Context(), "alpha")
	if err != nil || v.State == fleet.Controllable {
		t.Errorf("alpha: %+v, %v", v, err)
	}
	if _, err := s.UseIdentity(t.Context(), agent, "alpha", "work"); err == nil {
		t.Error("a browser of another generation was given to its session")
	}
	if _, err := s.Session(t.Context(), "beta"); fault.CodeOf(err) != fault.SessionNotFound {
		t.Errorf("beta: %v", err)
	}
	s.use("beta", "work")
	if got := h.rt.Running(); len(got) != 3 {
		t.Errorf("%v run, want the two of before and a new one", got)
	}
	if bad := h.rt.Violations(); len(bad) > 0 {
		t.Error(bad)
	}
	s.end()
}

// TestCheckStore protects an operator from restoring records that contradict
// each other. That sound ones are never called so, every run in these tests
// checks when it ends.
func TestCheckStore(t *testing.T) {
	type record = map[string]any
	table := func(b store.Bucket) store.Table[record] { return store.Table[record]{Bucket: b} }
	edit := func(tx *store.Tx, b store.Bucket, change func(*store.Record[record])) error {
		all, err := table(b).List(tx)
		if err != nil {
			return err
		}
		change(all[0])
		return table(b).Put(tx, all[0])
	}
	remove := func(b store.Bucket) func(*store.Tx) error {
		return func(tx *store.Tx) error {
			all, err := table(b).List(tx)
			if err != nil {
				return err
			}
			return table(b).Delete(tx, all[0])
		}
	}
	for want, break_ := range map[string]func(*store.Tx) error{
		"is bound to Identity": remove(store.Identities),
		"is bound to Profile":  remove(store.Profiles),
		"names the runtime":    remove(store.Runtimes),
		"of another Identity": func(tx *store.Tx) error {
			return edit(tx, store.Profiles, func(r *store.Record[record]) { r.Value["identity"] = "identity-x" })
		},
		"which is another's": func(tx *store.Tx) error {
			return edit(tx, store.Runtimes, func(r *store.Record[record]) { r.Value["identity"] = "identity-x" })
		},
		"bound to one Profile": func(tx *store.Tx) error {
			return edit(tx, store.Bindings, func(r *store.Record[record]) { r.Key, r.Rev = "second", 0 })
		},
		"belongs to nothing": func(tx *store.Tx) error {
			return edit(tx, store.Runtimes, func(r *store.Record[record]) { r.Key, r.Rev = "second", 0 })
		},
	} {
		h := newTestHost(t)
		s := h.start()
		s.saved("work")
		s.use("alpha", "work")
		s.contradictory = true
		if err := s.store.Update(t.Context(), break_); err != nil {
			t.Fatal(err)
		}
		if err := s.store.View(t.Context(), fleet.CheckStore); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
		s.end()
	}
}
