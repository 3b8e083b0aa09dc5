package fleet

import (
	"context"
	"errors"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

const opRelease = "release session browser"

// Operate says that a caller uses the session's browser until it calls the
// function that it gets: a release waits for that, and callers wait for a
// release. It starts nothing.
func (f *Fleet) Operate(ctx context.Context, session string) (done func(), err error) {
	done, err = f.uses.share(ctx, session)
	if err != nil {
		return nil, gone(ctx, opReach, "its Session Browser is being released", "Try again")
	}
	return done, nil
}

// ReleaseSession ends a Session Browser for good, as a person confirmed: it waits
// for the session's running operations, stops the browser cleanly and removes
// the Identity Binding. Profile and login stay, for the next session or this
// one. With loggedOut the person says that the Profile's login is lost: it is
// not given to a session again before its Identity is saved anew.
//
// A BROKEN runtime gets Explicit Runtime Recovery first. Whatever is not proven
// gone in the end stays BROKEN, and bound.
func (f *Fleet) ReleaseSession(ctx context.Context, actor audit.Actor, session string, loggedOut bool) (SessionView, error) {
	if err := CheckSession(opRelease, session); err != nil {
		return SessionView{}, err
	}
	if !actor.Person() {
		return SessionView{}, fault.New(fault.Unauthorized, opRelease, "A person does it: abfleet session release "+fault.Word(session), "only a person may end a Session Browser for good")
	}
	lock := func(ctx context.Context) (func(), error) {
		idle, err := f.uses.lock(ctx, session)
		if err != nil {
			return nil, err
		}
		unlock, err := f.locks.lock(ctx, sessionKey(session))
		if err != nil {
			idle()
			return nil, err
		}
		return func() { unlock(); idle() }, nil
	}
	return runUnder(ctx, f, opRelease, lock, func(ctx context.Context) (SessionView, error) {
		if err := f.resumeSession(ctx, audit.System("interrupted operation"), session); err != nil {
			return SessionView{}, err
		}
		b, err := f.loadBinding(session)
		if err != nil {
			return SessionView{}, err
		}
		if b == nil {
			return SessionView{}, noSession(opRelease, session)
		}
		err = f.update(func(tx *store.Tx) error {
			return intents.Put(tx, &intent{Key: sessionKey(session), Value: intentRecord{
				Kind: intentRelease, Session: session, Identity: b.identity.Key, LoggedOut: loggedOut, Actor: actor, At: now(),
			}})
		})
		if err != nil {
			return SessionView{}, err
		}
		if err := f.stopReleased(ctx, actor, b); err != nil {
			return SessionView{}, errors.Join(err, f.undoRelease(actor, session))
		}
		v, err := f.sessionView(session)
		if err != nil {
			return SessionView{}, err
		}
		v.State, v.Wanted, v.Problem = Stopped, WantedStopped, nil
		return v, f.unbind(ctx, session)
	})
}

// stopReleased stops the browser of a release and proves it gone. Where the
// ordinary stop cannot, ownership may be reconstructed: a person asked.
func (f *Fleet) stopReleased(ctx context.Context, actor audit.Actor, b *bound) error {
	instance := b.profile.Value.Instance
	r, _, err := f.stop(ctx, actor, opRelease, "release", instance, func(*store.Tx) error { return nil })
	if errors.Is(err, ErrUndecided) {
		return err
	}
	if err == nil && (r.Value.State == Stopped || r.Value.cleaned()) {
		vacant, reason, err := f.vacant(ctx, instance)
		if err != nil || vacant {
			return err
		}
		return f.recoverReleased(ctx, actor, b, reason)
	}
	if err == nil {
		err = f.notControllable(opRelease, r)
	}
	return f.recoverReleased(ctx, actor, b, err)
}

func (f *Fleet) recoverReleased(ctx context.Context, actor audit.Actor, b *bound, reason error) error {
	f.log.Warn("an ordinary stop is not enough, recovery is tried", "instance", b.profile.Value.Instance, "session", b.binding.Key, "error", reason)
	return f.recover(ctx, actor, opRelease, b.profile.Value.Instance)
}

// vacant asks whether nothing of a Stack is left whose record says so, and why it
// is not so: the record may be older than what runs, where a copy of the state
// was restored.
func (f *Fleet) vacant(ctx context.Context, instance string) (vacant bool, reason, err error) {
	left, err := f.examine(ctx, instance, opRelease)
	if err != nil || left.Vacant {
		return left.Vacant, nil, err
	}
	return false, errors.New(left.Reason), nil
}

// recover is Explicit Runtime Recovery of a Stack that an ordinary cleanup did
// not prove gone. It records that nothing is left, and no more: what becomes of
// the state BROKEN is decided by the transaction that this was for.
func (f *Fleet) recover(ctx context.Context, actor audit.Actor, op, instance string) error {
	r, req, err := f.recoverRequest(instance)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*(f.cfg.StopTimeout+stopSlack))
	defer cancel()
	report, err := f.rt.Recover(ctx, req)
	if err != nil {
		hint := "Look at the evidence: abfleet recover " + fault.Word(r.Value.Session) + "; nothing that is not proven ours was signalled"
		if r.Value.login() {
			hint = "Look at the journal of the service; nothing that is not proven ours was signalled"
		}
		return f.failure(err, fault.BrowserStopUnproven, op, hint, r)
	}
	_, err = f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		fact := facts{vacant: true}
		on := onCleaned
		switch r.Value.State {
		case Stopped:
			return nil
		case Starting, Stopping, Controllable:
			on = onObserved
		}
		if err := r.Value.apply(on, fact, now()); err != nil {
			return err
		}
		r.Value.LastExit = &ExitReport{Clean: report.Clean, Trigger: "stop", Detail: report.Detail, At: now()}
		return tx.Audit(event(actor, r, audit.RuntimeCleaned, audit.RuntimeCleaned, "%s was recovered and stopped: %s", what(r), describeExit(r.Value.LastExit)))
	})
	if err != nil {
		f.hold(instance, nil, err)
		return err
	}
	f.mu.Lock()
	delete(f.quarantine, instance)
	f.mu.Unlock()
	return nil
}

