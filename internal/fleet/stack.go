package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// This file handles one Stack: settle says what it is, start and stop change
// it. The caller holds the lock of the session or login that it belongs to.

func (f *Fleet) isQuarantined(instance string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.quarantine[instance]
	return ok
}

// hold quarantines a Stack in memory: the store could not take what is true.
func (f *Fleet) hold(instance string, ev Evidence, cause error) {
	f.log.Error("a browser is quarantined in memory: its state cannot be stored", "instance", instance, "error", cause)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.quarantine[instance] = ev
}

func (f *Fleet) setProven(r *runtime) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.proven[r.Key] = r.Value.Generation
	f.watch(r)
}

// forget drops what this process knew of Stacks that are no more.
func (f *Fleet) forget(instances ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, instance := range instances {
		delete(f.proven, instance)
	}
}

func (f *Fleet) isProven(r *runtime) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	generation, seen := f.proven[r.Key]
	return seen && generation == r.Value.Generation
}

func (f *Fleet) observe(ctx context.Context, ev Evidence) (Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	return f.rt.Observe(ctx, ev)
}

// stopStack is Runtime.Stop with its deadline. Close does not end it: a stop
// that is broken off leaves a browser nobody can prove anything about.
func (f *Fleet) stopStack(ctx context.Context, ev Evidence, reason string) (StopReport, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.cfg.StopTimeout+stopSlack)
	defer cancel()
	return f.rt.Stop(ctx, ev, reason)
}

func (f *Fleet) loadRuntime(instance string) (*runtime, error) {
	var r *runtime
	err := f.view(func(tx *store.Tx) (err error) {
		r, err = runtimes.Get(tx, instance)
		return err
	})
	return r, err
}

// changeRuntime applies fn to the stored runtime in one transaction and
// returns the result.
func (f *Fleet) changeRuntime(instance string, fn func(tx *store.Tx, r *runtime) error) (*runtime, error) {
	var r *runtime
	err := f.update(func(tx *store.Tx) (err error) {
		if r, err = runtimes.Get(tx, instance); err != nil {
			return err
		}
		if err := fn(tx, r); err != nil {
			return err
		}
		return runtimes.Put(tx, r)
	})
	return r, err
}

// changeProfile applies a trigger to the runtime's Profile, if it has one.
func changeProfile(tx *store.Tx, r *runtime, on trigger, f facts) error {
	if r.Value.login() {
		return nil
	}
	p, err := profiles.Get(tx, r.Value.Profile)
	if err != nil {
		return err
	}
	if err := p.Value.apply(on, f, now()); err != nil {
		return err
	}
	return profiles.Put(tx, p)
}

// event returns an audit event about a Stack, with the type that fits a
// session or a login.
func event(actor audit.Actor, r *runtime, session, login audit.Type, format string, args ...any) Event {
	e := Event{Type: session, Actor: actor, Session: r.Value.Session, Identity: r.Value.Identity, Summary: fmt.Sprintf(format, args...)}
	if r.Value.login() {
		e.Type = login
	}
	e.Details = map[string]string{
		"instance": r.Key, "generation": fmt.Sprint(r.Value.Generation), "state": string(r.Value.State),
	}
	if r.Value.Profile != "" {
		e.Details["profile"] = r.Value.Profile
	}
	return e
}

// what names a Stack's browser in a sentence.
func what(r *runtime) string {
	if r.Value.login() {
		return "the login browser"
	}
	return "the Session Browser"
}

func describeExit(e *ExitReport) string {
	how := "uncleanly"
	switch {
	case e == nil:
		return "how is not known"
	case e.Detail != "":
		how = e.Detail
	case e.Clean:
		how = "cleanly"
	}
	if !e.Clean {
		// Chromium writes cookies every 30 s, and session cookies for a clean end.
		how += "; logins in session cookies are lost, and what pages stored in its last 30 s may be lost"
	}
	return how
}

