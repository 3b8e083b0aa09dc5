package unit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// cgroupMount is where every systemd of the supported releases mounts the
// hierarchy. Tests point it elsewhere.
var cgroupMount = "/sys/fs/cgroup"

// emptyRecheck bounds how long WaitEmpty trusts the kernel's notification: the
// kernel limits its rate to one in 10 ms and drops a pending one when the
// directory is removed, so a cgroup that empties and goes at once may send none.
const emptyRecheck = 200 * time.Millisecond

// maxProcRead caps every file read from procfs and cgroupfs, in bytes. The
// largest of them, cgroup.procs of a browser, has some hundred short lines.
const maxProcRead = 1 << 20

// CgroupRoot returns the mount point of the unified cgroup hierarchy. On a host
// with the hybrid or the legacy layout it fails with fault.CgroupUnsupported.
func CgroupRoot() (string, error) {
	const op = "use control groups"
	const hint = "boot this host with systemd.unified_cgroup_hierarchy=1 on the kernel command line, the default since Debian 11"
	var st unix.Statfs_t
	if err := unix.Statfs(cgroupMount, &st); err != nil {
		return "", fault.New(fault.CgroupUnsupported, op, hint, "nothing is mounted on %s: %w", cgroupMount, err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		return cgroupMount, nil
	}
	if err := unix.Statfs(filepath.Join(cgroupMount, "unified"), &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return "", fault.New(fault.CgroupUnsupported, op, hint, "this host uses the hybrid cgroup layout; the unified layout (cgroup v2 alone) is required")
	}
	return "", fault.New(fault.CgroupUnsupported, op, hint, "%s is not a cgroup v2 file system; the unified layout is required", cgroupMount)
}

// Cgroup is one directory of the unified hierarchy. Path is counted from the
// root of the hierarchy, as in systemd's ControlGroup property and in
// /proc/PID/cgroup. The empty path and the root itself are refused by every
// method: an empty ControlGroup joined to the mount point would name all
// processes of the host.
type Cgroup struct {
	Path string
}

// errDeleted says that a process is still accounted to a directory that is gone.
var errDeleted = errors.New("cgroup of the process was removed")

// OfPID returns the cgroup of a process, from the "0::" line of its
// /proc/PID/cgroup only: lines of v1 controllers may be there too and say
// nothing about units. The error of a process that is gone is ErrNoProcess.
func OfPID(pid int) (Cgroup, error) {
	if pid <= 0 {
		return Cgroup{}, fmt.Errorf("pid %d: %w", pid, ErrNoProcess)
	}
	data, err := readCapped("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		if isGone(err) {
			return Cgroup{}, fmt.Errorf("pid %d: %w", pid, ErrNoProcess)
		}
		return Cgroup{}, err
	}
	p, err := parseProcCgroup(data)
	if err != nil {
		return Cgroup{}, fmt.Errorf("pid %d: %w", pid, err)
	}
	return Cgroup{Path: p}, nil
}

// parseProcCgroup finds the path of the "0::" line.
func parseProcCgroup(data []byte) (string, error) {
	found := ""
	for line := range bytes.Lines(data) {
		p, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\n"), "0::")
		if !ok {
			continue
		}
		if found != "" {
			return "", errors.New("two unified lines in its cgroup file")
		}
		if !strings.HasPrefix(p, "/") {
			return "", fmt.Errorf("malformed cgroup path %q", p)
		}
		found = p
	}
	switch {
	case found == "":
		return "", errors.New("no unified line in its cgroup file")
	case strings.HasSuffix(found, " (deleted)"):
		return "", errDeleted
	case path.Clean(found) != found || strings.HasPrefix(found, "/.."):
		// "/.." is how the kernel shows a cgroup outside the reader's namespace.
		return "", fmt.Errorf("cgroup path %q is not below our root", found)
	}
	return found, nil
}

// dir returns the directory, after checking that the path can only name a
// cgroup below the root.
func (c Cgroup) dir() (string, error) {
	if c.Path == "" || c.Path == "/" {
		return "", errors.New("an empty cgroup path names no unit")
	}
	if !strings.HasPrefix(c.Path, "/") || path.Clean(c.Path) != c.Path || strings.ContainsRune(c.Path, 0) {
		return "", fmt.Errorf("malformed cgroup path %q", c.Path)
	}
	root, err := CgroupRoot()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, c.Path), nil
}

