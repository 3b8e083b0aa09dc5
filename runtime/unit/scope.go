package unit

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"syscall"
	"time"

	"github.com/godbus/dbus/v5"
)

// Scope describes a transient scope to create around running processes.
//
// Beyond what it says, every scope is unloaded once it is empty even if it
// failed (CollectMode=inactive-or-failed), is killed after TimeoutStop
// (SendSIGKILL), and outlives the out-of-memory death of one of its processes
// (OOMPolicy=continue, where systemd knows it for scopes): a renderer that ate
// the memory must not take the browser with it.
type Scope struct {
	// Name ends in ".scope" and must never have been used before.
	Name string
	// Slice ends in ".slice" and is created on the fly.
	Slice       string
	Description string
	// PID is the process to put into the scope. Children that it has already
	// stay where they are.
	PID int
	// Others are more processes to put into the scope. That they arrived is for
	// the caller to see.
	Others []int
	// Requires and After name units that are active already; they give the
	// order of stopping.
	Requires, After []string
	// KillSignal replaces SIGTERM as the first signal of a stop.
	KillSignal syscall.Signal
	// TimeoutStop is how long a stop waits before SIGKILL; 0 means systemd's
	// default.
	TimeoutStop time.Duration
}

type property struct {
	Name  string
	Value dbus.Variant
}

// auxiliary is the last argument of StartTransientUnit, always empty here.
type auxiliary struct {
	Name  string
	Props []property
}

// optionalProperties may be unknown to a supported systemd and are then left
// away: upstream has OOMPolicy= for scopes since 253, Debian since 252.39.
var optionalProperties = []property{{"OOMPolicy", dbus.MakeVariant("continue")}}

func (s Scope) validate() error {
	if err := validName(s.Name, ".scope"); err != nil {
		return err
	}
	if err := validName(s.Slice, ".slice"); err != nil {
		return err
	}
	for _, pid := range append([]int{s.PID}, s.Others...) {
		if pid <= 0 {
			// To systemd 0 means the caller.
			return fmt.Errorf("process %d: %w", pid, ErrNoProcess)
		}
	}
	return nil
}

func (s Scope) properties() []property {
	props := []property{
		{"Description", dbus.MakeVariant(s.Description)},
		{"Slice", dbus.MakeVariant(s.Slice)},
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
		{"SendSIGKILL", dbus.MakeVariant(true)},
	}
	if s.KillSignal != 0 {
		props = append(props, property{"KillSignal", dbus.MakeVariant(int32(s.KillSignal))})
	}
	if s.TimeoutStop > 0 {
		props = append(props, property{"TimeoutStopUSec", dbus.MakeVariant(uint64(s.TimeoutStop / time.Microsecond))})
	}
	if len(s.Requires) > 0 {
		props = append(props, property{"Requires", dbus.MakeVariant(s.Requires)})
	}
	if len(s.After) > 0 {
		props = append(props, property{"After", dbus.MakeVariant(s.After)})
	}
	pids := []uint32{uint32(s.PID)}
	for _, pid := range s.Others {
		pids = append(pids, uint32(pid))
	}
	return append(props, property{"PIDs", dbus.MakeVariant(pids)})
}

// StartScope puts a process into a new scope. It returns when the job is done
// and the process is seen in the cgroup of that scope, below the slice that was
// asked for. Hold the process as an unreaped child meanwhile: then its number
// cannot be given to another.
//
// Errors to look for: ErrExists, ErrNoProcess, ErrNotMember, *JobError.
func (m *Manager) StartScope(ctx context.Context, s Scope) (Info, error) {
	info, err := m.startScope(ctx, s)
	if err != nil {
		return Info{}, fmt.Errorf("start %s: %w", s.Name, err)
	}
	return info, nil
}

func (m *Manager) startScope(ctx context.Context, s Scope) (Info, error) {
	if err := s.validate(); err != nil {
		return Info{}, err
	}
	if err := m.start(ctx, s.Name, s.properties(), optionalProperties); err != nil {
		return Info{}, err
	}
	info, err := m.verifyScope(ctx, s)
	if err != nil {
		m.dropEmpty(ctx, s.Name)
	}
	return info, err
}

// start makes a transient unit and returns when it is active.
func (m *Manager) start(ctx context.Context, name string, props, optional []property) error {
	w := m.newJobWait(name)
	defer m.dropJobWait(w)
	settled := func(ctx context.Context) (bool, error) {
		// The job first: while there is one, an inactive unit is only waiting.
		if pending, err := m.jobPending(ctx, name); pending || err != nil {
			return false, err
		}
		info, err := m.Info(ctx, name)
		switch {
		case err != nil:
			return false, err
		case info.ActiveState != "active":
			return false, &JobError{Unit: name, Result: "failed"}
		}
		return true, nil
	}
	job, err := m.startTransient(ctx, name, props, optional)
	if err != nil {
		return err
	}
	return m.wait(ctx, w, job, settled)
}