// settle makes the record of a Stack say what is true: it is adopted when it
// is proven ours and answers, recorded as stopped when it is proven gone, and
// cleaned up otherwise. The state of the runtime it returns is Controllable,
// Stopped, Broken or Quarantined. An error means that nothing could be found
// out or recorded; the Stack is not exposed then.
func (f *Fleet) settle(ctx context.Context, actor audit.Actor, instance string) (*runtime, error) {
	if err := f.releaseHeld(ctx, actor, instance); err != nil {
		return nil, err
	}
	r, err := f.loadRuntime(instance)
	if err != nil {
		return nil, err
	}
	switch r.Value.State {
	case Stopped, Broken:
		return r, nil
	}
	if len(r.Value.Evidence) == 0 {
		// The service died before the first role was recorded, and so before
		// any was released.
		return f.observed(ctx, actor, r, Observation{State: Stopped, Reason: "no role was released"})
	}
	// A Stack that this process never saw controllable gets one look: after
	// a restart of the service nothing is taken on trust.
	known := f.isProven(r)
	for try := 0; ; try++ {
		obs, err := f.observe(ctx, r.Value.Evidence)
		if err == nil && obs.State == Stopped {
			// Nobody else removes its files, and a display number is not given
			// out again while its lock is there.
			if _, serr := f.stopStack(ctx, r.Value.Evidence, "it ended"); serr != nil {
				f.log.Warn("leftovers of a browser stay", "instance", r.Key, "error", serr)
			}
		}
		if err == nil && (obs.State == Controllable || obs.State == Stopped) {
			return f.observed(ctx, actor, r, obs)
		}
		if ctx.Err() != nil {
			return nil, gone(ctx, opReach, "nothing was changed", "Try again")
		}
		if err == nil && obs.State == Ended {
			return f.cleanUp(ctx, actor, r, obs)
		}
		if known && try < len(observeAgain) {
			select {
			case <-time.After(observeAgain[try]):
				continue
			case <-ctx.Done():
				return nil, gone(ctx, opReach, "nothing was changed", "Try again")
			}
		}
		if err != nil && (known || errors.Is(err, ErrUndecided)) {
			return nil, f.failure(err, fault.BrowserNotControllable, opReach, "Try again; if it persists, look at the journal of the service", r)
		}
		if err != nil {
			obs = Observation{State: Unverified, Reason: err.Error()}
		}
		return f.cleanUp(ctx, actor, r, obs)
	}
}

// releaseHeld ends a quarantine in memory: first what runs is stopped, then
// the store has to take it.
func (f *Fleet) releaseHeld(ctx context.Context, actor audit.Actor, instance string) error {
	f.mu.Lock()
	ev, held := f.quarantine[instance]
	f.mu.Unlock()
	if !held {
		return nil
	}
	if len(ev) > 0 {
		if _, err := f.stopStack(ctx, ev, "its state could not be stored"); err != nil {
			r := &runtime{Key: instance}
			return f.failure(err, fault.BrowserNotControllable, opReach, "Look at the journal of the service and at `abfleet doctor`", r)
		}
	}
	_, err := f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		switch r.Value.State {
		case Stopped, Broken:
			return nil
		}
		if err := r.Value.apply(onObserved, facts{vacant: true}, now()); err != nil {
			return err
		}
		return tx.Audit(event(actor, r, audit.RuntimeCleaned, audit.RuntimeCleaned, "%s was stopped: its state could not be stored", what(r)))
	})
	if err != nil {
		return err
	}
	f.mu.Lock()
	delete(f.quarantine, instance)
	f.mu.Unlock()
	return nil
}

// endUnrecorded ends a Stack whose truth the store could not take: it runs, and
// nobody would know after this process. Until that is done, and stored, it is
// quarantined in memory.
func (f *Fleet) endUnrecorded(ctx context.Context, actor audit.Actor, instance string, ev Evidence, cause error) error {
	if errors.Is(cause, store.ErrConflict) {
		return cause // another operation has recorded it meanwhile
	}
	f.hold(instance, ev, cause)
	return errors.Join(cause, f.releaseHeld(ctx, actor, instance))
}

// observed records an observation that proves something.
func (f *Fleet) observed(ctx context.Context, actor audit.Actor, seen *runtime, obs Observation) (*runtime, error) {
	fact := facts{proof: obs.State == Controllable, vacant: obs.State == Stopped}
	if fact.proof && seen.Value.State == Controllable && f.isProven(seen) {
		return seen, nil
	}
	r, err := f.changeRuntime(seen.Key, func(tx *store.Tx, r *runtime) error {
		if r.Rev != seen.Rev {
			return store.ErrConflict
		}
		was := r.Value.State
		if err := r.Value.apply(onObserved, fact, now()); err != nil {
			return err
		}
		if fact.proof {
			r.Value.Problem = nil
			if err := changeProfile(tx, r, onStarted, fact); err != nil {
				return err
			}
			return tx.Audit(event(actor, r, audit.SessionAdopted, audit.LoginAdopted, "%s runs and was taken over", what(r)))
		}
		r.Value.LastExit = obs.Exit
		switch was {
		case Starting:
			return tx.Audit(event(actor, r, audit.SessionStartFailed, audit.LoginStartFailed, "the start of %s was interrupted", what(r)))
		case Stopping:
			return tx.Audit(event(actor, r, audit.SessionStopped, audit.LoginStopped, "%s was stopped: %s", what(r), describeExit(obs.Exit)))
		}
		return recordEnd(tx, actor, r, obs.Exit)
	})
	if err != nil && fact.proof {
		return nil, f.endUnrecorded(ctx, actor, seen.Key, seen.Value.Evidence, err)
	}
	if err != nil {
		return nil, err
	}
	if fact.proof {
		f.setProven(r)
	}
	return r, nil
}

