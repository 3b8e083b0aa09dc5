package fleet

import (
	"context"
	"fmt"
	"time"

	"abfleet/internal/config"
	"abfleet/internal/store"
)

// ShortenObserveAgain makes retries of observations quick for tests.
func ShortenObserveAgain() { observeAgain = []time.Duration{time.Millisecond, time.Millisecond} }

// ProfileOf returns "<identity>/profiles/<profile>" of a bound session, "" for
// another one.
func ProfileOf(db store.DB, session string) (path string) {
	err := db.View(context.Background(), func(tx *store.Tx) error {
		b, err := getBound(tx, session)
		if err == nil && b != nil {
			path = b.binding.Value.Identity + "/profiles/" + b.binding.Value.Profile
		}
		return err
	})
	if err != nil {
		return ""
	}
	return path
}

// EvidenceOf returns what a Browser would prove itself by.
func (b *Browser) EvidenceOf() Evidence { return b.runtime.Value.Evidence }

// InstanceOf returns the instance of a Browser.
func (b *Browser) InstanceOf() string { return b.runtime.Key }

// StoreInvariants returns what is wrong with the records by themselves.
func StoreInvariants(db store.DB) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	err := db.View(context.Background(), func(tx *store.Tx) error {
		ids, err := identities.List(tx)
		if err != nil {
			return err
		}
		ps, err := profiles.List(tx)
		if err != nil {
			return err
		}
		bs, err := bindings.List(tx)
		if err != nil {
			return err
		}
		rs, err := runtimes.List(tx)
		if err != nil {
			return err
		}
		its, err := intents.List(tx)
		if err != nil {
			return err
		}
		owner := map[string]string{}
		for _, id := range ids {
			owner[id.Value.Instance] = id.Key
		}
		profileByKey := map[string]*profile{}
		for _, p := range ps {
			owner[p.Value.Instance], profileByKey[p.Key] = p.Key, p
		}
		for _, r := range rs {
			if owner[r.Key] == "" {
				say("runtime %s belongs to nothing", r.Key)
			}
			if r.Value.State == Stopped && len(r.Value.Evidence) > 0 {
				say("stopped runtime %s has evidence", r.Key)
			}
			if r.Value.State == Controllable && len(r.Value.Evidence) == 0 {
				say("controllable runtime %s has no evidence", r.Key)
			}
		}
		if len(rs) != len(owner) {
			say("%d runtimes for %d owners", len(rs), len(owner))
		}
		boundTo := map[string]string{}
		for _, b := range bs {
			p := profileByKey[b.Value.Profile]
			if p == nil || p.Value.Identity != b.Value.Identity {
				say("session %s is bound to a Profile of another Identity", b.Key)
			}
			if other := boundTo[b.Value.Profile]; other != "" {
				say("sessions %s and %s share a Profile", other, b.Key)
			}
			boundTo[b.Value.Profile] = b.Key
		}
		for _, it := range its {
			if it.Value.Profile != "" && boundTo[it.Value.Profile] != "" {
				say("a switch reserves the bound Profile of %s", boundTo[it.Value.Profile])
			}
		}
		return nil
	})
	if err != nil {
		say("%v", err)
	}
	return wrong
}

// Settled returns what a finished reconciliation must not leave: intents, and
// states that say something is under way.
func Settled(db store.DB) (wrong []string) {
	err := db.View(context.Background(), func(tx *store.Tx) error {
		its, err := intents.List(tx)
		if err != nil {
			return err
		}
		for _, it := range its {
			wrong = append(wrong, "intent "+it.Key)
		}
		rs, err := runtimes.List(tx)
		if err != nil {
			return err
		}
		for _, r := range rs {
			switch r.Value.State {
			case Starting, Stopping, Unverified:
				wrong = append(wrong, "runtime "+r.Key+" is "+string(r.Value.State))
			}
		}
		used, err := usedProfiles(tx)
		if err != nil {
			return err
		}
		ps, err := profiles.List(tx)
		for _, p := range ps {
			if !used[p.Key] && p.Value.State == Creating {
				wrong = append(wrong, "unfinished Profile "+p.Key)
			}
		}
		return err
	})
	if err != nil {
		wrong = append(wrong, err.Error())
	}
	return wrong
}

// ControllableInstances lists the instances that are recorded controllable.
func ControllableInstances(db store.DB) map[string]bool {
	list := map[string]bool{}
	_ = db.View(context.Background(), func(tx *store.Tx) error {
		rs, err := runtimes.List(tx)
		for _, r := range rs {
			if r.Value.State == Controllable {
				list[r.Key] = true
			}
		}
		return err
	})
	return list
}

// Refuse is the first half of Close.
func (f *Fleet) Refuse() { f.refuse() }

// FailStore makes transactions fail with what fail returns, nil for none.
func FailStore(f *Fleet, fail func() error) {
	f.db.(interface{ SetFail(func() error) }).SetFail(fail)
}

// MayStart reports whether another start would be admitted now.
func MayStart(f *Fleet) bool {
	f.starts.mu.Lock()
	defer f.starts.mu.Unlock()
	return f.starts.free > 0
}

// Watchers is how many Stacks are watched.
func Watchers(f *Fleet) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.watched)
}

// SetLimits gives an Identity limits of its own.
func SetLimits(db store.DB, identity string, l config.Limits) {
	err := db.Update(context.Background(), func(tx *store.Tx) error {
		return changeIdentity(tx, identity, func(v *identityRecord) error { v.Limits = l; return nil })
	})
	if err != nil {
		panic(err)
	}
}
