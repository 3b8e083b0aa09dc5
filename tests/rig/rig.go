// Package rig boots a private, real systemd for tests: a system manager and the
// lingering user manager of a normal user, in namespaces of their own on an
// overlay of the machine's root, with their own /tmp, /run, /var/tmp and cgroup
// subtree. Nothing in it can reach the machine's root, /tmp, mounts, hostname,
// sysctls or (unless asked) network, and nothing of it is left after Close.
//
// Importing the package installs a hook: the importing binary is also the
// program that sets the namespaces up and enters them, so any test binary can
// boot a rig. Root is required.
package rig

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of Options.
const (
	DefaultUser = "tester"
	DefaultUID  = 1500
	// BinDir is where Install shows the project's programs inside a rig.
	BinDir = "/opt/abfleet/bin"
)

const (
	// bootTimeout bounds Boot when its context has no earlier deadline. A boot
	// takes about 3 s on an idle machine; the rest is room for a busy one.
	bootTimeout = 90 * time.Second
	// teardownTimeout bounds each wait of a teardown: PID 1 to die, the cgroup
	// to empty, the helpers to leave.
	teardownTimeout = 20 * time.Second
	// poweroffTimeout bounds a clean shutdown, which waits for stop jobs.
	poweroffTimeout = 120 * time.Second
)

// Options say what kind of rig to boot. The zero value is a usable one.
type Options struct {
	// Name is the hostname inside (default "rig").
	Name string
	// Home is a directory of the machine that becomes /home inside and outlives
	// the rig: a second Boot on it is a reboot of the same machine. Empty means a
	// temporary one, removed by Close.
	Home string
	// Binds maps directories or files of the machine to paths inside, read-only.
	Binds map[string]string
	// HostNetwork shares the machine's network instead of an own one with only lo.
	HostNetwork bool
	// Mask lists paths that do not exist inside.
	Mask []string
	// HybridCgroup gives the rig a hybrid cgroup tree (tmpfs with cgroup2 at
	// unified), which systemd runs on and the product has to refuse.
	HybridCgroup bool
	// UID and User name the normal user (default 1500, "tester"); its group has
	// the same number and name.
	UID  int
	User string
}

// Rig is one booted private systemd.
type Rig struct {
	opts     Options
	home     string // host directory shown as /home
	tempHome bool
	cgroup   string // host path of the rig's cgroup
	console  *console
	pid      int // PID 1 as the machine sees it
	pidfd    *os.File
	ns       []namespace
	exited   chan struct{} // closed when PID 1 has been reaped
	exit     error         // how PID 1 ended; valid after exited

	commands atomic.Uint64

	mu       sync.Mutex
	sockets  *socketAgent
	down     bool // no longer running: powered off, cut or closed
	closed   bool
	leftover error
}

// namespace is one namespace of a rig, kept open so that entering it is
// impossible to confuse with entering another one.
type namespace struct {
	File *os.File `json:"-"`
	FD   int
	Ino  uint64
	Type int
	Name string
}

// bootSpec is what the set-up stage needs to know.
type bootSpec struct {
	Hostname    string
	MachineID   string
	BootID      string
	Home        string
	User        string
	UID         int
	Binds       map[string]string
	Mask        []string
	Hybrid      bool
	HostNetwork bool
	Console     string
}

// stageMessage is what the set-up stage answers: an error, or (with the
// notification socket attached) that systemd is about to run.
type stageMessage struct {
	Error string `json:",omitempty"`
}

var bootCounter atomic.Uint64

// Boot starts a rig and returns when its system has booted and the user's
// manager answers. It first removes what rigs of dead launchers left behind.
func Boot(ctx context.Context, opts Options) (*Rig, error) {
	r, err := boot(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("cannot boot rig: %w", err)
	}
	return r, nil
}

