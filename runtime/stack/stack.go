// Package stack starts, observes and stops one Stack: the display of one
// Instance, if it has one, and its browser, each a Role in a transient scope of its own. It is
// the Runtime that the fleet's use cases drive, and the only place where the
// evidence they store is made and read.
//
// Starting goes through fixed steps, so that a service killed at any of them
// leaves nothing that cannot be proven and cleaned: the role is spawned
// blocked on a pipe, put into its scope, its membership verified, its pidfile
// and the store's record written, and only then released.
package stack

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/safefs"
	"abfleet/runtime/profile"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// journalStream is where journald takes the standard output of a process; the
// role connects by itself, once it is in its scope, so that its lines are
// filed under that scope.
const journalStream = "/run/systemd/journal/stdout"

// browserNoFile is the limit of open files of a browser. Chromium raises its
// soft limit up to the hard one and runs out of 1024 with some hundred tabs.
const browserNoFile = 8192

// evidence is what the store keeps of a running Stack, opaque to the fleet.
type evidence struct {
	Instance   string            `json:"instance"`
	Generation uint64            `json:"generation"`
	Key        string            `json:"key"` // opens the holder's socket
	Profile    string            `json:"profile"`
	Display    *proof.Generation `json:"display,omitempty"`
	VNC        *proof.Generation `json:"vnc,omitempty"` // of a display that serves no VNC itself
	Chromium   *proof.Generation `json:"chromium,omitempty"`
	// Manager is the run of systemd that the Stack was started under, as
	// unit.Manager.Started has it.
	Manager uint64 `json:"manager,omitempty"`
	// Former are Generations that a recovery replaced. Nothing of them may be
	// left either.
	Former []proof.Generation `json:"former,omitempty"`
}

// generations are the Stack's roles that were started, in the order in which
// they are; they are stopped the other way round.
func (e evidence) generations() []*proof.Generation {
	all := []*proof.Generation{e.Display, e.VNC, e.Chromium}
	return slices.DeleteFunc(all, func(g *proof.Generation) bool { return g == nil })
}

// viewer is the role that serves the display to people, nil for a Stack that was
// started without a display.
func (e evidence) viewer() (*proof.Generation, error) {
	switch {
	case e.Chromium == nil:
	case e.Display == nil:
		if e.Chromium.Display == 0 {
			return nil, nil
		}
	case e.VNC != nil:
		return e.VNC, nil
	case len(e.Display.Sockets) > 0:
		return e.Display, nil
	}
	return nil, neverStarted
}

// neverStarted says that a Stack, whose start broke off, lacks a role.
var neverStarted = fault.New(fault.BrowserNotControllable, "reach browser", "start it again", "a role of it was never started")

func (e evidence) encode() fleet.Evidence {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain data only
	}
	return b
}

func decode(ev fleet.Evidence) (evidence, error) {
	var e evidence
	if err := json.Unmarshal(ev, &e); err != nil {
		return e, fmt.Errorf("evidence: %w", err)
	}
	if e.Instance == "" {
		return e, errors.New("evidence names no instance")
	}
	return e, nil
}

// Runtime runs Stacks on a systemd manager. It implements fleet.Runtime.
type Runtime struct {
	cfg        *config.Config
	log        *slog.Logger
	units      *unit.Manager
	verifier   *proof.Verifier
	peerCgroup string // the service's own cgroup; its processes may open a holder's socket
	started    uint64 // which run of the manager this is

	// namespaces: user namespaces were seen to work. Should they be taken
	// away later, Chromium itself refuses to start.
	namespaces atomic.Bool

	mu       sync.Mutex
	displays map[int]bool // numbers given out and not yet seen as a lock file
}

var _ fleet.Runtime = (*Runtime)(nil)

