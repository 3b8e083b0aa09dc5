// Package profile handles the trees that a Chromium user data directory is
// made of: live login profiles, the immutable Template Snapshot, and the
// writable clones.
//
// A tree appears and disappears as a whole. It is built under a name with a
// suffix (".new", ".next"), reaches the disk with one syncfs, and is renamed;
// it is renamed to ".removing" before it is taken apart. What a crash leaves
// behind is finished by Sweep.
//
// Nothing here decides whether a tree may be touched: callers hold a proof
// that the profile is vacant.
package profile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// Report says what one copy did.
type Report struct {
	Files     int           // regular files written
	Dirs      int           // directories made, the top one included
	Bytes     int64         // sum of the sizes of Files
	Reflinked int           // files that share their blocks with the source
	Skipped   int           // entries that are neither file nor directory: links, sockets, fifos
	Duration  time.Duration // from the first look at the source to the last sync
}

// Suffixes of trees that are not, or no longer, what their name says.
const (
	suffixNew      = ".new"      // a clone being built
	suffixNext     = ".next"     // a snapshot being built, or the one just replaced
	suffixPrevious = ".previous" // the snapshot before, where names cannot be exchanged
	suffixRemoving = ".removing" // a tree being taken apart
)

// Modes of the copies.
const (
	writableDir, writableFile = 0o700, 0o600
	readOnlyDir, readOnlyFile = 0o500, 0o400
)

// What a profile that has been used always has, below its top.
const (
	localState  = "Local State"
	preferences = "Default/Preferences"
)

// firstRun is the empty file that keeps Chromium from greeting its user. The flag
// for that, --no-first-run, makes Debian's Chromium 150.0.7871.46 crash.
const firstRun = "First Run"

const hintSpace = "free space on the file system of the state directory, or stop and remove what is no longer needed, and try again"

// Create makes an empty profile directory, and its parents if they are
// missing. The directory must not exist.
func Create(dir string) error {
	op := "create profile " + dir
	parent := filepath.Dir(dir)
	if err := safefs.EnsureDir(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, writableDir); err != nil {
		return classify(err, op)
	}
	// The umask may have taken bits away.
	if err := os.Chmod(dir, writableDir); err != nil {
		return classify(err, op)
	}
	if err := safefs.WriteFile(filepath.Join(dir, firstRun), nil, 0o600); err != nil {
		return err
	}
	return classify(syncDir(parent), op)
}

// Unlock removes the browser's locks from a profile that is proven vacant. A
// SingletonLock that a crash left keeps Chromium from starting when the host's
// name has changed since.
func Unlock(dir string) error {
	op := "unlock profile " + dir
	entries, err := os.ReadDir(dir)
	if err != nil {
		return classify(err, op)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "Singleton") {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return classify(err, op)
		}
	}
	return nil
}

// Clone copies the profile or snapshot at src to dst, which must not exist,
// without caches and locks. The copy is writable. When Clone fails there is
// nothing at dst; without space the error's code is no_space.
func Clone(ctx context.Context, src, dst string) (Report, error) {
	op := "clone profile to " + dst
	start := time.Now()
	if err := safefs.CheckDir(src); err != nil {
		return Report{}, err
	}
	if err := safefs.CheckDir(filepath.Dir(dst)); err != nil {
		return Report{}, err
	}
	if _, err := os.Lstat(dst); err == nil {
		return Report{}, classify(&fs.PathError{Op: "clone", Path: dst, Err: unix.EEXIST}, op)
	}
	temp := dst + suffixNew
	r, err := build(ctx, src, temp, writableDir, writableFile)
	if err == nil {
		err = renameNew(temp, dst)
	}
	if err == nil {
		err = syncDir(filepath.Dir(dst))
	}
	if err != nil {
		return Report{}, classify(withCleanup(ctx, err, temp), op)
	}
	r.Duration = time.Since(start)
	return r, nil
}

// Capture makes the read-only tree snapshot out of a profile that ended
// cleanly, and replaces the snapshot before it, if any. There is a complete
// snapshot at that path at every moment from the first Capture on; after a
// failure it is the one before.
func Capture(ctx context.Context, profile, snapshot string) (Report, error) {
	op := "capture template snapshot"
	start := time.Now()
	if err := safefs.CheckDir(profile); err != nil {
		return Report{}, err
	}
	if err := safefs.CheckDir(filepath.Dir(snapshot)); err != nil {
		return Report{}, err
	}
	if err := cleanly(profile, op); err != nil {
		return Report{}, err
	}
	if _, err := os.Lstat(snapshot); err == nil {
		if err := safefs.CheckDir(snapshot); err != nil {
			return Report{}, err
		}
	}
	next := snapshot + suffixNext
	r, err := build(ctx, profile, next, readOnlyDir, readOnlyFile)
	if err == nil {
		err = complete(next)
	}
	if err == nil {
		// A browser that was started meanwhile has made this copy a mixture.
		err = cleanly(profile, op)
	}
	if err == nil {
		err = swap(next, snapshot)
	}
	if err != nil {
		return Report{}, classify(withCleanup(ctx, err, next), op)
	}
	r.Duration = time.Since(start)
	// The new snapshot is in place; what was replaced is only in the way.
	for _, old := range []string{next, snapshot + suffixPrevious} {
		if err := Remove(context.WithoutCancel(ctx), old); err != nil {
			return r, err
		}
	}
	return r, nil
}

func cleanly(profile, op string) error {
	if ok, why := ExitedCleanly(profile); !ok {
		return fault.New(fault.UncleanExit, op, "start the login again, close it with save, and do not end the browser by other means", "the browser did not end cleanly: %s", why)
	}
	return nil
}

