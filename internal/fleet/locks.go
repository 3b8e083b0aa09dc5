package fleet

import (
	"context"
	"math"
	"sync"

	"golang.org/x/sync/semaphore"
)

// keyLocks is a read-write lock per key, first come, first served; waiting for
// one ends with the context.
type keyLocks struct {
	mu   sync.Mutex // guards held
	held map[string]*keyLock
}

type keyLock struct {
	*semaphore.Weighted
	users int // holders and waiters
}

const writer = math.MaxInt64

// lock excludes everybody else. It returns the function that unlocks.
func (k *keyLocks) lock(ctx context.Context, key string) (func(), error) {
	return k.acquire(ctx, key, writer)
}

// share excludes those who lock, and nobody else.
func (k *keyLocks) share(ctx context.Context, key string) (func(), error) {
	return k.acquire(ctx, key, 1)
}

func (k *keyLocks) acquire(ctx context.Context, key string, weight int64) (func(), error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	k.mu.Lock()
	if k.held == nil {
		k.held = map[string]*keyLock{}
	}
	l := k.held[key]
	if l == nil {
		l = &keyLock{Weighted: semaphore.NewWeighted(writer)}
		k.held[key] = l
	}
	l.users++
	k.mu.Unlock()

	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.held, key)
		}
	}
	if err := l.Acquire(ctx, weight); err != nil {
		leave()
		return nil, context.Cause(ctx)
	}
	return func() { l.Release(weight); leave() }, nil
}
