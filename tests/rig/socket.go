package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// dialTimeout bounds one connect inside a rig.
	dialTimeout = 30 * time.Second
	// requestCap is the longest request or answer of the socket agent.
	requestCap = 16 << 10
)

// socketAgent is a process inside the rig, as the normal user, that connects and
// listens for the test: peers see a living process of that user.
type socketAgent struct {
	cmd    *exec.Cmd
	cancel context.CancelFunc
	conn   *net.UnixConn

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan agentAnswer
	err     error // set when the agent is gone
}

type agentRequest struct {
	ID            uint64
	Op            string // "dial" or "listen"
	Network, Addr string
}

type agentAnswer struct {
	ID    uint64
	Error string   `json:",omitempty"`
	Errno uintptr  `json:",omitempty"`
	file  *os.File // the socket
	err   error
}

// Dial connects from inside the rig, as its normal user: unix paths and loopback
// ports are the rig's. The peer of a unix socket sees the user's id and the id
// of a process that lives as long as the rig.
func (r *Rig) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	f, err := r.socket(ctx, "dial", network, addr)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: rigAddr{network, addr}, Err: err}
	}
	defer f.Close()
	return net.FileConn(f)
}

// Listen opens a listening socket inside the rig, as its normal user, and serves
// it here. Closing it does not remove a unix socket's path.
func (r *Rig) Listen(ctx context.Context, network, addr string) (net.Listener, error) {
	f, err := r.socket(ctx, "listen", network, addr)
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Addr: rigAddr{network, addr}, Err: err}
	}
	defer f.Close()
	return net.FileListener(f)
}

type rigAddr struct{ network, addr string }

func (a rigAddr) Network() string { return a.network }
func (a rigAddr) String() string  { return a.addr }

func (r *Rig) socket(ctx context.Context, op, network, addr string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	agent, err := r.agent()
	if err != nil {
		return nil, err
	}
	return agent.request(ctx, agentRequest{Op: op, Network: network, Addr: addr})
}

// agent starts the socket agent at its first use.
func (r *Rig) agent() (*socketAgent, error) {
	r.mu.Lock()
	agent := r.sockets
	r.mu.Unlock()
	if agent != nil {
		return agent, nil
	}
	agent, err := r.startAgent()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.down || r.sockets != nil {
		agent.close()
		if r.down {
			return nil, errors.New("the rig is down")
		}
		return r.sockets, nil
	}
	r.sockets = agent
	return agent, nil
}

func (r *Rig) startAgent() (*socketAgent, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cmd, spec, err := r.helper(ctx, opEnter)
	if err == nil {
		spec.Self, spec.Dir = true, "/"
		spec.Cgroup, err = r.commandCgroup()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		cancel()
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "socket agent"), os.NewFile(uintptr(pair[1]), "socket agent")
	defer theirs.Close()
	conn, err := unixConn(ours)
	if err != nil {
		cancel()
		return nil, err
	}
	cmd.Args = append(cmd.Args, spec.String(), opSockets, strconv.Itoa(r.opts.UID))
	cmd.Env = r.UserEnv()
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return errors.Join(killCgroup(spec.Cgroup), cmd.Process.Kill()) }
	if err := cmd.Start(); err != nil {
		cancel()
		conn.Close()
		return nil, err
	}
	a := &socketAgent{cmd: cmd, cancel: cancel, conn: conn, waiting: map[uint64]chan agentAnswer{}}
	go a.read()
	return a, nil
}

func (a *socketAgent) close() {
	a.conn.Close()
	a.cancel()
	a.cmd.Wait() // killed just now: its status says nothing
}

func (a *socketAgent) request(ctx context.Context, req agentRequest) (*os.File, error) {
	answer := make(chan agentAnswer, 1)
	a.mu.Lock()
	if a.err != nil {
		a.mu.Unlock()
		return nil, a.err
	}
	a.next++
	req.ID = a.next
	a.waiting[req.ID] = answer
	a.mu.Unlock()
	text, err := json.Marshal(req)
	if err == nil {
		_, err = a.conn.Write(text)
	}
	if err != nil {
		a.forget(req.ID)
		return nil, err
	}
	select {
	case got := <-answer:
		if got.err != nil {
			return nil, got.err
		}
		if got.Errno != 0 {
			return nil, os.NewSyscallError(req.Op, syscall.Errno(got.Errno))
		}
		if got.Error != "" {
			return nil, errors.New(got.Error)
		}
		return got.file, nil
	case <-ctx.Done():
		a.forget(req.ID)
		return nil, ctx.Err()
	}
}

