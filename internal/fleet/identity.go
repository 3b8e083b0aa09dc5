package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// CreateIdentity makes an Identity. It has to be logged in and saved before
// sessions can use it.
func (f *Fleet) CreateIdentity(ctx context.Context, actor audit.Actor, name string) (IdentityView, error) {
	const op = "create identity"
	name, err := checkName(op, name)
	if err != nil {
		return IdentityView{}, err
	}
	var v IdentityView
	err = f.db.Update(ctx, func(tx *store.Tx) error {
		if err := nameFree(tx, op, name, ""); err != nil {
			return err
		}
		id := &identity{Key: identityPrefix + randomText(alphanumeric, idLength)}
		at := now()
		id.Value = identityRecord{Name: name, Fold: fold(name), Created: at}
		if err := id.Value.apply(onCreate, facts{}, at); err != nil {
			return err
		}
		if id.Value.Instance, err = newRuntime(tx, runtimeRecord{Identity: id.Key, Updated: at}); err != nil {
			return err
		}
		if err := identities.Put(tx, id); err != nil {
			return err
		}
		if v, err = f.identityView(tx, id); err != nil {
			return err
		}
		return tx.Audit(Event{Type: audit.IdentityCreated, Actor: actor, Identity: id.Key, Summary: fmt.Sprintf("Identity %q was created", name)})
	})
	return v, err
}

