package fleet

import (
	"context"
	"errors"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

const (
	opUse    = "use identity"
	opStart  = "start session browser"
	opStop   = "stop session browser"
	opSwitch = "switch identity"
)

// bound is a Binding with what it points to.
type bound struct {
	binding  *binding
	identity *identity
	profile  *profile
}

// loadBinding returns nil for a session without a Binding.
func (f *Fleet) loadBinding(session string) (*bound, error) {
	var b *bound
	err := f.view(func(tx *store.Tx) (err error) {
		b, err = getBound(tx, session)
		return err
	})
	return b, err
}

func getBound(tx *store.Tx, session string) (*bound, error) {
	bind, err := optional(bindings.Get(tx, session))
	if err != nil || bind == nil {
		return nil, err
	}
	b := &bound{binding: bind}
	if b.identity, err = identities.Get(tx, bind.Value.Identity); err != nil {
		return nil, err
	}
	b.profile, err = profiles.Get(tx, bind.Value.Profile)
	return b, err
}

// UseIdentity binds the session to an Identity and ensures that its Session
// Browser runs. The same Identity again changes nothing. Another one replaces
// the browser: the new one is started first, and the old one stays as it is if
// anything fails.
func (f *Fleet) UseIdentity(ctx context.Context, actor audit.Actor, session, ref string) (SessionView, error) {
	if err := CheckSession(opUse, session); err != nil {
		return SessionView{}, err
	}
	return run(ctx, f, opUse, sessionKey(session), func(ctx context.Context) (SessionView, error) {
		if err := f.resumeSession(ctx, audit.System("interrupted operation"), session); err != nil {
			return SessionView{}, err
		}
		var id *identity
		err := f.view(func(tx *store.Tx) (err error) {
			id, err = find(tx, opUse, ref)
			return err
		})
		if err != nil {
			return SessionView{}, err
		}
		b, err := f.loadBinding(session)
		if err != nil {
			return SessionView{}, err
		}
		if b == nil || b.identity.Key != id.Key {
			if err := checkReady(id); err != nil {
				return SessionView{}, err
			}
		}
		switch {
		case b == nil:
			b, err = f.bind(actor, session, id)
			if err == nil {
				_, err = f.ensure(ctx, actor, b)
			}
		case b.identity.Key == id.Key:
			_, err = f.ensure(ctx, actor, b)
		default:
			err = f.switchTo(ctx, actor, b, id)
		}
		if err != nil {
			return SessionView{}, err
		}
		return f.sessionView(session)
	})
}

// checkReady refuses an Identity that new Profiles cannot be made of.
func checkReady(id *identity) error {
	switch id.Value.State {
	case Ready:
		return nil
	case Deleting:
		return beingDeleted(opUse, id)
	}
	name := fault.Word(id.Value.Name)
	return fault.New(fault.IdentityNotReady, opUse,
		"A person has to log in and save it first: abfleet identity login "+name+", then abfleet identity save "+name, "Identity %q is %s", id.Value.Name, id.Value.State)
}

// allocate returns a Profile of an Identity that nobody uses, or a new one. The
// Identity may have changed since it was looked at. A BROKEN Profile of which
// nothing is left returns to allocation if a person selects its Identity: no
// session has it that a person could release.
func (f *Fleet) allocate(tx *store.Tx, actor audit.Actor, key, session string) (*profile, error) {
	id, err := identities.Get(tx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, noIdentity(opUse, key)
	}
	if err == nil {
		err = checkReady(id)
	}
	if err != nil {
		return nil, err
	}
	used, err := usedProfiles(tx)
	if err != nil {
		return nil, err
	}
	all, err := profiles.List(tx)
	if err != nil {
		return nil, err
	}
	var free *profile
	for _, p := range all {
		if p.Value.Identity != id.Key || used[p.Key] || f.isQuarantined(p.Value.Instance) {
			continue
		}
		renewable := p.Value.State == NeedsLogin && p.Value.LoggedOut.Before(id.Value.SnapshotAt)
		recoverable := p.Value.State == Broken && actor.Person()
		if p.Value.State != Ready && !renewable && !recoverable {
			continue
		}
		r, err := runtimes.Get(tx, p.Value.Instance)
		if err != nil {
			return nil, err
		}
		if !recoverable && r.Value.State != Stopped || recoverable && !r.Value.cleaned() {
			continue
		}
		// The one this session had before is best, the oldest one next.
		better := free == nil || p.Value.Created.Before(free.Value.Created)
		if free != nil && (p.Value.LastSession == session) != (free.Value.LastSession == session) {
			better = p.Value.LastSession == session
		}
		if better {
			free = p
		}
	}
	at := now()
	if free == nil {
		free = &profile{Key: profilePrefix + randomText(alphanumeric, idLength), Value: profileRecord{Identity: id.Key, Created: at}}
		if err := free.Value.apply(onCreate, facts{}, at); err != nil {
			return nil, err
		}
		if free.Value.Instance, err = newRuntime(tx, runtimeRecord{Identity: id.Key, Profile: free.Key, Updated: at}); err != nil {
			return nil, err
		}
	}
	if free.Value.State == Broken {
		if free, err = f.reclaim(tx, actor, free); err != nil {
			return nil, err
		}
	}
	if free.Value.State == NeedsLogin {
		if err := free.Value.apply(onRenew, facts{vacant: true}, at); err != nil {
			return nil, err
		}
	}
	free.Value.LastSession, free.Value.Updated = session, at
	return free, profiles.Put(tx, free)
}

// reclaim returns a BROKEN Profile to allocation, of whose Stack nothing is left.
func (f *Fleet) reclaim(tx *store.Tx, actor audit.Actor, p *profile) (*profile, error) {
	r, err := runtimes.Get(tx, p.Value.Instance)
	if err != nil {
		return nil, err
	}
	if err := recovered(tx, actor, r); err != nil {
		return nil, err
	}
	if err := runtimes.Put(tx, r); err != nil {
		return nil, err
	}
	return profiles.Get(tx, p.Key)
}

// bind makes the first Binding of a session.
func (f *Fleet) bind(actor audit.Actor, session string, id *identity) (*bound, error) {
	var b *bound
	err := f.update(func(tx *store.Tx) error {
		p, err := f.allocate(tx, actor, id.Key, session)
		if err != nil {
			return err
		}
		at := now()
		bind := &binding{Key: session, Value: bindingRecord{Identity: id.Key, Profile: p.Key, Wanted: WantedRunning, Created: at, Updated: at}}
		if err := bindings.Put(tx, bind); err != nil {
			return err
		}
		b = &bound{bind, id, p}
		return tx.Audit(Event{
			Type: audit.BindingCreated, Actor: actor, Session: session, Identity: id.Key,
			Summary: fmt.Sprintf("the session uses Identity %q", id.Value.Name), Details: map[string]string{"profile": p.Key, "instance": p.Value.Instance},
		})
	})
	return b, err
}

// setWanted records what the user wants of the Binding.
func setWanted(tx *store.Tx, session string, wanted Wanted) error {
	b, err := bindings.Get(tx, session)
	if err != nil || b.Value.Wanted == wanted {
		return err
	}
	b.Value.Wanted, b.Value.Updated = wanted, now()
	return bindings.Put(tx, b)
}

// wantRunning records that the bound Session Browser is wanted, if it was not.
func (f *Fleet) wantRunning(session string) error {
	var wanted Wanted
	err := f.view(func(tx *store.Tx) error {
		b, err := bindings.Get(tx, session)
		if err == nil {
			wanted = b.Value.Wanted
		}
		return err
	})
	if err != nil || wanted == WantedRunning {
		return err
	}
	return f.update(func(tx *store.Tx) error { return setWanted(tx, session, WantedRunning) })
}

// ensure returns the bound Session Browser running, started if need be.
func (f *Fleet) ensure(ctx context.Context, actor audit.Actor, b *bound) (*runtime, error) {
	r, err := f.settle(ctx, audit.System("next use"), b.profile.Value.Instance)
	if err != nil {
		return nil, err
	}
	// Now, because an operator's stop that was just found out about says the
	// opposite.
	if err := f.wantRunning(b.binding.Key); err != nil {
		return nil, err
	}
	switch r.Value.State {
	case Controllable:
		return r, nil
	case Stopped:
		return f.start(ctx, actor, opStart, r.Key, b.binding.Key, "")
	}
	return nil, f.notControllable(opStart, r)
}

// switchTo replaces the Session Browser by one of another Identity.
func (f *Fleet) switchTo(ctx context.Context, actor audit.Actor, b *bound, id *identity) error {
	session := b.binding.Key
	var p *profile
	err := f.update(func(tx *store.Tx) (err error) {
		if p, err = f.allocate(tx, actor, id.Key, session); err != nil {
			return err
		}
		return intents.Put(tx, &intent{Key: sessionKey(session), Value: intentRecord{
			Kind: intentSwitch, Session: session, Identity: id.Key, Profile: p.Key, Actor: actor, At: now(),
		}})
	})
	if err != nil {
		return err
	}
	if _, err := f.start(ctx, actor, opSwitch, p.Value.Instance, session, ""); err != nil {
		return errors.Join(err, f.undoSwitch(ctx, actor, session, p.Key))
	}
	if err := f.stopReplaced(ctx, actor, b); err != nil {
		return errors.Join(err, f.undoSwitch(ctx, actor, session, p.Key))
	}
	return f.swap(ctx, actor, session)
}

// stopReplaced stops the browser that a replacement stands by for. One that is
// Broken or quarantined has to be proven gone, too.
func (f *Fleet) stopReplaced(ctx context.Context, actor audit.Actor, b *bound) error {
	session := b.binding.Key
	r, _, err := f.stop(ctx, actor, opSwitch, "switch", b.profile.Value.Instance, func(tx *store.Tx) error {
		it, err := intents.Get(tx, sessionKey(session))
		if err != nil {
			return err
		}
		it.Value.Replacing = true
		return intents.Put(tx, it)
	})
	if err != nil {
		return err
	}
	if r.Value.State != Stopped && !r.Value.cleaned() {
		return f.notControllable(opSwitch, r)
	}
	return nil
}

// swap binds the session to the replacement of its switch intent, whose old
// browser is proven gone. In the same transaction a person's switch returns a
// BROKEN Profile to allocation; an agent's leaves it BROKEN.
func (f *Fleet) swap(ctx context.Context, actor audit.Actor, session string) error {
	var b *bound
	err := f.update(func(tx *store.Tx) error {
		it, err := intents.Get(tx, sessionKey(session))
		if err != nil {
			return err
		}
		if b, err = getBound(tx, session); err != nil {
			return err
		}
		old, err := runtimes.Get(tx, b.profile.Value.Instance)
		if err != nil {
			return err
		}
		if old.Value.State == Broken && actor.Person() {
			if err := recovered(tx, actor, old); err != nil {
				return err
			}
			if err := runtimes.Put(tx, old); err != nil {
				return err
			}
		}
		at := now()
		b.binding.Value = bindingRecord{
			Identity: it.Value.Identity, Profile: it.Value.Profile, Wanted: WantedRunning,
			Created: b.binding.Value.Created, Updated: at,
		}
		if err := bindings.Put(tx, b.binding); err != nil {
			return err
		}
		if err := intents.Delete(tx, it); err != nil {
			return err
		}
		id, err := identities.Get(tx, it.Value.Identity)
		if err != nil {
			return err
		}
		return tx.Audit(Event{
			Type: audit.BindingSwitched, Actor: actor, Session: session, Identity: id.Key,
			Summary: fmt.Sprintf("the session uses Identity %q instead of %q", id.Value.Name, b.identity.Value.Name),
			Details: map[string]string{"from": b.profile.Key, "to": it.Value.Profile},
		})
	})
	if err != nil {
		return err
	}
	f.discardLeft(ctx, "switch", b.profile.Key)
	return nil
}

// discardLeft removes the Profile that a session has left, if it never was
// controllable. What the session asked for is done, whatever comes of this.
func (f *Fleet) discardLeft(ctx context.Context, op, profileKey string) {
	if err := f.discard(ctx, audit.System(op), profileKey); err != nil {
		f.log.Warn("an unfinished Profile stays until the next start of the service", "profile", profileKey, "error", err)
	}
}

// undoSwitch stops the replacement, frees its Profile and ends the intent. The
// Binding was never touched.
func (f *Fleet) undoSwitch(ctx context.Context, actor audit.Actor, session, profileKey string) error {
	var p *profile
	err := f.view(func(tx *store.Tx) (err error) {
		p, err = optional(profiles.Get(tx, profileKey))
		return err
	})
	if err != nil {
		return err
	}
	var serr error
	if p != nil {
		_, _, serr = f.stop(ctx, actor, opSwitch, "switch undone", p.Value.Instance, func(*store.Tx) error { return nil })
	}
	if errors.Is(serr, ErrUndecided) {
		return serr // the intent stays, and has it undone at the next use
	}
	err = f.update(func(tx *store.Tx) error {
		if err := endIntent(tx, sessionKey(session)); err != nil {
			return err
		}
		return tx.Audit(Event{Type: audit.SwitchUndone, Actor: actor, Session: session, Summary: "the session keeps its Identity: the switch was undone"})
	})
	if err == nil && serr == nil && p != nil && p.Value.State == Creating {
		err = f.discard(ctx, actor, profileKey)
	}
	return errors.Join(serr, err)
}

// discard removes a Profile that never was controllable and that nobody uses.
func (f *Fleet) discard(ctx context.Context, actor audit.Actor, profileKey string) error {
	var p *profile
	// free reports whether the Profile may go, in one view of the store.
	free := func(tx *store.Tx) (r *runtime, err error) {
		if p, err = optional(profiles.Get(tx, profileKey)); err != nil || p == nil || p.Value.State != Creating {
			return nil, err
		}
		used, err := usedProfiles(tx)
		if err != nil || used[profileKey] {
			return nil, err
		}
		if r, err = runtimes.Get(tx, p.Value.Instance); err != nil || r.Value.State != Stopped {
			return nil, err
		}
		return r, nil
	}
	const op = "remove unused profile"
	unlock, err := f.locks.lock(ctx, "discard:"+profileKey)
	if err != nil {
		return gone(ctx, op, "nothing was changed", "The next start of the service tries again")
	}
	defer unlock()
	var r *runtime
	err = f.view(func(tx *store.Tx) (err error) { r, err = free(tx); return err })
	if err != nil || r == nil {
		return err
	}
	// Sweeps keep away from the directory meanwhile.
	release, err := f.snapshots.share(ctx, p.Value.Identity)
	if err != nil {
		return gone(ctx, op, "nothing was changed", "The next start of the service tries again")
	}
	defer release()
	dir := f.cfg.ProfileDir(p.Value.Identity, profileKey)
	tctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), treeTimeout)
	defer cancel()
	if err := f.rt.RemoveTree(tctx, dir); err != nil {
		return f.failure(err, fault.Internal, op, "The next start of the service tries again", r)
	}
	err = f.update(func(tx *store.Tx) error {
		var err error
		if r, err = free(tx); err != nil || r == nil {
			return err
		}
		if err := p.Value.apply(onDiscard, facts{vacant: true}, now()); err != nil {
			return err
		}
		if err := runtimes.Delete(tx, r); err != nil {
			return err
		}
		if err := profiles.Delete(tx, p); err != nil {
			return err
		}
		return tx.Audit(Event{
			Type: audit.ProfileDiscarded, Actor: actor, Identity: p.Value.Identity,
			Summary: "an unfinished Profile was removed", Details: map[string]string{"profile": profileKey, "instance": r.Key},
		})
	})
	if err == nil && r != nil {
		f.forget(r.Key)
	}
	return err
}