// New connects to the systemd manager that cfg names and checks what every
// Stack needs from the host: unified cgroups and private directories.
func New(ctx context.Context, cfg *config.Config, log *slog.Logger) (*Runtime, error) {
	if _, err := unit.CgroupRoot(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.Home, cfg.RuntimeDir, cfg.TmpRoot} {
		if err := safefs.EnsureDir(dir); err != nil {
			return nil, err
		}
	}
	own, err := unit.OfPID(os.Getpid())
	if err != nil {
		return nil, err
	}
	m, err := unit.Dial(ctx, unit.Options{System: cfg.Manager == "system"})
	if err != nil {
		return nil, fault.Wrap(err, fault.SystemdUnavailable, "reach systemd",
			"the user manager has to run for this user: loginctl enable-linger, and a session with XDG_RUNTIME_DIR set")
	}
	started, err := m.Started(ctx)
	if err != nil {
		m.Close()
		return nil, fault.Wrap(err, fault.SystemdUnavailable, "reach systemd", "look at `systemctl --user status`; it has to answer")
	}
	return &Runtime{
		cfg: cfg, log: log, units: m, started: started,
		verifier:   &proof.Verifier{Units: m, Helper: cfg.RoleHelper, Displays: []string{cfg.Xvnc, cfg.Xvfb}, VNC: cfg.X11vnc, Chromium: cfg.Chromium},
		peerCgroup: own.Path,
		displays:   map[int]bool{},
	}, nil
}

// Close ends the D-Bus connection. Stacks go on.
func (r *Runtime) Close() { r.units.Close() }

// Ping asks the manager for a sign of life; the service's watchdog uses it.
func (r *Runtime) Ping(ctx context.Context) error { return r.units.Ping(ctx) }

// CreateProfile makes an empty Profile for a login, or checks the one that is
// there from the last.
func (r *Runtime) CreateProfile(_ context.Context, dir string) error {
	err := profile.Create(dir)
	if errors.Is(err, fs.ErrExist) {
		return safefs.CheckPrivate(dir)
	}
	return err
}

// RemoveTree deletes a Profile or a Template Snapshot.
func (r *Runtime) RemoveTree(ctx context.Context, dir string) error {
	if pid, what, held := r.verifier.ProfileHolder(dir, dir+".lock"); held {
		return fault.New(fault.ProfileBusy, "remove profile", "end that process; nothing was signalled and nothing removed", "it is held by %s (pid %d)", what, pid)
	}
	return profile.Remove(ctx, dir)
}

// Sweep finishes or undoes what a crash left half done among the trees in dir.
func (r *Runtime) Sweep(_ context.Context, dir string) error { return profile.Sweep(dir) }

// CaptureSnapshot copies a vacant, cleanly ended Profile into a read-only
// Template Snapshot. The last good snapshot stays until the new one is whole.
func (r *Runtime) CaptureSnapshot(ctx context.Context, dir, snapshot string) error {
	lock := dir + ".lock"
	if pid, what, held := r.verifier.ProfileHolder(dir, lock); held {
		return fault.New(fault.ProfileBusy, "save identity", "stop the browser that uses it first", "its Profile is held by %s (pid %d)", what, pid)
	}
	_, err := profile.Capture(ctx, dir, snapshot)
	return err
}

// files are the paths of one instance.
type files struct{ dir, tmp string }

func (r *Runtime) files(instance string) files {
	return files{r.cfg.InstanceDir(instance), r.tempDir(instance)}
}

func (f files) root() string             { return filepath.Join(f.dir, "root") }
func (f files) authority() string        { return filepath.Join(f.dir, "xauth") }
func (f files) password() string         { return filepath.Join(f.dir, "vnc.passwd") }
func (f files) rfb() string              { return filepath.Join(f.dir, "rfb.sock") }
func (f files) cdp() string              { return filepath.Join(f.dir, "cdp.sock") }
func (f files) pidfile(rl string) string { return filepath.Join(f.dir, rl+".pid") }

// exit is on the disk, unlike the rest: how a browser ended is still to be told
// after the boot that it ended in.
func (f files) exit() string { return filepath.Join(f.tmp, "exit.json") }

// claim says what has to be vacant for the Stack to count as stopped.
func (r *Runtime) claim(e evidence) proof.Claim {
	f := r.files(e.Instance)
	c := proof.Claim{
		Instance: e.Instance, Slice: r.cfg.Slice(e.Instance), Root: f.root(),
		Profile: e.Profile, LockFile: e.Profile + ".lock",
		Sockets: []string{f.cdp(), f.rfb()},
	}
	for _, g := range e.generations() {
		c.Generations = append(c.Generations, *g)
	}
	c.Generations = append(c.Generations, e.Former...)
	return c
}