// recoverRequest names a Stack by all that is known of it.
func (f *Fleet) recoverRequest(instance string) (*runtime, RecoverRequest, error) {
	r, err := f.loadRuntime(instance)
	if err != nil {
		return nil, RecoverRequest{}, err
	}
	req := RecoverRequest{Instance: instance, Profile: f.cfg.TemplateDir(r.Value.Identity), Evidence: r.Value.Evidence}
	if !r.Value.login() {
		req.Profile = f.cfg.ProfileDir(r.Value.Identity, r.Value.Profile)
	}
	f.mu.Lock()
	if held := f.quarantine[instance]; len(held) > 0 {
		req.Evidence = held
	}
	f.mu.Unlock()
	return r, req, nil
}

// unbind removes the Binding that a release intent is about, whose browser is
// proven gone. In the same transaction a BROKEN Profile returns to allocation;
// one that never was controllable is removed after it.
func (f *Fleet) unbind(ctx context.Context, session string) error {
	var b *bound
	err := f.update(func(tx *store.Tx) error {
		it, err := intents.Get(tx, sessionKey(session))
		if err != nil {
			return err
		}
		if b, err = getBound(tx, session); err != nil {
			return err
		}
		r, err := runtimes.Get(tx, b.profile.Value.Instance)
		if err != nil {
			return err
		}
		if r.Value.State == Broken {
			if err := recovered(tx, it.Value.Actor, r); err != nil {
				return err
			}
			if err := runtimes.Put(tx, r); err != nil {
				return err
			}
		}
		if it.Value.LoggedOut {
			if err := changeProfile(tx, r, onLoggedOut, facts{user: true}); err != nil {
				return err
			}
		}
		if err := bindings.Delete(tx, b.binding); err != nil {
			return err
		}
		if err := intents.Delete(tx, it); err != nil {
			return err
		}
		return tx.Audit(Event{
			Type: audit.BindingReleased, Actor: it.Value.Actor, Session: session, Identity: b.identity.Key,
			Summary: fmt.Sprintf("the session was released from Identity %q", b.identity.Value.Name),
			Details: map[string]string{"profile": b.profile.Key, "instance": r.Key},
		})
	})
	if err != nil {
		return err
	}
	f.discardLeft(ctx, "release", b.profile.Key)
	return nil
}

// undoRelease ends the intent of a release that could not be finished. The
// Binding was never touched.
func (f *Fleet) undoRelease(actor audit.Actor, session string) error {
	return f.update(func(tx *store.Tx) error {
		it, err := optional(intents.Get(tx, sessionKey(session)))
		if err != nil || it == nil {
			return err
		}
		if err := intents.Delete(tx, it); err != nil {
			return err
		}
		return tx.Audit(Event{
			Type: audit.ReleaseUndone, Actor: actor, Session: session, Identity: it.Value.Identity,
			Summary: "the session keeps its Identity: its browser is not proven stopped",
		})
	})
}

// resumeRelease finishes a release that a service that died had begun, as the
// person wanted, as far as an ordinary cleanup goes: recovery needs the person.
func (f *Fleet) resumeRelease(ctx context.Context, actor audit.Actor, it *intent, b *bound) error {
	session := it.Value.Session
	r, err := f.settle(ctx, actor, b.profile.Value.Instance)
	if err != nil {
		return err
	}
	if r.Value.State == Controllable {
		if r, _, err = f.stop(ctx, it.Value.Actor, opRelease, "release", r.Key, func(*store.Tx) error { return nil }); errors.Is(err, ErrUndecided) {
			return err
		}
	}
	if err == nil && (r.Value.State == Stopped || r.Value.cleaned()) {
		vacant, reason, verr := f.vacant(ctx, r.Key)
		if verr != nil {
			return verr
		}
		if vacant {
			return f.unbind(ctx, session)
		}
		err = reason
	}
	if err != nil {
		f.log.Warn("cannot finish an interrupted release", "session", session, "error", err)
	}
	return f.undoRelease(actor, session)
}

// RecoveryView is what an operator is shown before deciding on a recovery.
type RecoveryView struct {
	SessionView
	SessionUnits
	Examination Examination `json:"examination"`
}

// ExamineSession says what is left of a Session Browser, for a person who has to
// decide whether to release it. It changes nothing.
func (f *Fleet) ExamineSession(ctx context.Context, session string) (RecoveryView, error) {
	const op = "examine session browser"
	view, err := f.Session(ctx, session)
	if err != nil {
		return RecoveryView{}, err
	}
	v := RecoveryView{SessionView: view}
	if v.SessionUnits, err = f.SessionUnits(ctx, session); err != nil {
		return RecoveryView{}, err
	}
	v.Examination, err = f.examine(ctx, v.Instance, op)
	return v, err
}

func (f *Fleet) examine(ctx context.Context, instance, op string) (Examination, error) {
	r, req, err := f.recoverRequest(instance)
	if err != nil {
		return Examination{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	left, err := f.rt.Examine(ctx, req)
	if err != nil {
		err = f.failure(err, fault.BrowserNotControllable, op, "Try again; if it persists, look at the journal of the service", r)
	}
	return left, err
}