// cleanUp stops what could not be proven to be in order. It is quarantined
// when that is not proven either. Of a browser that is gone only the rest is
// cleared away, and it is no state of its own that this is under way.
func (f *Fleet) cleanUp(ctx context.Context, actor audit.Actor, seen *runtime, obs Observation) (*runtime, error) {
	recorded := func(r *runtime, fact facts) error {
		if r.Rev != seen.Rev {
			return store.ErrConflict
		}
		return r.Value.apply(onObserved, fact, now())
	}
	r, err := seen, error(nil)
	if obs.State != Ended {
		r, err = f.changeRuntime(seen.Key, func(tx *store.Tx, r *runtime) error {
			if err := recorded(r, facts{}); err != nil || seen.Value.State == Quarantined {
				return err // a quarantine was told before
			}
			e := event(actor, r, audit.RuntimeUnverified, audit.RuntimeUnverified, "%s is not proven to be in order and is cleaned up", what(r))
			e.Details["reason"] = obs.Reason
			return tx.Audit(e)
		})
	}
	if err != nil {
		return nil, f.endUnrecorded(ctx, actor, seen.Key, seen.Value.Evidence, err)
	}
	report, serr := f.stopStack(ctx, r.Value.Evidence, "cleanup: "+obs.Reason)
	exit := obs.Exit
	if exit == nil && serr == nil {
		exit = &ExitReport{Clean: report.Clean, Trigger: "stop", Detail: report.Detail, At: now()}
	}
	var refusal error
	if serr != nil {
		refusal = f.failure(serr, fault.BrowserStopUnproven, "clean up browser",
			"It is kept and not exposed; the next start of the service or the next use tries again", r)
	}
	if errors.Is(serr, ErrUndecided) {
		return nil, refusal // as it was, it is looked at again
	}
	r, err = f.changeRuntime(r.Key, func(tx *store.Tx, r *runtime) error {
		fact := facts{vacant: serr == nil}
		if obs.State == Ended {
			if err := recorded(r, fact); err != nil {
				return err
			}
		}
		if r.Value.State != Stopped {
			if err := r.Value.apply(onCleaned, fact, now()); err != nil {
				return err
			}
		}
		r.Value.LastExit = exit
		if refusal != nil {
			r.Value.Problem = problem(refusal, now())
			if seen.Value.State == Quarantined {
				return nil
			}
			return tx.Audit(event(actor, r, audit.RuntimeQuarantined, audit.RuntimeQuarantined, "%s is quarantined: its cleanup is not proven", what(r)))
		}
		r.Value.Problem = nil
		if obs.State == Ended {
			return recordEnd(tx, actor, r, exit)
		}
		return tx.Audit(event(actor, r, audit.RuntimeCleaned, audit.RuntimeCleaned, "%s was cleaned up: %s", what(r), describeExit(exit)))
	})
	if err != nil {
		f.hold(seen.Key, seen.Value.Evidence, err)
		return nil, err
	}
	return r, nil
}

// notControllable is the error for a Stack that settle found in a state that
// only a person can end.
func (f *Fleet) notControllable(op string, r *runtime) error {
	hint := "Do not retry. A person can look at the evidence and release it, which keeps its login: abfleet recover " + fault.Word(r.Value.Session)
	if r.Value.login() {
		hint = "Start the login again: that cleans it up first"
	}
	cause := errors.New("its last cleanup is not proven")
	if p := r.Value.Problem; p != nil {
		cause = fmt.Errorf("%w: %s", cause, p.Message)
	}
	return fault.New(fault.BrowserNotControllable, op, hint, "it is %s: %w", r.Value.State, cause)
}

