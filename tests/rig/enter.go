package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// hookName is argv[0] of a process that is a part of a rig, not a test.
	hookName = "abfleet-rig"

	opBoot    = "boot"    // become PID 1 of a new rig
	opEnter   = "enter"   // run a command inside a rig
	opMount   = "mount"   // attach a mount inside a rig
	opSockets = "sockets" // inside a rig, connect and listen for the test

	// commandGroup is the cgroup, below the rig's root, of commands run from
	// outside: no unit's, so that the managers leave it alone.
	commandGroup = "rig.cmd"

	// commandGrace is how long a command's pipes may stay open after its end
	// was asked for, when a process it started holds them.
	commandGrace = 5 * time.Second
)

// enterSpec tells the helper where to go. The namespaces are opened through the
// test's own descriptors: a process id could have been reused.
type enterSpec struct {
	Parent     int
	Namespaces []namespace
	Cgroup     string // of the command, on the machine; made by the test
	UID        int
	Dir        string
	Self       bool   // run this binary again inside instead of a program
	Target     string // opMount: where
}

func init() {
	if len(os.Args) < 2 || os.Args[0] != hookName {
		return
	}
	// Namespaces belong to threads, and only the main one survives an exec with
	// the parent death signal in place.
	runtime.LockOSThread()
	switch os.Args[1] {
	case opBoot:
		bootStage()
	case opEnter:
		os.Exit(enterStage(os.Args[2], os.Args[3:]))
	case opMount:
		os.Exit(mountStage(os.Args[2]))
	case opSockets:
		os.Exit(socketStage(os.Args[2]))
	}
	os.Exit(2)
}

// User prepares a command that runs inside the rig as the normal user: in its
// home directory, with the environment of UserEnv (append to Env to add to it;
// likewise ExtraFiles), in a cgroup of its own beside the managers'. Signals sent
// to the command reach the program. When ctx ends, everything still in that
// cgroup is killed; what systemd has moved into a unit lives on.
func (r *Rig) User(ctx context.Context, name string, args ...string) *exec.Cmd {
	return r.command(ctx, r.opts.UID, r.UserHome(), r.UserEnv(), append([]string{name}, args...))
}

// Root is User for the rig's root.
func (r *Rig) Root(ctx context.Context, name string, args ...string) *exec.Cmd {
	env := []string{"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/bash", "LANG=C.UTF-8", "PATH=" + BinDir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return r.command(ctx, 0, "/", env, append([]string{name}, args...))
}

// UserEnv is the environment a login of the normal user would have.
func (r *Rig) UserEnv() []string {
	return []string{
		"HOME=" + r.UserHome(), "USER=" + r.opts.User, "LOGNAME=" + r.opts.User, "SHELL=/bin/bash", "LANG=C.UTF-8",
		"PATH=" + BinDir + ":/usr/local/bin:/usr/bin:/bin",
		"XDG_RUNTIME_DIR=" + r.RuntimeDir(), "DBUS_SESSION_BUS_ADDRESS=unix:path=" + r.RuntimeDir() + "/bus",
	}
}

func (r *Rig) command(ctx context.Context, uid int, dir string, env, argv []string) *exec.Cmd {
	cmd, spec, err := r.helper(ctx, opEnter)
	if err == nil {
		spec.UID, spec.Dir = uid, dir
		spec.Cgroup, err = r.commandCgroup()
	}
	if err != nil {
		cmd.Err = fmt.Errorf("cannot run %s in rig: %w", argv[0], err)
		return cmd
	}
	group := spec.Cgroup
	cmd.Args = append(cmd.Args, spec.String())
	cmd.Args = append(cmd.Args, argv...)
	cmd.Env = env
	cmd.Cancel = func() error {
		// Wait returns after this: nothing of the command runs any more then.
		ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
		defer cancel()
		err := killCgroup(group)
		if err == nil {
			err = awaitEmpty(ctx, group)
		}
		return errors.Join(err, cmd.Process.Kill())
	}
	return cmd
}

// helper prepares a process of this binary that enters the rig's namespaces.
func (r *Rig) helper(ctx context.Context, op string) (*exec.Cmd, enterSpec, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{hookName, op}
	cmd.WaitDelay = commandGrace
	cmd.Dir = "/"
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.down {
		return cmd, enterSpec{}, errors.New("the rig is down")
	}
	return cmd, enterSpec{Parent: os.Getpid(), Namespaces: r.ns}, nil
}

func (s enterSpec) String() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // a struct of numbers and strings
	}
	return string(text)
}

func (r *Rig) commandCgroup() (string, error) {
	group := filepath.Join(r.cgroup, commandGroup, strconv.FormatUint(r.commands.Add(1), 10))
	return group, os.Mkdir(group, 0o755)
}

// Bind shows a directory or file of the machine read-only inside a running rig,
// in place of what an earlier Bind showed there.
func (r *Rig) Bind(ctx context.Context, host, inside string) error {
	if err := r.bind(ctx, host, inside); err != nil {
		return fmt.Errorf("cannot bind %s at %s in rig: %w", host, inside, err)
	}
	return nil
}

func (r *Rig) bind(ctx context.Context, host, inside string) error {
	fd, err := cloneTree(host, true)
	if err != nil {
		return err
	}
	tree := os.NewFile(uintptr(fd), host)
	defer tree.Close()
	cmd, spec, err := r.helper(ctx, opMount)
	if err != nil {
		return err
	}
	spec.Target = inside
	cmd.Args = append(cmd.Args, spec.String())
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{tree}
	_, err = output(cmd)
	return err
}

