package cdp

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
)

// ErrOverflow ends a subscription whose consumer fell too far behind.
var ErrOverflow = errors.New("events arrive faster than they are handled")

// Limits of one subscription's queue. Beyond half of them, events the
// subscriber declared lossy are dropped; beyond all of them it is closed.
const (
	queueEvents = 1 << 16
	queueBytes  = 64 << 20
)

// Event is one notification from the browser, or the answer to a call that was
// made with Subscription.Start.
type Event struct {
	Session string // session id, "" for the root session
	Method  string
	Params  json.RawMessage // parameters; of an answer, its result
	// Tag is what Start was given, nil for notifications; Err is the call's
	// failure.
	Tag any
	Err error
}

// Filter says which events a subscription gets.
type Filter struct {
	// Session limits them to one session; nil takes all sessions.
	Session *Session
	// Methods lists the wanted methods; empty takes all.
	Methods []string
	// Lossy lists methods that may be dropped when the consumer falls behind.
	// How many were is in Subscription.Dropped.
	Lossy []string
}

// Subscription is a queue of events in the order of their arrival.
type Subscription struct {
	conn    *Conn
	session string
	all     bool // every session
	methods map[string]string
	lossy   map[string]bool

	mu      sync.Mutex // guards what follows
	queue   []Event
	head    int
	bytes   int
	pushed  uint64 // events ever queued
	handled uint64 // events whose consumer has come back for more
	taken   bool   // one event is with the consumer
	dropped uint64
	err     error
	wake    chan struct{} // capacity 1
	flushes []flush
}

type flush struct {
	at uint64
	ch chan struct{}
}

// Subscribe starts a subscription. Events that arrive later are in it; the
// caller must consume it with Next or Close it.
func (c *Conn) Subscribe(f Filter) *Subscription {
	s := &Subscription{conn: c, all: f.Session == nil, wake: make(chan struct{}, 1)}
	if f.Session != nil {
		s.session = f.Session.id
	}
	if len(f.Methods) > 0 {
		s.methods = make(map[string]string, len(f.Methods))
		for _, m := range f.Methods {
			s.methods[m] = m
		}
	}
	s.lossy = make(map[string]bool, len(f.Lossy))
	for _, m := range f.Lossy {
		s.lossy[m] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		s.err = c.err
		return s
	}
	subs := append(slices.Clone(*c.subs.Load()), s)
	c.subs.Store(&subs)
	return s
}

// Close ends the subscription; Next then fails.
func (s *Subscription) Close() { s.close(ErrClosed) }

func (s *Subscription) close(err error) {
	s.conn.mu.Lock()
	subs := slices.DeleteFunc(slices.Clone(*s.conn.subs.Load()), func(o *Subscription) bool { return o == s })
	s.conn.subs.Store(&subs)
	s.conn.mu.Unlock()

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	if errors.Is(err, ErrOverflow) {
		s.queue, s.head, s.bytes = nil, 0, 0
	}
	s.signal()
}

// signal wakes the consumer. The caller holds s.mu.
func (s *Subscription) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// offer queues an event when the subscription wants it. It never blocks.
func (s *Subscription) offer(env envelope) {
	if !s.all && string(env.session) != s.session {
		return
	}
	var method string
	if s.methods != nil {
		var ok bool
		if method, ok = s.methods[string(env.method)]; !ok {
			return
		}
	} else {
		method = string(env.method)
	}
	s.push(Event{Session: string(env.session), Method: method, Params: env.params})
}

func (s *Subscription) push(ev Event) {
	s.mu.Lock()
	n, size := len(s.queue)-s.head, s.bytes+len(ev.Params)
	switch {
	case s.err != nil:
	case (n >= queueEvents/2 || size > queueBytes/2) && ev.Tag == nil && s.lossy[ev.Method]:
		s.dropped++
	case n >= queueEvents || (size > queueBytes && n > 0):
		s.mu.Unlock()
		s.close(ErrOverflow)
		return
	default:
		s.queue = append(s.queue, ev)
		s.bytes = size
		s.pushed++
		s.signal()
	}
	s.mu.Unlock()
}

// Next returns the oldest queued event, waiting for one if need be. Coming back
// for the next one says that the last was handled. When the connection ended,
// what was queued before is still returned.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		s.mu.Lock()
		if s.taken {
			s.taken = false
			s.handled++
			s.release()
		}
		if s.head < len(s.queue) {
			ev := s.queue[s.head]
			s.queue[s.head] = Event{}
			s.head++
			if s.head == len(s.queue) {
				s.head = 0
				if cap(s.queue) > 1024 {
					s.queue = nil
				} else {
					s.queue = s.queue[:0]
				}
			} else if s.head > 1024 && s.head > len(s.queue)/2 {
				s.queue = slices.Delete(s.queue, 0, s.head)
				s.head = 0
			}
			s.bytes -= len(ev.Params)
			s.taken = true
			s.mu.Unlock()
			return ev, nil
		}
		if err := s.err; err != nil {
			for _, f := range s.flushes {
				close(f.ch)
			}
			s.flushes = nil
			s.mu.Unlock()
			return Event{}, err
		}
		s.mu.Unlock()
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Event{}, context.Cause(ctx)
		}
	}
}

// release wakes the flushes that have been reached. The caller holds s.mu.
func (s *Subscription) release() {
	for len(s.flushes) > 0 && s.flushes[0].at <= s.handled {
		close(s.flushes[0].ch)
		s.flushes = s.flushes[1:]
	}
}

// Flush waits until the consumer has handled everything that is queued now.
func (s *Subscription) Flush(ctx context.Context) error {
	s.mu.Lock()
	if s.err != nil {
		defer s.mu.Unlock()
		return s.err
	}
	if s.handled >= s.pushed {
		s.mu.Unlock()
		return nil
	}
	f := flush{at: s.pushed, ch: make(chan struct{})}
	s.flushes = append(s.flushes, f)
	s.mu.Unlock()
	select {
	case <-f.ch:
		return nil
	case <-s.conn.done:
		return s.conn.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Start sends a command whose answer is queued among the events, in the order
// of their arrival, as an Event with that tag. Nothing is queued when Start
// fails. tag must not be nil.
func (s *Subscription) Start(ctx context.Context, on *Session, method string, params, tag any) error {
	_, err := s.conn.start(ctx, on.id, method, params, func(r reply) {
		s.push(Event{Session: on.id, Method: method, Params: r.raw, Tag: tag, Err: r.err})
	})
	return err
}

// Dropped is how many lossy events were dropped so far.
func (s *Subscription) Dropped() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}