// usedProfiles are the Profiles that a Binding or an intent refers to.
func usedProfiles(tx *store.Tx) (map[string]bool, error) {
	used := map[string]bool{}
	allBindings, err := bindings.List(tx)
	if err != nil {
		return nil, err
	}
	for _, b := range allBindings {
		used[b.Value.Profile] = true
	}
	allIntents, err := intents.List(tx)
	for _, it := range allIntents {
		used[it.Value.Profile] = true
	}
	return used, err
}

// resumeSession ends a switch or a release that a service that died had begun. A
// switch is finished once the old browser is gone, and undone as long as it is
// not.
func (f *Fleet) resumeSession(ctx context.Context, actor audit.Actor, session string) error {
	var it *intent
	err := f.view(func(tx *store.Tx) (err error) {
		it, err = optional(intents.Get(tx, sessionKey(session)))
		return err
	})
	if err != nil || it == nil {
		return err
	}
	b, err := f.loadBinding(session)
	if err != nil {
		return err
	}
	switch {
	case b == nil && it.Value.Kind == intentRelease:
		return f.update(func(tx *store.Tx) error { return endIntent(tx, sessionKey(session)) })
	case it.Value.Kind == intentRelease:
		return f.resumeRelease(ctx, actor, it, b)
	}
	if !it.Value.Replacing || b == nil {
		return f.undoSwitch(ctx, actor, session, it.Value.Profile)
	}
	old, err := f.settle(ctx, actor, b.profile.Value.Instance)
	if err != nil {
		return err
	}
	if old.Value.State == Stopped || old.Value.cleaned() {
		return f.swap(ctx, it.Value.Actor, session)
	}
	return f.undoSwitch(ctx, actor, session, it.Value.Profile)
}