func boot(ctx context.Context, opts Options) (*Rig, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("root is required")
	}
	if opts.Name == "" {
		opts.Name = "rig"
	}
	if opts.User == "" {
		opts.User = DefaultUser
	}
	if opts.UID == 0 {
		opts.UID = DefaultUID
	}
	if _, err := os.Stat(systemdPath); err != nil {
		return nil, fmt.Errorf("systemd is not installed: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()

	root, err := cgroupRoot()
	if err != nil {
		return nil, err
	}
	if err := sweep(root); err != nil {
		return nil, err
	}
	name, err := ownName()
	if err != nil {
		return nil, err
	}
	r := &Rig{opts: opts, home: opts.Home, cgroup: filepath.Join(root, name), exited: make(chan struct{})}
	if r.home == "" {
		r.home, r.tempHome = filepath.Join(tempDir, name), true
	}
	if r.home, err = filepath.Abs(r.home); err != nil {
		return nil, err
	}
	if err := prepareHome(r.home, opts.User, opts.UID); err != nil {
		return nil, err
	}
	if err := os.Mkdir(r.cgroup, 0o755); err != nil {
		r.removeTempHome()
		return nil, err
	}
	if err := r.start(ctx); err != nil {
		tail := ""
		if r.console != nil {
			tail = r.console.tail(4096)
		}
		err = errors.Join(err, r.Close())
		if tail != "" {
			err = fmt.Errorf("%w\nconsole of its PID 1 (tail):\n%s", err, tail)
		}
		return nil, err
	}
	return r, nil
}

func (r *Rig) start(ctx context.Context) error {
	var err error
	if r.console, err = newConsole(); err != nil {
		return err
	}
	stage, err := r.launch()
	if err != nil {
		return err
	}
	defer stage.Close()
	notify, err := awaitStage(ctx, stage)
	if err != nil {
		return err
	}
	defer notify.Close()
	// The stage's end of the channel closes by exec: systemd runs from here on,
	// and PID 1's root is the rig's root.
	if err := awaitExec(ctx, stage); err != nil {
		return err
	}
	if err := r.openNamespaces(); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(r.cgroup, commandGroup), 0o755); err != nil {
		return err
	}
	if err := r.awaitReady(ctx, notify); err != nil {
		return err
	}
	return r.awaitUserManager(ctx)
}

// launch starts the set-up stage as PID 1 of new namespaces, inside the rig's
// cgroup, and returns the channel to it.
func (r *Rig) launch() (*os.File, error) {
	machineID := sha256.Sum256([]byte("abfleet rig " + r.home))
	bootID, err := newUUID()
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(bootSpec{
		Hostname: r.opts.Name, MachineID: hex.EncodeToString(machineID[:16]), BootID: bootID,
		Home: r.home, User: r.opts.User, UID: r.opts.UID, Binds: r.opts.Binds, Mask: r.opts.Mask,
		Hybrid: r.opts.HybridCgroup, HostNetwork: r.opts.HostNetwork, Console: r.console.path,
	})
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "rig stage"), os.NewFile(uintptr(pair[1]), "rig stage")
	defer theirs.Close()
	group, err := os.Open(r.cgroup)
	if err != nil {
		ours.Close()
		return nil, err
	}
	defer group.Close()

	flags := uintptr(unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC)
	if !r.opts.HostNetwork {
		flags |= unix.CLONE_NEWNET
	}
	var pidfd int
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{hookName, opBoot}, Env: []string{}, Dir: "/",
		Stdin: r.console.slave, Stdout: r.console.slave, Stderr: r.console.slave,
		ExtraFiles: []*os.File{theirs},
		SysProcAttr: &syscall.SysProcAttr{
			Setsid: true, Cloneflags: flags, Pdeathsig: syscall.SIGKILL,
			UseCgroupFD: true, CgroupFD: int(group.Fd()), PidFD: &pidfd,
		},
	}
	started := make(chan error, 1)
	go func() {
		// The parent death signal fires when the starting thread ends, not the
		// process: this thread stays until the rig is dead.
		runtime.LockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			close(r.exited)
			return
		}
		started <- nil
		r.exit = cmd.Wait()
		close(r.exited)
	}()
	err = <-started
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("cannot create namespaces: %w", err)
	}
	r.pid = cmd.Process.Pid
	r.pidfd = os.NewFile(uintptr(pidfd), "rig pid 1")
	if _, err := ours.Write(spec); err != nil {
		ours.Close()
		return nil, fmt.Errorf("cannot hand over the boot specification: %w", err)
	}
	return ours, nil
}

