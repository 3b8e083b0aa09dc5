package profile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

var (
	errChanged = errors.New("the source changed while it was copied")
	errUnsafe  = errors.New("the tree is not a plain one of this user")
)

// maxDepth bounds the nesting of directories; profiles have about ten levels.
const maxDepth = 64

// skipped reports whether an entry is left out of every copy: caches that
// Chromium fills again, dumps, locks. parent is the path of its directory below
// the top, "" at the top itself. Caches are known by name only where Chromium
// keeps them, at the top, in a profile and in a storage partition; the same
// name inside an extension or a site's storage is content.
func skipped(parent, name string) bool {
	levels := 0
	if parent != "" {
		levels = 1 + strings.Count(parent, "/")
	}
	partition := false
	if levels == 5 {
		// <profile>/Storage/ext/<site>/<partition>
		_, rest, _ := strings.Cut(parent, "/")
		partition = strings.HasPrefix(rest, "Storage/ext/")
	}
	if levels > 1 && !partition {
		return false
	}
	switch name {
	case "Cache", "Code Cache", "GPUCache", "GPUPersistentCache", "Crashpad", "component_crx_cache",
		"Safe Browsing", "segmentation_platform", "DevToolsActivePort":
		return true
	}
	return strings.HasSuffix(name, "ShaderCache") ||
		strings.HasPrefix(name, "Dawn") && strings.HasSuffix(name, "Cache") ||
		strings.HasPrefix(name, "BrowserMetrics") ||
		strings.HasPrefix(name, "OptimizationGuide") ||
		strings.HasPrefix(name, "Singleton")
}

// copier copies one tree. Everything is opened relative to the directory it
// was found in and never through a symbolic link.
//
// Making a file costs the kernel a search for a free inode, which takes most of
// the time of a copy and goes on beside others in other directories: so
// directories are copied side by side.
type copier struct {
	ctx               context.Context
	beside            *errgroup.Group
	dirMode, fileMode uint32
	noReflink         atomic.Bool // the file system has said no

	mu     sync.Mutex
	report Report
}

// copiers bounds the directories that are copied at the same time; beyond a
// few they wait for each other in the file system's journal.
const copiers = 4

// count changes the report.
func (c *copier) count(change func(*Report)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.report)
}

// build copies src to the fresh tree dst, and returns when it is on the disk.
func build(ctx context.Context, src, dst string, dirMode, fileMode uint32) (Report, error) {
	if err := Remove(ctx, dst); err != nil {
		return Report{}, err
	}
	from, err := openDir(unix.AT_FDCWD, src)
	if err != nil {
		return Report{}, err
	}
	if err := os.Mkdir(dst, writableDir); err != nil {
		from.Close()
		return Report{}, err
	}
	to, err := openDir(unix.AT_FDCWD, dst)
	if err != nil {
		from.Close()
		return Report{}, err
	}
	defer to.Close()
	beside, ctx := errgroup.WithContext(ctx)
	beside.SetLimit(copiers)
	c := &copier{ctx: ctx, beside: beside, dirMode: dirMode, fileMode: fileMode}
	beside.Go(func() error { return c.dir(from, to, "") })
	if err := beside.Wait(); err != nil {
		return Report{}, err
	}
	// One sync for the whole tree costs a tenth of one for each file.
	if err := unix.Syncfs(int(to.Fd())); err != nil {
		return Report{}, &fs.PathError{Op: "syncfs", Path: dst, Err: err}
	}
	return c.report, nil
}

