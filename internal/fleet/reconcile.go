package fleet

import (
	"context"
	"errors"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/store"
)

// Reconcile brings records and reality together after the service was not
// there: what is proven to run is taken over, what died is recorded with how
// it ended, what is neither is cleaned up or quarantined, interrupted
// operations are finished or undone, and leftovers go. No Binding is ever
// removed.
//
// Operations may be called while it runs; they reconcile what they touch by
// themselves. One failure does not keep it from the rest; all are returned.
func (f *Fleet) Reconcile(ctx context.Context) error {
	actor := audit.System("reconcile")
	idKeys, sessions, profileKeys, err := f.inventory()
	if err != nil {
		return err
	}
	var errs []error
	each := func(keys []string, op string, lock func(string) string, fn func(context.Context, audit.Actor, string) error) {
		for _, key := range keys {
			if ctx.Err() != nil {
				return
			}
			_, err := run(ctx, f, op, lock(key), func(ctx context.Context) (struct{}, error) { return struct{}{}, fn(ctx, actor, key) })
			errs = append(errs, err)
		}
	}
	each(idKeys, "reconcile login", loginKey, f.reconcileLogin)
	each(sessions, "reconcile session", sessionKey, f.reconcileSession)
	each(profileKeys, "reconcile profile", unboundKey, f.reconcileUnbound)
	if ctx.Err() != nil {
		errs = append(errs, gone(ctx, "reconcile", "not everything was looked at", "The next use looks at what it touches"))
	}
	return errors.Join(errs...)
}

// RestartWanted starts the Session Browsers that are wanted and stopped: those
// that did not outlive their host. It takes half of the places for starts at
// most, so that who asks for a browser meanwhile does not wait for all of them.
// It follows Reconcile, and may run while operations do.
func (f *Fleet) RestartWanted(ctx context.Context) error {
	actor := audit.System("reconcile")
	_, sessions, _, err := f.inventory()
	if err != nil {
		return err
	}
	errs := make([]error, len(sessions))
	atOnce(f.restarts, len(sessions), func(i int) {
		if ctx.Err() != nil || f.work.Err() != nil {
			return // it stops; the next start goes on
		}
		_, errs[i] = run(ctx, f, opStart, sessionKey(sessions[i]), func(ctx context.Context) (struct{}, error) {
			return struct{}{}, f.restartWanted(ctx, actor, sessions[i])
		})
	})
	if ctx.Err() != nil {
		errs = append(errs, gone(ctx, "restart browsers", "not every wanted browser was started", "The next use starts them"))
	}
	return errors.Join(errs...)
}

// inventory lists what there is to reconcile: Identities, sessions with a
// Binding or an intent, and Profiles.
func (f *Fleet) inventory() (idKeys, sessions, profileKeys []string, err error) {
	err = f.view(func(tx *store.Tx) error {
		allIDs, err := identities.List(tx)
		if err != nil {
			return err
		}
		for _, id := range allIDs {
			idKeys = append(idKeys, id.Key)
		}
		allBindings, err := bindings.List(tx)
		if err != nil {
			return err
		}
		for _, b := range allBindings {
			sessions = append(sessions, b.Key)
		}
		allProfiles, err := profiles.List(tx)
		for _, p := range allProfiles {
			profileKeys = append(profileKeys, p.Key)
		}
		return err
	})
	return idKeys, sessions, profileKeys, err
}

func (f *Fleet) reconcileLogin(ctx context.Context, actor audit.Actor, key string) error {
	// A save that was cut off may have left the snapshot half swapped; nobody
	// clones from it while this holds the lock.
	if err := f.sweepIdentity(ctx, key); err != nil {
		return err
	}
	if err := f.resumeLogin(ctx, actor, key); err != nil {
		return err
	}
	id, err := f.loadIdentity(key)
	if errors.Is(err, store.ErrNotFound) {
		return nil // its deletion was finished
	}
	if err != nil {
		return err
	}
	_, err = f.reconcileStack(ctx, actor, id.Value.Instance)
	return err
}

