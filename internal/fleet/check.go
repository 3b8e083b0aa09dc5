package fleet

import (
	"errors"
	"fmt"

	"abfleet/internal/store"
)

// CheckStore reports the records that contradict each other: references to what
// is not there, two sessions on one Profile, two owners of one Stack. The store
// itself knows none of this; no transaction of this package leaves it so.
func CheckStore(tx *store.Tx) error {
	ids, err := byKey(identities.List(tx))
	if err != nil {
		return err
	}
	profs, err := byKey(profiles.List(tx))
	if err != nil {
		return err
	}
	stacks, err := byKey(runtimes.List(tx))
	if err != nil {
		return err
	}
	bound, err := bindings.List(tx)
	if err != nil {
		return err
	}
	if _, err := intents.List(tx); err != nil {
		return err
	}
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	// own demands that the Stack is recorded as that of the Identity and, but
	// for a login, of the Profile.
	own := func(what, instance, identity, profile string) {
		switch r := stacks[instance]; {
		case r == nil:
			wrong("%s names the runtime %q, which is not there", what, instance)
		case r.Value.Identity != identity || r.Value.Profile != profile:
			wrong("%s names the runtime %s, which is another's", what, instance)
		}
	}
	for key, id := range ids {
		own("Identity "+key, id.Value.Instance, key, "")
	}
	for key, p := range profs {
		if ids[p.Value.Identity] == nil {
			wrong("Profile %s is of Identity %q, which is not there", key, p.Value.Identity)
		}
		own("Profile "+key, p.Value.Instance, p.Value.Identity, key)
	}
	for key, r := range stacks {
		var owner string
		if r.Value.login() {
			if id := ids[r.Value.Identity]; id != nil {
				owner = id.Value.Instance
			}
		} else if p := profs[r.Value.Profile]; p != nil {
			owner = p.Value.Instance
		}
		if owner != key {
			wrong("the runtime %s belongs to nothing", key)
		}
	}
	sessions := map[string]string{}
	for _, b := range bound {
		p := profs[b.Value.Profile]
		switch {
		case ids[b.Value.Identity] == nil:
			wrong("session %q is bound to Identity %q, which is not there", b.Key, b.Value.Identity)
		case p == nil:
			wrong("session %q is bound to Profile %q, which is not there", b.Key, b.Value.Profile)
		case p.Value.Identity != b.Value.Identity:
			wrong("session %q is bound to Profile %s of another Identity", b.Key, b.Value.Profile)
		}
		if other, taken := sessions[b.Value.Profile]; taken {
			wrong("sessions %q and %q are bound to one Profile", other, b.Key)
		}
		sessions[b.Value.Profile] = b.Key
	}
	return errors.Join(errs...)
}

// Trees returns the directories below IdentitiesDir that the records name: those
// of Identities, and for each those of its Profiles, by their ids.
func Trees(tx *store.Tx) (map[string][]string, error) {
	ids, err := identities.List(tx)
	if err != nil {
		return nil, err
	}
	trees := map[string][]string{}
	for _, id := range ids {
		trees[id.Key] = nil
	}
	all, err := profiles.List(tx)
	for _, p := range all {
		trees[p.Value.Identity] = append(trees[p.Value.Identity], p.Key)
	}
	return trees, err
}

func byKey[T any](list []*store.Record[T], err error) (map[string]*store.Record[T], error) {
	m := make(map[string]*store.Record[T], len(list))
	for _, r := range list {
		if r != nil {
			m[r.Key] = r
		}
	}
	return m, err
}

// AmendRestored corrects the records of a copy that is about to be restored: an
// unfinished Profile of then may have been finished since, and hold logins. Its
// directory, which profileDir names by Identity and Profile, comes into being as a
// whole, so one that exists is kept.
func AmendRestored(tx *store.Tx, profileDir func(identity, profile string) string, exists func(dir string) (bool, error)) error {
	list, err := profiles.List(tx)
	if err != nil {
		return err
	}
	for _, p := range list {
		if p.Value.Whole {
			continue
		}
		found, err := exists(profileDir(p.Value.Identity, p.Key))
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		if err := p.Value.apply(onRestored, facts{user: true}, now()); err != nil {
			return err
		}
		if err := profiles.Put(tx, p); err != nil {
			return err
		}
	}
	return nil
}
