package holder

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// journalPriority is the level of the lines a role writes itself; "info".
const journalPriority = 6

// Main is the role helper: it waits on the go pipe for a Spec and becomes what
// the Spec says. It returns the exit status of the process. Without a complete
// Spec it runs nothing and says nothing.
func Main() int {
	for _, fd := range []int{goFD, statusFD} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			os.Stderr.WriteString("abfleet-role is started by abfleetd only\n")
			return 2
		}
		unix.CloseOnExec(fd)
	}
	closeInherited()
	defaultSignals()
	spec, err := readSpec(goFD)
	if err == errNotReleased {
		return 0
	}
	unix.Close(goFD)
	if err != nil {
		return fail(StepSpec, err)
	}
	res, step, err := prepare(spec)
	if err != nil {
		return fail(step, err)
	}
	if spec.Holder != nil {
		return hold(spec, res)
	}
	return become(spec, res)
}

// fail reports why the role does not start and returns the exit status.
func fail(step Step, err error) int {
	report(statusMessage{Step: step, Errno: errnoOf(err), Detail: err.Error()})
	return 1
}

func report(m statusMessage) {
	const longestDetail = 1000
	if len(m.Detail) > longestDetail {
		m.Detail = m.Detail[:longestDetail]
	}
	data, err := json.Marshal(m)
	if err != nil {
		return
	}
	// If the service is gone nobody needs to know.
	_, _ = unix.Write(statusFD, append(data, '\n'))
}

// closeInherited closes what came through the exec and was not meant to:
// everything that this process opened itself is marked close-on-exec.
func closeInherited() {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

// errNotReleased means that the go pipe ended before a complete Spec.
var errNotReleased = errors.New("not released")

// rawFD reads a descriptor without the runtime's poller.
type rawFD int

func (fd rawFD) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), p)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

func readSpec(fd int) (*Spec, error) {
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, err
	}
	var head [4]byte
	if _, err := io.ReadFull(rawFD(fd), head[:]); err != nil {
		return nil, errNotReleased
	}
	n := binary.BigEndian.Uint32(head[:])
	if n == 0 || n > maxSpec {
		return nil, fmt.Errorf("its length is %d bytes", n)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(rawFD(fd), data); err != nil {
		return nil, errNotReleased
	}
	var more [1]byte
	if k, _ := (rawFD(fd)).Read(more[:]); k != 0 {
		return nil, errors.New("something follows it")
	}
	spec := new(Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		return nil, err
	}
	return spec, spec.check()
}

// resources are the descriptors a role keeps.
type resources struct {
	root int // the runtime-root file
	lock int // the Profile's lock file, or -1
}

// prepare does what display and chromium roles have in common, in an order in
// which each step is in force for the next.
func prepare(spec *Spec) (resources, Step, error) {
	res := resources{root: -1, lock: -1}
	dir := spec.Dir
	if dir == "" {
		dir = "/"
	}
	if err := unix.Chdir(dir); err != nil {
		return res, StepDir, &os.PathError{Op: "chdir", Path: dir, Err: err}
	}
	unix.Umask(0o077)
	if err := limits(spec); err != nil {
		return res, StepLimits, err
	}
	var err error
	res.root, err = unix.Open(spec.RootFile, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		err = regular(res.root)
	}
	if err != nil {
		return res, StepRoot, &os.PathError{Op: "open", Path: spec.RootFile, Err: err}
	}
	if spec.LockFile != "" {
		res.lock, err = unix.Open(spec.LockFile, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
		if err == nil {
			err = regular(res.lock)
		}
		if err == nil {
			err = lockSoon(res.lock)
		}
		if err != nil {
			return res, StepLock, &os.PathError{Op: "lock", Path: spec.LockFile, Err: err}
		}
	}
	openOutput(spec)
	return res, "", nil
}

// lockPatience is how long a role tries to lock its Profile: whoever looks
// whether it is in use holds the lock for a moment.
const lockPatience = 200 * time.Millisecond

func lockSoon(fd int) error {
	for begin := time.Now(); ; time.Sleep(lockPatience / 20) {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err != unix.EWOULDBLOCK && err != unix.EINTR || time.Since(begin) > lockPatience {
			return err
		}
	}
}

// regular reports an error unless fd is a regular file of this user.
func regular(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errors.New("it is not a regular file")
	}
	if int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("it belongs to uid %d", st.Uid)
	}
	return nil
}

func limits(spec *Spec) error {
	if spec.NoFile > 0 {
		var lim syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
			return os.NewSyscallError("getrlimit", err)
		}
		lim.Cur = min(spec.NoFile, lim.Max)
		// The syscall package's own call, so that the Go runtime does not
		// put the inherited limit back when it executes a program.
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
			return os.NewSyscallError("setrlimit", err)
		}
	}
	return nil
}

// openOutput connects stdout and stderr to the journal. journald attributes a
// stream to the unit of the process that connects, which is why this happens
// here and not in the service. A role works without a journal too.
func openOutput(spec *Spec) {
	if spec.Journal == "" {
		return
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: spec.Journal}); err != nil {
		return
	}
	if err := unix.Shutdown(fd, unix.SHUT_RD); err != nil {
		return
	}
	// identifier, unit (trusted callers only), priority, level prefix,
	// forward to syslog, to kmsg, to the console.
	head := "abfleet-" + spec.Role + "\n\n" + strconv.Itoa(journalPriority) + "\n0\n0\n0\n0\n"
	if _, err := unix.Write(fd, []byte(head)); err != nil {
		return
	}
	for _, out := range []int{1, 2} {
		// dup3 cannot fail on two open descriptors.
		_ = unix.Dup3(fd, out, 0)
	}
}

// defaultSignals gives the C library's own two signals their default action,
// for this process and what it starts. The Go runtime leaves them alone, and
// some ancestors (GNU make's children) ignore them.
func defaultSignals() {
	var dflt [4]uint64 // struct sigaction with SIG_DFL, no flags and an empty mask
	for _, sig := range []uintptr{32, 33} {
		// It fails for no valid signal.
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&dflt)), 0, 8, 0, 0)
	}
}

// clearSignals gives the calling thread an empty mask and every signal that
// the service may have inherited as ignored its default action after the next
// exec: execve resets handlers, but not what is ignored.
func clearSignals(c chan<- os.Signal) {
	signal.Notify(c, unix.SIGHUP, unix.SIGINT, unix.SIGPIPE, unix.SIGCONT)
	var none unix.Sigset_t
	// Setting a valid mask cannot fail.
	_ = unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil)
}

// become replaces this process by the role's program.
func become(spec *Spec, res resources) int {
	runtime.LockOSThread()
	if err := passOn(res); err != nil {
		return fail(StepExec, err)
	}
	clearSignals(make(chan os.Signal, 1))
	report(statusMessage{})
	err := unix.Exec(spec.Args[0], spec.Args, spec.Env)
	return fail(StepExec, &os.PathError{Op: "exec", Path: spec.Args[0], Err: err})
}

// passOn marks everything close-on-exec but the standard streams and the
// role's evidence.
func passOn(res resources) error {
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	for _, fd := range []int{res.root, res.lock} {
		if fd < 0 {
			continue
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
	}
	return nil
}

// writeExit leaves exit.json, complete or not at all.
func writeExit(path string, e Exit) error {
	data, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err
	}
	temp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	if err := os.Remove(temp); err != nil && !os.IsNotExist(err) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		os.Remove(temp)
	}
	return err
}
