package stack

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/runtime/role"
)

// readyRetry is how soon a readiness check is tried again when the kernel has
// no event for what is missing: a socket file appears at bind, a moment before
// listen.
const readyRetry = 5 * time.Millisecond

// await runs check until it gives anything but role.ErrNotReady: at once, then
// whenever an entry of dir changes, and soon again after such a change. It
// ends early when the role dies.
func await(ctx context.Context, dir string, died <-chan struct{}, check func(context.Context) error) error {
	events, err := watchDir(ctx, dir)
	if err != nil {
		return err
	}
	for {
		err := check(ctx)
		if !errors.Is(err, role.ErrNotReady) {
			return err
		}
		var retry <-chan time.Time
		if errors.Is(err, unix.ECONNREFUSED) {
			retry = time.After(readyRetry)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-died:
			return errDied
		case <-events:
		case <-retry:
		}
	}
}

var errDied = errors.New("its process ended")

// watchDir returns a channel that gets a value after entries of dir appeared
// or changed; bursts are folded into one. The watch ends with ctx.
func watchDir(ctx context.Context, dir string) (<-chan struct{}, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_ATTRIB|unix.IN_DELETE); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "inotify_add_watch", Path: dir, Err: err}
	}
	f := os.NewFile(uintptr(fd), "inotify")
	out := make(chan struct{}, 1)
	stop := context.AfterFunc(ctx, func() { f.Close() })
	go func() {
		defer stop()
		defer f.Close()
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out, nil
}