// startTransient makes the call and returns the path of the job, or "" if the
// answer was lost and a unit of that name turned out to be there.
func (m *Manager) startTransient(ctx context.Context, name string, props, optional []property) (dbus.ObjectPath, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	asked := false
	for pause := redialFirst; ; pause = min(2*pause, redialMost) {
		l, err := m.link(ctx)
		if err != nil {
			return "", err
		}
		job, err := m.startOn(ctx, l, name, props, optional)
		if err == nil {
			return job, nil
		}
		if asked && errors.Is(err, ErrExists) {
			// Our first try came through; if it was not ours after all, the
			// process will not be in it.
			return "", nil
		}
		if !isLost(err) {
			return "", err
		}
		asked = true
		select {
		case <-time.After(pause):
		case <-m.done:
			return "", ErrClosed
		case <-ctx.Done():
			return "", fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
	}
}

// startOn adds the optional properties that are not known to be refused. If
// systemd objects to the whole, it leaves each of them away in turn, then all;
// only a refusal that this cures is remembered.
func (m *Manager) startOn(ctx context.Context, l *link, name string, props, optional []property) (dbus.ObjectPath, error) {
	m.mu.Lock()
	optional = slices.DeleteFunc(slices.Clone(optional), func(p property) bool { return m.refused[p.Name] })
	m.mu.Unlock()
	job, err := l.startTransientUnit(ctx, name, slices.Concat(props, optional))
	if len(optional) == 0 || !isRefusal(err) {
		return job, translate(err)
	}
	var drops [][]property
	for i := range optional {
		drops = append(drops, optional[i:i+1])
	}
	if len(optional) > 1 {
		drops = append(drops, optional)
	}
	for _, drop := range drops {
		left := slices.DeleteFunc(slices.Clone(optional), func(p property) bool {
			return slices.ContainsFunc(drop, func(d property) bool { return d.Name == p.Name })
		})
		job, again := l.startTransientUnit(ctx, name, slices.Concat(props, left))
		if again == nil {
			m.mu.Lock()
			for _, d := range drop {
				m.refused[d.Name] = true
			}
			m.mu.Unlock()
			return job, nil
		}
		if !isRefusal(again) {
			return "", translate(again)
		}
	}
	return "", translate(err)
}

// isRefusal reports whether systemd objects to a property. Which one, it says
// in the text only.
func isRefusal(err error) bool {
	switch errorName(err) {
	case namePropertyReadOnly, nameUnknownProperty, nameInvalidArgs:
		return true
	}
	return false
}

func (l *link) startTransientUnit(ctx context.Context, name string, props []property) (dbus.ObjectPath, error) {
	var job dbus.ObjectPath
	err := l.call(ctx, busName, managerPath, managerIface+".StartTransientUnit", []any{name, "fail", props, []auxiliary{}}, &job)
	return job, err
}

// verifyScope reads the scope back and checks that the process is in it.
func (m *Manager) verifyScope(ctx context.Context, s Scope) (Info, error) {
	info, err := m.infoAt(ctx, s.Name, unitPath(s.Name))
	if err != nil {
		return Info{}, err
	}
	switch {
	case info.ActiveState != "active":
		return Info{}, fmt.Errorf("scope is %s (%s): %w", info.ActiveState, info.SubState, ErrNotMember)
	case info.ControlGroup == "" || info.CgroupID == 0:
		return Info{}, fmt.Errorf("scope has no cgroup: %w", ErrNotMember)
	case info.InvocationID == "":
		return Info{}, errors.New("scope has no invocation id")
	case info.Slice != s.Slice || path.Base(info.ControlGroup) != s.Name || path.Base(path.Dir(info.ControlGroup)) != s.Slice:
		return Info{}, fmt.Errorf("cgroup %s is not %s below %s", info.ControlGroup, s.Name, s.Slice)
	}
	of, err := OfPID(s.PID)
	if err != nil {
		return Info{}, err
	}
	if of.Path != info.ControlGroup {
		return Info{}, fmt.Errorf("process %d is in %s: %w", s.PID, of.Path, ErrNotMember)
	}
	// A zombie still has the path in /proc but is not listed here.
	procs, err := info.Cgroup().Procs()
	if err != nil {
		return Info{}, err
	}
	if !slices.Contains(procs, s.PID) {
		return Info{}, fmt.Errorf("process %d is not listed in %s: %w", s.PID, info.ControlGroup, ErrNotMember)
	}
	return info, nil
}

// dropEmpty takes back a scope that we have just made and that turned out to
// hold no process. systemd unloads a scope when its last process leaves, which
// never happens to one that had none.
func (m *Manager) dropEmpty(ctx context.Context, name string) {
	info, err := m.Info(ctx, name)
	if err != nil || info.ControlGroup == "" {
		return
	}
	if populated, err := info.Cgroup().Populated(); err != nil || populated {
		return
	}
	// The caller gets the error that led here; an empty scope harms nobody.
	_ = m.stop(ctx, name)
}