// OpenCDP proves the browser ours and opens a private browser session on it.
func (r *Runtime) OpenCDP(ctx context.Context, ev fleet.Evidence) (net.Conn, error) {
	e, err := decode(ev)
	if err != nil {
		return nil, err
	}
	if err := r.prove(ctx, e.Chromium); err != nil {
		return nil, err
	}
	return r.dialHolder(ctx, e)
}

// OpenViewer proves the display ours and connects to its VNC server.
func (r *Runtime) OpenViewer(ctx context.Context, ev fleet.Evidence) (fleet.Viewer, error) {
	e, err := decode(ev)
	if err != nil {
		return fleet.Viewer{}, err
	}
	viewer, err := e.viewer()
	if err != nil {
		return fleet.Viewer{}, err
	}
	if viewer == nil {
		return fleet.Viewer{}, fault.New(fault.ViewerUnavailable, "open viewer", "Set display in the configuration and restart the service and this browser",
			"this fleet runs browsers without a display (display = %q)", config.DisplayNone)
	}
	if err := r.prove(ctx, viewer); err != nil {
		return fleet.Viewer{}, err
	}
	f := r.files(e.Instance)
	password, err := role.ReadVNCPassword(f.password())
	if err != nil {
		return fleet.Viewer{}, fmt.Errorf("VNC password: %w", err)
	}
	conn, err := role.DialRFB(ctx, f.rfb(), viewer.Leader.PID)
	if err != nil {
		return fleet.Viewer{}, err
	}
	return fleet.Viewer{Conn: conn, Password: password}, nil
}

// prove verifies a generation and what it listens on, and lets go of the proof
// at once: opening a socket needs no pidfd.
func (r *Runtime) prove(ctx context.Context, g *proof.Generation) error {
	if g == nil {
		return neverStarted
	}
	live, err := r.verifier.Live(ctx, *g)
	if err == nil {
		defer live.Close()
		if g.Browser != nil {
			_, err = live.Browser()
		}
		if err == nil {
			err = endpoints(ctx, live)
		}
	}
	return fault.Wrap(err, fault.BrowserNotControllable, "reach browser", "it is started again on its next use")
}

// newKey returns the secret that opens one generation's holder.
func newKey() string {
	b := make([]byte, 16)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// roleFailure turns the end of a role during its start into a cause.
func roleFailure(rl string, err error) error {
	return fmt.Errorf("%s ended before it was ready: %w", rl, err)
}

// termWait is how long a display may take to end after TERM, and a browser
// after a TERM that follows a failed clean close.
const termWait = 3 * time.Second

var errNoDisplay = errors.New("no free X display number")

// takeDisplay reserves a display number that shows no sign of use. Two starts
// of this service never get the same one; against other programs the X
// server's own lock decides, and the start goes on with the next number.
func (r *Runtime) takeDisplay(after int) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := max(after+1, role.FirstDisplay); n < role.FirstDisplay+1000; n++ {
		if !r.displays[n] && !role.DisplayTaken(n) {
			r.displays[n] = true
			return n, nil
		}
	}
	return 0, errNoDisplay
}

func (r *Runtime) releaseDisplay(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.displays, n)
}

// tempDir is the private TMPDIR of an instance's browser.
func (r *Runtime) tempDir(instance string) string { return r.cfg.TmpDir(instance) }

// clearInstance removes the runtime files of a Stack that is proven stopped.
func (r *Runtime) clearInstance(ctx context.Context, e evidence) error {
	var errs []error
	if e.Display != nil {
		if err := proof.ClearDisplay(e.Display.Display, e.Display.Leader.PID); err != nil {
			r.log.Warn("an X lock or socket stays", "display", e.Display.Display, "error", err)
		}
	}
	errs = append(errs, profile.Remove(ctx, r.files(e.Instance).dir), profile.Remove(ctx, r.tempDir(e.Instance)))
	return errors.Join(errs...)
}

// killOrder is the escalation for a role that has no clean close of its own.
var killOrder = []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}

// home returns the user's home directory, where downloads and font caches go.
func home() string {
	if h, err := os.UserHomeDir(); err == nil && strings.HasPrefix(h, "/") {
		return h
	}
	return "/"
}
