package rig

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// takeDown ends the rig's processes, gives back what it held of the machine and
// checks that nothing is left. It does so once and keeps the outcome.
func (r *Rig) takeDown() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.down {
		return r.leftover
	}
	r.down = true
	r.leftover = r.end()
	if r.leftover != nil {
		r.leftover = fmt.Errorf("cannot take rig down: %w", r.leftover)
	}
	return r.leftover
}

func (r *Rig) end() error {
	var errs []error
	if r.sockets != nil {
		r.sockets.close()
	}
	if r.pidfd != nil {
		if err := unix.PidfdSendSignal(int(r.pidfd.Fd()), unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
		timer := time.NewTimer(teardownTimeout)
		defer timer.Stop()
		select {
		case <-r.exited:
		case <-timer.C:
			errs = append(errs, fmt.Errorf("its PID 1 (%d) does not end", r.pid))
		}
		r.pidfd.Close()
	}
	// Helpers that are still about to enter have to find the namespaces gone
	// before the cgroup is judged empty.
	for _, ns := range r.ns {
		ns.File.Close()
	}
	if err := endCgroup(r.cgroup); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, r.verifyGone()...)...)
}

// verifyGone looks for what a rig could leave: processes in its namespaces,
// mounts that name it, its cgroup.
func (r *Rig) verifyGone() []error {
	var errs []error
	deadline := time.Now().Add(teardownTimeout)
	// A helper whose command was killed a moment ago is about to end, and so are
	// the last processes of a namespace that has lost its first.
	for left := r.processesIn(); len(left) > 0; left = r.processesIn() {
		for _, pid := range left {
			err := awaitExit(pid, deadline)
			if err == nil && time.Now().After(deadline) {
				err = os.ErrDeadlineExceeded // ended, and not reaped
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("left: %s: %w", describeProcess(pid), err))
			}
		}
		if len(errs) > 0 {
			break
		}
	}
	if _, err := os.Stat(r.cgroup); err == nil {
		errs = append(errs, fmt.Errorf("left: cgroup %s", r.cgroup))
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return append(errs, err)
	}
	defer f.Close()
	name := filepath.Base(r.cgroup)
	for scan := bufio.NewScanner(f); scan.Scan(); {
		m, ok := parseMount(scan.Text())
		if ok && (strings.Contains(m.point, name) || strings.Contains(m.root, name) || strings.HasPrefix(m.point, r.home+"/")) {
			errs = append(errs, fmt.Errorf("left: mount %s", m.point))
		}
	}
	return errs
}
