// Package fleettest has a Runtime without processes, for tests of everything
// that stands on the fleet's use cases, and the contract that it and every
// real Runtime keep. It is kept like the rest of the product: what the real
// one learns to do, this one does too.
package fleettest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// Runtime is a fleet.Runtime whose Stacks and directory trees are values in
// memory. It stands for the host, not for the service: a test that restarts
// the service keeps it and makes a new Fleet on it.
type Runtime struct {
	mu     sync.Mutex // guards the fields that follow
	trees  map[string]*tree
	stacks map[string]*stack
	broken []string
	conns  map[string][]net.Conn
	// changed is closed and made anew whenever something of a Stack ends.
	changed chan struct{}

	// Step, when set, is called before and after every effect with a name
	// for it. An error stands for the death of the service at that point:
	// nothing after it happens, not even a cleanup.
	Step func(point string) error
	// The next ones make the outside world fail. They get the instance or
	// the directory. Once a Stack runs, they are set within Change: it is
	// watched.
	FailStart   func(req fleet.StartRequest) error
	FailStop    func(instance string) error
	FailObserve func(instance string) error
	FailWatch   func(instance string) error
	FailTree    func(op, dir string) error
	// Reconstruct says of an instance that FailStop speaks of whether its
	// ownership can be reconstructed, so that Recover ends it; nil means no.
	Reconstruct func(instance string) bool
	// Headless has nobody see a display, whatever runs.
	Headless bool
	// UncleanStop makes clean stops impossible.
	UncleanStop func(instance string) bool
}

var _ fleet.Runtime = (*Runtime)(nil)

// tree is a directory: a profile or a snapshot.
type tree struct {
	snapshot bool
	used     bool // a browser has run on it
	clean    bool // the last one ended in order
	data     map[string]string
}

func (t *tree) copy() *tree {
	c := *t
	c.data = map[string]string{}
	for k, v := range t.data {
		c.data[k] = v
	}
	return &c
}

// stack is what runs of an Instance.
type stack struct {
	generation       uint64
	profile          string
	display, browser bool
	exit             *fleet.ExitReport
}

type evidence struct {
	Instance   string `json:"instance"`
	Generation uint64 `json:"generation"`
	Profile    string `json:"profile"`
	Display    bool   `json:"display"`
	Browser    bool   `json:"browser"`
}

func (e evidence) encode() fleet.Evidence {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain data
	}
	return b
}

func decode(ev fleet.Evidence) (evidence, error) {
	var e evidence
	if err := json.Unmarshal(ev, &e); err != nil || e.Instance == "" {
		return e, fmt.Errorf("evidence %q names no instance", ev)
	}
	return e, nil
}

// NewRuntime returns a host without anything on it.
func NewRuntime() *Runtime {
	return &Runtime{trees: map[string]*tree{}, stacks: map[string]*stack{}, conns: map[string][]net.Conn{}, changed: make(chan struct{})}
}

