package fleet

import (
	"context"
	"errors"
	"fmt"

	"abfleet/internal/audit"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// RenameIdentity gives an Identity another name. Its id, its browsers and its
// Bindings stay as they are.
func (f *Fleet) RenameIdentity(ctx context.Context, actor audit.Actor, ref, name string) (IdentityView, error) {
	const op = "rename identity"
	name, err := checkName(op, name)
	if err != nil {
		return IdentityView{}, err
	}
	var v IdentityView
	err = f.db.Update(ctx, func(tx *store.Tx) error {
		id, err := findUsable(tx, op, ref)
		if err != nil {
			return err
		}
		if err := nameFree(tx, op, name, id.Key); err != nil {
			return err
		}
		was := id.Value.Name
		if was != name {
			id.Value.Name, id.Value.Fold, id.Value.Updated = name, fold(name), now()
			if err := identities.Put(tx, id); err != nil {
				return err
			}
			err := tx.Audit(Event{Type: audit.IdentityRenamed, Actor: actor, Identity: id.Key, Summary: fmt.Sprintf("Identity %q is called %q now", was, name)})
			if err != nil {
				return err
			}
		}
		v, err = f.identityView(tx, id)
		return err
	})
	return v, err
}

// LimitIdentity sets what the browsers of an Identity may take, instead of what is
// configured for all. It holds from the next start of each browser on.
func (f *Fleet) LimitIdentity(ctx context.Context, actor audit.Actor, ref string, limits config.Limits) (IdentityView, error) {
	const op = "limit identity"
	if err := limits.Check(); err != nil {
		return IdentityView{}, fault.New(fault.InvalidArgument, op, "Correct the limit", "%w", err)
	}
	var v IdentityView
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		id, err := findUsable(tx, op, ref)
		if err != nil {
			return err
		}
		if id.Value.Limits != limits {
			id.Value.Limits, id.Value.Updated = limits, now()
			if err := identities.Put(tx, id); err != nil {
				return err
			}
			err := tx.Audit(Event{Type: audit.IdentityLimited, Actor: actor, Identity: id.Key, Summary: fmt.Sprintf("the browsers of Identity %q have other limits from their next start on", id.Value.Name)})
			if err != nil {
				return err
			}
		}
		v, err = f.identityView(tx, id)
		return err
	})
	return v, err
}

// nameFree refuses a name that another Identity has, but for case.
func nameFree(tx *store.Tx, op, name, self string) error {
	all, err := identities.List(tx)
	if err != nil {
		return err
	}
	for _, other := range all {
		if other.Key != self && other.Value.Fold == fold(name) {
			return fault.New(fault.DuplicateIdentity, op, "Use that Identity, or choose another name", "the name %q is taken", other.Value.Name)
		}
	}
	return nil
}

const opDelete = "delete identity"

// DeleteIdentity removes an Identity that no browser uses, with its login, its
// Template Snapshot and all its Profiles on the disk. From the moment it is
// recorded as DELETING it cannot be used any more; what a crash or a failure
// leaves of it is removed by the next try or start of the service.
func (f *Fleet) DeleteIdentity(ctx context.Context, actor audit.Actor, ref string) (IdentityView, error) {
	var id *identity
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		id, err = find(tx, opDelete, ref)
		return err
	})
	if err != nil {
		return IdentityView{}, err
	}
	if !actor.Person() {
		return IdentityView{}, fault.New(fault.Unauthorized, opDelete, "A person does it: abfleet identity delete "+fault.Word(id.Value.Name), "only a person may delete an Identity")
	}
	return run(ctx, f, opDelete, loginKey(id.Key), func(ctx context.Context) (IdentityView, error) {
		// An interrupted deletion ends here, and leaves nothing to delete.
		if err := f.resumeLogin(ctx, audit.System("interrupted operation"), id.Key); err != nil {
			return IdentityView{}, err
		}
		v := IdentityView{ID: id.Key, Name: id.Value.Name, State: Deleting, CreatedAt: id.Value.Created, UpdatedAt: now(), Login: LoginView{State: Stopped}}
		left, err := f.loadIdentity(id.Key)
		if errors.Is(err, store.ErrNotFound) {
			return v, nil
		}
		if err != nil {
			return IdentityView{}, err
		}
		// A login browser that a person closed does not count as in use.
		if _, err := f.settle(ctx, audit.System("next use"), left.Value.Instance); err != nil {
			return IdentityView{}, err
		}
		if err := f.beginDelete(actor, id.Key); err != nil {
			return IdentityView{}, err
		}
		return v, f.finishDelete(ctx, id.Key)
	})
}

