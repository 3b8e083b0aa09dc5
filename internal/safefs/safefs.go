// Package safefs opens, makes and checks the directories and files that this
// project trusts. Everything here refuses what another user could have put in
// the way: symbolic links, foreign owners, group or world write access. A file
// is replaced as a whole or not at all.
package safefs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

const (
	hintDir  = "make it a real directory that belongs to you with `chmod 700`, or choose another place in the configuration"
	hintFile = "make it a regular file that belongs to you with `chmod 600`, or remove it"
	// writableByOthers are the mode bits that let somebody else change what
	// is inside.
	writableByOthers = 0o022
)

// EnsureDir makes path and its missing parents with mode 0700 and then checks
// the result with CheckDir. Existing parents are left as they are.
func EnsureDir(path string) error {
	if path == "" {
		return fault.New(fault.UnsafePath, "use directory", hintDir, "the path is empty")
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return classify(err, "make directory "+path)
	}
	return CheckDir(path)
}

// CheckDir reports an error with code unsafe_path unless path is a real
// directory (not a symbolic link) that belongs to the effective user and that
// nobody else can write to.
func CheckDir(path string) error {
	st, err := statDir(path)
	if err != nil {
		return err
	}
	if st.Mode&writableByOthers != 0 {
		return unsafeDir(path, "its mode is %04o, others can write to it", st.Mode&0o7777)
	}
	return nil
}

// CheckPrivate is CheckDir for directories whose mode must be exactly 0700.
func CheckPrivate(path string) error {
	st, err := statDir(path)
	if err != nil {
		return err
	}
	if st.Mode&0o7777 != 0o700 {
		return unsafeDir(path, "its mode is %04o, not 0700", st.Mode&0o7777)
	}
	return nil
}

func statDir(path string) (unix.Stat_t, error) {
	var st unix.Stat_t
	if path == "" {
		return st, fault.New(fault.UnsafePath, "use directory", hintDir, "the path is empty")
	}
	if err := unix.Lstat(strings.TrimRight(path, "/")+rootSlash(path), &st); err != nil {
		return st, classify(&fs.PathError{Op: "stat", Path: path, Err: err}, "use directory "+path)
	}
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return st, unsafeDir(path, "it is a symbolic link")
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return st, unsafeDir(path, "it is not a directory")
	case int(st.Uid) != os.Geteuid():
		return st, unsafeDir(path, "it belongs to uid %d, not to uid %d", st.Uid, os.Geteuid())
	}
	return st, nil
}

// rootSlash keeps "/" a path after its trailing slashes were cut: with a
// trailing slash lstat follows a symbolic link.
func rootSlash(path string) string {
	if strings.TrimRight(path, "/") == "" {
		return "/"
	}
	return ""
}

// WriteFile replaces path by a file with the given content and mode: it writes
// a temporary file in the same directory, syncs it, renames it over path and
// syncs the directory. A symbolic link at path is replaced, never followed.
func WriteFile(path string, data []byte, mode fs.FileMode) (err error) {
	op := "write " + path
	dir, err := os.OpenFile(filepath.Dir(path), os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return classify(err, op)
	}
	defer dir.Close()
	base := filepath.Base(path)
	if base == "." || base == ".." || base == "/" {
		return fault.New(fault.UnsafePath, op, hintFile, "the path does not name a file")
	}
	if fi, err := os.Lstat(path); err == nil && fi.IsDir() {
		return fault.New(fault.UnsafePath, op, hintFile, "it is a directory")
	}
	f, temp, err := createTemp(dir, base)
	if err != nil {
		return classify(err, op)
	}
	defer func() {
		f.Close()
		if err != nil {
			unix.Unlinkat(int(dir.Fd()), temp, 0)
		}
	}()
	if _, err := f.Write(data); err != nil {
		return classify(err, op)
	}
	if err := f.Chmod(mode.Perm()); err != nil {
		return classify(err, op)
	}
	if err := f.Sync(); err != nil {
		return classify(err, op)
	}
	if err := unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), base); err != nil {
		return classify(&os.LinkError{Op: "rename", Old: temp, New: path, Err: err}, op)
	}
	if err := dir.Sync(); err != nil {
		return classify(err, op)
	}
	return nil
}

// maxTempNames bounds the search for a free temporary name. Names hold the
// process id, so more than a few leftovers mean that something is wrong.
const maxTempNames = 1000

func createTemp(dir *os.File, base string) (*os.File, string, error) {
	const longestBase = 200
	if len(base) > longestBase {
		base = base[:longestBase]
	}
	for i := range maxTempNames {
		name := "." + base + "." + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(i) + ".tmp"
		fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err == unix.EEXIST {
			continue
		}
		if err != nil {
			return nil, "", &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
		}
		return os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name)), name, nil
	}
	return nil, "", fmt.Errorf("no free temporary name beside %s", base)
}

// OpenPrivate opens a file of ours: it never follows a final symbolic link,
// never passes the descriptor on, and refuses anything that is not a regular
// file of the effective user without access for others. With os.O_CREATE a
// missing file is made with mode.
func OpenPrivate(path string, flags int, mode fs.FileMode) (*os.File, error) {
	op := "open " + path
	// O_NONBLOCK keeps a fifo put in our place from blocking the open; it
	// means nothing for the regular files that pass the check.
	truncate := flags & os.O_TRUNC
	f, err := os.OpenFile(path, flags&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, mode.Perm())
	if errors.Is(err, unix.ELOOP) {
		return nil, fault.New(fault.UnsafePath, op, hintFile, "it is a symbolic link")
	}
	if err != nil {
		return nil, classify(err, op)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, classify(err, op)
	}
	var reason string
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		reason = "it is not a regular file"
	case int(st.Uid) != os.Geteuid():
		reason = fmt.Sprintf("it belongs to uid %d, not to uid %d", st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		reason = fmt.Sprintf("its mode is %04o, others have access", st.Mode&0o7777)
	}
	if reason != "" {
		f.Close()
		return nil, fault.New(fault.UnsafePath, op, hintFile, "%s", reason)
	}
	// Only now is it certain that the content is ours to throw away.
	if truncate != 0 {
		if err := f.Truncate(0); err != nil {
			f.Close()
			return nil, classify(err, op)
		}
	}
	return f, nil
}

func unsafeDir(path, format string, args ...any) error {
	return fault.New(fault.UnsafePath, "use directory "+path, hintDir, format, args...)
}

// classify gives an error of the operating system the code that its errno
// deserves.
func classify(err error, op string) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fault.Wrap(err, fault.NoSpace, op, "free space on this file system and try again")
	case errors.Is(err, unix.EROFS):
		return fault.Wrap(err, fault.ReadOnly, op, "make this file system writable (the kernel's journal says why it is not) and try again")
	case errors.Is(err, unix.ENOENT):
		return fault.Wrap(err, fault.NotFound, op, "check the path")
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fault.Wrap(err, fault.UnsafePath, op, hintDir)
	}
	return fault.Wrap(err, fault.Internal, op, "")
}
