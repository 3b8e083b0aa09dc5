package proof

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Base names of the programs behind the Roles. Programs are told by /proc/PID/exe
// and never by their command line alone, which a program may rewrite.
var (
	displayPrograms = []string{"Xvnc", "Xtigervnc", "Xvfb"}
	vncPrograms     = []string{"x11vnc"}
	browserPrograms = []string{"chromium", "chrome", "chromium-browser"}
	helperPrograms  = []string{"abfleet-role"}
)

// isProgram reports whether exe is one of the names or the base name of a
// configured program.
func isProgram(exe string, names []string, configured ...string) bool {
	if slices.Contains(names, exe) {
		return true
	}
	for _, program := range configured {
		if program == "" {
			continue
		}
		if real, err := filepath.EvalSymlinks(program); err == nil {
			program = real
		}
		if exe == filepath.Base(program) {
			return true
		}
	}
	return false
}

// serves reports whether exe is a program that the leader of a Role becomes. The
// leader of the chromium Role stays the helper.
func (v *Verifier) serves(role, exe string) bool {
	switch role {
	case RoleDisplay:
		return isProgram(exe, displayPrograms, v.Displays...)
	case RoleVNC:
		return isProgram(exe, vncPrograms, v.VNC)
	}
	return false
}

// leaderSignature checks that a process looks like the leader of its Role. A
// trampoline that was released but has not yet become its Role is accepted for
// any Role: what it will become is known to us alone.
func (v *Verifier) leaderSignature(g Generation) error {
	pid := g.Leader.PID
	exe, err := readExe(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	if isProgram(exe, helperPrograms, v.Helper) {
		return nil
	}
	if g.orphaned() && isProgram(exe, browserPrograms, v.Chromium) {
		return profileSignature(pid, g.Profile, false)
	}
	if !v.serves(g.Role, exe) {
		return refuse(SignatureDiffers, "process %d runs %s, which is no leader of role %s", pid, exe, g.Role)
	}
	args, err := readArgs(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	if token := ":" + strconv.Itoa(g.Display); !slices.Contains(args, token) {
		return refuse(SignatureDiffers, "process %d does not serve display %s", pid, token)
	}
	// A display without sockets is one that has a VNC server beside it.
	if rfb := rfbPath(args); (rfb != "" || len(g.Sockets) > 0) && !slices.Contains(g.Sockets, rfb) {
		return refuse(SignatureDiffers, "process %d serves VNC on %q, which is not recorded", pid, rfb)
	}
	return nil
}

// rfbPath returns the path of the socket that the command line of an Xvnc or an
// x11vnc has it serve VNC on, or "".
func rfbPath(args []string) string {
	for i, arg := range args {
		if (arg == "-rfbunixpath" || arg == "-unixsock") && i+1 < len(args) {
			return args[i+1]
		}
		if path, ok := strings.CutPrefix(arg, "-rfbunixpath="); ok {
			return path
		}
	}
	return ""
}

// ofInstance returns the path by which the command line of a display or VNC
// server shows that it is the Instance's, or "": that of its VNC socket, or of an
// X authority beside the Instance's root file.
func ofInstance(args, sockets, roots []string) string {
	if rfb := rfbPath(args); rfb != "" && slices.Contains(sockets, rfb) {
		return rfb
	}
	i := slices.Index(args, "-auth")
	if i < 0 || i+1 >= len(args) {
		return ""
	}
	auth := args[i+1]
	if slices.ContainsFunc(roots, func(root string) bool { return filepath.Dir(root) == filepath.Dir(auth) }) {
		return auth
	}
	return ""
}

// userDataDir returns the value of --user-data-dir on a Chromium command line,
// or "" where it cannot be seen any more.
func userDataDir(args []string) string {
	for _, arg := range args {
		if dir, ok := strings.CutPrefix(arg, "--user-data-dir="); ok && dir != "" {
			return filepath.Clean(dir)
		}
		// A title set by the program is one string, with spaces for the NULs.
		// Then nothing exact can be said.
	}
	return ""
}

// titleNames reports whether a title that the program wrote over its command
// line, one string with spaces for the NULs, has the Profile in it. That is
// enough to keep away, never to act.
func titleNames(args []string, profile string) bool {
	return len(args) == 1 && strings.Contains(args[0]+" ", " --user-data-dir="+filepath.Clean(profile)+" ")
}

// profileSignature checks that a browser process has the Profile: by the
// SingletonLock that names it or, only where there is no SingletonLock (a
// browser that is exiting removes it early) and strict is false, by its command
// line. A piece that names something else is a contradiction, whatever the
// other one says. strict is for a process that is not recorded yet: to one that
// is, the lock's host says only what this host was called when it started.
func profileSignature(pid int, profile string, strict bool) error {
	args, err := readArgs(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	dir := userDataDir(args)
	if dir != "" && dir != filepath.Clean(profile) {
		return refuse(SignatureDiffers, "process %d has the profile %s", pid, dir)
	}
	lock, err := readSingleton(profile)
	switch {
	case err == nil && lock.pid == pid && (lock.here() || !strict):
		return nil
	case err == nil:
		return refuse(SingletonDiffers, "the SingletonLock of %s names %s, not process %d", profile, lock, pid)
	case !errors.Is(err, os.ErrNotExist):
		return refuse(SingletonDiffers, "%w", err)
	case strict || dir == "":
		return refuse(SingletonDiffers, "%s has no SingletonLock", profile)
	}
	return nil
}

// rootEvidence checks that a process holds the Instance's root file open.
func rootEvidence(pid int, root string) error {
	held, err := holdsRoot(pid, root)
	switch {
	case errors.Is(err, errGone):
		return unreadable(pid, err)
	case err != nil:
		return refuse(RootMissing, "process %d: %w", pid, err)
	case held == rootOther:
		return refuse(RootContradicts, "process %d holds the root file of another instance open", pid)
	case held != rootHeld:
		return refuse(RootMissing, "process %d does not hold %s open", pid, root)
	}
	return nil
}