func (a *socketAgent) forget(id uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, id)
}

func (a *socketAgent) read() {
	buf := make([]byte, requestCap)
	for {
		n, files, err := readMessage(a.conn, buf)
		if err != nil || n == 0 {
			a.fail(fmt.Errorf("the rig's socket agent is gone: %v", err))
			return
		}
		var answer agentAnswer
		if err := json.Unmarshal(buf[:n], &answer); err != nil {
			closeAll(files)
			a.fail(err)
			return
		}
		if len(files) == 1 {
			answer.file = files[0]
		}
		a.mu.Lock()
		waiter := a.waiting[answer.ID]
		delete(a.waiting, answer.ID)
		a.mu.Unlock()
		if waiter == nil {
			closeAll(files)
			continue
		}
		waiter <- answer
	}
}

func (a *socketAgent) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
	for id, waiter := range a.waiting {
		waiter <- agentAnswer{err: err}
		delete(a.waiting, id)
	}
}

// socketStage is the agent: it runs inside the rig until its channel closes.
func socketStage(uidText string) int {
	uid, err := strconv.Atoi(uidText)
	if err == nil {
		err = errors.Join(syscall.Setgroups(nil), syscall.Setgid(uid), syscall.Setuid(uid))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "socket agent: %v\n", err)
		return 1
	}
	conn, err := unixConn(os.NewFile(3, "socket agent"))
	if err != nil {
		fmt.Fprintf(os.Stderr, "socket agent: %v\n", err)
		return 1
	}
	buf := make([]byte, requestCap)
	for {
		n, err := conn.Read(buf)
		if err != nil || n == 0 {
			return 0
		}
		var req agentRequest
		if err := json.Unmarshal(buf[:n], &req); err != nil {
			fmt.Fprintf(os.Stderr, "socket agent: %v\n", err)
			return 1
		}
		go func() {
			f, err := serveSocket(req)
			answer := agentAnswer{ID: req.ID}
			var rights []byte
			if err != nil {
				answer.Error = err.Error()
				var errno syscall.Errno
				if errors.As(err, &errno) {
					answer.Errno = uintptr(errno)
				}
			} else {
				defer f.Close()
				rights = unix.UnixRights(int(f.Fd()))
			}
			text, err := json.Marshal(answer)
			if err == nil {
				_, _, err = conn.WriteMsgUnix(text, rights, nil)
			}
			if err != nil {
				os.Exit(1)
			}
		}()
	}
}

func serveSocket(req agentRequest) (*os.File, error) {
	type filer interface{ File() (*os.File, error) }
	if req.Op == "listen" {
		l, err := net.Listen(req.Network, req.Addr)
		if err != nil {
			return nil, err
		}
		if u, ok := l.(*net.UnixListener); ok {
			u.SetUnlinkOnClose(false)
		}
		defer l.Close()
		return l.(filer).File()
	}
	c, err := net.DialTimeout(req.Network, req.Addr, dialTimeout)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.(filer).File()
}

// unixConn turns a unix socket's descriptor into a connection and takes it over.
func unixConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("not a unix socket")
	}
	return u, nil
}

// readMessage reads one message and the descriptors sent with it. The end of the
// channel is a message of no bytes.
func readMessage(conn *net.UnixConn, buf []byte) (int, []*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if errors.Is(err, io.EOF) {
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return 0, nil, err
	}
	var files []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return n, files, nil
}

// receive is readMessage with a context, on a channel that is kept.
func receive(ctx context.Context, f *os.File, buf []byte) (int, []*os.File, error) {
	conn, err := net.FileConn(f)
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	n, files, err := readMessage(conn.(*net.UnixConn), buf)
	if ctx.Err() != nil {
		closeAll(files)
		return 0, nil, ctx.Err()
	}
	return n, files, err
}
