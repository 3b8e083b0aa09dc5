// Package fleet holds the vocabulary of the product and its use cases:
// Identities, their login and their Template Snapshots, Session Browsers and
// their Bindings, switching, and the reconciliation of all of it after a
// restart. It decides and records; what happens to processes and directories
// it asks of a Runtime.
//
// Every operation on a session or on a login holds that session's or login's
// lock, first finishes or undoes what a service that died left of it, and
// writes to the store before each effect what it is about to do and after it
// what came of it. Reconcile is nothing but that first step for everything.
//
// What a Stack is known to be is only what a Runtime proved in this process:
// after New, every recorded Stack has to be observed before it is handed out.
package fleet

import (
	"context"
	"errors"
	"log/slog"
	goruntime "runtime"
	"sync"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// Timeouts of the use cases. Those of start and stop come from the
// configuration.
var (
	// operationTimeout bounds a whole operation, waits included: the longest
	// is a switch, with a queue before it.
	operationTimeout = 5 * time.Minute
	// admissionTimeout is how long a start may queue for a processor.
	admissionTimeout = 2 * time.Minute
	// stopSlack is added to the configured stop timeout for what comes after
	// the clean close: TERM, KILL and the proof.
	stopSlack = 15 * time.Second
	// observeTimeout bounds one observation.
	observeTimeout = 8 * time.Second
	// observeAgain are the pauses before a browser that was proven ours
	// before is observed again when it is not: on a busy machine an answer
	// may take longer than an observation waits.
	observeAgain = []time.Duration{250 * time.Millisecond, time.Second, 3 * time.Second}
	// treeTimeout bounds work on directory trees.
	treeTimeout = 2 * time.Minute
)

// eventBuffer is how many events a slow watcher may lag behind.
const eventBuffer = 256

// Event is an audit event.
type Event = audit.Event

// Options is what New needs. Config, Store and Runtime are required.
type Options struct {
	Config  *config.Config
	Store   store.DB
	Runtime Runtime
	// Log gets the full text of errors, which the callers' text leaves out.
	Log *slog.Logger
	// Starts is how many Stacks may start at the same time; 0 means one per
	// processor.
	Starts int
}

// Fleet is the use cases. All methods may be called concurrently, also while
// Reconcile runs.
type Fleet struct {
	cfg *config.Config
	db  store.DB
	rt  Runtime
	log *slog.Logger

	locks keyLocks // of operations, by the keys of intents
	// snapshots are shared by clones of an Identity's snapshot and locked by
	// who replaces it.
	snapshots keyLocks
	// uses are shared by those who use a session's browser at the moment and
	// locked by its release.
	uses   keyLocks
	starts queue
	// ends are the Stacks whose end is being recorded.
	ends queue
	// restarts is how many browsers are restarted at once after the host was.
	restarts int

	work   context.Context // ends with Close
	cancel context.CancelFunc

	mu sync.Mutex // guards the fields that follow
	// proven are the generations that this process saw controllable.
	proven map[string]uint64
	// watched are the generations whose end is waited for.
	watched map[string]uint64
	// quarantine are the Stacks whose truth the store could not take.
	quarantine map[string]Evidence
	closed     bool
	busy       sync.WaitGroup
	watchers   sync.WaitGroup
}

// New returns the use cases over a store and a Runtime. Reconcile should
// follow; until it has, operations reconcile what they touch.
func New(o Options) (*Fleet, error) {
	if o.Config == nil || o.Store == nil || o.Runtime == nil {
		return nil, errors.New("fleet.New: Config, Store and Runtime are required")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Starts == 0 {
		o.Starts = goruntime.NumCPU()
	}
	f := &Fleet{
		cfg: o.Config, db: o.Store, rt: o.Runtime, log: o.Log,
		starts: queue{free: o.Starts}, restarts: max(1, o.Starts/2),
		ends: queue{free: observers}, watched: map[string]uint64{},
		proven: map[string]uint64{}, quarantine: map[string]Evidence{},
	}
	f.work, f.cancel = context.WithCancel(context.Background())
	return f, nil
}

// Close ends the starts that are under way, lets stops finish, and returns
// when no operation runs or ctx ends. Browsers go on. The store stays open.
func (f *Fleet) Close(ctx context.Context) error {
	f.refuse()
	done := make(chan struct{})
	go func() { f.busy.Wait(); f.watchers.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fault.New(fault.Timeout, "close fleet", "The next start of the service repairs what was under way", "%w", context.Cause(ctx))
	}
}

// refuse lets no operation begin from now on and ends the starts.
func (f *Fleet) refuse() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.cancel()
}

// Keys of operation locks and intents.
func sessionKey(session string) string { return "session:" + session }
func loginKey(identity string) string  { return "login:" + identity }
func unboundKey(profile string) string { return "unbound:" + profile }

// run runs fn under the operation lock of key. A caller that goes away while it
// waits for the lock leaves nothing; one that goes away later gets an error at
// once, and fn goes on: what has begun is always brought to an end.
func run[T any](ctx context.Context, f *Fleet, op, key string, fn func(context.Context) (T, error)) (T, error) {
	return runUnder(ctx, f, op, func(ctx context.Context) (func(), error) { return f.locks.lock(ctx, key) }, fn)
}

// runUnder is run under the locks that lock takes.
func runUnder[T any](ctx context.Context, f *Fleet, op string, lock func(context.Context) (func(), error), fn func(context.Context) (T, error)) (T, error) {
	var zero T
	unlock, err := lock(ctx)
	if err != nil {
		return zero, gone(ctx, op, "nothing was changed", "Try again when the browser's last operation is done")
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		unlock()
		return zero, fault.New(fault.ServiceUnavailable, op, "Try again in a few seconds", "the service is stopping")
	}
	f.busy.Add(1)
	f.mu.Unlock()

	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		defer f.busy.Done()
		defer unlock()
		work, cancel := context.WithTimeout(f.work, operationTimeout)
		defer cancel()
		value, err := fn(carried{work, ctx})
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return zero, gone(ctx, op, "the operation goes on in the background", "Ask for the status before you try again")
	}
}

