package proof

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
)

// Verifier makes Live and Vacant. Units is required; the programs are paths as
// configured, for installations where they have unusual names.
type Verifier struct {
	Units                 *unit.Manager
	Displays              []string // of the display Role, whichever is in use now
	VNC, Chromium, Helper string
}

// Live proves that the leader of a Generation runs and is ours. It holds pidfds,
// so it keeps meaning the same processes whatever happens to their numbers. Only
// a Verifier makes one. Close it after use.
type Live struct {
	v *Verifier

	mu        sync.Mutex // guards what follows, and keeps the pidfds open while in use
	g         Generation
	leader    int // pidfd, -1 once closed
	browser   int // pidfd of g.Browser, -1 while there is none
	noBrowser error
}

// Live verifies the leader of a recorded Generation. If the record names a
// browser too, that is verified as well; that it is gone or not ours does not
// refuse the Live, but Live.Browser and SignalBrowser then do.
// The error is a *Refusal.
func (v *Verifier) Live(ctx context.Context, g Generation) (*Live, error) {
	if missing := g.incomplete(); missing != "" {
		return nil, refuse(RecordIncomplete, "no valid %s", missing)
	}
	if err := SameBoot(g); err != nil {
		return nil, err
	}
	fd, err := pidfdOpen(g.Leader.PID)
	if err != nil {
		return nil, err
	}
	l := &Live{v: v, g: g, leader: fd, browser: -1, noBrowser: refuse(NoBrowser, "no browser process is recorded")}
	if err := v.checkLeader(ctx, g, fd); err != nil {
		l.Close()
		return nil, err
	}
	if g.Browser != nil {
		l.attach(*g.Browser, false)
	}
	return l, nil
}

// Browser finds, verifies and attaches the browser process of a chromium
// Generation: child of the leader, in the same cgroup, leader of its own group,
// holder of the root file, named by the Profile's SingletonLock. pid 0 means
// whoever the SingletonLock names. Record the returned Member before the Stack
// counts as ready. The error is a *Refusal.
func (v *Verifier) Browser(ctx context.Context, l *Live, pid int) (Member, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.verify(ctx); err != nil {
		return Member{}, err
	}
	if l.g.Role != RoleChromium {
		return Member{}, refuse(NoBrowser, "role %s has no browser process", l.g.Role)
	}
	if pid == 0 {
		lock, err := readSingleton(l.g.Profile)
		if err != nil {
			return Member{}, refuse(SingletonDiffers, "%w", err)
		}
		if recorded := l.g.Browser != nil && l.g.Browser.PID == lock.pid; !lock.here() && !recorded {
			return Member{}, refuse(SingletonDiffers, "the SingletonLock of %s names %s", l.g.Profile, lock)
		}
		pid = lock.pid
	}
	m, _, err := observe(pid)
	if err != nil {
		return Member{}, err
	}
	if b := l.g.Browser; b != nil && *b != m && l.browser >= 0 {
		return Member{}, refuse(SingletonDiffers, "process %d is the browser, process %d cannot be one too", b.PID, pid)
	}
	l.attach(m, l.g.Browser == nil || *l.g.Browser != m)
	if l.noBrowser != nil {
		return Member{}, l.noBrowser
	}
	return m, nil
}

// attach makes m the browser member if it proves to be it.
func (l *Live) attach(m Member, strict bool) {
	if l.browser >= 0 {
		unix.Close(l.browser)
		l.browser = -1
	}
	fd, err := pidfdOpen(m.PID)
	if err != nil {
		l.noBrowser = err
		return
	}
	if err := l.v.checkBrowser(l.g, m, fd, strict); err != nil {
		unix.Close(fd)
		l.noBrowser = err
		return
	}
	l.g.Browser, l.browser, l.noBrowser = &m, fd, nil
}

// Generation returns the record, with the browser if one was attached.
func (l *Live) Generation() Generation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.g
}

// Browser returns the browser member, verified anew, or the Refusal that keeps
// it from being one.
func (l *Live) Browser() (Member, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.verifyBrowser(); err != nil {
		return Member{}, err
	}
	return *l.g.Browser, nil
}