// ID returns the cgroup's number: the inode of its directory, which systemd
// offers as ControlGroupId. It is not used again while the host is up.
func (c Cgroup) ID() (uint64, error) {
	dir, err := c.dir()
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return 0, &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return 0, fmt.Errorf("%s is not a directory", dir)
	}
	return st.Ino, nil
}

// Procs returns the processes of exactly this cgroup, not of those below it.
// Zombies are not listed. A cgroup that is gone has none.
func (c Cgroup) Procs() ([]int, error) {
	dir, err := c.dir()
	if err != nil {
		return nil, err
	}
	data, err := readCapped(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		if isGone(err) {
			return nil, nil
		}
		return nil, err
	}
	var pids []int
	for _, field := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(field)
		if err != nil || pid < 0 {
			return nil, fmt.Errorf("malformed line %q in cgroup.procs", field)
		}
		// 0 stands for a process that our pid namespace cannot name.
		pids = append(pids, pid)
	}
	return pids, nil
}

// Subtree returns this cgroup and all below it that exist, parents first. A
// cgroup that is gone has no subtree.
func (c Cgroup) Subtree() ([]Cgroup, error) {
	dir, err := c.dir()
	if err != nil {
		return nil, err
	}
	var found []Cgroup
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			// Directories come and go while we walk.
			if isGone(err) {
				return nil
			}
			return err
		}
		if d.IsDir() {
			found = append(found, Cgroup{Path: path.Join(c.Path, strings.TrimPrefix(p, dir))})
		}
		return nil
	})
	return found, err
}

// Populated reports whether a live process is in the cgroup or below it. A
// cgroup that is gone is not populated.
func (c Cgroup) Populated() (bool, error) {
	dir, err := c.dir()
	if err != nil {
		return false, err
	}
	data, err := readCapped(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		if isGone(err) {
			return false, nil
		}
		return false, err
	}
	return parseEvents(data)
}

func parseEvents(data []byte) (bool, error) {
	for line := range strings.Lines(string(data)) {
		switch strings.TrimSuffix(line, "\n") {
		case "populated 1":
			return true, nil
		case "populated 0":
			return false, nil
		}
	}
	return false, errors.New("cgroup.events does not say whether it is populated")
}

// OOMKills returns how many processes of the cgroup and of those below it the
// kernel's out-of-memory killer has killed. It is 0 where there is no memory
// controller, and of a cgroup that is gone.
func (c Cgroup) OOMKills() (int, error) {
	dir, err := c.dir()
	if err != nil {
		return 0, err
	}
	data, err := readCapped(filepath.Join(dir, "memory.events"))
	if err != nil {
		if isGone(err) {
			return 0, nil
		}
		return 0, err
	}
	return parseOOMKills(data)
}

func parseOOMKills(data []byte) (int, error) {
	for line := range strings.Lines(string(data)) {
		if count, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "oom_kill "); ok {
			n, err := strconv.ParseUint(count, 10, 31)
			return int(n), err
		}
	}
	return 0, errors.New("memory.events does not say how many were killed")
}

// WaitEmpty returns when no live process is left in the cgroup and below it, or
// when ctx ends.
func (c Cgroup) WaitEmpty(ctx context.Context) error {
	dir, err := c.dir()
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		if isGone(err) {
			return nil
		}
		return err
	}
	defer f.Close()
	for {
		// Reading through the polled descriptor is what arms it again. The
		// answer itself comes from a fresh look: notifications coalesce.
		buf := make([]byte, 256)
		if _, err := f.ReadAt(buf, 0); isGone(err) {
			return nil
		}
		populated, err := c.Populated()
		if err != nil {
			return err
		}
		if !populated {
			return nil
		}
		fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		if err := Poll(ctx, fds, emptyRecheck); err != nil {
			return fmt.Errorf("%s is still populated: %w", c.Path, err)
		}
	}
}

// isGone reports whether err says that the process or cgroup behind a file does
// not exist any more: opening fails with ENOENT, reading what was open before
// with ENODEV (cgroupfs) or ESRCH (procfs).
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ESRCH)
}

// readCapped reads a small kernel file whole.
func readCapped(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxProcRead+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxProcRead {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, maxProcRead)
	}
	return data, nil
}