func (f *Fleet) reconcileSession(ctx context.Context, actor audit.Actor, session string) error {
	// A switch that is undone may leave a replacement that is not proven gone;
	// that says nothing of the browser that the session keeps.
	undone := f.resumeSession(ctx, actor, session)
	if undone != nil {
		if open, err := f.hasIntent(sessionKey(session)); open || err != nil {
			return errors.Join(undone, err)
		}
	}
	b, err := f.loadBinding(session)
	if err != nil || b == nil {
		return errors.Join(undone, err)
	}
	r, err := f.reconcileStack(ctx, actor, b.profile.Value.Instance)
	if err != nil {
		return errors.Join(undone, err)
	}
	// A stop that was asked for before the service died is brought to its
	// end.
	if b.binding.Value.Wanted == WantedStopped && r.Value.State == Controllable {
		_, _, err = f.stop(ctx, actor, opStop, "stop was asked for", r.Key, func(*store.Tx) error { return nil })
	}
	return errors.Join(undone, err)
}

// hasIntent reports whether an operation is under way by the store's word.
func (f *Fleet) hasIntent(key string) (open bool, err error) {
	err = f.view(func(tx *store.Tx) error {
		it, err := optional(intents.Get(tx, key))
		open = it != nil
		return err
	})
	return open, err
}

// reconcileStack settles a Stack, and cleans one that is Broken once more. A
// Broken one never becomes READY by that.
func (f *Fleet) reconcileStack(ctx context.Context, actor audit.Actor, instance string) (*runtime, error) {
	r, err := f.settle(ctx, actor, instance)
	if err != nil || r.Value.State != Broken || r.Value.cleaned() {
		return r, err
	}
	if _, serr := f.stopStack(ctx, r.Value.Evidence, "cleanup"); serr != nil {
		f.log.Warn("a BROKEN browser could not be cleaned up", "instance", instance, "error", serr)
		return r, nil
	}
	return f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		if err := r.Value.apply(onCleaned, facts{vacant: true}, now()); err != nil {
			return err
		}
		return tx.Audit(event(actor, r, audit.RuntimeCleaned, audit.RuntimeCleaned, "%s was cleaned up", what(r)))
	})
}

// reconcileUnbound stops what runs on a Profile that no session has, before
// anybody can be given it, and removes one that was never finished.
func (f *Fleet) reconcileUnbound(ctx context.Context, actor audit.Actor, key string) error {
	var p *profile
	err := f.view(func(tx *store.Tx) (err error) {
		if p, err = optional(profiles.Get(tx, key)); err != nil || p == nil {
			return err
		}
		used, err := usedProfiles(tx)
		if used[key] {
			p = nil
		}
		return err
	})
	if err != nil || p == nil {
		return err
	}
	r, err := f.loadRuntime(p.Value.Instance)
	if err != nil {
		return err
	}
	if r.Value.State != Stopped {
		if r, err = f.reconcileStack(ctx, actor, p.Value.Instance); err != nil {
			return err
		}
	}
	if r.Value.State == Controllable {
		if _, _, err := f.stop(ctx, actor, "stop unbound browser", "no session has it", r.Key, func(*store.Tx) error { return nil }); err != nil {
			return err
		}
	}
	return f.discard(ctx, actor, key)
}

// restartWanted starts a bound Session Browser that is wanted and stopped.
func (f *Fleet) restartWanted(ctx context.Context, actor audit.Actor, session string) error {
	b, err := f.loadBinding(session)
	if err != nil || b == nil || b.binding.Value.Wanted != WantedRunning {
		return err
	}
	r, err := f.loadRuntime(b.profile.Value.Instance)
	if err != nil || r.Value.State != Stopped {
		return err
	}
	if _, err := f.start(ctx, actor, opStart, r.Key, session, ""); err != nil {
		return fmt.Errorf("session %q: %w", clip(session), err)
	}
	return nil
}