// verify repeats every check of the leader. The caller holds mu.
func (l *Live) verify(ctx context.Context) error {
	if l.leader < 0 {
		return refuse(Closed, "%s", l.g)
	}
	return l.v.checkLeader(ctx, l.g, l.leader)
}

func (l *Live) verifyBrowser() error {
	switch {
	case l.leader < 0:
		return refuse(Closed, "%s", l.g)
	case l.noBrowser != nil:
		return l.noBrowser
	}
	return l.v.checkBrowser(l.g, *l.g.Browser, l.browser, false)
}

// Signal sends a signal to the leader after repeating every check. The error is
// a *Refusal, or the errno of the kernel.
func (l *Live) Signal(ctx context.Context, sig syscall.Signal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.verify(ctx); err != nil {
		return err
	}
	return send(l.leader, sig)
}

// SignalBrowser sends a signal to the browser process, and to none of its
// children, after repeating every check of leader and browser. The error is a
// *Refusal, or the errno of the kernel.
func (l *Live) SignalBrowser(ctx context.Context, sig syscall.Signal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.verify(ctx); err != nil {
		return err
	}
	if err := l.verifyBrowser(); err != nil {
		return err
	}
	return send(l.browser, sig)
}

func send(pidfd int, sig syscall.Signal) error {
	err := unix.PidfdSendSignal(pidfd, sig, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return refuse(PIDGone, "the process has ended")
	}
	if err != nil {
		return fmt.Errorf("send %v: %w", sig, err)
	}
	return nil
}

// Wait returns when leader and browser have ended, or with the error of ctx. A
// process that has ended but was not yet reaped counts as ended.
func (l *Live) Wait(ctx context.Context) error {
	l.mu.Lock()
	var fds []unix.PollFd
	var err error
	for _, fd := range []int{l.leader, l.browser} {
		if fd < 0 {
			continue
		}
		// Own copies: Close may come while we wait.
		dup, derr := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if derr != nil {
			err = fmt.Errorf("duplicate pidfd: %w", derr)
			break
		}
		defer unix.Close(dup)
		fds = append(fds, unix.PollFd{Fd: int32(dup), Events: unix.POLLIN})
	}
	closed := l.leader < 0
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if closed {
		return refuse(Closed, "nothing to wait for")
	}
	for len(fds) > 0 {
		if err := unit.Poll(ctx, fds, 0); err != nil {
			return err
		}
		left := fds[:0]
		for _, fd := range fds {
			if fd.Revents == 0 {
				left = append(left, fd)
			}
		}
		fds = left
	}
	return nil
}

// Close gives the pidfds back. The Live proves nothing afterwards.
func (l *Live) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, fd := range []*int{&l.leader, &l.browser} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
	return nil
}

// pidfdOpen holds a process. The error is a *Refusal.
func pidfdOpen(pid int) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return -1, refuse(PIDGone, "there is no process %d", pid)
	case err != nil:
		return -1, refuse(Unreadable, "hold process %d: %w", pid, err)
	}
	return fd, nil
}

// running checks that the process behind a pidfd has not ended. While it has
// not, its number in /proc is its own.
func running(pidfd, pid int) error {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(fds, 0)
	}
	switch {
	case err != nil:
		return refuse(Unreadable, "poll process %d: %w", pid, err)
	case n > 0:
		return refuse(PIDGone, "process %d has ended", pid)
	}
	return nil
}

// SameBoot checks that the Generation was started in this boot: after another
// one its pids and cgroup numbers mean something else.
func SameBoot(g Generation) error {
	boot, err := bootID()
	if err != nil {
		return refuse(Unreadable, "boot id: %w", err)
	}
	if boot != g.BootID {
		return refuse(BootDiffers, "recorded in boot %s, this is %s", g.BootID, boot)
	}
	return nil
}

// checkRecord checks that the record is of this boot and that the pidfile does
// not contradict it.
func checkRecord(g Generation) error {
	if err := SameBoot(g); err != nil {
		return err
	}
	file, err := ReadPidfile(PidfilePath(g))
	if err != nil {
		return err
	}
	if field := g.contradicts(file); field != "" {
		return refuse(PidfileDiffers, "pidfile and record differ in %s", field)
	}
	return nil
}

