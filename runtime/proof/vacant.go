package proof

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
)

// Claim names everything that must be gone for a Vacant. Zero fields are not
// looked at, so a Claim proves as much as it names: give it all that is known.
type Claim struct {
	Instance string
	// Generations are all starts that were recorded, also those of earlier boots
	// and those of which only the intent (Unit) is known.
	Generations []Generation
	// Slice is the name of the Stack's slice.
	Slice string
	// Root is the runtime-root evidence file; those of Generations count too.
	Root string
	// Profile and LockFile are the paths of the Profile and of its lock file.
	Profile  string
	LockFile string
	// Sockets are paths of unix sockets; those of Generations count too.
	Sockets []string
	// Display is an X display number; those of Generations of this boot count
	// too.
	Display int
}

// Vacant proves that nothing of an Instance is left and that nobody uses its
// Profile. It is a statement about one moment: ask for a new one immediately
// before doing what it allows. Only a Verifier makes one.
type Vacant struct {
	claim Claim
}

// Vacant verifies that nothing is left of what the Claim names. The error is a
// *Refusal that names the first thing found.
func (v *Verifier) Vacant(ctx context.Context, c Claim) (*Vacant, error) {
	if err := v.checkVacant(ctx, c); err != nil {
		return nil, err
	}
	return &Vacant{claim: c}, nil
}

func (v *Verifier) checkVacant(ctx context.Context, c Claim) error {
	if err := ctx.Err(); err != nil {
		return refuse(Unreadable, "%w", err)
	}
	if err := v.unitsEmpty(ctx, c); err != nil {
		return err
	}
	if err := membersGone(c.Generations); err != nil {
		return err
	}
	if err := v.profileFree(c.Profile, c.LockFile); err != nil {
		return err.Refusal
	}
	sockets, roots, displays := c.evidence()
	if err := v.nobodyElse(c.Profile, sockets, roots); err != nil {
		return err
	}
	for _, s := range sockets {
		if err := notListening(s); err != nil {
			return err
		}
	}
	for _, addr := range c.listeners() {
		if err := notServed(addr, c); err != nil {
			return err
		}
	}
	for _, n := range displays {
		if err := displayFree(n, c); err != nil {
			return err
		}
	}
	return nil
}

// evidence gathers what Claim and Generations name, each once. A display number
// of another boot says nothing: whoever has it now came after.
func (c Claim) evidence() (sockets, roots []string, displays []int) {
	boot, err := bootID()
	sockets = slices.Clone(c.Sockets)
	roots = []string{c.Root}
	displays = []int{c.Display}
	for _, g := range c.Generations {
		sockets = append(sockets, g.Sockets...)
		roots = append(roots, g.Root)
		if err != nil || g.BootID == boot {
			displays = append(displays, g.Display)
		}
	}
	slices.Sort(sockets)
	slices.Sort(roots)
	slices.Sort(displays)
	sockets, roots, displays = slices.Compact(sockets), slices.Compact(roots), slices.Compact(displays)
	empty := func(s string) bool { return s == "" }
	return slices.DeleteFunc(sockets, empty), slices.DeleteFunc(roots, empty),
		slices.DeleteFunc(displays, func(n int) bool { return n <= 0 })
}

// unitsEmpty checks the cgroups: those that were recorded, those that systemd
// names for the units now, and everything below the Stack's slice.
func (v *Verifier) unitsEmpty(ctx context.Context, c Claim) error {
	if len(c.Generations) == 0 && c.Slice == "" {
		return nil
	}
	if v.Units == nil {
		return refuse(UnitUnknown, "no connection to systemd")
	}
	for _, g := range c.Generations {
		if g.Cgroup != "" {
			if err := cgroupEmpty(unit.Cgroup{Path: g.Cgroup}); err != nil {
				return err
			}
			if parent := path.Dir(g.Cgroup); c.Slice != "" && path.Base(parent) == c.Slice {
				if err := cgroupEmpty(unit.Cgroup{Path: parent}); err != nil {
					return err
				}
			}
		}
		if g.Unit != "" {
			if err := v.unitEmpty(ctx, g.Unit); err != nil {
				return err
			}
		}
	}
	if c.Slice != "" {
		return v.unitEmpty(ctx, c.Slice)
	}
	return nil
}

func (v *Verifier) unitEmpty(ctx context.Context, name string) error {
	info, err := v.Units.Info(ctx, name)
	switch {
	case errors.Is(err, unit.ErrNotLoaded):
		return nil
	case err != nil:
		return refuse(UnitUnknown, "%w", err)
	case info.ControlGroup == "":
		return nil
	}
	return cgroupEmpty(info.Cgroup())
}

// cgroupEmpty checks a cgroup with all below it.
func cgroupEmpty(cg unit.Cgroup) error {
	populated, err := cg.Populated()
	if err != nil {
		return refuse(Unreadable, "cgroup %s: %w", cg.Path, err)
	}
	if !populated {
		return nil
	}
	// The list is for the reader only; populated has decided.
	var found []int
	if tree, err := cg.Subtree(); err == nil {
		for _, c := range tree {
			if procs, err := c.Procs(); err == nil {
				found = append(found, procs...)
			}
		}
	}
	return refuse(Populated, "cgroup %s has processes %v", cg.Path, found)
}

