package proof

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// singleton is the content of a Profile's SingletonLock, the symbolic link
// "host-pid" by which Chromium keeps a second one off its user data directory.
type singleton struct {
	host string
	pid  int
}

func (s singleton) String() string { return fmt.Sprintf("process %d on host %s", s.pid, s.host) }

// here reports whether the lock was taken on this host.
func (s singleton) here() bool {
	host, err := os.Hostname()
	return err == nil && s.host == host
}

func readSingleton(profile string) (singleton, error) {
	path := filepath.Join(profile, "SingletonLock")
	target, err := os.Readlink(path)
	if err != nil {
		return singleton{}, err
	}
	s, ok := parseSingleton(target)
	if !ok {
		return singleton{}, fmt.Errorf("%s points to %q, not to host-pid", path, target)
	}
	return s, nil
}

// parseSingleton splits at the last dash: a host name may have some too.
func parseSingleton(target string) (singleton, bool) {
	i := strings.LastIndexByte(target, '-')
	if i < 1 {
		return singleton{}, false
	}
	pid, err := strconv.ParseUint(target[i+1:], 10, 31)
	if err != nil || pid < 1 {
		return singleton{}, false
	}
	return singleton{host: target[:i], pid: int(pid)}, true
}

// ReadSingleton returns whom the SingletonLock of a Profile names. ok is false if
// there is none or if it cannot be understood.
func ReadSingleton(profile string) (host string, pid int, ok bool) {
	s, err := readSingleton(profile)
	return s.host, s.pid, err == nil
}

// liveSingleton reports whether the lock's owner may be a live browser on this
// host. After a power cut the lock names a number that any process may have
// since: a program that is no browser, a browser's child, which never takes the
// lock, or a browser with another Profile. A Profile is its user's alone, so that
// of other users only root's browsers count. A process of ours that cannot be
// looked at counts as a browser.
func (v *Verifier) liveSingleton(s singleton, profile string) bool {
	if !s.here() || !alive(s.pid) {
		return false
	}
	name, err := readExe(s.pid)
	if errors.Is(err, errGone) {
		return alive(s.pid)
	}
	if uid, uerr := readUID(s.pid); uerr == nil && uid != os.Geteuid() {
		if uid != 0 {
			return false
		}
		name, _, _ = program(s.pid)
		err = nil
	}
	if err == nil && !isProgram(name, browserPrograms, v.Chromium) {
		return false
	}
	if args, err := readArgs(s.pid); err == nil && (isChild(args) || hasAnother(args, profile)) {
		return false
	}
	return !locksAnother(s.pid, profile)
}

// isChild reports whether a command line is that of one of Chromium's own
// children.
func isChild(args []string) bool {
	// A title set by the program is one string, with spaces for the NULs.
	words := strings.Fields(strings.Join(args, " "))
	return len(words) > 1 && strings.HasPrefix(words[1], "--type=")
}

// hasAnother reports whether a command line names another Profile than this.
func hasAnother(args []string, profile string) bool {
	dir := userDataDir(args)
	if dir == "" || dir == filepath.Clean(profile) {
		return false
	}
	got, err := os.Stat(dir)
	want, werr := os.Stat(profile)
	return err != nil || werr != nil || !os.SameFile(got, want)
}

// locksAnother reports whether a process holds open the lock file of another
// Profile whose SingletonLock names it. A browser has one Profile, so the
// number in this one's lock was recycled.
func locksAnother(pid int, profile string) bool {
	files, err := openFiles(pid)
	if err != nil {
		return false
	}
	for _, target := range files {
		other, ok := strings.CutSuffix(target, ".lock")
		if !ok || other == filepath.Clean(profile) {
			continue
		}
		if s, err := readSingleton(other); err == nil && s.here() && s.pid == pid {
			return true
		}
	}
	return false
}

// flockState says who holds a lock file.
type flockState struct {
	exists bool
	held   bool
	owner  int // pid as /proc/locks tells, 0 if it does not
}

// probeFlock tries a shared lock without waiting and gives it back at once. Two
// probes do not disturb each other. A Role that takes its lock at this very
// moment is disturbed, also by an observer, which holds no lock of the Stack:
// therefore a Role tries for a while.
func probeFlock(path string) (flockState, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		return flockState{}, nil
	}
	if err != nil {
		return flockState{}, fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return flockState{}, fmt.Errorf("stat %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() {
		return flockState{}, fmt.Errorf("%s is not a regular file of ours", path)
	}
	err = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return flockState{exists: true, held: true, owner: flockOwner(st)}, nil
	case err != nil:
		return flockState{}, fmt.Errorf("lock %s: %w", path, err)
	}
	// Given back by word: a process that is being forked at this moment has a
	// copy of the descriptor until its exec, and with it the lock.
	_ = unix.Flock(fd, unix.LOCK_UN)
	return flockState{exists: true}, nil
}