// StopSession stops the Session Browser cleanly. Binding and Profile stay, and
// the next use starts it again.
func (f *Fleet) StopSession(ctx context.Context, actor audit.Actor, session string) (SessionView, error) {
	if err := CheckSession(opStop, session); err != nil {
		return SessionView{}, err
	}
	return run(ctx, f, opStop, sessionKey(session), func(ctx context.Context) (SessionView, error) {
		if err := f.resumeSession(ctx, audit.System("interrupted operation"), session); err != nil {
			return SessionView{}, err
		}
		b, err := f.loadBinding(session)
		if err != nil {
			return SessionView{}, err
		}
		if b == nil {
			return SessionView{}, noSession(opStop, session)
		}
		r, _, err := f.stop(ctx, actor, opStop, "session stopped", b.profile.Value.Instance, func(tx *store.Tx) error {
			return setWanted(tx, session, WantedStopped)
		})
		if err != nil {
			return SessionView{}, err
		}
		if r.Value.State != Stopped {
			return SessionView{}, f.notControllable(opStop, r)
		}
		return f.sessionView(session)
	})
}

// RestartSession stops the Session Browser cleanly and starts it again, with its
// Profile and under the present configuration.
func (f *Fleet) RestartSession(ctx context.Context, actor audit.Actor, session string) (SessionView, error) {
	const op = "restart session browser"
	if err := CheckSession(op, session); err != nil {
		return SessionView{}, err
	}
	return run(ctx, f, op, sessionKey(session), func(ctx context.Context) (SessionView, error) {
		if err := f.resumeSession(ctx, audit.System("interrupted operation"), session); err != nil {
			return SessionView{}, err
		}
		b, err := f.loadBinding(session)
		if err != nil {
			return SessionView{}, err
		}
		if b == nil {
			return SessionView{}, noSession(op, session)
		}
		// It is wanted from now on: a service that dies in between starts it.
		r, _, err := f.stop(ctx, actor, op, "restart", b.profile.Value.Instance, func(tx *store.Tx) error {
			return setWanted(tx, session, WantedRunning)
		})
		if err != nil {
			return SessionView{}, err
		}
		if r.Value.State != Stopped {
			return SessionView{}, f.notControllable(op, r)
		}
		if _, err := f.start(ctx, actor, op, r.Key, session, ""); err != nil {
			return SessionView{}, err
		}
		return f.sessionView(session)
	})
}