// Change runs change, which sets fields that make the world fail, while no call
// reads them.
func (r *Runtime) Change(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// hook reads a field that Change may set.
func hook[F any](r *Runtime, field *F) F {
	r.mu.Lock()
	defer r.mu.Unlock()
	return *field
}

func (r *Runtime) step(format string, args ...any) error {
	if r.Step == nil {
		return nil
	}
	return r.Step(fmt.Sprintf(format, args...))
}

func (r *Runtime) violation(format string, args ...any) {
	r.broken = append(r.broken, fmt.Sprintf(format, args...))
}

// busy returns the instance that has something running on a directory.
func (r *Runtime) busy(dir string) string {
	for instance, s := range r.stacks {
		if s.profile == dir && (s.display || s.browser) {
			return instance
		}
	}
	return ""
}

// treeStep wraps one operation on a directory.
func (r *Runtime) treeStep(ctx context.Context, op, dir string, fn func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := r.step("before %s", op); err != nil {
		return err
	}
	if fail := hook(r, &r.FailTree); fail != nil {
		if err := fail(op, dir); err != nil {
			return err
		}
	}
	r.mu.Lock()
	err := fn()
	r.mu.Unlock()
	if err != nil {
		return err
	}
	return r.step("after %s", op)
}

// CreateProfile implements fleet.Runtime.
func (r *Runtime) CreateProfile(ctx context.Context, dir string) error {
	return r.treeStep(ctx, "create profile", dir, func() error {
		if r.trees[dir] == nil {
			r.trees[dir] = &tree{data: map[string]string{}}
		}
		return nil
	})
}

// CaptureSnapshot implements fleet.Runtime.
func (r *Runtime) CaptureSnapshot(ctx context.Context, dir, snapshot string) error {
	return r.treeStep(ctx, "capture snapshot", dir, func() error {
		const op = "save identity"
		t := r.trees[dir]
		switch {
		case t == nil:
			return fault.New(fault.NotFound, op, "", "there is no %s", dir)
		case r.busy(dir) != "":
			return fault.New(fault.ProfileBusy, op, "Stop the browser first", "%s is used by %s", dir, r.busy(dir))
		case !t.used || !t.clean:
			return fault.New(fault.UncleanExit, op, "Start the login again", "the browser of %s did not end cleanly", dir)
		}
		c := t.copy()
		c.snapshot = true
		r.trees[snapshot] = c
		return nil
	})
}

// RemoveTree implements fleet.Runtime.
func (r *Runtime) RemoveTree(ctx context.Context, dir string) error {
	return r.treeStep(ctx, "remove tree", dir, func() error {
		if i := r.busy(dir); i != "" {
			r.violation("%s is removed while %s runs on it", dir, i)
			return fault.New(fault.ProfileBusy, "remove profile", "Stop the browser first", "%s is used by %s", dir, i)
		}
		delete(r.trees, dir)
		return nil
	})
}

// Sweep implements fleet.Runtime. Trees in memory have no leftovers.
func (r *Runtime) Sweep(ctx context.Context, dir string) error {
	return r.treeStep(ctx, "sweep", dir, func() error { return nil })
}

// Start implements fleet.Runtime.
func (r *Runtime) Start(ctx context.Context, req fleet.StartRequest) (fleet.Evidence, error) {
	e := evidence{Instance: req.Instance, Generation: req.Generation, Profile: req.Profile}
	if err := r.admit(req); err != nil {
		return nil, &fleet.StartError{Confirmed: true, Err: err}
	}
	err := r.launch(ctx, req, &e)
	var dead *death
	if err == nil || errors.As(err, &dead) {
		return e.encode(), err
	}
	if _, serr := r.Stop(context.WithoutCancel(ctx), e.encode(), "start failed"); serr != nil {
		return e.encode(), &fleet.StartError{Err: errors.Join(err, serr)}
	}
	return e.encode(), &fleet.StartError{Confirmed: true, Err: err}
}

// death is the error of a Step; after it nothing is cleaned up.
type death struct{ err error }

func (d *death) Error() string { return d.err.Error() }
func (d *death) Unwrap() error { return d.err }

func (r *Runtime) admit(req fleet.StartRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.stacks[req.Instance]; s != nil {
		if s.display || s.browser {
			r.violation("%s is started while it runs", req.Instance)
			return errors.New("its last run is not proven ended")
		}
		if req.Generation <= s.generation {
			r.violation("%s is started as generation %d after %d", req.Instance, req.Generation, s.generation)
		}
	}
	if i := r.busy(req.Profile); i != "" {
		return fault.New(fault.ProfileBusy, "start session browser", "End it first", "%s is held by %s", req.Profile, i)
	}
	return nil
}

func (r *Runtime) launch(ctx context.Context, req fleet.StartRequest, e *evidence) error {
	if req.CloneFrom != "" {
		if err := r.clone(req); err != nil {
			return err
		}
	}
	r.mu.Lock()
	known := r.trees[req.Profile] != nil && !r.trees[req.Profile].snapshot
	r.mu.Unlock()
	if !known {
		return fault.New(fault.NotFound, "start session browser", "", "there is no profile %s", req.Profile)
	}
	if err := r.role(ctx, req, e, "display"); err != nil {
		return err
	}
	if err := r.role(ctx, req, e, "browser"); err != nil {
		return err
	}
	if fail := hook(r, &r.FailStart); fail != nil {
		if err := fail(req); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if err := r.step("after start"); err != nil {
		return &death{err}
	}
	return nil
}

func (r *Runtime) clone(req fleet.StartRequest) error {
	if err := r.step("before clone"); err != nil {
		return &death{err}
	}
	if fail := hook(r, &r.FailTree); fail != nil {
		if err := fail("clone", req.Profile); err != nil {
			return err
		}
	}
	r.mu.Lock()
	src := r.trees[req.CloneFrom]
	switch {
	case src == nil || !src.snapshot:
		r.mu.Unlock()
		return fault.New(fault.NotFound, "clone profile", "", "there is no snapshot %s", req.CloneFrom)
	case r.trees[req.Profile] != nil:
		r.mu.Unlock()
		return fmt.Errorf("clone: %s exists", req.Profile)
	}
	c := src.copy()
	c.snapshot = false
	r.trees[req.Profile] = c
	r.mu.Unlock()
	if err := r.step("after clone"); err != nil {
		return &death{err}
	}
	return nil
}

// role spawns one role blocked, records it and releases it.
func (r *Runtime) role(ctx context.Context, req fleet.StartRequest, e *evidence, role string) error {
	if err := r.step("before record of %s", role); err != nil {
		return &death{err}
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	before := *e
	e.Display = true
	e.Browser = role == "browser"
	if req.Record != nil {
		if err := req.Record(ctx, e.encode()); err != nil {
			*e = before
			return fmt.Errorf("record: %w", err)
		}
	}
	// A service that dies here leaves a role that was never released: it ends
	// by itself.
	if err := r.step("before release of %s", role); err != nil {
		return &death{err}
	}
	r.mu.Lock()
	s := r.stacks[req.Instance]
	if role == "display" {
		s = &stack{generation: req.Generation, profile: req.Profile}
		r.stacks[req.Instance] = s
		s.display = true
	} else {
		for i, other := range r.stacks {
			if other.profile == req.Profile && other.browser {
				r.violation("two browsers on %s: %s and %s", req.Profile, i, req.Instance)
			}
		}
		s.browser = true
		t := r.trees[req.Profile]
		t.used, t.clean = true, false
	}
	r.mu.Unlock()
	if err := r.step("after release of %s", role); err != nil {
		return &death{err}
	}
	return nil
}

// Observe implements fleet.Runtime.
func (r *Runtime) Observe(ctx context.Context, ev fleet.Evidence) (fleet.Observation, error) {
	e, err := decode(ev)
	if err != nil {
		return fleet.Observation{}, err
	}
	if err := ctx.Err(); err != nil {
		return fleet.Observation{}, err
	}
	if err := r.step("observe"); err != nil {
		return fleet.Observation{}, err
	}
	if fail := hook(r, &r.FailObserve); fail != nil {
		if err := fail(e.Instance); err != nil {
			return fleet.Observation{}, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stacks[e.Instance]
	switch {
	case s == nil || !s.display && !s.browser:
		o := fleet.Observation{State: fleet.Stopped}
		if s != nil && s.generation == e.Generation {
			o.Exit = s.exit
		}
		return o, nil
	case s.generation != e.Generation:
		return fleet.Observation{State: fleet.Unverified, Reason: "another generation runs"}, nil
	case s.display && s.browser && e.Browser:
		return fleet.Observation{State: fleet.Controllable}, nil
	case s.exit != nil:
		return fleet.Observation{State: fleet.Ended, Reason: "the browser is gone", Exit: s.exit}, nil
	}
	return fleet.Observation{State: fleet.Unverified, Reason: "not all roles run"}, nil
}

// Stop implements fleet.Runtime.
func (r *Runtime) Stop(ctx context.Context, ev fleet.Evidence, _ string) (fleet.StopReport, error) {
	e, err := decode(ev)
	if err != nil {
		return fleet.StopReport{}, err
	}
	if err := r.step("before stop"); err != nil {
		return fleet.StopReport{}, err
	}
	if fail := hook(r, &r.FailStop); fail != nil {
		if err := fail(e.Instance); err != nil {
			return fleet.StopReport{}, err
		}
	}
	if err := ctx.Err(); err != nil {
		return fleet.StopReport{}, err
	}
	r.mu.Lock()
	s := r.stacks[e.Instance]
	if s != nil && s.generation != e.Generation && (s.display || s.browser) {
		r.mu.Unlock()
		return fleet.StopReport{}, fault.New(fault.OwnershipRefused, "stop browser", "", "generation %d runs, not %d", s.generation, e.Generation)
	}
	report := r.clear(e.Instance)
	r.mu.Unlock()
	return report, r.step("after stop")
}

// clear ends all of an instance. It needs r.mu held.
func (r *Runtime) clear(instance string) fleet.StopReport {
	s := r.stacks[instance]
	report := fleet.StopReport{Detail: "it was gone already"}
	if s != nil {
		if s.browser {
			clean := r.UncleanStop == nil || !r.UncleanStop(instance)
			r.end(s, &fleet.ExitReport{Clean: clean, Trigger: "stop", Detail: "closed", At: time.Now().UTC()})
		}
		s.display = false
		if s.exit != nil {
			report = fleet.StopReport{Clean: s.exit.Clean, Detail: s.exit.Detail}
		}
	}
	r.closeConns(instance)
	r.notify()
	return report
}

// notify wakes those who watch. It needs r.mu held.
func (r *Runtime) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Watch implements fleet.Runtime.
func (r *Runtime) Watch(ctx context.Context, ev fleet.Evidence) error {
	e, err := decode(ev)
	if err != nil {
		return err
	}
	if fail := hook(r, &r.FailWatch); fail != nil {
		if err := fail(e.Instance); err != nil {
			return err
		}
	}
	for {
		r.mu.Lock()
		s, changed := r.stacks[e.Instance], r.changed
		whole := s != nil && s.generation == e.Generation && s.display && s.browser
		r.mu.Unlock()
		if !whole {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Examine implements fleet.Runtime.
func (r *Runtime) Examine(ctx context.Context, req fleet.RecoverRequest) (fleet.Examination, error) {
	if err := ctx.Err(); err != nil {
		return fleet.Examination{}, err
	}
	r.mu.Lock()
	s := r.stacks[req.Instance]
	left := s != nil && (s.display || s.browser)
	r.mu.Unlock()
	if !left {
		return fleet.Examination{Vacant: true, Recoverable: true}, nil
	}
	verdict := fleet.VerdictProven
	if fail := hook(r, &r.FailStop); fail != nil && fail(req.Instance) != nil {
		verdict = fleet.VerdictAmbiguous
		if can := hook(r, &r.Reconstruct); can != nil && can(req.Instance) {
			verdict = fleet.VerdictReconstructible
		}
	}
	return fleet.Examination{
		Recoverable: verdict != fleet.VerdictAmbiguous, Reason: "it runs",
		Roles: []fleet.RoleExamination{{Role: "browser", Verdict: verdict, PID: 1}},
	}, nil
}

// Recover implements fleet.Runtime.
func (r *Runtime) Recover(ctx context.Context, req fleet.RecoverRequest) (fleet.StopReport, error) {
	report, err := fleet.StopReport{Detail: "it was gone already"}, error(nil)
	if len(req.Evidence) > 0 {
		report, err = r.Stop(ctx, req.Evidence, "recovery")
	} else if left, _ := r.Examine(ctx, req); !left.Vacant {
		err = fault.New(fault.BrowserStopUnproven, "stop browser", "Look", "it runs, and no record proves whose it is")
	}
	if can := hook(r, &r.Reconstruct); err == nil || can == nil || !can(req.Instance) {
		return report, err
	}
	r.mu.Lock()
	report = r.clear(req.Instance)
	r.mu.Unlock()
	return report, r.step("after recovery")
}

// end needs r.mu held.
func (r *Runtime) end(s *stack, exit *fleet.ExitReport) {
	s.browser, s.exit = false, exit
	if t := r.trees[s.profile]; t != nil {
		t.clean = exit.Clean
	}
}

// closeConns needs r.mu held.
func (r *Runtime) closeConns(instance string) {
	for _, c := range r.conns[instance] {
		c.Close()
	}
	delete(r.conns, instance)
}

func (r *Runtime) connect(ev fleet.Evidence, serve func(net.Conn)) (net.Conn, error) {
	e, err := decode(ev)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stacks[e.Instance]
	if s == nil || s.generation != e.Generation || !s.browser || !s.display {
		return nil, fault.New(fault.BrowserNotControllable, "reach browser", "It is started again on its next use", "%s does not run", e.Instance)
	}
	near, far := net.Pipe()
	r.conns[e.Instance] = append(r.conns[e.Instance], far)
	go serve(far)
	return near, nil
}

// OpenCDP implements fleet.Runtime. The browser answers every message with an
// empty result.
func (r *Runtime) OpenCDP(_ context.Context, ev fleet.Evidence) (net.Conn, error) {
	return r.connect(ev, func(c net.Conn) {
		defer c.Close()
		in := bufio.NewReader(c)
		for {
			frame, err := in.ReadBytes(0)
			if err != nil {
				return
			}
			var m struct {
				ID int `json:"id"`
			}
			if json.Unmarshal(frame[:len(frame)-1], &m) != nil {
				return
			}
			if _, err := fmt.Fprintf(c, "{\"id\":%d,\"result\":{}}\x00", m.ID); err != nil {
				return
			}
		}
	})
}

// OpenViewer implements fleet.Runtime. The display sends its banner.
func (r *Runtime) OpenViewer(_ context.Context, ev fleet.Evidence) (fleet.Viewer, error) {
	conn, err := r.connect(ev, func(c net.Conn) {
		defer c.Close()
		if _, err := c.Write([]byte("RFB 003.008\n")); err != nil {
			return
		}
		var b [1]byte
		for {
			if _, err := c.Read(b[:]); err != nil {
				return
			}
		}
	})
	if err == nil && r.Headless {
		conn.Close()
		return fleet.Viewer{}, fault.New(fault.ViewerUnavailable, "open viewer", "Configure a display", "there is none")
	}
	return fleet.Viewer{Conn: conn, Password: []byte("password")}, err
}

// KillBrowsers ends the browsers whose Profile directory contains part, as a
// signal would; their displays stay. It returns how many.
func (r *Runtime) KillBrowsers(part string) int {
	return r.endBrowsers(part, fleet.ExitReport{Trigger: fleet.TriggerSignal, Signal: "SIGKILL", Detail: "killed by SIGKILL"})
}

// CloseBrowsers ends the browsers whose Profile directory contains part, as a
// person does who closes the last window.
func (r *Runtime) CloseBrowsers(part string) int {
	return r.endBrowsers(part, fleet.ExitReport{Clean: true, Trigger: fleet.TriggerBrowser, Detail: "ended by itself"})
}

// StopUnits ends the browsers whose Profile directory contains part, as systemd
// does for an operator or, with shutdown, because it goes down.
func (r *Runtime) StopUnits(part string, shutdown bool) int {
	if shutdown {
		return r.endBrowsers(part, fleet.ExitReport{Clean: true, Trigger: fleet.TriggerShutdown, Detail: "closed as systemd shut down"})
	}
	return r.endBrowsers(part, fleet.ExitReport{Clean: true, Trigger: fleet.TriggerOperator, Detail: "closed by an operator through systemd"})
}

func (r *Runtime) endBrowsers(part string, exit fleet.ExitReport) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	exit.At = time.Now().UTC()
	n := 0
	for _, s := range r.stacks {
		if s.browser && strings.Contains(s.profile, part) {
			r.end(s, &exit)
			n++
		}
	}
	r.notify()
	return n
}

// PowerCut ends everything at once.
func (r *Runtime) PowerCut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for instance, s := range r.stacks {
		if s.browser {
			r.trees[s.profile].clean = false
		}
		s.browser, s.display, s.exit = false, false, nil
		r.closeConns(instance)
	}
	r.notify()
}

// Put stores a value in a profile, as a site's cookie would be; Get reads it.
// dir may be any part of the directory's path that names one tree.
func (r *Runtime) Put(dir, key, value string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	t, err := r.tree(dir)
	if err == nil {
		t.data[key] = value
	}
	return err
}

// Get returns what Put stored.
func (r *Runtime) Get(dir, key string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t, err := r.tree(dir)
	if err != nil {
		return "", err
	}
	return t.data[key], nil
}

func (r *Runtime) tree(part string) (*tree, error) {
	var found []string
	for dir := range r.trees {
		if strings.Contains(dir, part) {
			found = append(found, dir)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%q names %v", part, found)
	}
	return r.trees[found[0]], nil
}

// Running lists the Profile directories that browsers run on, sorted.
func (r *Runtime) Running() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var dirs []string
	for _, s := range r.stacks {
		if s.browser {
			dirs = append(dirs, s.profile)
		}
	}
	slices.Sort(dirs)
	return dirs
}

// Remains lists the instances of which anything runs, sorted.
func (r *Runtime) Remains() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []string
	for instance, s := range r.stacks {
		if s.display || s.browser {
			list = append(list, instance)
		}
	}
	slices.Sort(list)
	return list
}

// Trees lists all directories, sorted.
func (r *Runtime) Trees() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var dirs []string
	for d := range r.trees {
		dirs = append(dirs, d)
	}
	slices.Sort(dirs)
	return dirs
}

// Violations lists what no Runtime may ever be asked to do and was.
func (r *Runtime) Violations() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.broken)
}