// carried is a context that has the values of another one, too.
type carried struct {
	context.Context
	values context.Context
}

func (c carried) Value(key any) any {
	if v := c.Context.Value(key); v != nil {
		return v // among them, what cancels it
	}
	return c.values.Value(key)
}

// gone is the error for a caller whose context ended.
func gone(ctx context.Context, op, state, hint string) error {
	code := fault.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		code = fault.Timeout
	}
	return fault.New(code, op, hint, "%w; %s", context.Cause(ctx), state)
}

// update runs one transaction. It does not end with an operation's context:
// what has happened is recorded even when nobody waits for it any more.
func (f *Fleet) update(fn func(*store.Tx) error) error {
	return f.db.Update(context.Background(), fn)
}

func (f *Fleet) view(fn func(*store.Tx) error) error {
	return f.db.View(context.Background(), fn)
}

// Watch returns the audit events from now on, until ctx ends. A watcher that
// is too slow gets an event of type audit.Gap and reads Events again.
func (f *Fleet) Watch(ctx context.Context) <-chan Event {
	return f.db.Events().Subscribe(ctx, eventBuffer)
}

// Events returns up to limit of the newest events with an id above after,
// oldest first.
func (f *Fleet) Events(ctx context.Context, after uint64, limit int) ([]Event, error) {
	var list []Event
	err := f.db.View(ctx, func(tx *store.Tx) (err error) {
		list, err = tx.Events(after, limit)
		return err
	})
	return list, err
}

// Counts says how many Stacks run or may run, and how many of those are not
// exposed because their ownership or cleanup is not proven, or was not in the past.
func (f *Fleet) Counts() (running, quarantined int) {
	f.mu.Lock()
	held := len(f.quarantine)
	f.mu.Unlock()
	err := f.view(func(tx *store.Tx) error {
		all, err := runtimes.List(tx)
		for _, r := range all {
			switch r.Value.State {
			case Stopped:
			case Broken, Quarantined:
				quarantined++
				if len(r.Value.Evidence) > 0 {
					running++
				}
			default:
				running++
			}
		}
		return err
	})
	if err != nil {
		f.log.Error("cannot count browsers", "error", err)
	}
	return running, max(quarantined, held)
}

func now() time.Time { return time.Now().UTC() }
