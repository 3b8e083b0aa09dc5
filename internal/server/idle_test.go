package server

import (
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"abfleet/internal/api"
)

// A held gate leaves connections where the next service finds them.
func TestHeldGateAcceptsNothingAndLosesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(listener)
	defer g.Close()
	accepted := make(chan net.Conn)
	go func() {
		for {
			conn, err := g.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- conn
		}
	}()
	dial := func() net.Conn {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	dial()
	await(t, accepted, "the first connection")

	// A connection that is accepted while the gate closes is handed out
	// before hold returns.
	for range 50 {
		holding := make(chan struct{})
		go func() { g.hold(); close(holding) }()
		dial()
		select {
		case <-accepted:
			<-holding
		case <-holding:
			select {
			case <-accepted:
				t.Fatal("a held gate handed out a connection")
			default:
			}
			g.release()
			await(t, accepted, "the connection that waited")
			continue
		}
		g.release()
	}

	g.hold()
	dial()
	select {
	case <-accepted:
		t.Fatal("a held gate handed out a connection")
	default:
	}
	// The next process, with its own copy of the socket, gets it.
	_ = listener.(*net.UnixListener).SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := listener.Accept(); err != nil {
		t.Errorf("the connection is lost: %v", err)
	}
	_ = g.Close()
	if _, open := <-accepted; open {
		t.Error("a closed gate handed out a connection")
	}
}

func TestIdleExitWaitsForEverybody(t *testing.T) {
	r := newRig(t, func(d *Deps) { d.IdleExit = 50 * time.Millisecond })
	notYet := func(why string) {
		t.Helper()
		select {
		case <-r.Idle():
			t.Fatalf("the service is idle with %s", why)
		case <-time.After(4 * 50 * time.Millisecond):
		}
	}
	// A client that keeps its connection open is one.
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	notYet("a client")
	r.fleet.mu.Lock()
	r.fleet.running = 1
	r.fleet.mu.Unlock()
	_ = conn.Close()
	notYet("a Stack")
	// It went on serving all the while.
	if _, err := api.NewClient(r.socket).Get(t.Context(), api.VersionPath, nil); err != nil {
		t.Fatal(err)
	}
	r.fleet.mu.Lock()
	r.fleet.running = 0
	r.fleet.mu.Unlock()
	await(t, r.Idle(), "idleness")
}

// No connection is lost in the moment in which the service decides to exit:
// either it is answered, or it waits for the next service.
func TestIdleExitLosesNoConnection(t *testing.T) {
	r := newRig(t, func(d *Deps) { d.IdleExit = time.Millisecond })
	var clients sync.WaitGroup
	unanswered := make(chan error, 64)
	for range 8 {
		clients.Go(func() {
			for {
				select {
				case <-r.Idle():
					return
				default:
				}
				conn, err := net.Dial("unix", r.socket)
				if err != nil {
					unanswered <- err
					return
				}
				_, _ = io.WriteString(conn, "GET /v1/version HTTP/1.0\r\n\r\n")
				_ = conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
				answer, err := io.ReadAll(conn)
				_ = conn.Close()
				select {
				case <-r.Idle():
					// In the queue: a timeout, and not a byte.
					if timeout, ok := err.(net.Error); len(answer) == 0 && (!ok || !timeout.Timeout()) {
						unanswered <- err
					}
				default:
					if len(answer) == 0 {
						unanswered <- err
					}
				}
			}
		})
	}
	clients.Wait()
	close(unanswered)
	for err := range unanswered {
		t.Errorf("a connection was neither answered nor left in the queue: %v", err)
	}
}

// The last look is taken with the gates held: who connects while it is taken
// waits in the queue and is not half answered.
func TestIdleExitLooksWithHeldGates(t *testing.T) {
	var r *rig
	var late net.Conn
	ready := make(chan struct{})
	r = newRig(t, func(d *Deps) {
		d.IdleExit = time.Millisecond
		d.Fleet = &lookingFleet{fakeFleet: d.Fleet.(*fakeFleet), look: func() {
			<-ready
			if late == nil {
				late, _ = net.Dial("unix", r.socket)
				_, _ = io.WriteString(late, "GET /v1/version HTTP/1.0\r\n\r\n")
			}
		}}
	})
	close(ready)
	await(t, r.Idle(), "idleness")
	defer late.Close()
	_ = late.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	answer, err := io.ReadAll(late)
	if timeout, ok := err.(net.Error); len(answer) > 0 || !ok || !timeout.Timeout() {
		t.Errorf("a connection of the last moment was taken: %q, %v", answer, err)
	}
}

type lookingFleet struct {
	*fakeFleet
	look func()
}

func (f *lookingFleet) Counts() (int, int) {
	f.look()
	return f.fakeFleet.Counts()
}

// Who was accepted just before the gates were held counts.
func TestIdleExitCountsTheLastAccepted(t *testing.T) {
	i := newIdle(time.Hour, func() bool { return false })
	conn, other := net.Pipe()
	defer other.Close()
	g := newGate(nil)
	g.deadline = func(at time.Time) error {
		if !at.IsZero() {
			i.connState(conn, http.StateNew)
		}
		return errors.ErrUnsupported
	}
	i.watch(g)
	i.expire(i.serials)
	select {
	case <-i.done:
		t.Error("the service is idle with a connection")
	default:
	}
	if g.held {
		t.Error("the gate stays held")
	}
	i.connState(conn, http.StateClosed)
	g.deadline = func(time.Time) error { return errors.ErrUnsupported }
	i.expire(i.serials)
	select {
	case <-i.done:
	default:
		t.Error("the service is not idle without any")
	}
}

func TestIdleIsOffByDefault(t *testing.T) {
	i := newIdle(0, func() bool { return false })
	conn, other := net.Pipe()
	defer other.Close()
	i.connState(conn, http.StateNew)
	i.connState(conn, http.StateClosed)
	if i.timer != nil {
		t.Error("a timer runs")
	}
}

// A service that nobody talks to is told so once, and told at the first
// connection that somebody does.
func TestAttended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			mu   sync.Mutex // guards told
			told []bool
		)
		i := newIdle(0, func() bool { return true })
		i.attended = func(attended bool) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, attended)
		}
		i.watch(newGate(nil))
		short := func(times int, pause time.Duration) {
			for range times {
				conn, other := net.Pipe()
				i.connState(conn, http.StateNew)
				i.connState(conn, http.StateClosed)
				other.Close()
				time.Sleep(pause)
			}
			synctest.Wait()
		}
		for _, c := range []struct {
			name string
			do   func()
			want []bool
		}{
			{"connections after the start", func() { short(20, unattendedAfter/2) }, nil},
			{"none", func() { short(1, 3*unattendedAfter) }, []bool{false}},
			{"still none", func() { time.Sleep(time.Hour); synctest.Wait() }, nil},
			{"many connections", func() { short(20, unattendedAfter/2) }, []bool{true}},
			{"none again", func() { time.Sleep(time.Hour); synctest.Wait() }, []bool{false}},
		} {
			c.do()
			mu.Lock()
			if !slices.Equal(told, c.want) {
				t.Errorf("%s: told %v, want %v", c.name, told, c.want)
			}
			told = nil
			mu.Unlock()
		}
	})
}