// complete verifies that a snapshot has what a profile cannot do without, and
// no lock that would stop the browser of a clone.
func complete(tree string) error {
	for _, name := range []string{localState, preferences} {
		fi, err := os.Lstat(filepath.Join(tree, name))
		if err != nil {
			return err
		}
		if !fi.Mode().IsRegular() || fi.Size() == 0 {
			return fmt.Errorf("%s is not a file with content", name)
		}
	}
	if left, err := singletons(tree); err != nil || len(left) > 0 {
		return errors.Join(err, fmt.Errorf("%s was copied", strings.Join(left, ", ")))
	}
	return nil
}

// swap puts next in the place of current.
func swap(next, current string) error {
	parent := filepath.Dir(current)
	err := unix.Renameat2(unix.AT_FDCWD, next, unix.AT_FDCWD, current, unix.RENAME_EXCHANGE)
	switch {
	case err == nil:
	case err == unix.ENOENT:
		// The first snapshot has nothing to be exchanged with.
		if err := renameNew(next, current); err != nil {
			return err
		}
	case err == unix.EINVAL || err == unix.ENOSYS:
		// This file system exchanges nothing. Sweep goes back to the
		// previous snapshot when the second rename did not happen.
		previous := current + suffixPrevious
		if err := os.Rename(current, previous); err != nil {
			return err
		}
		if err := os.Rename(next, current); err != nil {
			return errors.Join(err, os.Rename(previous, current))
		}
	default:
		return &os.LinkError{Op: "exchange", Old: next, New: current, Err: err}
	}
	return syncDir(parent)
}

// maxPreferences bounds the Preferences file that is read; 200 KB is usual.
const maxPreferences = 64 << 20

// ExitedCleanly reports whether the browser that used a profile last has
// written everything: its exit type is Normal and its locks are gone. If not,
// the second result says why.
func ExitedCleanly(profile string) (bool, string) {
	left, err := singletons(profile)
	if err != nil {
		return false, err.Error()
	}
	if len(left) > 0 {
		return false, strings.Join(left, ", ") + " is left"
	}
	f, err := os.OpenFile(filepath.Join(profile, preferences), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, "it was never used"
	}
	if err != nil {
		return false, err.Error()
	}
	defer f.Close()
	var p struct {
		Profile struct {
			ExitType string `json:"exit_type"`
		} `json:"profile"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxPreferences)).Decode(&p); err != nil {
		return false, "its preferences are damaged: " + err.Error()
	}
	if p.Profile.ExitType != "Normal" {
		return false, fmt.Sprintf("its exit type is %q, not \"Normal\"", p.Profile.ExitType)
	}
	return true, ""
}

// singletons lists the locks in a profile.
func singletons(profile string) ([]string, error) {
	d, err := os.Open(profile)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var left []string
	for _, n := range names {
		if strings.HasPrefix(n, "Singleton") {
			left = append(left, n)
		}
	}
	return left, nil
}

// Sweep finishes what crashed operations left directly in dir: half-built
// trees go, half-removed trees go, and a snapshot whose replacement was
// interrupted is put back. It must not run beside other operations in dir.
// A directory that does not exist has nothing to sweep.
func Sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return classify(err, "sweep "+dir)
	}
	if err := safefs.CheckDir(dir); err != nil {
		return err
	}
	ctx := context.Background()
	// Previous snapshots first: they decide about ".next".
	for _, e := range entries {
		base, ok := strings.CutSuffix(e.Name(), suffixPrevious)
		if !ok || !e.IsDir() || base == "" {
			continue
		}
		path, current := filepath.Join(dir, e.Name()), filepath.Join(dir, base)
		if _, err := os.Lstat(current); errors.Is(err, fs.ErrNotExist) {
			if err := renameNew(path, current); err != nil {
				return classify(err, "restore snapshot "+current)
			}
			if err := syncDir(dir); err != nil {
				return classify(err, "restore snapshot "+current)
			}
			continue
		}
		if err := Remove(ctx, path); err != nil {
			return err
		}
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if !e.IsDir() {
			continue
		}
		switch filepath.Ext(e.Name()) {
		case suffixNew, suffixNext:
			err = Remove(ctx, path)
		case suffixRemoving:
			err = takeApart(ctx, path)
		}
		if err != nil {
			return classify(err, "sweep "+dir)
		}
	}
	return nil
}

// renameNew renames a tree to a name that must be free.
func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL || err == unix.ENOSYS {
		// Without the flag an empty directory would be replaced; the caller
		// has seen that there is none.
		err = unix.Rename(from, to)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// withCleanup removes a tree that was not finished and adds to err what
// prevents that.
func withCleanup(ctx context.Context, err error, tree string) error {
	return errors.Join(err, Remove(context.WithoutCancel(ctx), tree))
}

// classify gives an error its code. One that has a code keeps it.
func classify(err error, op string) error {
	var known *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fault.Wrap(err, fault.NoSpace, op, hintSpace)
	case errors.As(err, &known):
		return err
	case errors.Is(err, unix.EROFS):
		return fault.Wrap(err, fault.ReadOnly, op, "make the file system of the state directory writable and try again")
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Canceled, op, "try again")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.Timeout, op, "try again when the disk is less busy")
	case errors.Is(err, errChanged):
		return fault.Wrap(err, fault.ProfileBusy, op, "stop the browser that uses this profile and try again")
	case errors.Is(err, errUnsafe), errors.Is(err, unix.ELOOP):
		return fault.Wrap(err, fault.UnsafePath, op, "make the tree a plain one that belongs to you: no foreign owners, no symbolic links in place of directories, no mounts")
	}
	return fault.Wrap(err, fault.Internal, op, "")
}