// checkLeader compares everything that is known about the leader. It looks at
// the process before and after asking systemd: before, so that the reason is the
// process's own and not that its scope was unloaded; after, so that what allows
// a signal is microseconds old.
func (v *Verifier) checkLeader(ctx context.Context, g Generation, pidfd int) error {
	if err := checkRecord(g); err != nil {
		return err
	}
	if err := v.checkLeaderProcess(g, pidfd); err != nil {
		return err
	}
	if err := v.checkUnit(ctx, g); err != nil {
		// A process that ended meanwhile took its scope with it.
		if gone := running(pidfd, g.Leader.PID); gone != nil {
			return gone
		}
		return err
	}
	return v.checkLeaderProcess(g, pidfd)
}

// checkLeaderProcess compares what /proc says. All of it is read between two
// looks at the pidfd, so it is about the process that the pidfd means.
func (v *Verifier) checkLeaderProcess(g Generation, pidfd int) error {
	if err := running(pidfd, g.Leader.PID); err != nil {
		return err
	}
	got, _, err := observe(g.Leader.PID)
	if err != nil {
		return err
	}
	if err := g.Leader.same(got); err != nil {
		return err
	}
	if err := inCgroup(g.Leader.PID, g); err != nil {
		return err
	}
	if err := v.leaderSignature(g); err != nil {
		return err
	}
	if err := rootEvidence(g.Leader.PID, g.Root); err != nil {
		return err
	}
	if g.Role == RoleChromium {
		if err := lockEvidence(g.Leader.PID, g.LockFile); err != nil {
			return err
		}
	}
	if _, err := listenerEvidence(g.Leader.PID, g.Sockets); err != nil {
		return err
	}
	return running(pidfd, g.Leader.PID)
}

// checkUnit checks that systemd still has the unit in the recorded invocation
// and cgroup. A unit that is being stopped still counts.
func (v *Verifier) checkUnit(ctx context.Context, g Generation) error {
	if v.Units == nil {
		return refuse(UnitUnknown, "no connection to systemd")
	}
	info, err := v.Units.Info(ctx, g.Unit)
	switch {
	case errors.Is(err, unit.ErrNotLoaded):
		return refuse(UnitGone, "%s is not loaded", g.Unit)
	case err != nil:
		return refuse(UnitUnknown, "%w", err)
	case info.InvocationID != g.InvocationID:
		return refuse(InvocationDiffers, "%s is invocation %s, not %s", g.Unit, info.InvocationID, g.InvocationID)
	case !info.Active():
		return refuse(UnitInactive, "%s is %s (%s)", g.Unit, info.ActiveState, info.Result)
	case info.ControlGroup != g.Cgroup:
		return refuse(CgroupDiffers, "%s has cgroup %q, not %s", g.Unit, info.ControlGroup, g.Cgroup)
	case info.CgroupID != g.CgroupID:
		return refuse(CgroupIDDiffers, "cgroup of %s has number %d, not %d", g.Unit, info.CgroupID, g.CgroupID)
	}
	return nil
}

// checkBrowser compares everything that is known about the browser process. The
// leader has been checked by the caller.
func (v *Verifier) checkBrowser(g Generation, m Member, pidfd int, strict bool) error {
	if !m.complete() {
		return refuse(PGIDDiffers, "process %d does not lead its group %d", m.PID, m.PGID)
	}
	if err := running(pidfd, m.PID); err != nil {
		return err
	}
	got, s, err := observe(m.PID)
	if err != nil {
		return err
	}
	if err := m.same(got); err != nil {
		return err
	}
	if m.UID != g.Leader.UID {
		return refuse(UIDDiffers, "process %d runs as uid %d, its leader as %d", m.PID, m.UID, g.Leader.UID)
	}
	exe, err := readExe(m.PID)
	if err != nil {
		return unreadable(m.PID, err)
	}
	browser := isProgram(exe, browserPrograms, v.Chromium)
	if s.PPID != g.Leader.PID && !(browser && g.orphaned()) {
		return refuse(ParentDiffers, "process %d is a child of %d, not of the leader %d", m.PID, s.PPID, g.Leader.PID)
	}
	if err := inCgroup(m.PID, g); err != nil {
		return err
	}
	if !browser {
		return refuse(SignatureDiffers, "process %d runs %s, which is no browser", m.PID, exe)
	}
	if err := profileSignature(m.PID, g.Profile, strict); err != nil {
		return err
	}
	if err := rootEvidence(m.PID, g.Root); err != nil {
		return err
	}
	if err := listenerUncontradicted(m.PID, g.Listener); err != nil {
		return err
	}
	return running(pidfd, m.PID)
}

