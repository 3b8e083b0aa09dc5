package server

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// gate is a listener that can be held: connections then wait in the kernel's
// queue, which belongs to systemd's socket and outlives this process. Closing
// the listener instead would do the same, but cannot be undone, and a
// connection accepted just before would be lost when the process exits.
type gate struct {
	net.Listener
	deadline func(time.Time) error

	mu      sync.Mutex // guards the fields that follow
	changed *sync.Cond
	held    bool
	parked  bool // Accept waits for the gate to be released
	closed  bool
}

func newGate(listener net.Listener) *gate {
	g := &gate{Listener: listener, deadline: func(time.Time) error { return errors.ErrUnsupported }}
	if l, ok := listener.(interface{ SetDeadline(time.Time) error }); ok {
		g.deadline = l.SetDeadline
	}
	g.changed = sync.NewCond(&g.mu)
	return g
}

// Accept waits for a connection, and for the gate to be open.
func (g *gate) Accept() (net.Conn, error) {
	for {
		g.mu.Lock()
		for g.held && !g.closed {
			g.parked = true
			g.changed.Broadcast()
			g.changed.Wait()
		}
		g.parked = false
		closed := g.closed
		g.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		conn, err := g.Listener.Accept()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		return conn, err
	}
}

// hold stops accepting. When it returns, every accepted connection has been
// handed out by Accept and asked for the next one.
func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = true
	if g.deadline(time.Unix(1, 0)) != nil {
		return
	}
	for !g.parked && !g.closed {
		g.changed.Wait()
	}
}

// release accepts again.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = false
	_ = g.deadline(time.Time{})
	g.changed.Broadcast()
}

// Close closes this process's copy of the listener.
func (g *gate) Close() error {
	g.mu.Lock()
	g.closed = true
	g.changed.Broadcast()
	g.mu.Unlock()
	return g.Listener.Close()
}
