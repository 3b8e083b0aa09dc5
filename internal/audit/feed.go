package audit

import (
	"context"
	"sync"
	"time"
)

// Feed hands every published value to every subscriber, in order. Publishing
// never waits: a subscriber that falls behind gets one gap value in the last
// place of its buffer and nothing more until it has read that far. Whoever
// reads a gap reads the store again and has then missed nothing. The zero Feed
// is not usable; see NewFeed.
type Feed[T any] struct {
	gap func() T

	mu     sync.Mutex // guards the fields that follow
	subs   map[*subscriber[T]]struct{}
	closed bool
}

type subscriber[T any] struct {
	ch     chan T
	behind bool // a gap is the last value in ch, or was until it was read
}

// NewFeed returns a Feed whose gap values come from gap.
func NewFeed[T any](gap func() T) *Feed[T] {
	return &Feed[T]{gap: gap, subs: map[*subscriber[T]]struct{}{}}
}

// Subscribe returns a channel of what is published from now on, buffered for
// buffer values (at least 2). It is closed when ctx ends or the Feed closes.
func (f *Feed[T]) Subscribe(ctx context.Context, buffer int) <-chan T {
	s := &subscriber[T]{ch: make(chan T, max(buffer, 2))}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || ctx.Err() != nil {
		close(s.ch)
		return s.ch
	}
	f.subs[s] = struct{}{}
	context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.drop(s)
	})
	return s.ch
}

// Publish hands the values to all subscribers.
func (f *Feed[T]) Publish(values ...T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range values {
		for s := range f.subs {
			s.send(v, f.gap)
		}
	}
}

// send needs the Feed's lock: nobody else writes to s.ch, so what is seen to
// fit does fit.
func (s *subscriber[T]) send(v T, gap func() T) {
	switch {
	case s.behind && len(s.ch) > 0:
		return
	case len(s.ch) == cap(s.ch)-1:
		s.behind = true
		s.ch <- gap()
	default:
		s.behind = false
		s.ch <- v
	}
}

// Close ends all subscriptions; what is buffered can still be read.
func (f *Feed[T]) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for s := range f.subs {
		f.drop(s)
	}
}

// drop needs f.mu held.
func (f *Feed[T]) drop(s *subscriber[T]) {
	if _, ok := f.subs[s]; ok {
		delete(f.subs, s)
		close(s.ch)
	}
}

// NewStream returns the Feed of events.
func NewStream() *Feed[Event] {
	return NewFeed(func() Event {
		return Event{
			At: time.Now().UTC(), Type: Gap, Actor: System("feed"),
			Summary: "some events were skipped for this watcher, which was too slow: read the stored events again",
		}
	})
}