// openNamespaces takes hold of the namespaces of the rig's PID 1.
func (r *Rig) openNamespaces() error {
	types := []namespace{
		{Name: "pid", Type: unix.CLONE_NEWPID}, {Name: "uts", Type: unix.CLONE_NEWUTS}, {Name: "ipc", Type: unix.CLONE_NEWIPC},
		{Name: "cgroup", Type: unix.CLONE_NEWCGROUP}, {Name: "net", Type: unix.CLONE_NEWNET}, {Name: "mnt", Type: unix.CLONE_NEWNS},
	}
	for _, ns := range types {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", r.pid, ns.Name))
		if err != nil {
			return err
		}
		ns.File, ns.FD = f, int(f.Fd())
		r.ns = append(r.ns, ns)
		if r.ns[len(r.ns)-1].Ino, err = inode(f); err != nil {
			return err
		}
	}
	return nil
}

func inode(f *os.File) (uint64, error) {
	var stat unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &stat)
	return stat.Ino, err
}

// join enters the namespaces of the spec with the calling thread.
func (s enterSpec) join() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	var files []*os.File
	for _, ns := range s.Namespaces {
		f, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", s.Parent, ns.FD))
		if err != nil {
			return err
		}
		if ino, err := inode(f); err != nil || ino != ns.Ino {
			return fmt.Errorf("%s namespace of the rig is gone", ns.Name)
		}
		files = append(files, f)
	}
	for i, ns := range s.Namespaces {
		if err := unix.Setns(int(files[i].Fd()), ns.Type); err != nil {
			return fmt.Errorf("cannot enter %s namespace: %w", ns.Name, err)
		}
	}
	closeAll(files)
	return nil
}

// enterStage runs a command inside a rig as its child and ends as it ended. The
// command itself is started through setpriv: the child is to die with us, and the
// parent death signal has to be set after the change of user.
func enterStage(text string, argv []string) int {
	complain := func(err error) int {
		fmt.Fprintf(os.Stderr, "cannot enter rig: %v\n", err)
		return 125
	}
	var spec enterSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return complain(err)
	}
	files, err := inheritedFiles()
	if err != nil {
		return complain(err)
	}
	group, err := os.Open(spec.Cgroup)
	if err != nil {
		return complain(err)
	}
	groups, err := os.Open(filepath.Dir(spec.Cgroup))
	if err != nil {
		return complain(err)
	}
	exe, err := os.Open("/proc/self/exe")
	if err != nil {
		return complain(err)
	}
	if err := errors.Join(spec.join(), dropCapabilities()); err != nil {
		return complain(err)
	}
	cmd := &exec.Cmd{
		Path: "/usr/bin/setpriv", Env: os.Environ(), Dir: spec.Dir, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, ExtraFiles: files,
		SysProcAttr: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())},
	}
	cmd.Args = []string{"setpriv", "--pdeathsig", "KILL"}
	if spec.UID != 0 {
		id := strconv.Itoa(spec.UID)
		cmd.Args = append(cmd.Args, "--reuid", id, "--regid", id, "--clear-groups", "--inh-caps=-all")
	}
	cmd.Args = append(append(cmd.Args, "--"), argv...)
	if spec.Self {
		// The binary's path means nothing inside; and as the user it might not be
		// executable, so it starts as root and drops privileges itself.
		cmd.ExtraFiles = append(cmd.ExtraFiles, exe)
		cmd.Path = fmt.Sprintf("/proc/self/fd/%d", 2+len(cmd.ExtraFiles))
		cmd.Args = append([]string{hookName}, argv...)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	if err := cmd.Start(); err != nil {
		return complain(err)
	}
	go func() {
		for s := range signals {
			cmd.Process.Signal(s)
		}
	}()
	cmd.Wait()
	// Fails, rightly, while something the command started still runs there.
	unix.Unlinkat(int(groups.Fd()), filepath.Base(spec.Cgroup), unix.AT_REMOVEDIR)
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !status.Signaled() {
		return status.ExitStatus()
	}
	signal.Reset()
	unix.Kill(os.Getpid(), status.Signal())
	return 128 + int(status.Signal())
}

// inheritedFiles are the descriptors beyond the standard ones that the test gave
// to the command: exactly those that are not close-on-exec.
func inheritedFiles() ([]*os.File, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	var fds []int
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < 3 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			fds = append(fds, fd)
		}
	}
	if len(fds) == 0 {
		return nil, nil
	}
	files := make([]*os.File, slices.Max(fds)-2)
	for _, fd := range fds {
		unix.CloseOnExec(fd)
		files[fd-3] = os.NewFile(uintptr(fd), "inherited")
	}
	return files, nil
}

// mountStage attaches the tree on descriptor 3 inside a rig.
func mountStage(text string) int {
	var spec enterSpec
	err := json.Unmarshal([]byte(text), &spec)
	if err == nil {
		err = spec.join()
	}
	if err == nil {
		// EINVAL: nothing was bound there before.
		if err = unix.Unmount(spec.Target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			err = nil
		}
	}
	if err == nil {
		err = attachAt(3, spec.Target)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// processesIn lists the processes whose pid or mount namespace is the rig's.
func (r *Rig) processesIn() []int {
	want := map[string]bool{}
	for _, ns := range r.ns {
		if ns.Name == "pid" || ns.Name == "mnt" {
			want[fmt.Sprintf("%s:[%d]", ns.Name, ns.Ino)] = true
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		for _, kind := range []string{"pid", "mnt"} {
			if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind)); err == nil && want[link] {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

func describeProcess(pid int) string {
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	text := strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
	return fmt.Sprintf("process %d (%s)", pid, text[:min(len(text), 200)])
}
