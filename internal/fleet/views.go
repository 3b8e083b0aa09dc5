package fleet

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// Problem is the last failure of something, as a person or a model may see it.
type Problem struct {
	Code    fault.Code `json:"code"`
	Message string     `json:"message"`
	Hint    string     `json:"hint,omitempty"`
	At      time.Time  `json:"at"`
}

// Wanted is what the user wants of a bound Session Browser.
type Wanted string

// The two wishes. Only a user's or operator's stop sets WantedStopped.
const (
	WantedRunning Wanted = "running"
	WantedStopped Wanted = "stopped"
)

// LoginView is the login browser of an Identity.
type LoginView struct {
	// State is a runtime state. Controllable means that it is proven to run.
	State     State     `json:"state"`
	StartedAt time.Time `json:"started_at,omitzero"`
	// Unsaved means that a login was started since the last good save.
	Unsaved bool     `json:"unsaved,omitempty"`
	Problem *Problem `json:"problem,omitempty"`
}

// IdentityView is an Identity as everybody may see it.
type IdentityView struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	// State is NeedsLogin or Ready.
	State State     `json:"state"`
	Login LoginView `json:"login"`
	// Sessions is how many sessions are bound to it, PreparedProfiles how
	// many further ones can be bound without a new clone.
	Sessions         int `json:"sessions"`
	PreparedProfiles int `json:"prepared_profiles"`
	// Limits are what its browsers have instead of the configured ones.
	Limits     config.Limits `json:"limits,omitzero"`
	SnapshotAt time.Time     `json:"snapshot_at,omitzero"`
	CreatedAt  time.Time     `json:"created_at"`
	UpdatedAt  time.Time     `json:"updated_at"`
	// Problem is why the last save failed, nil after a good one.
	Problem *Problem `json:"problem,omitempty"`
}

// SessionView is a bound session as everybody may see it.
type SessionView struct {
	Session      string `json:"session"`
	IdentityID   string `json:"identity_id"`
	IdentityName string `json:"identity_name"`
	Wanted       Wanted `json:"wanted"`
	// State is a runtime state. Controllable means that it is proven to run.
	State State `json:"state"`
	// Queued is its place among the starts that wait for a processor, from 1
	// on; 0 for none.
	Queued    int       `json:"queued,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	BoundAt   time.Time `json:"bound_at"`
	UpdatedAt time.Time `json:"updated_at"`
	// Problem is why it does not run, nil when nothing is wrong.
	Problem *Problem `json:"problem,omitempty"`
	// LastExit is how its browser ended the last time.
	LastExit *ExitReport `json:"last_exit,omitempty"`
}

func (f *Fleet) identityView(tx *store.Tx, id *identity) (IdentityView, error) {
	v := IdentityView{
		ID: id.Key, Name: id.Value.Name, State: id.Value.State, SnapshotAt: id.Value.SnapshotAt, Limits: id.Value.Limits,
		CreatedAt: id.Value.Created, UpdatedAt: id.Value.Updated, Problem: id.Value.Problem,
	}
	r, err := runtimes.Get(tx, id.Value.Instance)
	if err != nil {
		return v, err
	}
	v.Login = LoginView{State: f.shown(r), StartedAt: startedAt(r), Unsaved: id.Value.Unsaved, Problem: r.Value.Problem}
	used, err := usedProfiles(tx)
	if err != nil {
		return v, err
	}
	all, err := profiles.List(tx)
	if err != nil {
		return v, err
	}
	for _, p := range all {
		if p.Value.Identity == id.Key && p.Value.State == Ready && !used[p.Key] {
			v.PreparedProfiles++
		}
	}
	allBindings, err := bindings.List(tx)
	for _, b := range allBindings {
		if b.Value.Identity == id.Key {
			v.Sessions++
		}
	}
	return v, err
}

// viewSession returns the view and, while the record says that the browser is
// controllable, the evidence to observe it by.
func (f *Fleet) viewSession(tx *store.Tx, session string) (SessionView, Evidence, error) {
	b, err := getBound(tx, session)
	if err == nil && b == nil {
		err = store.ErrNotFound
	}
	if err != nil {
		return SessionView{}, nil, err
	}
	r, err := runtimes.Get(tx, b.profile.Value.Instance)
	if err != nil {
		return SessionView{}, nil, err
	}
	v := SessionView{
		Session: session, IdentityID: b.identity.Key, IdentityName: b.identity.Value.Name,
		Wanted: b.binding.Value.Wanted, State: f.shown(r), Queued: f.starts.position(r.Key), StartedAt: startedAt(r),
		BoundAt: b.binding.Value.Created, UpdatedAt: b.binding.Value.Updated, Problem: r.Value.Problem, LastExit: r.Value.LastExit,
	}
	if v.State != Controllable {
		return v, nil, nil
	}
	return v, r.Value.Evidence, nil
}

// shown is the state that may be told: what this process has not proven is
// not controllable, whatever the record says.
func (f *Fleet) shown(r *runtime) State {
	if f.isQuarantined(r.Key) {
		return Quarantined
	}
	if r.Value.State == Controllable && !f.isProven(r) {
		return Unverified
	}
	return r.Value.State
}

func startedAt(r *runtime) time.Time {
	if r.Value.State == Stopped {
		return time.Time{}
	}
	return r.Value.Started
}

// observeSession corrects a view by what is true now. It records nothing: who
// looks does not act.
func (f *Fleet) observeSession(ctx context.Context, v *SessionView, ev Evidence) {
	if len(ev) == 0 {
		return
	}
	state, exit := f.look(ctx, ev)
	v.State = state
	if exit != nil {
		v.LastExit = exit
	}
}

func (f *Fleet) observeLogin(ctx context.Context, v *IdentityView) {
	if v.Login.State != Controllable {
		return
	}
	var ev Evidence
	err := f.db.View(ctx, func(tx *store.Tx) error {
		id, err := identities.Get(tx, v.ID)
		if err != nil {
			return err
		}
		r, err := runtimes.Get(tx, id.Value.Instance)
		if err == nil && r.Value.State == Controllable {
			ev = r.Value.Evidence
		}
		return err
	})
	if err == nil && len(ev) > 0 {
		v.Login.State, _ = f.look(ctx, ev)
	}
}

func (f *Fleet) look(ctx context.Context, ev Evidence) (State, *ExitReport) {
	obs, err := f.observe(ctx, ev)
	switch {
	case err != nil:
		return Unverified, nil
	case obs.State == Ended:
		return Stopped, obs.Exit
	}
	return obs.State, obs.Exit
}

// observers is how many observations a list makes at once.
const observers = 4

// atOnce runs fn for 0 to n-1, so many at once.
func atOnce(many, n int, fn func(i int)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, many)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			fn(i)
		})
	}
	wg.Wait()
}

func sortBy[T any](list []T, key func(T) string) {
	slices.SortStableFunc(list, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
}
