package fleet

import (
	"context"
	"slices"
	"sync"
)

// queue admits starts, first come, first served: a browser that starts keeps
// its processors busy, and more at once would only all be late.
type queue struct {
	mu      sync.Mutex // guards the fields that follow
	free    int
	waiting []*ticket
}

// ticket is one start that waits for its turn.
type ticket struct {
	instance string
	turn     chan struct{}
	moved    chan struct{} // capacity 1: there is one less before it
}

type progressKey struct{}

// WithProgress has the operations under ctx tell, while a start waits for a
// processor, which place it has in the queue: 1 comes next. report must not
// block.
func WithProgress(ctx context.Context, report func(place int)) context.Context {
	return context.WithValue(ctx, progressKey{}, report)
}

// enter returns when it is the instance's turn, or ctx ends. The function it
// returns ends the turn.
func (q *queue) enter(ctx context.Context, instance string) (leave func(), err error) {
	report, _ := ctx.Value(progressKey{}).(func(int))
	q.mu.Lock()
	if q.free > 0 {
		q.free--
		q.mu.Unlock()
		return q.leave, nil
	}
	t := &ticket{instance: instance, turn: make(chan struct{}), moved: make(chan struct{}, 1)}
	q.waiting = append(q.waiting, t)
	q.mu.Unlock()
	for waiting := true; waiting; {
		if place := q.position(instance); report != nil && place > 0 {
			report(place)
		}
		select {
		case <-t.turn:
			return q.leave, nil
		case <-t.moved:
		case <-ctx.Done():
			waiting = false
		}
	}
	q.mu.Lock()
	i := slices.Index(q.waiting, t)
	if i >= 0 {
		q.remove(i)
	}
	q.mu.Unlock()
	if i < 0 {
		q.leave() // its turn came at the same moment
	}
	return nil, context.Cause(ctx)
}

func (q *queue) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.free++
		return
	}
	close(q.waiting[0].turn)
	q.remove(0)
}

// remove takes a ticket out and tells those behind it. It needs q.mu held.
func (q *queue) remove(i int) {
	q.waiting = slices.Delete(q.waiting, i, i+1)
	for _, t := range q.waiting[i:] {
		select {
		case t.moved <- struct{}{}:
		default:
		}
	}
}

// position is 1 for the instance whose turn comes next, and 0 for one that does
// not wait.
func (q *queue) position(instance string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return 1 + slices.IndexFunc(q.waiting, func(t *ticket) bool { return t.instance == instance })
}
