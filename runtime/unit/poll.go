package unit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Poll blocks until one of the descriptors reports an event (then its Revents
// is set), until limit has passed (0 means no limit; no Revents is set then),
// or until ctx ends, whose error it returns. It is for kernel objects that the
// Go runtime cannot wait for by itself: pidfds and cgroup.events.
func Poll(ctx context.Context, fds []unix.PollFd, limit time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		one := binary.NativeEndian.AppendUint64(nil, 1)
		// Cannot fail: the counter is far from its maximum.
		_, _ = unix.Write(wake, one)
	})
	defer func() {
		// The descriptor may be closed only when nobody can write to it any more.
		if !stop() {
			<-woken
		}
		unix.Close(wake)
	}()

	all := append(fds[:len(fds):len(fds)], unix.PollFd{Fd: int32(wake), Events: unix.POLLIN})
	var deadline time.Time
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	for {
		timeout := -1
		if limit > 0 {
			timeout = max(0, int(time.Until(deadline).Milliseconds()))
		}
		n, err := unix.Poll(all, timeout)
		copy(fds, all)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("poll: %w", err)
		case ctx.Err() != nil:
			return ctx.Err()
		case n > 0 || limit > 0 && !time.Now().Before(deadline):
			return nil
		}
	}
}