// membersGone checks the recorded processes of this boot wherever they are now:
// another program can have moved them out of our cgroup.
func membersGone(generations []Generation) error {
	boot, err := bootID()
	if err != nil {
		return refuse(Unreadable, "boot id: %w", err)
	}
	for _, g := range generations {
		if g.BootID != boot {
			continue
		}
		for _, m := range g.members() {
			s, err := readStat(m.PID)
			switch {
			case errors.Is(err, errGone):
			case err != nil:
				return refuse(Unreadable, "process %d: %w", m.PID, err)
			case s.StartTime == m.StartTime && !s.dead():
				return refuse(StillAlive, "process %d of %s lives", m.PID, g)
			}
		}
	}
	return nil
}

// nobodyElse looks through all processes for one with a Role signature of this
// Instance.
func (v *Verifier) nobodyElse(profile string, sockets, roots []string) error {
	all, err := pids()
	if err != nil {
		return refuse(Unreadable, "process table: %w", err)
	}
	for _, pid := range all {
		why := v.usesProfile(pid, profile)
		if why == "" {
			why = v.hasRole(pid, sockets, roots)
		}
		if why != "" {
			return refuse(Elsewhere, "process %d %s", pid, why)
		}
	}
	return nil
}

// program returns the base name of what a process runs. Where the kernel does
// not show it (another user's process, or one that may not be dumped) the first
// word of the command line has to do; guessed then is true.
func program(pid int) (name string, args []string, guessed bool) {
	exe, err := readExe(pid)
	if err == nil {
		return exe, nil, false
	}
	if errors.Is(err, errGone) {
		return "", nil, false
	}
	if args, err = readArgs(pid); err != nil || len(args) == 0 {
		return "", nil, false
	}
	return filepath.Base(args[0]), args, true
}

// usesProfile says why a process is taken for a browser with the Profile, or "".
// A Profile is its user's alone, so that of other users only root's count: their
// command lines say what they like.
func (v *Verifier) usesProfile(pid int, profile string) string {
	if profile == "" {
		return ""
	}
	name, args, _ := program(pid)
	if !isProgram(name, browserPrograms, v.Chromium) {
		return ""
	}
	if uid, err := readUID(pid); err == nil && uid != os.Geteuid() && uid != 0 {
		return ""
	}
	if args == nil {
		var err error
		if args, err = readArgs(pid); err != nil {
			return ""
		}
	}
	if (userDataDir(args) == filepath.Clean(profile) || titleNames(args, profile)) && alive(pid) {
		return fmt.Sprintf("runs %s on %s", name, profile)
	}
	return ""
}

// hasRole says why a process is taken for a Role of this Instance, or "".
func (v *Verifier) hasRole(pid int, sockets, roots []string) string {
	name, args, guessed := program(pid)
	server := v.serves(RoleDisplay, name) || v.serves(RoleVNC, name)
	if !server && !isProgram(name, helperPrograms, v.Helper) && !isProgram(name, browserPrograms, v.Chromium) {
		return ""
	}
	if server {
		if args == nil {
			args, _ = readArgs(pid)
		}
		if path := ofInstance(args, sockets, roots); path != "" && alive(pid) {
			return fmt.Sprintf("runs %s on %s", name, path)
		}
	}
	if guessed {
		// Its open files are as closed to us as its program.
		return ""
	}
	files, err := openFiles(pid)
	if err != nil {
		return ""
	}
	if root := rootAmong(files, roots); root != "" {
		return fmt.Sprintf("runs %s and holds %s open", name, root)
	}
	return ""
}

// rootAmong returns the first open file that is one of the root files, or "". A
// Role keeps the file open also after its directory was removed.
func rootAmong(files map[string]string, roots []string) string {
	for _, target := range files {
		if slices.Contains(roots, strings.TrimSuffix(target, " (deleted)")) {
			return target
		}
	}
	return ""
}

// connectTimeout bounds the attempt to reach a unix socket. The kernel answers
// at once, unless the listener's queue is full.
const connectTimeout = 2 * time.Second

// notListening checks that nobody accepts connections on a unix socket.
func notListening(name string) error {
	peer, err := knock(name)
	if errors.Is(err, unix.EACCES) && openSocket(name) {
		peer, err = knock(name)
	}
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOTDIR):
		return nil
	case err != nil:
		return refuse(ListenerLive, "%s: %w", name, err)
	}
	return refuse(ListenerLive, "process %d listens on %s", peer.pid, name)
}

// openSocket lets this user connect to a socket of its own. A server that is
// killed between the bind and the mode that it wants, as an Xvnc may be, leaves
// one that nobody may connect to, and that would stay a riddle for ever.
func openSocket(name string) bool {
	var st unix.Stat_t
	err := unix.Lstat(name, &st)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK && int(st.Uid) == os.Geteuid() && unix.Chmod(name, 0o600) == nil
}

// peer is who listens on a socket, as the kernel recorded it.
type peer struct{ pid, uid int }

// knock connects to a unix socket and hangs up. A name with a leading "@" is an
// abstract one. The error is the errno.
func knock(name string) (peer, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return peer{}, err
	}
	defer unix.Close(fd)
	// The send timeout is what bounds a connect to a full queue.
	tv := unix.NsecToTimeval(connectTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
		return peer{}, err
	}
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: name})
	for errors.Is(err, unix.EINTR) {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: name})
	}
	if err != nil {
		return peer{}, err
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return peer{}, err
	}
	return peer{pid: int(cred.Pid), uid: int(cred.Uid)}, nil
}
