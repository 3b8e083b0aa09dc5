package fleet_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/fleet/fleettest"
	"abfleet/internal/store"
)

func TestMain(m *testing.M) {
	store.MaybeRunChecker()
	fleet.ShortenObserveAgain()
	os.Exit(m.Run())
}

var (
	agent    = audit.Actor{Kind: audit.KindAgent, How: "mcp"}
	user     = audit.Actor{Kind: audit.KindUser, How: "http"}
	operator = audit.Actor{Kind: audit.KindOperator, How: "cli"}
)

// testing_ is what *testing.T and *rapid.T have in common here.
type testing_ interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
}

// host is a machine: it keeps its processes and its disk while services come
// and go on it.
type host struct {
	t   testing_
	cfg *config.Config
	rt  *fleettest.Runtime
}

func newHost(t testing_, dir string) *host {
	t.Helper()
	cfg, err := config.Load("", func(key string) string {
		return map[string]string{"HOME": dir, "AGENT_BROWSER_FLEET_HOME": filepath.Join(dir, "home"), "XDG_RUNTIME_DIR": "/run/user/1500"}[key]
	})
	if err != nil {
		t.Fatal(err)
	}
	return &host{t, cfg, fleettest.NewRuntime()}
}

// newTestHost uses a short directory: the names in t.TempDir leave no room for
// a TMPDIR.
func newTestHost(t *testing.T) *host {
	t.Helper()
	return newHost(t, shortDir(t))
}

// shortDir is in memory where it can be: hundreds of services start and die
// here, and the disk is the store's own tests' matter.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "abf")
	if err != nil {
		dir, err = os.MkdirTemp("", "abf")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// service is one run of the service on a host.
type service struct {
	*fleet.Fleet
	h     *host
	store *store.Store
	log   *strings.Builder
	// contradictory is set by a test that spoiled the records.
	contradictory bool

	mu sync.Mutex // guards the fields that follow
	// steps counts fault points; at the crash-th the service is dead.
	steps, crash int
	crashAt      string
	dead         bool
	points       []string
	// seen are the Stacks that this run has proof of.
	seen map[string]bool
}

// Reconcile does all that a start of the service does.
func (s *service) Reconcile(ctx context.Context) error {
	return errors.Join(s.Fleet.Reconcile(ctx), s.RestartWanted(ctx))
}

// start starts the service.
func (h *host) start() *service {
	h.t.Helper()
	st, err := store.Open(context.Background(), h.cfg.StateFile())
	if err != nil {
		h.t.Fatal(err)
	}
	s := &service{h: h, store: st, log: &strings.Builder{}, seen: map[string]bool{}}
	h.rt.Step = s.step
	s.Fleet, err = fleet.New(fleet.Options{
		Config: h.cfg, Store: &faultyStore{DB: st, step: s.step}, Runtime: &provingRuntime{Runtime: h.rt, s: s},
		Log: slog.New(slog.NewTextHandler(&lockedWriter{w: s.log}, nil)), Starts: 2,
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// arm makes the service die at the n-th fault point from now on.
func (s *service) arm(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps, s.crash, s.points = 0, n, nil
}

// armAt makes the service die at the next fault point of that name.
func (s *service) armAt(point string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.crashAt = point
}

var errDead = errors.New("the service is dead")

func (s *service) step(point string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead {
		return errDead
	}
	s.steps++
	s.points = append(s.points, point)
	if s.crash > 0 && s.steps == s.crash || s.crashAt == point {
		s.dead = true
		return errDead
	}
	return nil
}

func (s *service) died() (bool, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.points) == 0 {
		return s.dead, ""
	}
	return s.dead, s.points[len(s.points)-1]
}

// end ends the run, dead or alive, without telling the browsers.
func (s *service) end() {
	s.h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		s.h.t.Fatal(err)
	}
	if err := s.store.View(ctx, fleet.CheckStore); err != nil && !s.contradictory {
		s.h.t.Errorf("the records contradict each other: %v", err)
	}
	if err := s.store.Close(ctx); err != nil {
		s.h.t.Fatal(err)
	}
}

// faultyStore makes every transaction two fault points: the service may die
// before the commit and after it.
type faultyStore struct {
	store.DB
	step func(string) error
	fail func() error
}

// SetFail makes commits fail as a full disk does.
func (f *faultyStore) SetFail(fail func() error) { f.fail = fail }

func (f *faultyStore) Update(ctx context.Context, fn func(*store.Tx) error) error {
	if err := f.step("before commit"); err != nil {
		return err
	}
	if f.fail != nil {
		if err := f.fail(); err != nil {
			return err
		}
	}
	if err := f.DB.Update(ctx, fn); err != nil {
		return err
	}
	return f.step("after commit")
}

// provingRuntime checks that nothing is opened that this run has no proof of.
type provingRuntime struct {
	*fleettest.Runtime
	s *service
}

func (p *provingRuntime) Start(ctx context.Context, req fleet.StartRequest) (fleet.Evidence, error) {
	ev, err := p.Runtime.Start(ctx, req)
	if err == nil {
		p.note(ev)
	}
	return ev, err
}

func (p *provingRuntime) Observe(ctx context.Context, ev fleet.Evidence) (fleet.Observation, error) {
	o, err := p.Runtime.Observe(ctx, ev)
	if err == nil && o.State == fleet.Controllable {
		p.note(ev)
	}
	return o, err
}

func (p *provingRuntime) note(ev fleet.Evidence) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.s.seen[string(ev)] = true
}

// proven reports whether this run has seen proof of what a Browser stands for.
func (s *service) proven(ev fleet.Evidence) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[string(ev)]
}

type lockedWriter struct {
	mu sync.Mutex
	w  *strings.Builder
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// saved makes an Identity whose login left a cookie.
func (s *service) saved(name string) fleet.IdentityView {
	s.h.t.Helper()
	ctx := context.Background()
	v, err := s.CreateIdentity(ctx, user, name)
	if err == nil {
		_, err = s.StartLogin(ctx, user, name, "https://example.org/login")
	}
	if err == nil {
		err = s.h.rt.Put(v.ID+"/template", "cookie", "login of "+name)
	}
	if err == nil {
		v, err = s.SaveIdentity(ctx, user, name)
	}
	if err != nil {
		s.h.t.Fatalf("saved identity %s: %v", name, err)
	}
	return v
}

func (s *service) use(session, ref string) fleet.SessionView {
	s.h.t.Helper()
	v, err := s.UseIdentity(context.Background(), agent, session, ref)
	if err != nil {
		s.h.t.Fatalf("use %s for %s: %v", ref, session, err)
	}
	return v
}

// profileOf returns the directory of the session's Profile.
func (s *service) profileOf(session string) string {
	s.h.t.Helper()
	profile := fleet.ProfileOf(s.store, session)
	if profile == "" {
		s.h.t.Fatalf("session %s has no Profile", session)
	}
	return profile
}

func wantCode(t testing_, what string, err error, code fault.Code) {
	t.Helper()
	if fault.CodeOf(err) != code {
		t.Errorf("%s: %v (%s), want %s", what, err, fault.CodeOf(err), code)
	}
	if err != nil && fault.HintOf(err) == "" {
		t.Errorf("%s: %v has no hint", what, err)
	}
}

// types lists the types of all events, oldest first.
func (s *service) types() []audit.Type {
	s.h.t.Helper()
	events, err := s.Events(context.Background(), 0, 1000)
	if err != nil {
		s.h.t.Fatal(err)
	}
	var list []audit.Type
	for _, e := range events {
		list = append(list, e.Type)
	}
	return list
}
