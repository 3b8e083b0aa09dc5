package profile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// Remove removes a tree, read-only ones too. It follows no symbolic link,
// crosses no mount, and first renames the tree, so that a half-removed one is
// never taken for a whole. What does not exist is removed already.
func Remove(ctx context.Context, dir string) error {
	op := "remove " + dir
	var st unix.Stat_t
	err := unix.Lstat(dir, &st)
	if err != nil && err != unix.ENOENT {
		return classify(&fs.PathError{Op: "stat", Path: dir, Err: err}, op)
	}
	removing := dir + suffixRemoving
	// An interrupted removal of the same tree, or of one before it.
	if err := takeApart(ctx, removing); err != nil {
		return classify(err, op)
	}
	if err == unix.ENOENT {
		return nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() {
		return fault.New(fault.UnsafePath, op, "look at what is there and remove it by hand", "it is not a directory of this user")
	}
	if err := renameNew(dir, removing); err != nil {
		return classify(err, op)
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return classify(err, op)
	}
	return classify(takeApart(ctx, removing), op)
}

// takeApart removes a tree that no longer has its name.
func takeApart(ctx context.Context, dir string) error {
	parent, err := os.Open(filepath.Dir(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(parent.Fd()), &st); err != nil {
		return &fs.PathError{Op: "stat", Path: parent.Name(), Err: err}
	}
	r := remover{ctx: ctx, dev: st.Dev}
	err = r.tree(parent, filepath.Base(dir), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

type remover struct {
	ctx context.Context
	dev uint64
}

// tree removes the directory name in parent with all that is in it.
func (r *remover) tree(parent *os.File, name string, depth int) error {
	if depth > 2*maxDepth {
		return fmt.Errorf("%w: it is nested more than %d levels deep", errUnsafe, 2*maxDepth)
	}
	d, err := r.open(parent, name)
	if err != nil {
		return err
	}
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		if e.IsDir() {
			err = r.tree(d, e.Name(), depth+1)
		} else if err = unix.Unlinkat(int(d.Fd()), e.Name(), 0); err != nil {
			err = &fs.PathError{Op: "unlink", Path: e.Name(), Err: err}
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		return &fs.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}

// open opens a directory so that what is in it can be listed and removed.
func (r *remover) open(parent *os.File, name string) (*os.File, error) {
	// O_PATH needs no permission on the directory itself, and holds on to it
	// while its mode is changed.
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOTDIR || err == unix.ELOOP {
		err = errUnsafe
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Dev != r.dev {
		return nil, fmt.Errorf("%w: something is mounted on %s", errUnsafe, name)
	}
	if int(st.Uid) == os.Geteuid() && st.Mode&0o700 != 0o700 {
		if err := unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), writableDir); err != nil {
			return nil, &fs.PathError{Op: "chmod", Path: name, Err: err}
		}
	}
	opened, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(opened), name), nil
}
