package fleet

import (
	"crypto/rand"
	"errors"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/config"
	"abfleet/internal/store"
)

// The stored form of the vocabulary. Ids are keys of their tables.

type identityRecord struct {
	Name string `json:"name"`
	// Fold is the Name as it is compared with others.
	Fold  string `json:"fold"`
	State State  `json:"state"`
	// Instance is the login browser's Stack.
	Instance string `json:"instance"`
	// Unsaved means that the template changed since the last good save.
	Unsaved    bool      `json:"unsaved,omitempty"`
	SnapshotAt time.Time `json:"snapshot_at,omitzero"`
	Problem    *Problem  `json:"problem,omitempty"`
	// Limits are what its browsers have instead of the configured ones.
	Limits  config.Limits `json:"limits,omitzero"`
	Created time.Time     `json:"created"`
	Updated time.Time     `json:"updated"`
}

type profileRecord struct {
	Identity string `json:"identity"`
	Instance string `json:"instance"`
	State    State  `json:"state"`
	// Whole means that its clone was complete once.
	Whole bool `json:"whole,omitempty"`
	// LastSession is preferred when the Profile is free.
	LastSession string `json:"last_session,omitempty"`
	// LoggedOut is when a person said that its login is lost.
	LoggedOut time.Time `json:"logged_out,omitzero"`
	Created   time.Time `json:"created"`
	Updated   time.Time `json:"updated"`
}

type bindingRecord struct {
	Identity string    `json:"identity"`
	Profile  string    `json:"profile"`
	Wanted   Wanted    `json:"wanted"`
	Created  time.Time `json:"created"`
	Updated  time.Time `json:"updated"`
}

// runtimeRecord is the Stack of a Profile or, without one, of a login.
type runtimeRecord struct {
	Identity string `json:"identity"`
	Profile  string `json:"profile,omitempty"`
	// Session is the label of the last start.
	Session    string      `json:"session,omitempty"`
	State      State       `json:"state"`
	Generation uint64      `json:"generation"`
	Evidence   Evidence    `json:"evidence,omitempty"`
	Started    time.Time   `json:"started,omitzero"`
	Updated    time.Time   `json:"updated"`
	Problem    *Problem    `json:"problem,omitempty"`
	LastExit   *ExitReport `json:"last_exit,omitempty"`
}

func (r *runtimeRecord) login() bool { return r.Profile == "" }

// cleaned says that the runtime is BROKEN and a later cleanup has proven that
// nothing of it is left. It stays BROKEN until a person's action ends that.
func (r *runtimeRecord) cleaned() bool { return r.State == Broken && len(r.Evidence) == 0 }

// intentKind says what was under way.
type intentKind string

const (
	intentSwitch  intentKind = "switch"
	intentSave    intentKind = "save"
	intentRelease intentKind = "release"
	intentDelete  intentKind = "delete"
)

// intentRecord is written before an operation of several steps has effects and
// removed in the transaction that ends it. Its key is that of the operation
// lock, so there is one at most, and whoever holds the lock and finds one has
// found the work of a service that died.
//
// The other operations need none: a start is the state "starting", a stop
// "stopping", a Profile in the making "CREATING".
type intentRecord struct {
	Kind     intentKind `json:"kind"`
	Session  string     `json:"session,omitempty"`
	Identity string     `json:"identity"`
	// Profile is the replacement of a switch.
	Profile string `json:"profile,omitempty"`
	// Replacing is set once the replacement runs and the old browser is
	// about to be stopped.
	Replacing bool `json:"replacing,omitempty"`
	// LoggedOut is set by a release whose Profile has lost its login.
	LoggedOut bool        `json:"logged_out,omitempty"`
	Actor     audit.Actor `json:"actor"`
	At        time.Time   `json:"at"`
}

var (
	identities = store.Table[identityRecord]{Bucket: store.Identities}
	profiles   = store.Table[profileRecord]{Bucket: store.Profiles}
	bindings   = store.Table[bindingRecord]{Bucket: store.Bindings}
	runtimes   = store.Table[runtimeRecord]{Bucket: store.Runtimes}
	intents    = store.Table[intentRecord]{Bucket: store.Intents}
)

type (
	identity = store.Record[identityRecord]
	profile  = store.Record[profileRecord]
	binding  = store.Record[bindingRecord]
	runtime  = store.Record[runtimeRecord]
	intent   = store.Record[intentRecord]
)

// optional turns ErrNotFound into a nil record.
func optional[T any](r *store.Record[T], err error) (*store.Record[T], error) {
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	return r, err
}

const (
	alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"
	base32       = "abcdefghijklmnopqrstuvwxyz234567"
)

// randomText returns n random characters of an alphabet.
func randomText(alphabet string, n int) string {
	out := make([]byte, 0, n)
	buf := make([]byte, 2*n)
	// Bytes beyond the last full round of the alphabet would favour its
	// first characters.
	limit := 256 - 256%len(alphabet)
	for len(out) < n {
		rand.Read(buf)
		for _, b := range buf {
			if int(b) < limit && len(out) < n {
				out = append(out, alphabet[int(b)%len(alphabet)])
			}
		}
	}
	return string(out)
}

const (
	identityPrefix = "identity-"
	profilePrefix  = "profile-"
	idLength       = 16
	instanceLength = 10
)

// newRuntime stores the runtime of a new Stack and returns its instance.
func newRuntime(tx *store.Tx, value runtimeRecord) (string, error) {
	for {
		r := &runtime{Key: randomText(base32, instanceLength), Value: value}
		r.Value.State = Stopped
		err := runtimes.Put(tx, r)
		if errors.Is(err, store.ErrConflict) {
			continue // that instance exists
		}
		return r.Key, err
	}
}

// apply moves the record along the table.
func (r *runtimeRecord) apply(on trigger, f facts, now time.Time) error {
	to, err := next(machineRuntime, r.State, on, f)
	if err != nil {
		return err
	}
	r.State, r.Updated = to, now
	if f.vacant {
		r.Evidence = nil // of what is proven gone
	}
	return nil
}

func (p *profileRecord) apply(on trigger, f facts, now time.Time) error {
	f.whole = p.Whole
	to, err := next(machineProfile, p.State, on, f)
	if err != nil {
		return err
	}
	if on == onLoggedOut {
		p.LoggedOut = now
	}
	p.State, p.Updated = to, now
	p.Whole = to == Ready || on == onRestored || p.Whole && on != onRenew
	return nil
}

func (i *identityRecord) apply(on trigger, f facts, now time.Time) error {
	to, err := next(machineIdentity, i.State, on, f)
	if err != nil {
		return err
	}
	i.State, i.Updated = to, now
	return nil
}
