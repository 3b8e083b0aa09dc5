// Package store keeps the fleet's records in one bbolt file, state.db.
//
// Records are JSON documents in typed tables. Each carries a revision, so that
// a write says which version it replaces, and the host and epoch that wrote
// it: the interface is compare-and-swap and watch, so that a cluster's store
// can stand behind it one day. Audit events are appended in the transaction
// that makes the change.
//
// bbolt maps its file into memory and trusts it: a damaged page is a panic or
// a SIGBUS in the process that reads it. So nobody opens a file here that a
// helper process has not walked first (see MaybeRunChecker), and a file that
// fails is kept aside, never repaired, overwritten or replaced by an empty
// one. A checked copy, state.db.copy, is what an operator restores from.
package store

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

const (
	// schema is the version of the records' form. A file of another version
	// is refused; the migration that changes it comes with the change.
	schema = 1
	// maxEvents is how many audit events are kept.
	maxEvents = 10_000
	// watchBuffer is how many changes a slow watcher may lag behind.
	watchBuffer = 256
)

// Timeouts of Open and Close.
var (
	// lockTimeout is how long Open waits for another service to let go of the
	// state: a restart overlaps the old process's last moments.
	lockTimeout = 3 * time.Second
	// lockRetry is the pause between two tries; flock has no event to wait on
	// that a deadline could end.
	lockRetry = 50 * time.Millisecond
	// checkTimeout bounds the helper process.
	checkTimeout = 60 * time.Second
)

// Bucket names a table of the file.
type Bucket string

// The buckets. Audit is written through Tx.Audit only.
const (
	Identities Bucket = "identities"
	Profiles   Bucket = "profiles"
	Bindings   Bucket = "bindings"
	Runtimes   Bucket = "runtimes"
	Intents    Bucket = "intents"

	bucketMeta  Bucket = "meta"
	bucketAudit Bucket = "audit"
)

var buckets = []Bucket{bucketMeta, Identities, Profiles, Bindings, Runtimes, Intents, bucketAudit}

// DB is what the use cases need of a store.
type DB interface {
	// View runs fn in a consistent read-only transaction.
	View(ctx context.Context, fn func(*Tx) error) error
	// Update runs fn in a transaction that is committed, durably, when fn
	// returns nil and leaves no trace otherwise. Transactions run one at a
	// time. fn must not start another one.
	Update(ctx context.Context, fn func(*Tx) error) error
	// Watch reports the keys that change from now on, until ctx ends.
	Watch(ctx context.Context) <-chan Change
	// Events is the stream of committed audit events.
	Events() *audit.Feed[audit.Event]
	// HostID is the random id of this host's state.
	HostID() string
}

// Change is one changed key.
type Change struct {
	Bucket  Bucket
	Key     string
	Rev     uint64
	Deleted bool
	// Gap means that this watcher was too slow and has to read again.
	Gap bool
}

// Store is a DB in a file, held by one process at a time.
type Store struct {
	path  string
	lock  *os.File
	db    *bolt.DB
	meta  metaRecord
	watch *audit.Feed[Change]
	event *audit.Feed[audit.Event]

	// mu makes commits and what is published about them one sequence.
	mu sync.Mutex
	// backup keeps two copies from being written at once.
	backup sync.Mutex
}

var _ DB = (*Store)(nil)

// metaRecord describes the file itself.
type metaRecord struct {
	Schema int    `json:"schema"`
	Host   string `json:"host"`
	// Epoch grows with every Open: it tells which run wrote a record.
	Epoch   uint64    `json:"epoch"`
	Created time.Time `json:"created"`
}

var metaTable = Table[metaRecord]{bucketMeta}

const metaKey = "fleet"

// Open opens the state at path, or makes it when there never was one. The
// program must have called MaybeRunChecker. Errors have these codes:
// state_in_use when another service holds it, state_corrupt when it is damaged
// (and kept aside) or missing although the fleet has been used, state_too_new
// when a newer version wrote it. A file that could not be checked is left where
// it is, for another try.
func Open(ctx context.Context, path string) (_ *Store, err error) {
	if err := safefs.EnsureDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	lock, err := takeLock(ctx, path+".lock", lockTimeout)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	switch _, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		if err := create(ctx, path); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, fault.New(fault.Internal, opOpen, "", "%w", err)
	default:
		if err := checkOrKeepAside(ctx, path); err != nil {
			return nil, err
		}
	}
	db, err := openBolt(path, false)
	if err != nil {
		return nil, err
	}
	s := &Store{
		path: path, lock: lock, db: db,
		watch: audit.NewFeed(func() Change { return Change{Gap: true} }),
		event: audit.NewStream(),
	}
	if err := s.begin(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return s, nil
}

