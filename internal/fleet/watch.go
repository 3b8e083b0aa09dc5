package fleet

import (
	"context"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/store"
)

// watchAgain and watchAtLeast are the first and the longest pause before a Stack
// is watched again that was told to have lost something and turned out to be in
// order, of which could not be found out what became of it, or that could not be
// watched. Each pause doubles. Where nothing errs there is none.
const (
	watchAgain   = time.Second
	watchAtLeast = time.Minute
)

// watch has the end of a generation noticed that this process has proven. A
// generation is watched once, until it ends or the Fleet closes. It needs f.mu
// held.
func (f *Fleet) watch(r *runtime) {
	if f.watched[r.Key] == r.Value.Generation || f.closed {
		return
	}
	f.watched[r.Key] = r.Value.Generation
	f.watchers.Add(1)
	go func() {
		defer f.watchers.Done()
		f.watchOver(r.Key, r.Value.Generation, r.Value.Evidence)
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.watched[r.Key] == r.Value.Generation {
			delete(f.watched, r.Key)
		}
	}()
}

// watchOver records the end of a generation when it comes.
func (f *Fleet) watchOver(instance string, generation uint64, ev Evidence) {
	for pause := watchAgain; ; pause = min(2*pause, watchAtLeast) {
		err := f.rt.Watch(f.work, ev)
		if f.work.Err() != nil {
			return
		}
		if err != nil {
			f.log.Warn("a browser cannot be watched, it is looked at now and then", "instance", instance, "error", err)
		}
		runs, err := f.settleEnded(f.work, instance, generation)
		if err != nil && f.work.Err() == nil {
			f.log.Warn("cannot record the end of a browser", "instance", instance, "error", err)
		}
		if !runs && err == nil {
			return // it ended, and that is recorded
		}
		select {
		case <-time.After(pause):
		case <-f.work.Done():
			return
		}
	}
}

// settleEnded settles a Stack that has lost something, once whoever works on it
// is done, and reports whether that generation runs nevertheless. What was done
// to it meanwhile is told already. Nothing is restarted: that is for the next
// use.
func (f *Fleet) settleEnded(ctx context.Context, instance string, generation uint64) (runs bool, err error) {
	type outcome struct{ moved, runs bool }
	for {
		owner, err := f.owner(instance)
		if err != nil || owner == "" {
			return false, err
		}
		did, err := run(ctx, f, "record the end of a browser", owner, func(ctx context.Context) (outcome, error) {
			// Another session may have got its Profile while this waited.
			if now, err := f.owner(instance); err != nil || now != owner {
				return outcome{moved: true}, err
			}
			r, err := f.loadRuntime(instance)
			if err != nil || r.Value.Generation != generation || r.Value.State != Controllable {
				return outcome{}, err
			}
			// A host that shuts down ends all of them at once.
			leave, err := f.ends.enter(ctx, instance)
			if err != nil {
				return outcome{}, err
			}
			defer leave()
			r, err = f.settle(ctx, audit.System("watch"), instance)
			return outcome{runs: err == nil && r.Value.State == Controllable}, err
		})
		if err != nil || !did.moved {
			return did.runs, err
		}
	}
}

// owner is the key of the lock under which operations work on a Stack now, empty
// when the Stack is not known any more.
func (f *Fleet) owner(instance string) (key string, err error) {
	err = f.view(func(tx *store.Tx) error {
		r, err := optional(runtimes.Get(tx, instance))
		if err != nil || r == nil {
			return err
		}
		if r.Value.login() {
			key = loginKey(r.Value.Identity)
			return nil
		}
		key = unboundKey(r.Value.Profile)
		all, err := bindings.List(tx)
		for _, b := range all {
			if b.Value.Profile == r.Value.Profile {
				key = sessionKey(b.Key)
			}
		}
		if err != nil {
			return err
		}
		open, err := intents.List(tx)
		for _, it := range open {
			if it.Value.Profile == r.Value.Profile {
				key = it.Key // the replacement of a switch
			}
		}
		return err
	})
	return key, err
}

// recordEnd stores how a Stack ended that nobody here stopped. What an operator
// stopped through systemd stays stopped, as what is stopped through the fleet.
func recordEnd(tx *store.Tx, actor audit.Actor, r *runtime, exit *ExitReport) error {
	r.Value.LastExit = exit
	if exit == nil || exit.Trigger != TriggerOperator {
		return tx.Audit(event(actor, r, audit.SessionEnded, audit.LoginEnded, "%s ended: %s", what(r), describeExit(exit)))
	}
	b, err := optional(bindings.Get(tx, r.Value.Session))
	if err != nil {
		return err
	}
	if b != nil && b.Value.Profile == r.Value.Profile {
		if err := setWanted(tx, b.Key, WantedStopped); err != nil {
			return err
		}
	}
	operator := audit.Actor{Kind: audit.KindOperator, How: "systemd"}
	return tx.Audit(event(operator, r, audit.SessionStopped, audit.LoginStopped, "%s was stopped: %s", what(r), describeExit(exit)))
}
