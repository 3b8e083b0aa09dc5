package holder

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Spec is everything a role needs. It crosses the go pipe as JSON after the
// trampoline's membership in its scope has been verified.
type Spec struct {
	Role       string
	Instance   string
	Generation uint64
	Unit       string
	// Args is the program and its arguments; Args[0] is an absolute path.
	Args []string
	// Env is the whole environment of the role, nothing is added to it.
	Env []string
	// Dir is the working directory, "/" when empty.
	Dir string
	// RootFile is the runtime-root evidence. The role's main process keeps
	// it open read-only for as long as it lives.
	RootFile string
	// LockFile is the Profile's lock. An exclusive flock is held for as long
	// as the holder or the browser process lives. Empty: no lock.
	LockFile string
	// Labels are journal fields ABF_* for every line that is relayed.
	Labels map[string]string
	// NoFile is RLIMIT_NOFILE, capped by the hard limit; 0 keeps what is inherited.
	NoFile uint64
	// Journal is the path of journald's stdout stream socket. The native
	// socket is expected beside it. Empty, or nobody there: /dev/null.
	Journal string
	// Holder is set for Chromium, which gets a holder as its parent. Without
	// it the trampoline is replaced by Args.
	Holder *HolderSpec `json:",omitempty"`
}

// HolderSpec is the part of a Spec that only the holder needs.
type HolderSpec struct {
	// Socket is the path of the CDP socket, in a directory of mode 0700.
	Socket string
	// Key is the generation's secret that every peer must show.
	Key string
	// PeerCgroup is the path of the cgroup that peers must be in, as in the
	// "0::" line of /proc/PID/cgroup. Empty: uid and key decide.
	PeerCgroup string
	// ExitFile is where the holder leaves its Exit.
	ExitFile string
	// Display is the X display, ":N", whose windows are kept as large as the
	// screen, and Authority the path of its Xauthority file. Empty: none.
	Display, Authority string
	// Mute lists texts whose lines of the browser's output are not relayed:
	// complaints about what it was denied on purpose.
	Mute []string `json:",omitempty"`
	// CloseTimeout is how long Browser.close may take before the pair is
	// closed; 0 means DefaultCloseTimeout.
	CloseTimeout time.Duration
}

const (
	// DefaultCloseTimeout is how long Chromium may take to write everything
	// and exit after Browser.close. It takes 0.3 to 0.6 s on an idle machine.
	DefaultCloseTimeout = 8 * time.Second
	// maxSpec bounds the JSON of a Spec on the go pipe.
	maxSpec = 1 << 20
	// minKey is the least length of a generation's key in bytes.
	minKey = 16
	// maxSocketPath is what sockaddr_un holds, without the final NUL.
	maxSocketPath = 107
)

// check reports what makes a Spec unusable.
func (s *Spec) check() error {
	switch {
	case s.Role == "" || s.Instance == "":
		return errors.New("role and instance must be named")
	case len(s.Args) == 0 || !filepath.IsAbs(s.Args[0]):
		return errors.New("the program must be an absolute path")
	case !filepath.IsAbs(s.RootFile):
		return errors.New("the runtime-root file must be an absolute path")
	case s.LockFile != "" && !filepath.IsAbs(s.LockFile):
		return errors.New("the lock file must be an absolute path")
	}
	for _, v := range s.Env {
		if strings.IndexByte(v, '=') < 1 || strings.IndexByte(v, 0) >= 0 {
			return errors.New("every environment entry must be NAME=value")
		}
	}
	h := s.Holder
	if h == nil {
		return nil
	}
	switch {
	case !filepath.IsAbs(h.Socket) || len(h.Socket) > maxSocketPath:
		return fmt.Errorf("the socket must be an absolute path of at most %d bytes", maxSocketPath)
	case len(h.Key) < minKey:
		return fmt.Errorf("the key must have at least %d bytes", minKey)
	case !filepath.IsAbs(h.ExitFile):
		return errors.New("the exit file must be an absolute path")
	case h.CloseTimeout < 0:
		return errors.New("the close timeout must not be negative")
	}
	return nil
}

// RoleError is what a role reports when it cannot become what it was told to.
type RoleError struct {
	Step   Step          // what was being done
	Errno  syscall.Errno // 0 when no system call failed
	Detail string        // the cause as text
}

// Step names a stage of a role's start.
type Step string

// The stages, in their order.
const (
	StepSpec    Step = "read spec"
	StepDir     Step = "change directory"
	StepLimits  Step = "set resource limits"
	StepRoot    Step = "open runtime-root file"
	StepLock    Step = "lock profile"
	StepSocket  Step = "bind CDP socket"
	StepBrowser Step = "start browser"
	StepExec    Step = "execute program"
)

func (e *RoleError) Error() string { return "cannot " + string(e.Step) + ": " + e.Detail }

// Is lets errors.Is match the errno and ErrLockHeld.
func (e *RoleError) Is(target error) bool {
	if target == ErrLockHeld {
		return e.Step == StepLock && e.Errno == unix.EWOULDBLOCK
	}
	errno, ok := target.(syscall.Errno)
	return ok && e.Errno != 0 && e.Errno == errno
}

// ErrLockHeld means that another process holds the Profile's lock.
var ErrLockHeld = errors.New("the profile lock is held by another process")

// Triggers of an Exit. A close that was asked for is TriggerClose followed by
// ": " and the reason.
const (
	TriggerSignal  = "signal"
	TriggerClose   = "close"
	TriggerBrowser = "browser exited"
	TriggerEOF     = "holder EOF"
)

// Exit says how a browser ended. The holder writes it when the browser process
// is gone; a missing file means that the holder did not live to write it.
type Exit struct {
	Instance   string
	Generation uint64
	BrowserPID int
	// Trigger is what started the end: one of the Trigger constants.
	Trigger string
	// Detail adds what is known: the signal's name, who asked.
	Detail string `json:",omitempty"`
	// Step is the last means that was needed: "none" (it ended by itself),
	// "Browser.close", "pair closed", "SIGTERM", "SIGKILL".
	Step string
	// Code is the exit code, -1 when a signal ended the process.
	Code int
	// Signal is the name of the signal that ended the process, if one did.
	Signal string `json:",omitempty"`
	// OOMKills counts the kernel's out-of-memory kills in the role's cgroup.
	OOMKills int
	// UnitStopped: systemd stopped the unit, as far as its way of asking tells:
	// the stop signal with a SIGCONT after it.
	UnitStopped bool `json:",omitempty"`
	// Clean: exit code 0, and nothing harsher than closing the pair was needed.
	Clean bool
	At    time.Time
}

// Ended reports whether the browser process had ended when this was written: one
// that not even SIGKILL ends is given up.
func (e Exit) Ended() bool { return e.Code >= 0 || e.Signal != "" }

// maxExit bounds exit.json.
const maxExit = 64 << 10

// ReadExit reads an exit.json. It reports fs.ErrNotExist when there is none.
func ReadExit(path string) (Exit, error) {
	var e Exit
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return e, fmt.Errorf("cannot read exit record: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxExit))
	if err == nil {
		err = json.Unmarshal(data, &e)
	}
	if err != nil {
		return Exit{}, fmt.Errorf("cannot read exit record %s: %w", path, err)
	}
	return e, nil
}
