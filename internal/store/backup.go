package store

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// copyInterval is the age at which KeepCopy replaces the copy, and
// copyRetry the pause after a failure.
var (
	copyInterval = 24 * time.Hour
	copyRetry    = time.Hour
)

func copyPath(path string) string { return path + ".copy" }

// CopyPath is where Backup puts the copy.
func (s *Store) CopyPath() string { return copyPath(s.path) }

// Backup writes a consistent copy beside the state file, has it checked in the
// helper and only then puts it in the place of the last one.
func (s *Store) Backup(ctx context.Context) (err error) {
	const op = "copy fleet state"
	s.backup.Lock()
	defer s.backup.Unlock()
	temp := s.CopyPath() + ".new"
	defer func() {
		if err != nil {
			os.Remove(temp)
			err = classify(op, err)
		}
	}()
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := safefs.OpenPrivate(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	w := &keeping{w: f}
	err = s.db.View(func(b *bolt.Tx) error {
		_, err := b.WriteTo(w)
		return err
	})
	if w.err != nil {
		err = w.err
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := CheckFile(ctx, temp); err != nil {
		var damaged *Damaged
		if errors.As(err, &damaged) {
			return fault.New(fault.StateCorrupt, op, "Check the disk; the copy of before is kept", "the copy is damaged: %s", damaged.Reason)
		}
		return err
	}
	if err := os.Rename(temp, s.CopyPath()); err != nil {
		return err
	}
	return syncDir(s.dir())
}

// keeping remembers the error of a write: bbolt passes on its text only, and
// the errno is what says that the disk is full.
type keeping struct {
	w   io.Writer
	err error
}

func (k *keeping) Write(p []byte) (int, error) {
	n, err := k.w.Write(p)
	if err != nil {
		k.err = err
	}
	return n, err
}

// KeepCopy renews the copy whenever it is a day old, until ctx ends.
func (s *Store) KeepCopy(ctx context.Context, log *slog.Logger) {
	for {
		wait := time.Duration(0)
		if info, err := os.Lstat(s.CopyPath()); err == nil {
			wait = max(0, copyInterval-time.Since(info.ModTime()))
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		if err := s.Backup(ctx); err != nil && ctx.Err() == nil {
			log.Error("cannot renew the copy of the fleet state", "error", err)
			timer.Reset(copyRetry)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-timer.C:
			}
		}
	}
}
