package proof

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxProcFile caps what is read of one file in /proc, in bytes. A command line
// can be larger; what is beyond the cap is not looked at.
const maxProcFile = 1 << 20

// stat is what /proc/PID/stat says about a process.
type stat struct {
	State     byte
	PPID      int
	PGID      int
	StartTime uint64 // clock ticks since boot
}

// dead reports whether the process has ended and only its entry is left.
func (s stat) dead() bool { return s.State == 'Z' || s.State == 'X' || s.State == 'x' }

// errGone says that there is no such process.
var errGone = errors.New("no such process")

func procPath(pid int, name string) string {
	return "/proc/" + strconv.Itoa(pid) + "/" + name
}

func readProc(pid int, name string) ([]byte, error) {
	f, err := os.Open(procPath(pid, name))
	if err != nil {
		return nil, goneOr(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxProcFile))
	if err != nil {
		return nil, goneOr(err)
	}
	return data, nil
}

func goneOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return errGone
	}
	return err
}

func readStat(pid int) (stat, error) {
	data, err := readProc(pid, "stat")
	if err != nil {
		return stat{}, err
	}
	return parseStat(data)
}

// parseStat reads fields 3, 4, 5 and 22. Field 2 is the program's name in
// parentheses, which the program chooses: it may hold spaces and parentheses,
// so counting starts after the last one.
func parseStat(data []byte) (stat, error) {
	end := bytes.LastIndexByte(data, ')')
	if end < 0 || bytes.IndexByte(data, '(') > end {
		return stat{}, errors.New("malformed stat line: no name")
	}
	fields := strings.Fields(string(data[end+1:]))
	const state, ppid, pgid, start = 0, 1, 2, 19 // counted from field 3
	if len(fields) <= start {
		return stat{}, errors.New("malformed stat line: too short")
	}
	if f := fields[state]; len(f) != 1 || f[0]|0x20 < 'a' || f[0]|0x20 > 'z' {
		return stat{}, errors.New("malformed stat line: no state")
	}
	s := stat{State: fields[state][0]}
	var err [3]error
	s.PPID, err[0] = strconv.Atoi(fields[ppid])
	s.PGID, err[1] = strconv.Atoi(fields[pgid])
	s.StartTime, err[2] = strconv.ParseUint(fields[start], 10, 64)
	if e := errors.Join(err[:]...); e != nil {
		return stat{}, fmt.Errorf("malformed stat line: %w", e)
	}
	return s, nil
}

// readUID returns the user that a process runs as. The owner of /proc/PID does
// not tell: it is root for every process that may not be dumped.
func readUID(pid int) (int, error) {
	data, err := readProc(pid, "status")
	if err != nil {
		return 0, err
	}
	return parseUID(data)
}

// parseUID reads the Uid line and wants all four user ids to be the same.
func parseUID(data []byte) (int, error) {
	for line := range strings.Lines(string(data)) {
		rest, ok := strings.CutPrefix(line, "Uid:")
		if !ok {
			continue
		}
		ids := strings.Fields(rest)
		if len(ids) != 4 {
			return 0, errors.New("malformed Uid line")
		}
		for _, id := range ids[1:] {
			if id != ids[0] {
				return 0, fmt.Errorf("mixed user ids %s", strings.Join(ids, ","))
			}
		}
		uid, err := strconv.ParseUint(ids[0], 10, 32)
		if err != nil {
			return 0, errors.New("malformed Uid line")
		}
		return int(uid), nil
	}
	return 0, errors.New("no Uid line")
}

// readExe returns the base name of the program that a process runs. It survives
// the removal of the file, which is what a package upgrade does.
func readExe(pid int) (string, error) {
	target, err := os.Readlink(procPath(pid, "exe"))
	if err != nil {
		return "", goneOr(err)
	}
	return filepath.Base(strings.TrimSuffix(target, " (deleted)")), nil
}

// readArgs returns the command line as the process shows it now: programs may
// rewrite it.
func readArgs(pid int) ([]string, error) {
	data, err := readProc(pid, "cmdline")
	if err != nil {
		return nil, err
	}
	return parseArgs(data), nil
}

func parseArgs(data []byte) []string {
	text := strings.TrimRight(string(data), "\x00")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\x00")
}

// bootID identifies this boot of the host. It is read anew each time, so that
// no value outlives what it describes.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(data))
	if len(id) != 36 {
		return "", fmt.Errorf("malformed boot id %q", id)
	}
	return id, nil
}

// pids lists all processes that this /proc shows.
func pids() ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var all []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
			all = append(all, pid)
		}
	}
	return all, nil
}

// alive reports whether a process of that number exists and has not ended.
// Another user's process, which we may not signal, is alive.
func alive(pid int) bool {
	if pid <= 0 {
		return false
	}
	if err := unix.Kill(pid, 0); errors.Is(err, unix.ESRCH) {
		return false
	}
	s, err := readStat(pid)
	if errors.Is(err, errGone) {
		return false
	}
	return err != nil || !s.dead()
}

// rootFD says how a process relates to the runtime-root evidence file.
type rootFD int

const (
	rootNone  rootFD = iota
	rootHeld         // an open file of the process is exactly the file
	rootOther        // it holds the root file of another Instance
)

// holdsRoot looks through the open files of a process for the Instance's root
// file: same path, same device, same inode. The file must be a regular file of
// ours and no symbolic link.
func holdsRoot(pid int, root string) (rootFD, error) {
	var want unix.Stat_t
	if err := unix.Lstat(root, &want); err != nil {
		return rootNone, fmt.Errorf("root file %s: %w", root, err)
	}
	if want.Mode&unix.S_IFMT != unix.S_IFREG || int(want.Uid) != os.Geteuid() {
		return rootNone, fmt.Errorf("root file %s is not a regular file of ours", root)
	}
	files, err := openFiles(pid)
	if err != nil {
		return rootNone, err
	}
	held := rootNone
	for link, target := range files {
		if target != root {
			if isSiblingRoot(target, root) {
				return rootOther, nil
			}
			continue
		}
		var got unix.Stat_t
		if unix.Stat(link, &got) == nil && got.Dev == want.Dev && got.Ino == want.Ino {
			held = rootHeld
		}
	}
	return held, nil
}

// openFiles returns where the links in /proc/PID/fd point to, by their paths.
func openFiles(pid int) (map[string]string, error) {
	dir, err := os.Open(procPath(pid, "fd"))
	if err != nil {
		return nil, goneOr(err)
	}
	defer dir.Close()
	fds, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, goneOr(err)
	}
	files := make(map[string]string, len(fds))
	for _, fd := range fds {
		link := procPath(pid, "fd/"+fd)
		// One that cannot be read was closed meanwhile.
		if target, err := os.Readlink(link); err == nil {
			files[link] = target
		}
	}
	return files, nil
}

// isSiblingRoot reports whether path is RUN/<other instance>/root.
func isSiblingRoot(path, root string) bool {
	return filepath.Base(path) == filepath.Base(root) &&
		filepath.Dir(filepath.Dir(path)) == filepath.Dir(filepath.Dir(root)) &&
		filepath.Dir(path) != filepath.Dir(root)
}