// beginDelete records that the Identity is being deleted, if nothing uses it.
func (f *Fleet) beginDelete(actor audit.Actor, key string) error {
	return f.update(func(tx *store.Tx) error {
		id, err := identities.Get(tx, key)
		if err != nil {
			return err
		}
		if err := f.unused(tx, id); err != nil {
			return err
		}
		if err := id.Value.apply(onDelete, facts{vacant: true, user: true}, now()); err != nil {
			return err
		}
		if err := identities.Put(tx, id); err != nil {
			return err
		}
		return intents.Put(tx, &intent{Key: loginKey(key), Value: intentRecord{Kind: intentDelete, Identity: key, Actor: actor, At: now()}})
	})
}

// unused refuses an Identity that a session, a login or anything not proven gone
// still uses.
func (f *Fleet) unused(tx *store.Tx, id *identity) error {
	name := fault.Word(id.Value.Name)
	allBindings, err := bindings.List(tx)
	if err != nil {
		return err
	}
	for _, b := range allBindings {
		if b.Value.Identity == id.Key {
			return fault.New(fault.IdentityInUse, opDelete, "Release its sessions first: abfleet session list, then abfleet session release SESSION",
				"session %q uses it", clip(b.Key))
		}
	}
	allIntents, err := intents.List(tx)
	if err != nil {
		return err
	}
	for _, it := range allIntents {
		if it.Value.Identity == id.Key && it.Key != loginKey(id.Key) {
			return fault.New(fault.IdentityInUse, opDelete, "Try again when that is done", "session %q is switching to it", clip(it.Value.Session))
		}
	}
	allRuntimes, err := runtimes.List(tx)
	if err != nil {
		return err
	}
	for _, r := range allRuntimes {
		if r.Value.Identity != id.Key {
			continue
		}
		gone := r.Value.State == Stopped || r.Value.cleaned()
		switch {
		case gone && !f.isQuarantined(r.Key):
		case r.Value.login():
			return fault.New(fault.IdentityInUse, opDelete, "Stop it first: abfleet identity stop "+name, "its login browser is %s", f.shown(r))
		default:
			return fault.New(fault.IdentityInUse, opDelete, "Look at what is left of it: systemctl --user status "+f.cfg.Slice(r.Key)+"; end that, restart the service, and try again",
				"a browser of it that no session has is %s", f.shown(r))
		}
	}
	return nil
}

// finishDelete removes what a recorded deletion is about: the directories first,
// each proven unused, then the records.
func (f *Fleet) finishDelete(ctx context.Context, key string) error {
	dirs := []string{f.cfg.TemplateDir(key), f.cfg.SnapshotDir(key)}
	err := f.view(func(tx *store.Tx) error {
		all, err := profiles.List(tx)
		for _, p := range all {
			if p.Value.Identity == key {
				dirs = append(dirs, f.cfg.ProfileDir(key, p.Key))
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	unlock, err := f.snapshots.lock(ctx, key)
	if err != nil {
		return gone(ctx, opDelete, "it is finished by the next try or start of the service", "Try again")
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), treeTimeout)
	defer cancel()
	// Their parent goes last: it has what belongs to none of them.
	for _, dir := range append(dirs, f.cfg.IdentityDir(key)) {
		if err := f.rt.RemoveTree(ctx, dir); err != nil {
			return f.failure(err, fault.Internal, opDelete, "Delete it again; the next start of the service tries, too", nil)
		}
	}
	var instances []string
	err = f.update(func(tx *store.Tx) error {
		it, err := intents.Get(tx, loginKey(key))
		if err != nil {
			return err
		}
		id, err := identities.Get(tx, key)
		if err != nil {
			return err
		}
		fact := facts{vacant: true, user: true}
		allProfiles, err := profiles.List(tx)
		if err != nil {
			return err
		}
		for _, p := range allProfiles {
			if p.Value.Identity != key {
				continue
			}
			if err := p.Value.apply(onDelete, fact, now()); err != nil {
				return err
			}
			if err := profiles.Delete(tx, p); err != nil {
				return err
			}
		}
		allRuntimes, err := runtimes.List(tx)
		if err != nil {
			return err
		}
		for _, r := range allRuntimes {
			if r.Value.Identity == key {
				instances = append(instances, r.Key)
				if err := runtimes.Delete(tx, r); err != nil {
					return err
				}
			}
		}
		if err := id.Value.apply(onDiscard, fact, now()); err != nil {
			return err
		}
		if err := identities.Delete(tx, id); err != nil {
			return err
		}
		if err := intents.Delete(tx, it); err != nil {
			return err
		}
		return tx.Audit(Event{Type: audit.IdentityDeleted, Actor: it.Value.Actor, Identity: key, Summary: fmt.Sprintf("Identity %q was deleted", id.Value.Name)})
	})
	if err == nil {
		f.forget(instances...)
	}
	return err
}
