package unit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// maxEarlyJobs caps how many results of one unit are kept for a waiter that does
// not know its job's path yet.
const maxEarlyJobs = 64

// jobWait waits for one job of one unit. It is registered before the call that
// makes the job, because JobRemoved may arrive before the call's reply.
type jobWait struct {
	unit string
	kick chan struct{} // capacity 1: something below changed

	mu      sync.Mutex // guards what follows
	results map[dbus.ObjectPath]string
	doubt   bool // signals may have been lost: query the unit
}

func (w *jobWait) note(change func()) {
	w.mu.Lock()
	change()
	w.mu.Unlock()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (m *Manager) newJobWait(unit string) *jobWait {
	w := &jobWait{unit: unit, kick: make(chan struct{}, 1), results: make(map[dbus.ObjectPath]string)}
	m.mu.Lock()
	m.jobs[w] = struct{}{}
	m.mu.Unlock()
	return w
}

func (m *Manager) dropJobWait(w *jobWait) {
	m.mu.Lock()
	delete(m.jobs, w)
	m.mu.Unlock()
}

func (m *Manager) jobRemoved(job dbus.ObjectPath, unit, result string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for w := range m.jobs {
		if w.unit == unit {
			w.note(func() {
				if len(w.results) < maxEarlyJobs {
					w.results[job] = result
				} else {
					w.doubt = true
				}
			})
		}
	}
}

// wait returns when the job is done, or fails with a *JobError. settled looks
// at the unit itself and reports whether what the job was for has come about;
// it is asked when signals may have been lost.
func (m *Manager) wait(ctx context.Context, w *jobWait, job dbus.ObjectPath, settled func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, JobTimeout)
	defer cancel()
	tick := time.NewTicker(jobRecheck)
	defer tick.Stop()
	for {
		w.mu.Lock()
		result, removed := w.results[job]
		// Without a path no result can be told to be of this job.
		doubt := w.doubt || job == ""
		w.doubt = false
		w.mu.Unlock()
		switch {
		case removed && result == "done":
			return nil
		case removed:
			return &JobError{Unit: w.unit, Result: result}
		case doubt:
			done, err := settled(ctx)
			if done || err != nil {
				return err
			}
		}
		select {
		case <-w.kick:
		case <-tick.C:
			w.note(func() { w.doubt = true })
		case <-m.done:
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("job for %s: %w", w.unit, ctx.Err())
		}
	}
}

// stop runs StopUnit and waits for its job.
func (m *Manager) stop(ctx context.Context, name string) error {
	w := m.newJobWait(name)
	defer m.dropJobWait(w)
	var job dbus.ObjectPath
	// Asking twice merges with the pending job, so the call may be repeated.
	err := m.call(ctx, managerPath, managerIface+".StopUnit", []any{name, "replace"}, &job)
	if errors.Is(err, ErrNotLoaded) {
		return nil
	}
	if err == nil {
		err = m.wait(ctx, w, job, func(ctx context.Context) (bool, error) {
			pending, err := m.jobPending(ctx, name)
			if errors.Is(err, ErrNotLoaded) {
				return true, nil
			}
			if pending || err != nil {
				return false, err
			}
			info, err := m.Info(ctx, name)
			switch {
			case errors.Is(err, ErrNotLoaded):
				return true, nil
			case err == nil && info.Active():
				// The job is over and did not do what it was for.
				return false, &JobError{Unit: name, Result: "canceled"}
			}
			return err == nil, err
		})
	}
	if err != nil {
		return fmt.Errorf("stop %s: %w", name, err)
	}
	return nil
}

// jobPending reports whether systemd has a job for a loaded unit.
func (m *Manager) jobPending(ctx context.Context, name string) (bool, error) {
	var path dbus.ObjectPath
	if err := m.call(ctx, managerPath, managerIface+".GetUnit", []any{name}, &path); err != nil {
		return false, err
	}
	var value dbus.Variant
	if err := m.call(ctx, path, propsIface+".Get", []any{unitIface, "Job"}, &value); err != nil {
		return false, err
	}
	var job struct {
		ID   uint32
		Path dbus.ObjectPath
	}
	if err := value.Store(&job); err != nil {
		return false, fmt.Errorf("job of %s: %w", name, err)
	}
	return job.ID != 0, nil
}

// Stop stops a scope: systemd signals its processes as its KillSignal and
// TimeoutStop say. A scope that is not loaded is no error. The end of the job
// does not prove that no process is left.
func (m *Manager) Stop(ctx context.Context, name string) error {
	if err := validName(name, ".scope"); err != nil {
		return err
	}
	return m.stop(ctx, name)
}

// StopSlice stops a slice and with it every unit in it, in the order of their
// dependencies. A slice that is not loaded is no error.
func (m *Manager) StopSlice(ctx context.Context, name string) error {
	if err := validName(name, ".slice"); err != nil {
		return err
	}
	return m.stop(ctx, name)
}

// ResetFailed lets systemd forget a failed unit, so that its name is free
// again. A unit that is not loaded is no error.
func (m *Manager) ResetFailed(ctx context.Context, name string) error {
	err := m.call(ctx, managerPath, managerIface+".ResetFailedUnit", []any{name})
	if err != nil && !errors.Is(err, ErrNotLoaded) {
		return fmt.Errorf("reset %s: %w", name, err)
	}
	return nil
}
