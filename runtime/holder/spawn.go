package holder

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// File descriptors of a fresh trampoline.
const (
	goFD     = 3 // read end: the Spec, then end of file
	statusFD = 4 // write end: a statusMessage per line
)

// statusMessage is what a role reports while it starts. A message without
// Step means that everything before the exec has worked.
type statusMessage struct {
	Step   Step          `json:",omitempty"`
	Errno  syscall.Errno `json:",omitempty"`
	Detail string        `json:",omitempty"`
}

const (
	// maxStatus bounds what a role may report.
	maxStatus = 8 << 10
	// releaseTimeout bounds the writing of a Spec: the trampoline does nothing but read it.
	releaseTimeout = 10 * time.Second
	// abortTimeout is how long a trampoline may take to see the end of its
	// pipe before it is killed.
	abortTimeout = 2 * time.Second
)

// Spawned is a role process, first as a trampoline that waits for its Spec.
// It is a child of the caller and is reaped in the background, but not before
// Release or Abort: until then its number, which goes into a scope and into the
// record, can be nobody else's.
type Spawned struct {
	process *os.Process
	pidfd   int
	status  *os.File
	reaping sync.Once

	mu   sync.Mutex // guards the field that follows
	pipe *os.File   // nil once released or aborted

	done  chan struct{}
	state *os.ProcessState // valid once done is closed
	err   error
}

// Spawn starts the role helper at the given path in a session of its own, with
// an empty environment. It runs nothing until Release, and exits by itself if
// the caller dies before that.
func Spawn(ctx context.Context, helperPath string) (*Spawned, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("cannot spawn role helper: %w", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot spawn role helper: %w", err)
	}
	defer null.Close()
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("cannot spawn role helper: %w", err)
	}
	defer goRead.Close()
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		goWrite.Close()
		return nil, fmt.Errorf("cannot spawn role helper: %w", err)
	}
	defer statusWrite.Close()
	s := &Spawned{pidfd: -1, status: statusRead, pipe: goWrite, done: make(chan struct{})}
	s.process, err = os.StartProcess(helperPath, []string{helperPath}, &os.ProcAttr{
		Dir:   "/",
		Env:   []string{},
		Files: []*os.File{null, null, null, goFD: goRead, statusFD: statusWrite},
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &s.pidfd},
	})
	if err != nil {
		goWrite.Close()
		statusRead.Close()
		return nil, fmt.Errorf("cannot spawn role helper: %w", err)
	}
	return s, nil
}

// reap starts to wait for the end of the process.
func (s *Spawned) reap() {
	s.reaping.Do(func() {
		go func() {
			s.state, s.err = s.process.Wait()
			close(s.done)
		}()
	})
}

// PID is the process id. It stays the role's id after Release.
func (s *Spawned) PID() int { return s.process.Pid }

// PIDFD is a pidfd of the process, valid until Close, or -1 where the kernel
// gave none. It stays with s: duplicate it to keep it.
func (s *Spawned) PIDFD() int { return s.pidfd }

// Done is closed when the process has ended and was reaped, which is never
// before Release, Abort, Wait or Close.
func (s *Spawned) Done() <-chan struct{} { return s.done }

// Wait waits for the end of the process.
func (s *Spawned) Wait(ctx context.Context) (*os.ProcessState, error) {
	s.reap()
	select {
	case <-s.done:
		return s.state, s.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Release tells the trampoline what to become. It can be called once.
func (s *Spawned) Release(spec Spec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pipe == nil {
		return errors.New("cannot release role: it was released or aborted before")
	}
	if err := spec.check(); err != nil {
		return fmt.Errorf("cannot release role: %w", err)
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("cannot release role: %w", err)
	}
	if len(data) > maxSpec {
		return fmt.Errorf("cannot release role: the specification has %d bytes, the limit is %d", len(data), maxSpec)
	}
	frame := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(data)), uint32(len(data)))
	frame = append(frame, data...)
	file := s.pipe
	s.pipe = nil
	s.reap()
	defer file.Close()
	if err := file.SetWriteDeadline(time.Now().Add(releaseTimeout)); err != nil {
		return fmt.Errorf("cannot release role: %w", err)
	}
	if _, err := file.Write(frame); err != nil {
		return fmt.Errorf("cannot release role: %w", err)
	}
	return nil
}

// Abort ends a trampoline that was not released and waits for its end. After
// Release it does nothing: a running role is stopped through its proof.
func (s *Spawned) Abort() {
	s.mu.Lock()
	file := s.pipe
	s.pipe = nil
	s.mu.Unlock()
	if file == nil {
		return
	}
	s.reap()
	file.Close()
	timer := time.NewTimer(abortTimeout)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
		// Safe: a child of ours that nobody else reaps keeps its id.
		s.process.Kill()
		<-s.done
	}
	s.Close()
}

// Ready waits until the role has started: its files are open, its lock is
// held, and its program was executed (display), or its browser was started and
// its socket accepts (chromium). A failure is a *RoleError.
func (s *Spawned) Ready(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.status.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	// End of file comes when the role closes its end, by exec or by hand.
	data, err := io.ReadAll(io.LimitReader(s.status, maxStatus))
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("cannot see the role start: %w", err)
	}
	started := false
	dec := json.NewDecoder(bytes.NewReader(data))
	for {
		var m statusMessage
		if err := dec.Decode(&m); err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("cannot see the role start: its report is damaged: %w", err)
		}
		if m.Step != "" {
			return &RoleError{Step: m.Step, Errno: m.Errno, Detail: m.Detail}
		}
		started = true
	}
	if !started {
		return errors.New("cannot see the role start: it ended before it reported")
	}
	return nil
}

// Close gives back the descriptors of s. The process goes on, and is still reaped.
func (s *Spawned) Close() {
	s.reap()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pipe != nil {
		s.pipe.Close()
		s.pipe = nil
	}
	s.status.Close()
	if s.pidfd >= 0 {
		unix.Close(s.pidfd)
		s.pidfd = -1
	}
}
