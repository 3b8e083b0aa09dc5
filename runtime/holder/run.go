package holder

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The steps of a stop, each with the time it has before the next, harsher one.
// They are variables so that tests can shrink them.
var (
	// pairTimeout: Chromium ends cleanly in 0.2 s when the pair closes.
	pairTimeout = 3 * time.Second
	// termTimeout: SIGTERM ends Chromium in 0.1 s, without its cookies.
	termTimeout = 2 * time.Second
	// killTimeout: after SIGKILL only a broken disk keeps a process.
	killTimeout = 5 * time.Second
	// flushTimeout: clients get what is queued for them, such as the answer
	// to their Browser.close.
	flushTimeout = time.Second
	// drainTimeout: the last lines of a browser that has ended. Helper
	// processes that outlive it may hold the pipes open for longer.
	drainTimeout = 300 * time.Millisecond
)

// The steps as they are recorded.
const (
	stepNone  = "none"
	stepClose = "Browser.close"
	stepPair  = "pair closed"
	stepTerm  = "SIGTERM"
	stepKill  = "SIGKILL"
)

// Descriptors of a browser process: what --remote-debugging-pipe reads and
// writes, and the evidence, which no child of the browser inherits.
const (
	pipeInFD  = 3
	pipeOutFD = 4
	rootFD    = 5
	lockFD    = 6
)

// gcPercent trades a little time for memory while there are clients.
const gcPercent = 40

// unattendedMemory is what a holder without clients may grow to, in bytes, before
// garbage is collected: only what its browser logs makes any.
const unattendedMemory = 12 << 20

// collect sets when garbage is collected. Without clients it is by size alone: Go
// forces a collection every two minutes otherwise, which would wake the holder of
// every browser that nobody uses.
func collect(attended bool) {
	if attended {
		debug.SetGCPercent(gcPercent)
		debug.SetMemoryLimit(math.MaxInt64)
		return
	}
	debug.SetMemoryLimit(unattendedMemory)
	debug.SetGCPercent(-1)
}

// hold is the holder of a Chromium.
func hold(spec *Spec, res resources) int {
	collect(true)
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	// The signals are caught before there is a browser, so that none is lost;
	// and caught rather than ignored, because a child would inherit that.
	signals := make(chan os.Signal, 8)
	ignored := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGWINCH, unix.SIGTERM, unix.SIGINT)
	signal.Notify(ignored, unix.SIGHUP, unix.SIGPIPE, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	continued := watchContinued()

	h := spec.Holder
	relay := newRelay(spec)
	defer relay.close()
	// A record of the generation before would be taken for this one's.
	if err := os.Remove(h.ExitFile); err != nil && !os.IsNotExist(err) {
		return fail(StepSocket, err)
	}
	l, err := listen(h.Socket)
	if err != nil {
		return fail(StepSocket, err)
	}
	defer l.Close()
	br, err := startBrowser(spec, res, relay)
	if err != nil {
		return fail(StepBrowser, err)
	}
	report(statusMessage{})
	unix.Close(statusFD)

	closes := make(chan string, 1)
	b := newBroker(br.root)
	b.attended = collect
	b.onClose = func(reason string) {
		select {
		case closes <- reason:
		default: // the stop is under way
		}
	}
	s := &server{
		spec:   spec,
		broker: b,
		relay:  relay,
		hello:  welcome{BrowserPID: br.pid, Generation: spec.Generation},
	}
	go b.trim.run()
	if h.Display != "" {
		go func() {
			// The start of the browser comes first.
			<-b.page
			time.Sleep(windowsAfter)
			if err := keepWindows(h.Display, h.Authority); err != nil {
				relay.say(4, "cannot keep the windows as large as the screen: "+err.Error())
			}
		}()
	}
	rootEnded := make(chan error, 1)
	go func() { rootEnded <- b.readRoot() }()
	go s.accept(l)

	exit := Exit{Instance: spec.Instance, Generation: spec.Generation, BrowserPID: br.pid, Step: stepNone}
	var signaled time.Time
	select {
	case <-br.done:
		exit.Trigger = TriggerBrowser
	case sig := <-signals:
		exit.Trigger = TriggerSignal
		exit.Detail = unix.SignalName(sig.(syscall.Signal))
		signaled = time.Now()
	case reason := <-closes:
		exit.Trigger = TriggerClose + ": " + reason
	case err := <-rootEnded:
		// Usually the first sign of a browser that exits by itself.
		exit.Trigger = TriggerBrowser
		if !br.wait(pairTimeout) {
			exit.Trigger = TriggerEOF
			if err != nil && err != io.EOF {
				exit.Detail = err.Error()
			}
		}
	}
	if exit.Trigger == TriggerBrowser {
		b.mu.Lock()
		if b.closeAsked {
			exit.Detail = "a client sent Browser.close"
		}
		b.mu.Unlock()
	}
	s.end()
	timeout := h.CloseTimeout
	if timeout == 0 {
		timeout = DefaultCloseTimeout
	}
	exit.Step = br.stop(b, timeout)
	br.describe(&exit)
	exit.UnitStopped = exit.Detail == unix.SignalName(unix.SIGWINCH) && continued().After(signaled.Add(-continueSlack))
	exit.OOMKills = oomKills()
	exit.At = time.Now().UTC()
	status := 0
	if err := writeExit(h.ExitFile, exit); err != nil {
		relay.say(3, "cannot write exit record: "+err.Error())
		status = 1
	}
	l.Close()
	b.root.Close()
	b.flush(flushTimeout)
	br.drain(drainTimeout)
	relay.say(6, "browser ended: "+summary(exit))
	return status
}