func noSession(op, session string) error {
	return fault.New(fault.SessionNotFound, op, "List the sessions: abfleet session list", "session %q has no Session Browser", clip(session))
}

// Browser returns the session's Browser, controllable: one that was stopped or
// died is started again with its Profile.
func (f *Fleet) Browser(ctx context.Context, session string) (*Browser, error) {
	if err := CheckSession(opReach, session); err != nil {
		return nil, err
	}
	return run(ctx, f, opReach, sessionKey(session), func(ctx context.Context) (*Browser, error) {
		if err := f.resumeSession(ctx, audit.System("interrupted operation"), session); err != nil {
			return nil, err
		}
		b, err := f.loadBinding(session)
		if err != nil {
			return nil, err
		}
		if b == nil {
			return nil, fault.NotSelected(opReach)
		}
		r, err := f.ensure(ctx, audit.System("next use"), b)
		if err != nil {
			return nil, err
		}
		return f.browser(session, b.identity, r), nil
	})
}

// RunningBrowser returns the session's Browser while it runs. Unlike Browser
// it never starts one: it is for those who only look.
func (f *Fleet) RunningBrowser(ctx context.Context, session string) (*Browser, error) {
	if err := CheckSession(opReach, session); err != nil {
		return nil, err
	}
	var (
		bd *bound
		r  *runtime
	)
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		if bd, err = getBound(tx, session); err != nil || bd == nil {
			return err
		}
		r, err = runtimes.Get(tx, bd.profile.Value.Instance)
		return err
	})
	if err != nil {
		return nil, err
	}
	if bd == nil {
		return nil, fault.NotSelected(opReach)
	}
	switch r.Value.State {
	case Controllable:
	case Stopped:
		return nil, fault.New(fault.BrowserStopped, opReach, "Its next use by the agent, or selecting its Identity, starts it", "it is stopped")
	default:
		return nil, fault.New(fault.BrowserNotControllable, opReach, "Look at it: abfleet session show "+fault.Word(session), "it is %s", r.Value.State)
	}
	b := f.browser(session, bd.identity, r)
	return b, b.Running(ctx)
}