// awaitStage waits for the set-up stage and takes systemd's notification socket
// from it.
func awaitStage(ctx context.Context, stage *os.File) (*os.File, error) {
	buf := make([]byte, 64<<10)
	n, files, err := receive(ctx, stage, buf)
	if err != nil {
		return nil, fmt.Errorf("set-up stage: %w", err)
	}
	if n == 0 {
		return nil, errors.New("set-up stage ended without an answer")
	}
	var msg stageMessage
	if err := json.Unmarshal(buf[:n], &msg); err != nil {
		return nil, err
	}
	if msg.Error != "" || len(files) != 1 {
		closeAll(files)
		return nil, fmt.Errorf("set-up stage: %s", msg.Error)
	}
	return files[0], nil
}

// awaitExec waits until the channel closes; a message instead is the error of
// a failed exec.
func awaitExec(ctx context.Context, stage *os.File) error {
	buf := make([]byte, 64<<10)
	n, files, err := receive(ctx, stage, buf)
	closeAll(files)
	if err != nil {
		return fmt.Errorf("set-up stage: %w", err)
	}
	if n == 0 {
		return nil
	}
	var msg stageMessage
	if err := json.Unmarshal(buf[:n], &msg); err != nil {
		return err
	}
	return errors.New(msg.Error)
}

// awaitReady reads PID 1's notifications until it says that the boot is done.
func (r *Rig) awaitReady(ctx context.Context, notify *os.File) error {
	done := make(chan error, 1)
	conn, err := unixConn(notify)
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				done <- err
				return
			}
			for line := range strings.SplitSeq(string(buf[:n]), "\n") {
				if line == "READY=1" {
					done <- nil
					return
				}
			}
		}
	}()
	select {
	case err := <-done:
		return err
	case <-r.exited:
		return fmt.Errorf("its PID 1 ended: %v", r.exit)
	case <-ctx.Done():
		return fmt.Errorf("its PID 1 did not become ready: %w", ctx.Err())
	}
}

// awaitUserManager waits until the user's manager has finished its own boot.
func (r *Rig) awaitUserManager(ctx context.Context) error {
	out, err := r.User(ctx, "systemctl", "--user", "is-system-running", "--wait").CombinedOutput()
	state := strings.TrimSpace(string(out))
	if state == "running" || state == "degraded" {
		return nil
	}
	detail, _ := r.Root(ctx, "systemctl", "status", "--no-pager", "--lines=20", fmt.Sprintf("user@%d.service", r.opts.UID)).CombinedOutput()
	return fmt.Errorf("its user manager is not running: %s (%v)\n%s", state, err, bytes.TrimSpace(detail))
}

// PID is the process id, on the machine, of the rig's PID 1.
func (r *Rig) PID() int { return r.pid }

// Home is the machine's directory that is /home inside.
func (r *Rig) Home() string { return r.home }

// UserHome is the user's home directory inside the rig.
func (r *Rig) UserHome() string { return "/home/" + r.opts.User }

// UID is the number of the normal user.
func (r *Rig) UID() int { return r.opts.UID }

// RuntimeDir is the user's XDG_RUNTIME_DIR inside the rig.
func (r *Rig) RuntimeDir() string { return fmt.Sprintf("/run/user/%d", r.opts.UID) }

// Path is the machine's path of a file inside the rig. It is valid while the
// rig runs. An absolute symbolic link in it would be followed on the machine's
// root: use it for paths that have none.
func (r *Rig) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", r.pid), path)
}