// openDir opens a real directory of this user, relative to parent.
func openDir(parent int, name string) (*os.File, error) {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOTDIR {
		err = errUnsafe
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	if int(st.Uid) != os.Geteuid() {
		f.Close()
		return nil, foreign(name, st.Uid)
	}
	return f, nil
}

func foreign(name string, uid uint32) error {
	return fmt.Errorf("%w: %s belongs to uid %d", errUnsafe, name, uid)
}

// dir copies the content of from to the empty directory to. It closes from.
func (c *copier) dir(from, to *os.File, path string) error {
	defer from.Close()
	if strings.Count(path, "/") >= maxDepth {
		return fmt.Errorf("%w: it is nested more than %d levels deep", errUnsafe, maxDepth)
	}
	c.count(func(r *Report) { r.Dirs++ })
	var st unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	entries, err := from.ReadDir(-1)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if skipped(path, e.Name()) {
			continue
		}
		switch below := filepath.Join(path, e.Name()); {
		case e.Type().IsRegular():
			err = c.file(from, to, e.Name(), below)
		case e.IsDir():
			err = c.subdir(from, to, e.Name(), below)
		default:
			c.count(func(r *Report) { r.Skipped++ })
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Fchmod(int(to.Fd()), c.dirMode); err != nil {
		return &fs.PathError{Op: "chmod", Path: path, Err: err}
	}
	return setTime(to, st.Mtim)
}

func (c *copier) subdir(from, to *os.File, name, path string) error {
	src, err := openDir(int(from.Fd()), name)
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(int(to.Fd()), name, writableDir); err != nil {
		src.Close()
		return &fs.PathError{Op: "mkdir", Path: path, Err: err}
	}
	dst, err := openDir(int(to.Fd()), name)
	if err != nil {
		src.Close()
		return err
	}
	below := func() error {
		defer dst.Close()
		return c.dir(src, dst, path)
	}
	if c.beside.TryGo(below) {
		return nil
	}
	return below()
}

// file copies one regular file.
func (c *copier) file(from, to *os.File, name, path string) error {
	sfd, err := unix.Openat(int(from.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	src := os.NewFile(uintptr(sfd), path)
	defer src.Close()
	var before, after unix.Stat_t
	if err := unix.Fstat(sfd, &before); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	switch {
	case before.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("%w: %s is not a file", errChanged, path)
	case int(before.Uid) != os.Geteuid():
		return foreign(path, before.Uid)
	}
	dfd, err := unix.Openat(int(to.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, writableFile)
	if err != nil {
		return &fs.PathError{Op: "create", Path: path, Err: err}
	}
	dst := os.NewFile(uintptr(dfd), path)
	defer dst.Close()
	if err := c.content(src, dst, before); err != nil {
		return &fs.PathError{Op: "copy", Path: path, Err: err}
	}
	if err := unix.Fstat(sfd, &after); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if after.Size != before.Size || after.Mtim != before.Mtim {
		return fmt.Errorf("%w: %s", errChanged, path)
	}
	if err := unix.Fchmod(dfd, c.fileMode); err != nil {
		return &fs.PathError{Op: "chmod", Path: path, Err: err}
	}
	c.count(func(r *Report) { r.Files, r.Bytes = r.Files+1, r.Bytes+before.Size })
	return setTime(dst, before.Mtim)
}

// setTime gives a copy the modification time of its source.
func setTime(f *os.File, mtime unix.Timespec) error {
	times := []unix.Timespec{mtime, mtime}
	if err := unix.UtimesNanoAt(int(f.Fd()), "", times, unix.AT_EMPTY_PATH); err == nil {
		return nil
	}
	// Kernels before 5.8 take no empty path here.
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), times, 0); err != nil {
		return &fs.PathError{Op: "set time of", Path: f.Name(), Err: err}
	}
	return nil
}

// content fills dst, by sharing blocks where the file system can.
func (c *copier) content(src, dst *os.File, st unix.Stat_t) error {
	if st.Size == 0 {
		return nil
	}
	if !c.noReflink.Load() {
		err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
		if err == nil {
			c.count(func(r *Report) { r.Reflinked++ })
			var got unix.Stat_t
			if err := unix.Fstat(int(dst.Fd()), &got); err != nil {
				return err
			}
			if got.Size != st.Size {
				return errChanged
			}
			return nil
		}
		if noSpace(err) {
			return err
		}
		c.noReflink.Store(true)
	}
	const block = 512
	if st.Blocks*block >= st.Size {
		return copyRange(src, dst, 0, st.Size)
	}
	return copySparse(src, dst, st.Size)
}

func noSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EIO)
}

// copySparse copies the parts of a file that have data and leaves the holes.
func copySparse(src, dst *os.File, size int64) error {
	if err := unix.Ftruncate(int(dst.Fd()), size); err != nil {
		return err
	}
	for pos := int64(0); pos < size; {
		data, err := unix.Seek(int(src.Fd()), pos, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		if err != nil {
			return err
		}
		hole, err := unix.Seek(int(src.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := copyRange(src, dst, data, min(hole, size)); err != nil {
			return err
		}
		pos = hole
	}
	return nil
}

// copyRange copies the bytes from start to end to the same place in dst.
func copyRange(src, dst *os.File, start, end int64) error {
	in, out := start, start
	for in < end {
		n, err := unix.CopyFileRange(int(src.Fd()), &in, int(dst.Fd()), &out, int(min(end-in, 1<<30)), 0)
		if err == unix.EINTR {
			continue
		}
		if noSpace(err) {
			return err
		}
		if err != nil {
			// Some file systems know this call for some files only.
			return copyPlain(src, dst, in, end)
		}
		if n == 0 {
			return errChanged
		}
	}
	return nil
}

func copyPlain(src, dst *os.File, start, end int64) error {
	n, err := io.Copy(io.NewOffsetWriter(dst, start), io.NewSectionReader(src, start, end-start))
	if err == nil && n != end-start {
		err = errChanged
	}
	return err
}