// start starts a stopped Stack.
func (f *Fleet) start(ctx context.Context, actor audit.Actor, op, instance, session, url string) (*runtime, error) {
	req, _, err := f.request(instance, session, url)
	if err != nil {
		return nil, err
	}
	// Before it takes a place among the starts: a save may take minutes, and
	// those of other Identities do not wait for it.
	if req.CloneFrom != "" {
		unlock, err := f.snapshots.share(ctx, req.Identity)
		if err != nil {
			return nil, gone(ctx, op, "nothing was started", "Try again when the Identity's save is done")
		}
		defer unlock()
	}
	admission, cancel := context.WithTimeout(ctx, admissionTimeout)
	defer cancel()
	leave, err := f.starts.enter(admission, instance)
	if err != nil {
		if ctx.Err() != nil {
			return nil, gone(ctx, op, "nothing was started", "Try again in a few seconds")
		}
		return nil, fault.New(fault.BrowserStartFailed, op, "Try again when fewer browsers are starting", "its turn did not come within %s", admissionTimeout)
	}
	defer leave()
	// Again: its limits may have changed while it waited.
	req, dirty, err := f.request(instance, session, url)
	if err != nil {
		return nil, err
	}

	r, err := f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		if err := r.Value.apply(onStart, facts{}, now()); err != nil {
			return err
		}
		v := &r.Value
		v.Generation++
		v.Session, v.Evidence, v.Problem, v.Started = session, nil, nil, time.Time{}
		req.Generation = v.Generation
		return nil
	})
	if err != nil {
		return nil, err
	}

	req.Record = func(_ context.Context, ev Evidence) error {
		_, err := f.changeRuntime(instance, func(_ *store.Tx, r *runtime) error {
			if r.Value.State != Starting || r.Value.Generation != req.Generation {
				return store.ErrConflict
			}
			r.Value.Evidence = ev
			return nil
		})
		return err
	}
	ev, serr := f.launch(ctx, req, dirty)
	if serr != nil {
		return nil, f.startFailed(ctx, actor, op, r, ev, serr)
	}
	done, err := f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		if err := r.Value.apply(onStarted, facts{proof: true}, now()); err != nil {
			return err
		}
		r.Value.Evidence, r.Value.Started = ev, now()
		if err := changeProfile(tx, r, onStarted, facts{proof: true}); err != nil {
			return err
		}
		return tx.Audit(event(actor, r, audit.SessionStarted, audit.LoginStarted, "%s was started", what(r)))
	})
	if err != nil {
		return nil, f.endUnrecorded(ctx, actor, instance, ev, err)
	}
	f.setProven(done)
	return done, nil
}

// request says what to start. dirty is set when the Profile's directory may
// hold the rest of an attempt that failed.
func (f *Fleet) request(instance, session, url string) (req StartRequest, dirty bool, err error) {
	err = f.view(func(tx *store.Tx) error {
		r, err := runtimes.Get(tx, instance)
		if err != nil {
			return err
		}
		id := r.Value.Identity
		of, err := identities.Get(tx, id)
		if err != nil {
			return err
		}
		req = StartRequest{Instance: instance, Profile: f.cfg.TemplateDir(id), URL: url, Session: session, Identity: id, Limits: of.Value.Limits.Over(f.cfg.Limits)}
		if r.Value.login() {
			return nil
		}
		p, err := profiles.Get(tx, r.Value.Profile)
		if err != nil {
			return err
		}
		req.Profile = f.cfg.ProfileDir(id, r.Value.Profile)
		if p.Value.State == Creating {
			req.CloneFrom = f.cfg.SnapshotDir(id)
			dirty = r.Value.Generation > 0
		}
		return nil
	})
	return req, dirty, err
}

// launch prepares the directory and starts the Stack.
func (f *Fleet) launch(ctx context.Context, req StartRequest, dirty bool) (Evidence, error) {
	prepare, cancel := context.WithTimeout(ctx, treeTimeout)
	defer cancel()
	switch {
	case req.Session == "":
		if err := f.rt.CreateProfile(prepare, req.Profile); err != nil {
			return nil, &StartError{Confirmed: true, Err: err}
		}
	case dirty:
		// A Profile that was never controllable holds nothing of a user's.
		if err := f.rt.RemoveTree(prepare, req.Profile); err != nil {
			return nil, &StartError{Confirmed: true, Err: err}
		}
	}
	ctx, cancel = context.WithTimeout(ctx, f.cfg.StartTimeout)
	defer cancel()
	return f.rt.Start(ctx, req)
}