// Identities lists all Identities, in the order of their names.
func (f *Fleet) Identities(ctx context.Context) ([]IdentityView, error) {
	views := []IdentityView{}
	err := f.db.View(ctx, func(tx *store.Tx) error {
		all, err := identities.List(tx)
		if err != nil {
			return err
		}
		for _, id := range all {
			v, err := f.identityView(tx, id)
			if err != nil {
				return err
			}
			views = append(views, v)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	sortBy(views, func(v IdentityView) string { return fold(v.Name) })
	atOnce(observers, len(views), func(i int) { f.observeLogin(ctx, &views[i]) })
	return views, nil
}

// Identity shows one Identity; ref is its id or its name in any case.
func (f *Fleet) Identity(ctx context.Context, ref string) (IdentityView, error) {
	var v IdentityView
	err := f.db.View(ctx, func(tx *store.Tx) error {
		id, err := find(tx, "show identity", ref)
		if err != nil {
			return err
		}
		v, err = f.identityView(tx, id)
		return err
	})
	if err == nil {
		f.observeLogin(ctx, &v)
	}
	return v, err
}

// login runs fn under the lock of an Identity's login, after what a service
// that died left of its last operation was finished or undone.
func (f *Fleet) login(ctx context.Context, actor audit.Actor, op, ref string, fn func(ctx context.Context, id *identity) error) (IdentityView, error) {
	var id *identity
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		id, err = findUsable(tx, op, ref)
		return err
	})
	if err != nil {
		return IdentityView{}, err
	}
	key := id.Key
	return run(ctx, f, op, loginKey(key), func(ctx context.Context) (IdentityView, error) {
		if err := f.resumeLogin(ctx, audit.System("interrupted operation"), key); err != nil {
			return IdentityView{}, err
		}
		var id *identity
		// It may have been deleted while this waited.
		err := f.view(func(tx *store.Tx) (err error) {
			id, err = findUsable(tx, op, key)
			return err
		})
		if err != nil {
			return IdentityView{}, err
		}
		if err := fn(ctx, id); err != nil {
			return IdentityView{}, err
		}
		var v IdentityView
		err = f.view(func(tx *store.Tx) error {
			id, err := identities.Get(tx, key)
			if err != nil {
				return err
			}
			v, err = f.identityView(tx, id)
			return err
		})
		return v, err
	})
}

func (f *Fleet) loadIdentity(key string) (*identity, error) {
	var id *identity
	err := f.view(func(tx *store.Tx) (err error) {
		id, err = identities.Get(tx, key)
		return err
	})
	return id, err
}

// changeIdentity applies fn to the stored Identity within a transaction.
func changeIdentity(tx *store.Tx, key string, fn func(*identityRecord) error) error {
	id, err := identities.Get(tx, key)
	if err != nil {
		return err
	}
	if err := fn(&id.Value); err != nil {
		return err
	}
	return identities.Put(tx, id)
}

// StartLogin starts the Identity's login browser on its template, for a person
// to log in with, and opens url in it. One that runs is left as it is.
func (f *Fleet) StartLogin(ctx context.Context, actor audit.Actor, ref, url string) (IdentityView, error) {
	const op = "start login browser"
	if err := checkURL(op, url); err != nil {
		return IdentityView{}, err
	}
	return f.login(ctx, actor, op, ref, func(ctx context.Context, id *identity) error {
		r, err := f.settle(ctx, audit.System("next use"), id.Value.Instance)
		stuck := err == nil && (r.Value.State == Broken || r.Value.State == Quarantined)
		if stuck || f.isQuarantined(id.Value.Instance) {
			r, err = f.recoverLogin(ctx, actor, op, id.Value.Instance, err)
		}
		if err != nil {
			return err
		}
		switch r.Value.State {
		case Controllable:
			return nil
		case Stopped:
		default:
			return f.notControllable(op, r)
		}
		// Before the browser can change the template, the Identity says that
		// there is something to save.
		err = f.update(func(tx *store.Tx) error {
			return changeIdentity(tx, id.Key, func(v *identityRecord) error {
				v.Unsaved, v.Updated = true, now()
				return nil
			})
		})
		if err != nil {
			return err
		}
		_, err = f.start(ctx, actor, op, id.Value.Instance, "", url)
		return err
	})
}

// recoverLogin makes a BROKEN or quarantined login browser usable again because a
// person starts a login, if it is proven gone. stuck is why an ordinary cleanup
// failed, nil where its record says so.
func (f *Fleet) recoverLogin(ctx context.Context, actor audit.Actor, op, instance string, stuck error) (*runtime, error) {
	r, err := f.loadRuntime(instance)
	if err != nil {
		return nil, err
	}
	if !actor.Person() {
		return nil, cmp.Or(stuck, f.notControllable(op, r))
	}
	if !r.Value.cleaned() || f.isQuarantined(instance) {
		if err := f.recover(ctx, actor, op, instance); err != nil {
			return nil, err
		}
	}
	return f.changeRuntime(instance, func(tx *store.Tx, r *runtime) error {
		if r.Value.State != Broken {
			r.Value.Problem = nil // what was quarantined is stopped by its recovery
			return nil
		}
		return recovered(tx, actor, r)
	})
}

// recovered records that a Broken Stack is proven gone and that a person's
// action ends its state.
func recovered(tx *store.Tx, actor audit.Actor, r *runtime) error {
	fact := facts{vacant: true, user: true}
	if err := r.Value.apply(onRecovered, fact, now()); err != nil {
		return err
	}
	r.Value.Problem = nil
	if !r.Value.login() {
		p, err := profiles.Get(tx, r.Value.Profile)
		if err != nil {
			return err
		}
		if p.Value.State == Broken {
			if err := changeProfile(tx, r, onRecovered, fact); err != nil {
				return err
			}
		}
	}
	return tx.Audit(event(actor, r, audit.RuntimeRecovered, audit.RuntimeRecovered, "%s was recovered", what(r)))
}

// StopLogin closes the login browser without saving. What was done in it
// stays in the template.
func (f *Fleet) StopLogin(ctx context.Context, actor audit.Actor, ref string) (IdentityView, error) {
	const op = "stop login browser"
	return f.login(ctx, actor, op, ref, func(ctx context.Context, id *identity) error {
		_, _, err := f.stop(ctx, actor, op, "login stopped", id.Value.Instance, func(*store.Tx) error { return nil })
		return err
	})
}

// SaveIdentity closes the login browser cleanly and makes its state the
// Template Snapshot that new Profiles are cloned from. A login browser that
// the person closed already is saved too. Whatever fails, the last good
// snapshot stays.
func (f *Fleet) SaveIdentity(ctx context.Context, actor audit.Actor, ref string) (IdentityView, error) {
	return f.login(ctx, actor, opSave, ref, func(ctx context.Context, id *identity) error {
		r, err := f.settle(ctx, audit.System("next use"), id.Value.Instance)
		if err != nil {
			return err
		}
		if r.Value.State != Controllable && r.Value.State != Stopped {
			return f.notControllable(opSave, r)
		}
		if r.Value.State == Stopped && !id.Value.Unsaved {
			return fault.New(fault.LoginNotRunning, opSave, "Start a login first: abfleet identity login "+fault.Word(id.Value.Name), "no login was started since the last save")
		}
		it := &intent{Key: loginKey(id.Key), Value: intentRecord{Kind: intentSave, Identity: id.Key, Actor: actor, At: now()}}
		r, _, err = f.stop(ctx, actor, opSave, "save", id.Value.Instance, func(tx *store.Tx) error { return intents.Put(tx, it) })
		if err != nil {
			return f.saveFailed(actor, id.Key, err)
		}
		return f.capture(ctx, actor, id.Key, r)
	})
}

const opSave = "save identity"

// capture makes the snapshot of a stopped template and ends the save intent.
func (f *Fleet) capture(ctx context.Context, actor audit.Actor, key string, r *runtime) error {
	if x := r.Value.LastExit; x != nil && !x.Clean {
		return f.saveFailed(actor, key, fault.New(fault.UncleanExit, opSave,
			"Start the login again, check that you are still logged in, and save", "the login browser did not end cleanly: %s", describeExit(x)))
	}
	unlock, err := f.snapshots.lock(ctx, key)
	if err != nil {
		return f.saveFailed(actor, key, gone(ctx, opSave, "nothing was saved", "Try again"))
	}
	defer unlock()
	tctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), treeTimeout)
	defer cancel()
	if err := f.rt.CaptureSnapshot(tctx, f.cfg.TemplateDir(key), f.cfg.SnapshotDir(key)); err != nil {
		return f.saveFailed(actor, key, f.failure(err, fault.Internal, opSave, "The last good snapshot is kept. Try again; if it persists, run: abfleet doctor", r))
	}
	return f.update(func(tx *store.Tx) error {
		if err := endIntent(tx, loginKey(key)); err != nil {
			return err
		}
		name := ""
		err := changeIdentity(tx, key, func(v *identityRecord) error {
			at := now()
			v.Unsaved, v.SnapshotAt, v.Problem, name = false, at, nil, v.Name
			return v.apply(onSaved, facts{vacant: true}, at)
		})
		if err != nil {
			return err
		}
		return tx.Audit(Event{Type: audit.SnapshotSaved, Actor: actor, Identity: key, Summary: fmt.Sprintf("Identity %q was saved", name)})
	})
}