// continueSlack is how much earlier than the stop signal the SIGCONT after it may
// be seen: to a stopped process both come at once, in any order.
const continueSlack = time.Second

// watchContinued returns what tells when the last SIGCONT came.
func watchContinued() func() time.Time {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCONT)
	var last atomic.Pointer[time.Time]
	last.Store(new(time.Time))
	go func() {
		for range signals {
			now := time.Now()
			last.Store(&now)
		}
	}()
	return func() time.Time { return *last.Load() }
}

func summary(e Exit) string {
	s := "trigger " + e.Trigger
	if e.Detail != "" {
		s += " (" + e.Detail + ")"
	}
	s += ", last step " + e.Step
	if e.Signal != "" {
		return s + ", killed by " + e.Signal
	}
	return s + ", exit code " + strconv.Itoa(e.Code)
}

// browser is the running child.
type browser struct {
	process *os.Process
	pid     int
	pidfd   int
	root    *os.File // the holder's end of the pair

	done    chan struct{} // closed when the browser process has ended
	state   *os.ProcessState
	streams sync.WaitGroup
	outputs []*os.File
}

// startBrowser starts Spec.Args with both debugging descriptors on one end of
// a socketpair. A pipe could be opened again through /proc by any process of
// the same user, a socket cannot.
func startBrowser(spec *Spec, res resources, relay *relay) (_ *browser, err error) {
	var opened []int
	keep := func(fds ...int) { opened = append(opened, fds...) }
	defer func() {
		for _, fd := range opened {
			unix.Close(fd)
		}
	}()
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
	}
	keep(null)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	keep(pair[1])
	ours := []int{pair[0]}
	files := []uintptr{uintptr(null), 0, 0, pipeInFD: uintptr(pair[1]), pipeOutFD: uintptr(pair[1]), rootFD: uintptr(res.root)}
	if res.lock >= 0 {
		files = append(files, uintptr(res.lock))
	}
	for fd := 1; fd <= 2 && err == nil; fd++ {
		var p [2]int
		if err = unix.Pipe2(p[:], unix.O_CLOEXEC); err == nil {
			ours = append(ours, p[0])
			keep(p[1])
			files[fd] = uintptr(p[1])
		}
	}
	for _, fd := range ours {
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
	}
	br := &browser{pidfd: -1, done: make(chan struct{})}
	if err == nil {
		br.pid, err = fork(spec, files, &br.pidfd)
	}
	if err != nil {
		keep(ours...)
		return nil, err
	}
	if br.process, err = os.FindProcess(br.pid); err != nil {
		// Cannot happen for a child that was not waited for.
		_ = unix.Kill(br.pid, unix.SIGKILL)
		keep(ours...)
		return nil, err
	}
	br.root = os.NewFile(uintptr(ours[0]), "CDP pair")
	for _, fd := range ours[1:] {
		f := os.NewFile(uintptr(fd), "browser output")
		br.outputs = append(br.outputs, f)
		br.streams.Add(1)
		go func() {
			defer br.streams.Done()
			relay.copy(f)
		}()
	}
	go func() {
		br.state, _ = br.process.Wait()
		close(br.done)
	}()
	return br, nil
}

