package store

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

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
	s.backup.Lock()
	defer s.backup.Unlock()
	temp := s.CopyPath() + ".new"
	defer func() {
		if err != nil {
			err = classify(opCopy, err)
		}
	}()
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeChecked(ctx, temp, s.writeTo); err != nil {
		return err
	}
	if err := os.Rename(temp, s.CopyPath()); err != nil {
		os.Remove(temp)
		return err
	}
	return syncDir(s.dir())
}

const opCopy = "copy fleet state"

// CopyTo writes a consistent, checked copy to a path that the operator names
// and where nothing is yet.
func (s *Store) CopyTo(ctx context.Context, path string) error {
	return place(ctx, path, s.writeTo)
}

// CopyClosed is CopyTo for the state file at state while no service holds it.
// The file is locked only while it is read, so that a service that starts
// meanwhile waits for no check. It is state_in_use when a service holds it.
func CopyClosed(ctx context.Context, state, path string) error {
	return place(ctx, path, func(w io.Writer) error {
		f, err := safefs.OpenPrivate(state, os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		// Who has it can be asked for a copy: nobody waits here.
		lock, err := takeLock(ctx, state+".lock", 0)
		switch {
		case errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES):
			// Where the lock cannot be opened for writing, no service is.
		case err != nil:
			return err
		default:
			defer lock.Close()
		}
		_, err = io.Copy(w, f)
		return err
	})
}

// writeTo writes the state as it is now.
func (s *Store) writeTo(w io.Writer) error {
	return s.db.View(func(b *bolt.Tx) error {
		_, err := b.WriteTo(w)
		return err
	})
}

// place makes a checked file of what fill writes and gives it its name, unless
// something has that name.
func place(ctx context.Context, path string, fill func(io.Writer) error) error {
	if !filepath.IsAbs(path) {
		return fault.New(fault.InvalidArgument, opCopy, "Name an absolute path", "%s is relative", path)
	}
	exists := func() error {
		return fault.New(fault.InvalidArgument, opCopy, "Name a path where nothing is yet", "%s exists", path)
	}
	if _, err := os.Lstat(path); err == nil {
		return exists()
	}
	temp := path + ".new-" + rand.Text()
	if err := writeChecked(ctx, temp, fill); err != nil {
		return classify(opCopy, err)
	}
	if err := renameNoReplace(temp, path); err != nil {
		os.Remove(temp)
		if errors.Is(err, fs.ErrExist) {
			return exists()
		}
		return classify(opCopy, err)
	}
	return nil
}

// writeChecked makes a private file of what fill writes, durably, and has it
// checked. There is no file when it fails.
func writeChecked(ctx context.Context, path string, fill func(io.Writer) error) (err error) {
	f, err := safefs.OpenPrivate(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(path)
		}
	}()
	w := &keeping{w: f}
	err = fill(w)
	if w.err != nil {
		err = w.err
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = CheckFile(ctx, path)
	var damaged *Damaged
	if errors.As(err, &damaged) {
		return fault.New(fault.StateCorrupt, opCopy, "Check the disk; earlier copies are kept: abfleet store check", "the copy is damaged: %w", damaged)
	}
	return err
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
