package proof

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
)

// xTmp is where X servers keep their locks and sockets, fixed by the X server.
// Tests point it elsewhere.
var xTmp = "/tmp"

func xLock(n int) string     { return filepath.Join(xTmp, fmt.Sprintf(".X%d-lock", n)) }
func xTempLock(n int) string { return filepath.Join(xTmp, fmt.Sprintf(".tX%d-lock", n)) }
func xSocket(n int) string   { return filepath.Join(xTmp, ".X11-unix", fmt.Sprintf("X%d", n)) }

// xLockInfo is what an X lock file says.
type xLockInfo struct {
	exists bool
	pid    int // whom it names, 0 if it cannot be understood
	uid    int // owner of the file
}

func readXLock(n int) (xLockInfo, error) {
	path := xLock(n)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		return xLockInfo{}, nil
	}
	if err != nil {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			return xLockInfo{exists: true, uid: int(st.Uid)}, nil
		}
		return xLockInfo{}, fmt.Errorf("open %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return xLockInfo{}, fmt.Errorf("stat %s: %w", path, err)
	}
	info := xLockInfo{exists: true, uid: int(st.Uid)}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return info, nil
	}
	data, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return xLockInfo{}, fmt.Errorf("read %s: %w", path, err)
	}
	info.pid = parseXLock(data)
	return info, nil
}

// parseXLock reads the ten columns and newline of an X lock file, 0 if it is
// anything else.
func parseXLock(data []byte) int {
	if len(data) != 11 || data[10] != '\n' {
		return 0
	}
	pid, err := strconv.ParseUint(strings.TrimLeft(string(data[:10]), " "), 10, 31)
	if err != nil {
		return 0
	}
	return int(pid)
}

// answering returns who accepts connections for a display, on the path and on
// the abstract socket.
func answering(n int) ([]peer, error) {
	var all []peer
	for _, name := range []string{xSocket(n), "@" + xSocket(n)} {
		p, err := knock(name)
		switch {
		case err == nil:
			all = append(all, p)
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOTDIR):
		default:
			return nil, fmt.Errorf("connect to %s: %w", name, err)
		}
	}
	return all, nil
}

// displayFree checks that no X server that may be the Claim's lives on the
// display. One of another user cannot be, by the kernel's word, and one that is
// proven not to be is no obstacle: the number is anybody's once it is free. Files
// that a dead server left behind are no server; ClearDisplay removes them.
func displayFree(n int, c Claim) error {
	us := os.Geteuid()
	peers, err := answering(n)
	if err != nil {
		return refuse(DisplayLive, "display :%d: %w", n, err)
	}
	for _, p := range peers {
		if p.uid == us && !notOf(c, p.pid) {
			return refuse(DisplayLive, "process %d answers on display :%d", p.pid, n)
		}
	}
	lock, err := readXLock(n)
	switch {
	case err != nil:
		return refuse(Unreadable, "display :%d: %w", n, err)
	case !lock.exists || lock.uid != us:
	case lock.pid == 0:
		return refuse(DisplayLockDiffers, "%s names no process", xLock(n))
	case alive(lock.pid) && !notOf(c, lock.pid):
		return refuse(DisplayLive, "%s names process %d, which lives", xLock(n), lock.pid)
	}
	return nil
}

// notOf reports whether a process is proven not to be the Claim's display server:
// the Claim has a record of that server, and this is a stranger.
func notOf(c Claim, pid int) bool {
	return slices.ContainsFunc(c.Generations, func(g Generation) bool { return g.Display > 0 }) && stranger(c, pid)
}

// stranger reports whether a process is proven to be none of the Claim's: no
// recorded one, without its root file open, without a place in its slice, and
// with nothing of its on the command line. All of it is read while a pidfd says
// that the process has not ended. What cannot be read proves nothing.
func stranger(c Claim, pid int) bool {
	if c.Instance == "" || c.Root == "" || c.Slice == "" {
		return false
	}
	fd, err := pidfdOpen(pid)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	m, _, err := observe(pid)
	if err != nil {
		return false
	}
	for _, g := range c.Generations {
		if slices.ContainsFunc(g.members(), func(r Member) bool { return r.PID == pid && r.StartTime == m.StartTime }) {
			return false
		}
	}
	files, err := openFiles(pid)
	if err != nil {
		return false
	}
	args, err := readArgs(pid)
	if err != nil {
		return false
	}
	cg, err := unit.OfPID(pid)
	if err != nil || slices.Contains(strings.Split(cg.Path, "/"), c.Slice) {
		return false
	}
	sockets, roots, _ := c.evidence()
	return rootAmong(files, roots) == "" && ofInstance(args, sockets, roots) == "" && running(fd, pid) == nil
}

// ClearDisplay removes the X lock and the X socket that the dead process deadPID
// left behind on display n. It does so only if the lock names exactly that
// process, the process does not live and nobody answers on the display;
// otherwise it touches nothing and returns a *Refusal. Nothing left behind is no
// error.
//
// It takes the X servers' own temporary lock meanwhile, so that no server can
// take the number over between the check and the removal.
func ClearDisplay(n, deadPID int) error {
	if n <= 0 || deadPID <= 1 {
		return refuse(RecordIncomplete, "display %d, process %d", n, deadPID)
	}
	if alive(deadPID) {
		return refuse(StillAlive, "process %d lives", deadPID)
	}
	temp := xTempLock(n)
	fd, err := unix.Open(temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if errors.Is(err, unix.EEXIST) {
		return refuse(DisplayBusy, "%s exists: an X server is starting, or died while it did", temp)
	}
	if err != nil {
		return refuse(Unreadable, "create %s: %w", temp, err)
	}
	unix.Close(fd)
	defer unix.Unlink(temp)

	peers, err := answering(n)
	switch {
	case err != nil:
		return refuse(DisplayLive, "display :%d: %w", n, err)
	case len(peers) > 0:
		return refuse(DisplayLive, "process %d answers on display :%d", peers[0].pid, n)
	}
	lock, err := readXLock(n)
	if err != nil {
		return refuse(Unreadable, "display :%d: %w", n, err)
	}
	if lock.exists && lock.pid != deadPID {
		return refuse(DisplayLockDiffers, "%s names process %d, not %d", xLock(n), lock.pid, deadPID)
	}
	socket := xSocket(n)
	if !lock.exists {
		var st unix.Stat_t
		switch err := unix.Lstat(socket, &st); {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return nil
		case err != nil:
			return refuse(Unreadable, "stat %s: %w", socket, err)
		}
		return refuse(DisplayLockDiffers, "%s is there and no lock says whose it was", socket)
	}
	// The socket first: as long as the lock is there the number is taken.
	for _, file := range []string{socket, xLock(n)} {
		if err := unix.Unlink(file); err != nil && !errors.Is(err, unix.ENOENT) {
			return refuse(Unreadable, "remove %s: %w", file, err)
		}
	}
	return nil
}