const opOpen = "open fleet state"

// takeLock takes the lock that makes this process the only one on the state.
// It is a file of its own, because the helper has to lock state.db itself.
func takeLock(ctx context.Context, path string, wait time.Duration) (*os.File, error) {
	f, err := safefs.OpenPrivate(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(wait)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, fault.New(fault.Internal, opOpen, "", "lock %s: %w", path, err)
		}
		if time.Now().After(deadline) {
			f.Close()
			return nil, inUse()
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fault.New(fault.Canceled, opOpen, "", "%w", context.Cause(ctx))
		case <-time.After(lockRetry):
		}
	}
}

func inUse() error {
	return fault.New(fault.StateInUse, opOpen,
		"Stop the other service first, or give this one its own AGENT_BROWSER_FLEET_HOME", "another process holds it")
}

// openBolt opens a file that is known to be sound.
func openBolt(path string, readOnly bool) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout: lockTimeout, ReadOnly: readOnly, FreelistType: bolt.FreelistMapType, NoStatistics: true,
		OpenFile: safefs.OpenPrivate,
	})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, inUse()
	case err != nil && fault.CodeOf(err) == fault.Internal:
		return nil, fault.New(fault.Internal, opOpen, "", "%w", err)
	case err != nil:
		return nil, err
	}
	return db, nil
}

// create makes an empty state file in one step: a crash leaves either none or
// a complete one, so that an empty or half-written file is always damage.
func create(ctx context.Context, path string) error {
	if used, what := everUsed(path); used {
		return fault.New(fault.StateCorrupt, opOpen, restoreHint(path), "the state file is missing, but %s exists", what)
	}
	temp := path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.Internal, opOpen, "", "%w", err)
	}
	db, err := openBolt(temp, false)
	if err != nil {
		return err
	}
	host := make([]byte, 16)
	rand.Read(host)
	meta := metaRecord{Schema: schema, Host: hex.EncodeToString(host), Created: time.Now().UTC()}
	err = db.Update(func(b *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := b.CreateBucket([]byte(name)); err != nil {
				return err
			}
		}
		return metaTable.Put(&Tx{bolt: b, host: meta.Host}, &Record[metaRecord]{Key: metaKey, Value: meta})
	})
	err = errors.Join(err, db.Close())
	if err == nil {
		err = CheckFile(ctx, temp)
	}
	if err == nil {
		err = renameNoReplace(temp, path)
	}
	if err != nil {
		os.Remove(temp)
		return classify(opOpen, err)
	}
	return nil
}

// everUsed reports whether this directory held a fleet before, and what says
// so: first of all a file that was damaged, since a start that follows the one
// which kept it aside has nothing else to tell.
func everUsed(path string) (bool, string) {
	if kept, err := filepath.Glob(path + ".corrupt-*"); err == nil && len(kept) > 0 {
		return true, filepath.Base(kept[len(kept)-1])
	}
	dir := filepath.Dir(path)
	if entries, err := os.ReadDir(filepath.Join(dir, "identities")); err == nil && len(entries) > 0 {
		return true, "the identities directory"
	}
	if _, err := os.Lstat(copyPath(path)); err == nil {
		return true, filepath.Base(copyPath(path))
	}
	return false, ""
}