// lockEvidence checks that a process holds the exclusive flock of a Profile's
// lock file through an open file of its own. The kernel lists the lock with each
// descriptor of the open file that has it, so that a process which merely opened
// the lock file, or whose lock file was replaced, is told apart.
func lockEvidence(pid int, lockFile string) error {
	var want unix.Stat_t
	if err := unix.Lstat(lockFile, &want); err != nil {
		return refuse(LockMissing, "lock file %s: %w", lockFile, err)
	}
	if want.Mode&unix.S_IFMT != unix.S_IFREG || int(want.Uid) != os.Geteuid() {
		return refuse(LockMissing, "%s is not a regular file of ours", lockFile)
	}
	files, err := openFiles(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	for link, target := range files {
		// The kernel tells paths without the symbolic links that ours may have.
		var got unix.Stat_t
		if filepath.Base(target) != filepath.Base(lockFile) || unix.Stat(link, &got) != nil || got.Dev != want.Dev || got.Ino != want.Ino {
			continue
		}
		// One that cannot be read was closed meanwhile.
		if info, err := readProc(pid, "fdinfo/"+filepath.Base(link)); err == nil && hasFlock(string(info)) {
			return nil
		}
	}
	return refuse(LockMissing, "process %d does not hold the lock of %s", pid, lockFile)
}

// hasFlock reports whether a file in /proc/PID/fdinfo shows an exclusive flock,
// with a line such as
//
//	lock:	1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
//
// whose process is who took the lock, alive or not.
func hasFlock(fdinfo string) bool {
	for line := range strings.Lines(fdinfo) {
		f := strings.Fields(line)
		if len(f) >= 5 && f[0] == "lock:" && f[2] == "FLOCK" && f[4] == "WRITE" {
			return true
		}
	}
	return false
}

// flockOwner looks the lock up in /proc/locks. It names the process that took
// the lock, which need not be the one that holds it now: open files are
// inherited. It is a detail for people, never evidence.
func flockOwner(st unix.Stat_t) int {
	data, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	return parseLocks(string(data), unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
}

// parseLocks finds the owner of a granted flock, with lines such as
//
//	1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
//
// where a waiting lock has "->" as second field.
func parseLocks(table string, major, minor uint32, inode uint64) int {
	want := fmt.Sprintf("%02x:%02x:%d", major, minor, inode)
	suffix := fmt.Sprintf(":%d", inode)
	guess := 0
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 6 || f[1] != "FLOCK" {
			continue
		}
		pid, err := strconv.Atoi(f[4])
		if err != nil || pid <= 0 {
			continue
		}
		if f[5] == want {
			return pid
		}
		// btrfs shows another device here than in stat.
		if strings.HasSuffix(f[5], suffix) {
			guess = pid
		}
	}
	return guess
}

// ProfileHolder reports whether anybody has the Profile in use: by the flock on
// its lock file, by its SingletonLock, or as a browser started on it. pid is 0
// where the holder is not known, what says for people how it was found. Evidence
// that cannot be read counts as held.
func (v *Verifier) ProfileHolder(profile, lockFile string) (pid int, what string, held bool) {
	if err := v.profileFree(profile, lockFile); err != nil {
		return err.pid, err.Detail, true
	}
	all, err := pids()
	if err != nil {
		return 0, "the process table cannot be read", true
	}
	for _, pid := range all {
		if why := v.usesProfile(pid, profile); why != "" {
			return pid, why, true
		}
	}
	return 0, "", false
}

// heldBy is a Refusal that knows the process behind it.
type heldBy struct {
	*Refusal
	pid int
}

// profileFree checks flock and SingletonLock of a Profile.
func (v *Verifier) profileFree(profile, lockFile string) *heldBy {
	var lock flockState
	if lockFile != "" {
		var err error
		if lock, err = probeFlock(lockFile); err != nil {
			return &heldBy{refuse(LockUnsafe, "%w", err), 0}
		}
		if lock.held {
			return &heldBy{refuse(LockHeld, "%s is locked, by process %d as far as known", lockFile, lock.owner), lock.owner}
		}
	}
	if profile == "" {
		return nil
	}
	s, err := readSingleton(profile)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return &heldBy{refuse(SingletonUnclear, "%w", err), 0}
	case v.liveSingleton(s, profile):
		return &heldBy{refuse(SingletonLive, "the SingletonLock of %s names %s, which lives", profile, s), s.pid}
	case !s.here() && !lock.exists:
		// After a change of the host's name the lock is stale and our own free
		// flock says so. Without one it may be a browser on another host.
		return &heldBy{refuse(SingletonUnclear, "the SingletonLock of %s names %s", profile, s), 0}
	}
	return nil
}
