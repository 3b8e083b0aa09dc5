package unit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Events waits for the end of processes and for cgroups that empty. It costs
// neither a thread nor a wake-up while nothing happens, however many there are.
// It is used by one goroutine; Close it after use.
type Events struct {
	epoll   *os.File
	sources []source
}

type source struct {
	pidfd  int // -1 for a cgroup
	cgroup Cgroup
	events *os.File
}

// NewEvents returns Events that wait for nothing yet.
func NewEvents() (*Events, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	// Only a non-blocking file is handed to the Go runtime's own poller, in
	// which an epoll set may be nested.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &Events{epoll: os.NewFile(uintptr(fd), "epoll")}, nil
}

// AddProcess waits for the process behind a pidfd, which Events then owns.
func (e *Events) AddProcess(pidfd int) error {
	e.sources = append(e.sources, source{pidfd: pidfd})
	return e.add(pidfd, unix.EPOLLIN)
}

// AddCgroup waits for a cgroup that has no process any more. One that is gone
// already counts as empty.
func (e *Events) AddCgroup(c Cgroup) error {
	dir, err := c.dir()
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if isGone(err) {
		return ErrEmpty
	}
	if err != nil {
		return err
	}
	e.sources = append(e.sources, source{pidfd: -1, cgroup: c, events: f})
	return e.add(int(f.Fd()), unix.EPOLLPRI)
}

// ErrEmpty says that a cgroup is gone, and with it every process in it.
var ErrEmpty = errors.New("cgroup is gone")

func (e *Events) add(fd int, events uint32) error {
	return e.control(func(epoll int) error {
		err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(len(e.sources) - 1)})
		return os.NewSyscallError("epoll_ctl", err)
	})
}

func (e *Events) control(fn func(epoll int) error) error {
	conn, err := e.epoll.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	err = conn.Control(func(fd uintptr) { ferr = fn(int(fd)) })
	return errors.Join(err, ferr)
}

// Wait returns nil once a process has ended or a cgroup has emptied, or the
// error of ctx.
func (e *Events) Wait(ctx context.Context) error {
	conn, err := e.epoll.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() {
		// The file is open until Close, and pollable: this cannot fail.
		_ = e.epoll.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()
	var happened bool
	var herr error
	err = conn.Read(func(fd uintptr) bool {
		happened, herr = e.look(int(fd))
		return happened || herr != nil
	})
	switch {
	case happened:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return errors.Join(herr, err)
}

// look reports whether what is waited for has happened, and arms again what
// has not.
func (e *Events) look(epoll int) (bool, error) {
	events := make([]unix.EpollEvent, len(e.sources)+1)
	n, err := unix.EpollWait(epoll, events, 0)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.EpollWait(epoll, events, 0)
	}
	if err != nil {
		return false, fmt.Errorf("epoll_wait: %w", err)
	}
	for _, ev := range events[:n] {
		s := e.sources[ev.Fd]
		if s.pidfd >= 0 {
			return true, nil
		}
		// Reading through the polled descriptor is what arms it again; what
		// comes between the two reads is an event again.
		buf := make([]byte, 256)
		if _, err := s.events.ReadAt(buf, 0); isGone(err) {
			return true, nil
		}
		populated, err := s.cgroup.Populated()
		if err != nil || !populated {
			return !populated, err
		}
	}
	return false, nil
}

// Close gives all descriptors back.
func (e *Events) Close() {
	e.epoll.Close()
	for _, s := range e.sources {
		if s.pidfd >= 0 {
			unix.Close(s.pidfd)
		} else {
			s.events.Close()
		}
	}
}