// saveFailed ends the save intent with an error, which it returns.
func (f *Fleet) saveFailed(actor audit.Actor, key string, cause error) error {
	err := f.update(func(tx *store.Tx) error {
		if err := endIntent(tx, loginKey(key)); err != nil {
			return err
		}
		err := changeIdentity(tx, key, func(v *identityRecord) error {
			v.Problem = problem(cause, now())
			return v.apply(onSaveFailed, facts{}, now())
		})
		if err != nil {
			return err
		}
		return tx.Audit(Event{Type: audit.SnapshotFailed, Actor: actor, Identity: key, Summary: cause.Error()})
	})
	return errors.Join(cause, err)
}

func endIntent(tx *store.Tx, key string) error {
	it, err := optional(intents.Get(tx, key))
	if err != nil || it == nil {
		return err
	}
	return intents.Delete(tx, it)
}

// resumeLogin ends what a service that died had begun on an Identity: a save is
// undone while the login browser still runs, and finished otherwise; a deletion
// is finished.
func (f *Fleet) resumeLogin(ctx context.Context, actor audit.Actor, key string) error {
	var it *intent
	err := f.view(func(tx *store.Tx) (err error) {
		it, err = optional(intents.Get(tx, loginKey(key)))
		return err
	})
	if err != nil || it == nil {
		return err
	}
	if it.Value.Kind == intentDelete {
		return f.finishDelete(ctx, key)
	}
	id, err := f.loadIdentity(key)
	if err != nil {
		return err
	}
	r, err := f.settle(ctx, actor, id.Value.Instance)
	if err != nil {
		return err
	}
	// The swap of the snapshot may have been cut in two.
	if err := f.sweepIdentity(ctx, key); err != nil {
		return err
	}
	switch r.Value.State {
	case Stopped:
		// Its failure is kept as the Identity's problem; it is not that of
		// the operation that comes next.
		if err := f.capture(ctx, it.Value.Actor, key, r); err != nil {
			f.log.Warn("cannot finish an interrupted save", "identity", key, "error", err)
		}
	case Controllable:
		return f.update(func(tx *store.Tx) error { return endIntent(tx, loginKey(key)) })
	default:
		err := f.saveFailed(it.Value.Actor, key, f.notControllable(opSave, r))
		f.log.Warn("cannot finish an interrupted save", "identity", key, "error", err)
	}
	return nil
}

// sweepIdentity repairs what a crash left in an Identity's directories, while
// nobody clones from its snapshot or removes a Profile.
func (f *Fleet) sweepIdentity(ctx context.Context, key string) error {
	const op = "repair directories"
	unlock, err := f.snapshots.lock(ctx, key)
	if err != nil {
		return gone(ctx, op, "nothing was changed", "Try again")
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), treeTimeout)
	defer cancel()
	err = errors.Join(f.rt.Sweep(ctx, f.cfg.IdentityDir(key)), f.rt.Sweep(ctx, f.cfg.ProfilesDir(key)))
	if err != nil {
		return f.failure(err, fault.Internal, op, "Run: abfleet doctor", nil)
	}
	return nil
}

// LoginBrowser returns the Identity's login browser while it runs. It never
// starts one.
func (f *Fleet) LoginBrowser(ctx context.Context, ref string) (*Browser, error) {
	const op = "reach login browser"
	var (
		id *identity
		r  *runtime
	)
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		if id, err = find(tx, op, ref); err != nil {
			return err
		}
		r, err = runtimes.Get(tx, id.Value.Instance)
		return err
	})
	if err != nil {
		return nil, err
	}
	b := f.browser("", id, r)
	if r.Value.State == Controllable {
		if err = b.Running(ctx); err == nil {
			return b, nil
		}
	}
	hint := "Start a login first: abfleet identity login " + fault.Word(id.Value.Name)
	if err != nil {
		return nil, fault.New(fault.LoginNotRunning, op, hint, "%w", err)
	}
	return nil, fault.New(fault.LoginNotRunning, op, hint, "it is %s", r.Value.State)
}
