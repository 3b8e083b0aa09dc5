package store

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// Summary is what a state file holds.
type Summary struct {
	Schema int
	Host   string
	// Revision is that of the last transaction that wrote a record.
	Revision uint64
	// Records counts the records of each table.
	Records map[Bucket]int
	// Events is the number of audit events, LastEvent the time of the newest.
	Events    int
	LastEvent time.Time
}

// Inspect checks a file that no service holds, a copy, and returns what it
// holds. verify looks at what the records mean to their owner. The error is
// state_corrupt for a file that must not be used, state_too_new for that of a
// newer version.
func Inspect(ctx context.Context, path string, verify func(*Tx) error) (Summary, error) {
	err := CheckFile(ctx, path)
	var damaged *Damaged
	switch {
	case errors.As(err, &damaged):
		return Summary{}, fault.New(fault.StateCorrupt, opCheck, "", "%s: %w", path, damaged)
	case err != nil:
		return Summary{}, err
	}
	db, err := openBolt(path, true)
	if err != nil {
		return Summary{}, err
	}
	defer db.Close()
	s := Summary{Records: map[Bucket]int{}}
	err = db.View(func(b *bolt.Tx) error {
		tx := &Tx{bolt: b}
		meta, err := metaTable.Get(tx, metaKey)
		if err != nil {
			return fault.New(fault.StateCorrupt, opCheck, "", "%s: %w", path, err)
		}
		s.Schema, s.Host = meta.Value.Schema, meta.Value.Host
		if s.Schema != schema {
			return tooNew(opCheck, s.Schema)
		}
		s.Revision = b.Bucket([]byte(bucketMeta)).Sequence()
		for _, name := range []Bucket{Identities, Profiles, Bindings, Runtimes, Intents} {
			s.Records[name] = b.Bucket([]byte(name)).Stats().KeyN
		}
		s.Events = b.Bucket([]byte(bucketAudit)).Stats().KeyN
		newest, err := tx.Events(0, 1)
		if err != nil {
			return fault.New(fault.StateCorrupt, opCheck, "", "%s: %w", path, err)
		}
		if len(newest) > 0 {
			s.LastEvent = newest[0].At
		}
		if err := verify(tx); err != nil {
			return fault.New(fault.StateCorrupt, opCheck, "", "%s: its records contradict each other: %w", path, err)
		}
		return nil
	})
	return s, err
}

func tooNew(op string, found int) error {
	return fault.New(fault.StateTooNew, op, "Install the version of abfleet that wrote this state, or a newer one",
		"its schema is %d, this version knows %d", found, schema)
}

// CopyOf is where the checked copy of the state file at path is.
func CopyOf(path string) string { return copyPath(path) }

const opRestore = "restore fleet state"

// Restore puts a copy of from in the place of the state file at path and
// returns under which name the one of before is kept, "" when there was none. A
// crash leaves one of the two at path. It is state_in_use when a service holds
// the state; from is inspected as Inspect does, and accept sees what it holds
// while nothing else can change the state. amend then corrects what became untrue
// since the copy was made.
func Restore(ctx context.Context, path, from string, verify func(*Tx) error, accept func(Summary) error, amend func(*Tx) error) (kept string, err error) {
	if err := safefs.EnsureDir(filepath.Dir(path)); err != nil {
		return "", err
	}
	lock, err := takeLock(ctx, path+".lock", lockTimeout)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	temp := path + ".restore"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", classify(opRestore, err)
	}
	err = writeChecked(ctx, temp, func(w io.Writer) error {
		f, err := safefs.OpenPrivate(from, os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
	if err != nil {
		return "", classify(opRestore, err)
	}
	defer func() {
		if err != nil {
			os.Remove(temp)
		}
	}()
	summary, err := Inspect(ctx, temp, verify)
	if err != nil {
		return "", err
	}
	if err := accept(summary); err != nil {
		return "", err
	}
	if err := amendFile(temp, amend); err != nil {
		return "", err
	}
	if _, err := Inspect(ctx, temp, verify); err != nil {
		return "", err
	}
	// A second name, not a rename: at no moment is there no state file.
	kept, err = linkAside(path, time.Now())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", classify(opRestore, err)
	}
	if err := os.Rename(temp, path); err != nil {
		return kept, classify(opRestore, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return kept, classify(opRestore, err)
	}
	return kept, nil
}

// amendFile writes to a file that nothing else uses, in one transaction.
func amendFile(path string, amend func(*Tx) error) error {
	db, err := openBolt(path, false)
	if err != nil {
		return err
	}
	var ferr error
	err = db.Update(func(b *bolt.Tx) error {
		tx := &Tx{bolt: b}
		meta, err := metaTable.Get(tx, metaKey)
		if err == nil {
			tx.host, tx.epoch = meta.Value.Host, meta.Value.Epoch
			err = amend(tx)
		}
		ferr = err
		return err
	})
	if ferr == nil && err != nil {
		ferr = classify(opRestore, err)
	}
	if err := db.Close(); err != nil && ferr == nil {
		ferr = classify(opRestore, err)
	}
	return ferr
}

// linkAside gives the file a second name that no file has, durably.
func linkAside(path string, now time.Time) (string, error) {
	return aside(path+".before-"+stamp(now), func(kept string) error {
		err := os.Link(path, kept)
		if err == nil {
			err = syncDir(filepath.Dir(path))
		}
		return err
	})
}

// Missing is the error for a state file at path that is not there.
func Missing(path string) error {
	if used, what := everUsed(path); used {
		return fault.New(fault.StateCorrupt, opCheck, restoreHint(path), "the state file is missing, but %s exists", what)
	}
	return fault.New(fault.InvalidArgument, opCheck, "Name a file, or use the fleet first", "there is no state file %s: this fleet was never used", path)
}