// Sessions lists all bound sessions, in the order of their ids.
func (f *Fleet) Sessions(ctx context.Context) ([]SessionView, error) {
	views := []SessionView{}
	var evidence []Evidence
	err := f.db.View(ctx, func(tx *store.Tx) error {
		all, err := bindings.List(tx)
		if err != nil {
			return err
		}
		for _, b := range all {
			v, ev, err := f.viewSession(tx, b.Key)
			if err != nil {
				return err
			}
			views, evidence = append(views, v), append(evidence, ev)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	atOnce(observers, len(views), func(i int) { f.observeSession(ctx, &views[i], evidence[i]) })
	return views, nil
}

// Session shows a bound session. One without a Binding is session_not_found.
func (f *Fleet) Session(ctx context.Context, session string) (SessionView, error) {
	const op = "show session"
	if err := CheckSession(op, session); err != nil {
		return SessionView{}, err
	}
	var (
		v  SessionView
		ev Evidence
	)
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		v, ev, err = f.viewSession(tx, session)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return SessionView{}, noSession(op, session)
	}
	if err != nil {
		return SessionView{}, err
	}
	f.observeSession(ctx, &v, ev)
	return v, nil
}

// SessionUnits names what systemd has of a Session Browser, running or not. It is
// for operators: no agent and no page is told.
type SessionUnits struct {
	Instance string `json:"instance"`
	Slice    string `json:"slice"`
}

// SessionUnits returns the names for a bound session.
func (f *Fleet) SessionUnits(ctx context.Context, session string) (SessionUnits, error) {
	var units SessionUnits
	err := f.db.View(ctx, func(tx *store.Tx) error {
		b, err := getBound(tx, session)
		if err != nil {
			return err
		}
		if b == nil {
			return noSession("show session", session)
		}
		units.Instance = b.profile.Value.Instance
		units.Slice = f.cfg.Slice(units.Instance)
		return nil
	})
	return units, err
}

// sessionView is the session after an operation that proved what it is.
func (f *Fleet) sessionView(session string) (SessionView, error) {
	var v SessionView
	err := f.view(func(tx *store.Tx) (err error) {
		v, _, err = f.viewSession(tx, session)
		return err
	})
	return v, err
}
