package holder

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// handshakeTimeout is how long a peer may take to say who it is.
	handshakeTimeout = 5 * time.Second
	// attachTimeout is how long a client waits for a browser that does not
	// answer CDP yet. Clients have deadlines of their own, and shorter ones.
	attachTimeout = 2 * time.Minute
	// pageTimeout is how long a starting browser may take to show a page
	// before clients are let in without one.
	pageTimeout = 15 * time.Second
	// maxPeers bounds the connections, in and after the handshake.
	maxPeers = 64
	// controlPeers are let in beyond that, for control connections only:
	// asking for the stop must work beside any number of clients.
	controlPeers = 16
)

// server accepts clients for the broker.
type server struct {
	spec   *Spec
	broker *broker
	relay  *relay
	// hello is what every client is told, without the product.
	hello welcome

	mu      sync.Mutex // guards the fields that follow
	product string
	peers   int
	// pageAsked: somebody waits, or waited, for the first page.
	pageAsked bool
	ended     bool // the stop has begun: control connections only
}

// listen binds the CDP socket. Only a socket may be in its place, left by a
// generation before: the caller holds the Profile's lock.
func listen(path string) (*net.UnixListener, error) {
	var st unix.Stat_t
	dir := filepath.Dir(path)
	if err := unix.Lstat(dir, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return nil, fmt.Errorf("%s is not a directory of this user with mode 0700", dir)
	}
	switch err := unix.Lstat(path, &st); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK:
		if err := unix.Unlink(path); err != nil {
			return nil, &os.PathError{Op: "unlink", Path: path, Err: err}
		}
	case err == nil:
		return nil, fmt.Errorf("%s exists and is not a socket", path)
	case err != unix.ENOENT:
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	// The directory keeps others out until this has happened.
	if err := unix.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, &os.PathError{Op: "chmod", Path: path, Err: err}
	}
	return l, nil
}

// acceptPause is how long to wait after a failed accept, which is a lack of
// descriptors or memory that only time cures.
const acceptPause = 100 * time.Millisecond

// accept serves until the listener is closed.
func (s *server) accept(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.relay.say(4, "cannot accept CDP client: "+err.Error())
			time.Sleep(acceptPause)
			continue
		}
		s.mu.Lock()
		full := s.peers >= maxPeers+controlPeers
		if !full {
			s.peers++
		}
		s.mu.Unlock()
		if full {
			conn.SetWriteDeadline(time.Now().Add(acceptPause))
			s.refuse(conn, welcome{Error: refusedBusy})
			conn.Close()
			continue
		}
		go func() {
			defer func() {
				conn.Close()
				s.mu.Lock()
				s.peers--
				s.mu.Unlock()
			}()
			s.serve(conn)
		}()
	}
}

func (s *server) refuse(conn net.Conn, w welcome) {
	// The peer is refused whether it hears why or not.
	_ = writeWelcome(conn, w)
}

func writeWelcome(conn net.Conn, w welcome) error {
	data, err := json.Marshal(w)
	if err != nil {
		return err
	}
	_, err = conn.Write(append(data, 0))
	return err
}

func (s *server) serve(conn *net.UnixConn) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return
	}
	who, err := s.trust(conn)
	if err != nil {
		s.relay.say(4, "refused CDP client "+who+": "+err.Error())
		s.refuse(conn, welcome{Error: refusedPeer})
		return
	}
	frame, err := readSmallFrame(conn, maxHandshake)
	if err != nil {
		return
	}
	g, version, err := s.judge(frame)
	switch {
	case err == ErrVersion:
		s.refuse(conn, welcome{Error: refusedVersion, Min: minVersion, Max: maxVersion})
		return
	case err != nil:
		s.relay.say(4, "refused CDP client "+who+": "+err.Error())
		s.refuse(conn, welcome{Error: refusedPeer})
		return
	}
	hello := s.hello
	hello.Version = version
	session := ""
	if !g.Control {
		s.mu.Lock()
		full := s.peers > maxPeers
		s.mu.Unlock()
		if full {
			s.refuse(conn, welcome{Error: refusedBusy})
			return
		}
		ctx, stop := untilHangup(conn)
		session, hello.Product, err = s.attach(ctx)
		stop()
		if err != nil {
			why := refusedEnded
			if errors.Is(err, errUnheard) {
				why = refusedBusy
			}
			_ = conn.SetDeadline(time.Now().Add(handshakeTimeout))
			s.refuse(conn, welcome{Error: why})
			return
		}
	}
	// The writer of a client may wait for as long as the client lives: what
	// it waits with is bounded by the queue.
	err = conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err == nil {
		err = writeWelcome(conn, hello)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	var c *client
	if err == nil {
		c, err = s.broker.add(conn, session)
	}
	if err != nil {
		if session != "" {
			s.broker.detach(session)
		}
		return
	}
	c.read()
	s.broker.remove(c)
}