// fork runs the program from a thread with an empty signal mask, in a session
// of its own.
func fork(spec *Spec, files []uintptr, pidfd *int) (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var none, before unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, &before); err != nil {
		return 0, os.NewSyscallError("sigprocmask", err)
	}
	pid, err := syscall.ForkExec(spec.Args[0], spec.Args, &syscall.ProcAttr{
		Env:   spec.Env,
		Files: files,
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: pidfd},
	})
	// Restoring a mask that the kernel gave cannot fail.
	_ = unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
	if err != nil {
		return 0, &os.PathError{Op: "exec", Path: spec.Args[0], Err: err}
	}
	return pid, nil
}

// wait reports whether the browser has ended within the time given.
func (br *browser) wait(timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-br.done:
		return true
	case <-timer.C:
		return false
	}
}

// stop ends the browser as gently as it permits and returns the last step that
// was needed. Only the first two steps keep what a user has logged into.
func (br *browser) stop(b *broker, closeTimeout time.Duration) string {
	select {
	case <-br.done:
		return stepNone
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	go func() {
		// A connection that is gone has no use for the rest of the time.
		if _, err := b.call(ctx, "Browser.close", ""); errors.Is(err, errRootClosed) || errors.Is(err, unix.EPIPE) {
			cancel()
		}
	}()
	select {
	case <-br.done:
		return stepClose
	case <-ctx.Done():
	}
	b.root.Close()
	if br.wait(pairTimeout) {
		return stepPair
	}
	br.signal(unix.SIGTERM)
	if br.wait(termTimeout) {
		return stepTerm
	}
	br.signal(unix.SIGKILL)
	br.wait(killTimeout)
	return stepKill
}

// signal reaches the browser process and no other.
func (br *browser) signal(sig syscall.Signal) {
	if br.pidfd >= 0 {
		_ = unix.PidfdSendSignal(br.pidfd, sig, nil, 0)
		return
	}
	// Safe without a pidfd: the process package knows whether it was reaped.
	_ = br.process.Signal(sig)
}

func (br *browser) describe(e *Exit) {
	e.Code = -1
	select {
	case <-br.done:
	default:
		e.Detail = strings.TrimSpace(e.Detail + " the browser process did not end")
		return
	}
	if br.state == nil {
		return
	}
	ws, ok := br.state.Sys().(syscall.WaitStatus)
	if !ok {
		return
	}
	if ws.Signaled() {
		e.Signal = unix.SignalName(ws.Signal())
	} else {
		e.Code = ws.ExitStatus()
	}
	gentle := e.Step == stepNone || e.Step == stepClose || e.Step == stepPair
	e.Clean = gentle && e.Code == 0 && e.Signal == ""
}

// drain reads the rest of the output, for the time given at most.
func (br *browser) drain(timeout time.Duration) {
	deadline := time.Now().Add(timeout)
	for _, f := range br.outputs {
		_ = f.SetReadDeadline(deadline)
	}
	br.streams.Wait()
}

// oomKills reads how often the kernel's out-of-memory killer struck in the
// cgroup of this process. 0 where the memory controller is not there.
func oomKills() int {
	path, err := cgroupOf(os.Getpid())
	if err != nil {
		return 0
	}
	data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, "memory.events"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}
