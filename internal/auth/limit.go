package auth

import (
	"sync"
	"time"
)

const (
	// maxFailures is how many wrong tokens are taken at once.
	maxFailures = 10
	// failureInterval is how long it takes to forget one. A token has 256
	// bits, so this is for the log and the processor, not for the token: a
	// person locked out by a neighbour's noise waits seconds.
	failureInterval = 3 * time.Second
)

// bucket counts failures and forgets them one by one.
type bucket struct {
	now func() time.Time

	mu    sync.Mutex
	empty time.Time // when the last of the failures is forgotten
}

func newBucket(now func() time.Time) *bucket { return &bucket{now: now} }

// wait returns how long until another failure is affordable, 0 for now.
func (b *bucket) wait() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	affordable := b.empty.Add(-(maxFailures - 1) * failureInterval)
	return max(0, affordable.Sub(b.now()))
}

// take records a failure.
func (b *bucket) take() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.empty.Before(now) {
		b.empty = now
	}
	b.empty = b.empty.Add(failureInterval)
}