// untilHangup returns a context that ends when the peer hangs up. stop ends the
// watch; until then nobody may read from conn. It leaves conn with a deadline
// that has passed.
func untilHangup(conn *net.UnixConn) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	raw, err := conn.SyscallConn()
	if err == nil {
		err = conn.SetReadDeadline(time.Time{})
	}
	if err != nil {
		cancel() // it is closed
		return ctx, cancel
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Nothing is read: what the peer says early is for its client.
		if raw.Read(func(fd uintptr) bool { return hungUp(int(fd)) }) == nil {
			cancel()
		}
	}()
	return ctx, func() {
		_ = conn.SetReadDeadline(time.Unix(1, 0))
		<-done
		cancel()
	}
}

func hungUp(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds, 0)
	for err == unix.EINTR {
		n, err = unix.Poll(fds, 0)
	}
	return err == nil && n > 0
}

// trust looks at what the kernel says about a peer.
func (s *server) trust(conn *net.UnixConn) (who string, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return "?", err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return "?", err
	}
	if credErr != nil {
		return "?", credErr
	}
	who = fmt.Sprintf("pid %d uid %d", cred.Pid, cred.Uid)
	if int(cred.Uid) != os.Geteuid() {
		return who, errors.New("another user")
	}
	if want := s.spec.Holder.PeerCgroup; want != "" {
		got, err := cgroupOf(int(cred.Pid))
		if err != nil {
			return who, err
		}
		if got != want {
			return who, errors.New("not in the service's cgroup")
		}
	}
	return who, nil
}

// cgroupOf returns the path of a process's cgroup in the unified hierarchy.
func cgroupOf(pid int) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && path != "" {
			return path, nil
		}
	}
	return "", fmt.Errorf("pid %d has no cgroup in the unified hierarchy", pid)
}

// judge decides about a greeting: the key, then the version.
func (s *server) judge(frame []byte) (g greeting, version int, err error) {
	if err := json.Unmarshal(frame, &g); err != nil || g.Versions == nil {
		return g, 0, errors.New("not a greeting")
	}
	if subtle.ConstantTimeCompare([]byte(g.Key), []byte(s.spec.Holder.Key)) != 1 {
		return g, 0, errors.New("wrong key")
	}
	version = min(g.Versions.Max, maxVersion)
	if version < g.Versions.Min || version < minVersion {
		return g, 0, ErrVersion
	}
	return g, version, nil
}

// attach waits for a browser that answers and makes a session in it.
func (s *server) attach(ctx context.Context) (session, product string, err error) {
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended {
		return "", "", ErrEnded
	}
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	// All questions go at once: while it starts, the browser takes as long
	// for each answer as for all of them.
	var wg sync.WaitGroup
	var versionErr, pageErr error
	wg.Go(func() { product, versionErr = s.version(ctx) })
	wg.Go(func() { pageErr = s.awaitPage(ctx, pageTimeout) })
	a, err := s.broker.call(ctx, methodAttach, "")
	if err != nil {
		cancel()
	}
	wg.Wait()
	if err == nil && a.session == "" {
		err = errors.New("the browser gave no session")
	}
	if err = errors.Join(err, versionErr, pageErr); err != nil {
		if a.session != "" {
			s.broker.detach(a.session)
		}
		return "", "", err
	}
	return a.session, product, nil
}

// awaitPage returns when the browser has shown its first page, or has had the
// time given; from then on at once. What is attached before could take an empty
// browser for one whose last page was closed.
func (s *server) awaitPage(ctx context.Context, timeout time.Duration) error {
	s.mu.Lock()
	asked := s.pageAsked
	s.pageAsked = true
	s.mu.Unlock()
	if !asked {
		// It goes on when the first client gives up: others wait for it too.
		go s.lookForPage(timeout)
	}
	select {
	case <-s.broker.page:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *server) lookForPage(timeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), attachTimeout)
	defer cancel()
	_, err := s.broker.call(ctx, "Target.setDiscoverTargets", `{"discover":true}`)
	if err == nil {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		select {
		case <-s.broker.page:
		case <-timer.C:
			s.relay.say(4, "the browser shows no page")
		}
	}
	// Nobody must wait again.
	s.broker.mu.Lock()
	s.broker.lookNoFurther()
	s.broker.mu.Unlock()
	// Nobody waits for this answer, and nothing hangs on it.
	ctx, cancel = context.WithTimeout(context.Background(), pageTimeout)
	defer cancel()
	_, _ = s.broker.call(ctx, "Target.setDiscoverTargets", `{"discover":false}`)
}

func (s *server) version(ctx context.Context) (string, error) {
	s.mu.Lock()
	product := s.product
	s.mu.Unlock()
	if product != "" {
		return product, nil
	}
	a, err := s.broker.call(ctx, "Browser.getVersion", "")
	if err != nil {
		return "", err
	}
	var v struct{ Result struct{ Product string } }
	if err := json.Unmarshal(a.data, &v); err != nil {
		return "", err
	}
	s.mu.Lock()
	s.product = v.Result.Product
	s.mu.Unlock()
	return v.Result.Product, nil
}

// end makes the server refuse new sessions.
func (s *server) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
}

// errnoOf returns the errno in err's chain, or 0.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return 0
}