// checkOrKeepAside checks an existing file in the helper and moves it out of
// the way when it is damaged. A file that others could write to, or a link, is
// refused before that.
func checkOrKeepAside(ctx context.Context, path string) error {
	f, err := safefs.OpenPrivate(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	f.Close()
	err = CheckFile(ctx, path)
	var damaged *Damaged
	if !errors.As(err, &damaged) {
		return err
	}
	kept, kerr := keepAside(path, time.Now())
	if kerr != nil {
		return fault.New(fault.StateCorrupt, opOpen, "Make the state directory writable and start again", "%w; it could not be kept aside: %w", err, kerr)
	}
	return fault.New(fault.StateCorrupt, opOpen, restoreHint(path), "the state file is damaged (%s) and was kept as %s", damaged.Reason, kept)
}

// keepAside renames the file to a name that no file has.
func keepAside(path string, now time.Time) (string, error) {
	return aside(path+".corrupt-"+stamp(now), func(kept string) error { return renameNoReplace(path, kept) })
}

// stamp is a time in a file name.
func stamp(at time.Time) string { return at.UTC().Format("20060102T150405Z") }

// aside tries keep with names after base until one is free, and returns it. It
// is "" when nothing was kept.
func aside(base string, keep func(string) error) (string, error) {
	for i := range 100 {
		kept := base
		if i > 0 {
			kept = fmt.Sprintf("%s-%d", base, i)
		}
		switch err := keep(kept); {
		case err == nil:
			return kept, nil
		case !errors.Is(err, fs.ErrExist):
			return "", err
		}
	}
	return "", fmt.Errorf("too many files named %s", base)
}

func restoreHint(path string) string {
	hint := "Nothing was deleted: browsers that run go on, Profiles stay on disk"
	if _, err := os.Lstat(copyPath(path)); err == nil {
		return fmt.Sprintf("%s. Restore the last checked copy: abfleet store restore %s", hint, fault.Word(copyPath(path)))
	}
	return fmt.Sprintf("%s. There is no checked copy; restore a backup: abfleet store restore FILE", hint)
}

// renameNoReplace renames within one directory and syncs it.
func renameNoReplace(from, to string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return syncDir(filepath.Dir(to))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// begin starts this run's epoch.
func (s *Store) begin(ctx context.Context) error {
	return s.Update(ctx, func(tx *Tx) error {
		rec, err := metaTable.Get(tx, metaKey)
		if err != nil {
			return fault.New(fault.StateCorrupt, opOpen, restoreHint(s.path), "%w", err)
		}
		if rec.Value.Schema != schema {
			return tooNew(opOpen, rec.Value.Schema)
		}
		rec.Value.Epoch++
		tx.host, tx.epoch = rec.Value.Host, rec.Value.Epoch
		s.meta = rec.Value
		return metaTable.Put(tx, rec)
	})
}

// HostID implements DB.
func (s *Store) HostID() string { return s.meta.Host }

// Events implements DB.
func (s *Store) Events() *audit.Feed[audit.Event] { return s.event }

// Watch implements DB.
func (s *Store) Watch(ctx context.Context) <-chan Change { return s.watch.Subscribe(ctx, watchBuffer) }

// View implements DB.
func (s *Store) View(ctx context.Context, fn func(*Tx) error) error {
	if err := ctx.Err(); err != nil {
		return fault.New(fault.Canceled, "read fleet state", "", "%w", context.Cause(ctx))
	}
	return s.db.View(func(b *bolt.Tx) error { return fn(&Tx{bolt: b}) })
}

// Update implements DB.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	const op = "write fleet state"
	if err := ctx.Err(); err != nil {
		return fault.New(fault.Canceled, op, "", "%w", context.Cause(ctx))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	tx := &Tx{host: s.meta.Host, epoch: s.meta.Epoch}
	var ferr error
	err := s.db.Update(func(b *bolt.Tx) error {
		tx.bolt = b
		ferr = fn(tx)
		return ferr
	})
	if err != nil {
		if ferr != nil {
			return ferr
		}
		return classify(op, err)
	}
	s.watch.Publish(tx.changes...)
	s.event.Publish(tx.events...)
	return nil
}

// classify gives an error of the file its code.
func classify(op string, err error) error {
	if fault.CodeOf(err) != fault.Internal {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fault.New(fault.NoSpace, op, "Free space on the file system of the state directory and try again", "%w", err)
	}
	if errors.Is(err, unix.EROFS) {
		return fault.New(fault.ReadOnly, op, "Make the file system of the state directory writable (the kernel's journal says why it is not) and try again", "%w", err)
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return fault.New(fault.UnsafePath, op, "Give the state directory mode 0700, its files mode 0600, and both to the user that the service runs as", "%w", err)
	}
	return fault.New(fault.Internal, op, "Check the disk and the file system of the state directory", "%w", err)
}

func (s *Store) dir() string { return filepath.Dir(s.path) }

// Close writes the checked copy and closes the file. The file is closed also
// when the copy fails, which the error then says.
func (s *Store) Close(ctx context.Context) error {
	err := s.Backup(ctx)
	s.watch.Close()
	s.event.Close()
	return errors.Join(err, s.db.Close(), s.lock.Close())
}