// startFailed records a failed start. Nothing of it is left, or it is BROKEN.
func (f *Fleet) startFailed(ctx context.Context, actor audit.Actor, op string, started *runtime, ev Evidence, serr error) error {
	r, err := f.loadRuntime(started.Key)
	if err != nil {
		f.hold(started.Key, ev, err)
		return errors.Join(serr, err)
	}
	if len(ev) == 0 {
		ev = r.Value.Evidence
	}
	var failed *StartError
	confirmed := errors.As(serr, &failed) && failed.Confirmed
	if !confirmed && len(r.Value.Evidence) == 0 {
		confirmed = true // no role was ever released
	}
	if !confirmed {
		_, cerr := f.stopStack(ctx, ev, "start failed")
		confirmed = cerr == nil
		serr = errors.Join(serr, cerr)
	}
	hint := "Try once more; if it fails again, do not go on trying: a person has to run: abfleet doctor"
	if !confirmed {
		hint = "Do not retry. Its cleanup is not proven, so it is kept and not exposed; a person has to look at the journal of the service"
	}
	public := f.failure(serr, fault.BrowserStartFailed, op, hint, r)
	if !confirmed && errors.Is(serr, ErrUndecided) {
		// What was released is recorded; it is settled at the next use or start.
		return public
	}
	_, err = f.changeRuntime(r.Key, func(tx *store.Tx, r *runtime) error {
		fact := facts{vacant: confirmed}
		if err := r.Value.apply(onStartFailed, fact, now()); err != nil {
			return err
		}
		r.Value.Problem = problem(public, now())
		if confirmed {
			return tx.Audit(event(actor, r, audit.SessionStartFailed, audit.LoginStartFailed, "%s did not start: %s", what(r), public))
		}
		r.Value.Evidence = ev
		if err := changeProfile(tx, r, onStartFailed, fact); err != nil {
			return err
		}
		return tx.Audit(event(actor, r, audit.RuntimeBroken, audit.RuntimeBroken, "%s did not start and its cleanup is not proven: %s", what(r), public))
	})
	if err != nil {
		if confirmed {
			ev = nil // nothing is left to stop, only to record
		}
		f.hold(r.Key, ev, err)
		return errors.Join(public, err)
	}
	return public
}

// stop stops a Stack and proves it. record runs in the transaction that
// records the wish to stop. The returned runtime is Stopped unless there is an
// error, or Broken as it was before: an ordinary stop cleans a Broken Stack
// and does not make it READY.
func (f *Fleet) stop(ctx context.Context, actor audit.Actor, op, reason, instance string, record func(*store.Tx) error) (*runtime, StopReport, error) {
	if err := f.releaseHeld(ctx, actor, instance); err != nil {
		return nil, StopReport{}, err
	}
	r, err := f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		switch r.Value.State {
		case Stopped, Broken, Quarantined:
		default:
			if err := r.Value.apply(onStop, facts{}, now()); err != nil {
				return err
			}
		}
		return record(tx)
	})
	if err != nil || r.Value.State == Stopped {
		return r, StopReport{Clean: true}, err
	}
	report, serr := StopReport{Clean: true}, error(nil)
	if len(r.Value.Evidence) > 0 {
		report, serr = f.stopStack(ctx, r.Value.Evidence, reason)
	}
	var public error
	if serr != nil {
		public = f.failure(serr, fault.BrowserStopUnproven, op, "It is kept and not exposed. Look at the journal of the service; nothing that is not proven ours was signalled", r)
	}
	if errors.Is(serr, ErrUndecided) {
		// The record stays as it is, and is settled at the next use or start.
		return r, report, public
	}
	was, left := r.Value.State, Evidence(nil)
	if serr != nil {
		left = r.Value.Evidence
	}
	r, err = f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		on := onStopDone
		if was == Broken || was == Quarantined {
			on = onCleaned
		}
		fact := facts{vacant: serr == nil}
		if err := r.Value.apply(on, fact, now()); err != nil {
			return err
		}
		if public != nil {
			r.Value.Problem = problem(public, now())
			if on == onStopDone {
				if err := changeProfile(tx, r, onStopDone, fact); err != nil {
					return err
				}
			}
			told := audit.RuntimeBroken
			if was == Quarantined {
				told = audit.RuntimeQuarantined
			}
			return tx.Audit(event(actor, r, told, told, "%s could not be stopped: %s", what(r), public))
		}
		if was == Broken {
			return tx.Audit(event(actor, r, audit.RuntimeCleaned, audit.RuntimeCleaned, "%s was cleaned up", what(r)))
		}
		r.Value.Problem = nil
		r.Value.LastExit = &ExitReport{Clean: report.Clean, Trigger: "stop", Detail: report.Detail, At: now()}
		return tx.Audit(event(actor, r, audit.SessionStopped, audit.LoginStopped, "%s was stopped: %s", what(r), describeExit(r.Value.LastExit)))
	})
	if err != nil {
		f.hold(instance, left, err)
		return nil, report, errors.Join(public, err)
	}
	return r, report, public
}
