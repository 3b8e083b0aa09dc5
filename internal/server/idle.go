package server

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// idle tells when the service may exit because nobody needs it: no connection,
// and nothing that busy reports, for a while.
//
// The decision is free of races. The gates are held first, so that a connection
// either is counted before the last look, or waits in systemd's socket and
// starts the service again.
type idle struct {
	after time.Duration
	busy  func() bool
	done  chan struct{}
	// attended is told when a connection comes after a time without any, and when
	// there has been none for unattendedAfter; nil if nobody wants to know.
	attended func(bool)

	mu      sync.Mutex // guards the fields that follow
	gates   []*gate
	conns   map[net.Conn]struct{}
	timer   *time.Timer
	over    bool // done is closed, or stop was called
	serials int  // of armed timers: one that was replaced does nothing
	quiet   *time.Timer
	alone   bool // attended was told so
}

// unattendedAfter keeps short connections one after the other, as of a script that
// calls the CLI, from counting as many ends.
const unattendedAfter = 10 * time.Second

func newIdle(after time.Duration, busy func() bool) *idle {
	i := &idle{after: after, busy: busy, done: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	return i
}

// arm starts the timer anew where it has to run. i.mu is held.
func (i *idle) arm() {
	i.serials++
	if i.timer != nil {
		i.timer.Stop()
	}
	if i.after <= 0 || i.over || len(i.conns) > 0 || len(i.gates) == 0 {
		return
	}
	serial := i.serials
	i.timer = time.AfterFunc(i.after, func() { i.expire(serial) })
}

// watch adds a gate. Before there is one the service is not idle, it starts.
func (i *idle) watch(g *gate) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.gates = append(i.gates, g)
	i.attend()
	i.arm()
}

// connState counts connections. Viewers leave it when they are upgraded; busy
// counts them.
func (i *idle) connState(conn net.Conn, state http.ConnState) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch state {
	case http.StateNew:
		i.conns[conn] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(i.conns, conn)
	default:
		return
	}
	i.attend()
	i.arm()
}

// attend tells attended what the connections are. i.mu is held.
func (i *idle) attend() {
	if i.attended == nil {
		return
	}
	if len(i.conns) == 0 {
		if i.quiet == nil {
			i.quiet = time.AfterFunc(unattendedAfter, i.unattended)
		}
		i.quiet.Reset(unattendedAfter)
		return
	}
	if i.quiet != nil {
		i.quiet.Stop()
	}
	if i.alone {
		i.alone = false
		i.attended(true)
	}
}

func (i *idle) unattended() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.conns) == 0 && !i.alone {
		i.alone = true
		i.attended(false)
	}
}

// expire looks whether the service is idle still, with the gates held.
func (i *idle) expire(serial int) {
	i.mu.Lock()
	stale := serial != i.serials || i.over
	gates := i.gates
	i.mu.Unlock()
	if stale {
		return
	}
	for _, g := range gates {
		g.hold()
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over {
		return
	}
	// A gate that came meanwhile is not held.
	if len(i.gates) == len(gates) && len(i.conns) == 0 && !i.busy() {
		i.over = true
		close(i.done)
		return
	}
	for _, g := range gates {
		g.release()
	}
	i.arm()
}

// stop ends the watch; gates that are held stay so.
func (i *idle) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.over = true
	i.arm()
}