// Console is the end of what PID 1 printed, for failure messages.
func (r *Rig) Console() string { return r.console.tail(consoleCap) }

// Exited is closed when the rig's PID 1 has ended.
func (r *Rig) Exited() <-chan struct{} { return r.exited }

// Journal runs journalctl as root inside the rig and returns what it prints.
func (r *Rig) Journal(ctx context.Context, args ...string) (string, error) {
	return output(r.Root(ctx, "journalctl", append([]string{"--no-pager", "--quiet"}, args...)...))
}

// Sh runs a shell script as the normal user and returns its standard output;
// the error carries the end of standard error.
func (r *Rig) Sh(ctx context.Context, script string) (string, error) {
	return output(r.User(ctx, "sh", "-c", script))
}

// RootSh is Sh as root.
func (r *Rig) RootSh(ctx context.Context, script string) (string, error) {
	return output(r.Root(ctx, "sh", "-c", script))
}

func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil {
		text := bytes.TrimSpace(stderr.Bytes())
		err = fmt.Errorf("%w: %s", err, text[max(0, len(text)-4096):])
	}
	return stdout.String(), err
}

// MountTmpfs mounts a tmpfs of the given size (as mount(8) takes it: "4m") on a
// directory of the rig, made if missing and owned by the normal user.
func (r *Rig) MountTmpfs(ctx context.Context, path, size string) error {
	out, err := r.Root(ctx, "sh", "-ec", `mkdir -p "$1"; exec mount -t tmpfs -o "nosuid,nodev,mode=0700,size=$2,uid=$3,gid=$3" tmpfs "$1"`,
		"sh", path, size, fmt.Sprint(r.opts.UID)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("cannot mount tmpfs on %s: %w: %s", path, err, bytes.TrimSpace(out))
	}
	return nil
}

// Install shows the programs in binDir, a directory of the machine, read-only
// at BinDir, which is on the PATH of the rig's user. A second Install replaces
// the first.
func (r *Rig) Install(ctx context.Context, binDir string) error { return r.Bind(ctx, binDir, BinDir) }

// Poweroff shuts the rig down as its operator would and waits for the end of
// its PID 1. Nothing but Home is left then; Close still has to be called.
func (r *Rig) Poweroff(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, poweroffTimeout)
	defer cancel()
	// The command may be killed by the very shutdown it asks for, so its own
	// status says nothing: the end of PID 1 does.
	out, err := r.Root(ctx, "systemctl", "poweroff").CombinedOutput()
	select {
	case <-r.exited:
	case <-ctx.Done():
		return fmt.Errorf("cannot power off rig: its PID 1 is still there: %w (systemctl: %v: %s)\n%s", ctx.Err(), err, bytes.TrimSpace(out), r.console.tail(4096))
	}
	return r.takeDown()
}

// PowerCut ends the rig as a power failure would: SIGKILL of its PID 1, which
// takes everything with it. Only what reached Home is left.
func (r *Rig) PowerCut(context.Context) error { return r.takeDown() }

// Close ends the rig, removes what it used on the machine and checks that
// nothing is left; the error names what is. Closing twice is harmless.
func (r *Rig) Close() error {
	err := r.takeDown()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return err
	}
	r.closed = true
	if r.console != nil {
		r.console.close()
	}
	return errors.Join(err, r.removeTempHome())
}

func (r *Rig) removeTempHome() error {
	if !r.tempHome {
		return nil
	}
	return os.RemoveAll(r.home)
}

func prepareHome(home, user string, uid int) error {
	if err := os.MkdirAll(home, 0o755); err != nil {
		return err
	}
	dir := filepath.Join(home, user)
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		return os.Chown(dir, uid, uid)
	case errors.Is(err, os.ErrExist):
		return nil
	default:
		return err
	}
}

func newUUID() (string, error) {
	var b [16]byte
	if _, err := io.ReadFull(rand.Reader, b[:]); err != nil {
		return "", err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