// Wake continues the recorded processes of a Generation: a stopped one ends
// nothing. It is for a browser whose holder has died and which no Live can
// prove any more. Each process is checked by itself, in the recorded invocation
// and cgroup, and nothing but SIGCONT is ever sent on that.
func (v *Verifier) Wake(ctx context.Context, g Generation) error {
	if missing := g.incomplete(); missing != "" {
		return refuse(RecordIncomplete, "no valid %s", missing)
	}
	if err := checkRecord(g); err != nil {
		return err
	}
	switch err := v.checkUnit(ctx, g); ReasonOf(err) {
	case "":
	case UnitGone, UnitInactive:
		return nil // nothing is left in it
	default:
		return err
	}
	var errs []error
	for _, m := range g.members() {
		if err := wake(g, m); !Ended(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func wake(g Generation, m Member) error {
	fd, err := pidfdOpen(m.PID)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	got, _, err := observe(m.PID)
	if err != nil {
		return err
	}
	if err := m.same(got); err != nil {
		return err
	}
	if err := inCgroup(m.PID, g); err != nil {
		return err
	}
	if err := running(fd, m.PID); err != nil {
		return err
	}
	return send(fd, syscall.SIGCONT)
}

// AwaitEnd returns when the Generation's cgroup is empty and none of its
// recorded processes lives, wherever it is now; or with an error, at the latest
// when ctx ends.
func (v *Verifier) AwaitEnd(ctx context.Context, g Generation) error {
	err := SameBoot(g)
	if err == nil {
		// Also where the record names no cgroup that could be waited for.
		for _, m := range g.members() {
			if err := IgnoreEnded(awaitMember(ctx, m)); err != nil {
				return fmt.Errorf("%s: %w", g, err)
			}
		}
	}
	if err := (unit.Cgroup{Path: g.Cgroup}).WaitEmpty(ctx); err != nil {
		return fmt.Errorf("%s: %w", g, err)
	}
	return IgnoreEnded(err)
}

func awaitMember(ctx context.Context, m Member) error {
	fd, err := pidfdOpen(m.PID)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	s, err := readStat(m.PID)
	if err != nil {
		return unreadable(m.PID, err)
	}
	if s.StartTime != m.StartTime || s.dead() {
		return nil
	}
	if err := unit.Poll(ctx, []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		return refuse(StillAlive, "process %d lives: %w", m.PID, err)
	}
	return nil
}

// IgnoreEnded is err, or nil where that is only that the process has ended.
func IgnoreEnded(err error) error {
	if Ended(err) {
		return nil
	}
	return err
}

// StopUnit has systemd stop the Generation's scope after proving that the unit
// is the recorded invocation. It is the last resort, for a scope whose leader is
// gone or cannot be proven: only systemd then knows what is in it. A unit that
// is not loaded is no error. Whether anything is left is for Vacant to say.
func (v *Verifier) StopUnit(ctx context.Context, g Generation) error {
	if missing := g.incomplete(); missing != "" {
		return refuse(RecordIncomplete, "no valid %s", missing)
	}
	if err := SameBoot(g); err != nil {
		return err
	}
	switch err := v.checkUnit(ctx, g); ReasonOf(err) {
	case "":
		return v.Units.Stop(ctx, g.Unit)
	case UnitGone:
		return nil
	case UnitInactive:
		return v.Units.ResetFailed(ctx, g.Unit)
	default:
		return err
	}
}
