package fleet

import (
	"context"
	"math"
	"sync"

	"golang.org/x/sync/semaphore"
)

// keyLocks is a mutex per key; waiting for one ends with the context.
type keyLocks struct {
	mu   sync.Mutex // guards held
	held map[string]*keyLock
}

type keyLock struct {
	token chan struct{} // holds one value while the lock is free
	users int           // holder and waiters
}

// lock returns the function that unlocks.
func (k *keyLocks) lock(ctx context.Context, key string) (func(), error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	k.mu.Lock()
	if k.held == nil {
		k.held = map[string]*keyLock{}
	}
	l := k.held[key]
	if l == nil {
		l = &keyLock{token: make(chan struct{}, 1)}
		l.token <- struct{}{}
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
	select {
	case <-l.token:
		return func() { l.token <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}

// rwLocks is a read-write lock per key, for a Template Snapshot: clones read
// it, a save replaces it.
type rwLocks struct {
	mu    sync.Mutex // guards locks, which grows with the Identities used
	locks map[string]*semaphore.Weighted
}

const writer = math.MaxInt64

func (l *rwLocks) get(key string) *semaphore.Weighted {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = map[string]*semaphore.Weighted{}
	}
	s := l.locks[key]
	if s == nil {
		s = semaphore.NewWeighted(writer)
		l.locks[key] = s
	}
	return s
}

func (l *rwLocks) acquire(ctx context.Context, key string, weight int64) (func(), error) {
	s := l.get(key)
	if err := s.Acquire(ctx, weight); err != nil {
		return nil, err
	}
	return func() { s.Release(weight) }, nil
}

func (l *rwLocks) read(ctx context.Context, key string) (func(), error) {
	return l.acquire(ctx, key, 1)
}

func (l *rwLocks) write(ctx context.Context, key string) (func(), error) {
	return l.acquire(ctx, key, writer)
}
