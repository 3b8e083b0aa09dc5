package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fleet"
)

// awaitEvent returns the next event of one of the types.
func awaitEvent(t *testing.T, feed <-chan audit.Event, types ...audit.Type) audit.Event {
	t.Helper()
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	for {
		select {
		case e := <-feed:
			if slices.Contains(types, e.Type) {
				return e
			}
		case <-deadline.C:
			t.Fatalf("no event of %v", types)
		}
	}
}

// TestWatch protects who looks at a session: its browser's end is recorded and
// told with its cause although nobody asks, it keeps its Binding and stays
// wanted, and nothing is started for it.
func TestWatch(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	feed := s.Watch(t.Context())
	h.rt.KillBrowsers(s.profileOf("s"))
	e := awaitEvent(t, feed, audit.SessionEnded)
	if e.Session != "s" || e.Actor.How != "watch" || !strings.Contains(e.Summary, "SIGKILL") {
		t.Errorf("event: %+v", e)
	}
	v, err := s.Session(t.Context(), "s")
	if err != nil || v.State != fleet.Stopped || v.Wanted != fleet.WantedRunning || v.LastExit == nil || v.LastExit.Signal != "SIGKILL" {
		t.Errorf("session: %+v %v", v, err)
	}
	if left := h.rt.Remains(); len(left) != 0 {
		t.Errorf("%v run", left)
	}
	mustBrowser(t, s, "s")
	// The next generation is watched too.
	h.rt.CloseBrowsers(s.profileOf("s"))
	if e := awaitEvent(t, feed, audit.SessionEnded); !strings.Contains(e.Summary, "by itself") {
		t.Errorf("event: %+v", e)
	}
}

// TestWatchLogin protects the person who closes the login browser's window: the
// page sees it end, and the login can be saved.
func TestWatchLogin(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	v, err := s.CreateIdentity(t.Context(), user, "a")
	if err == nil {
		_, err = s.StartLogin(t.Context(), user, "a", "")
	}
	if err != nil {
		t.Fatal(err)
	}
	feed := s.Watch(t.Context())
	h.rt.CloseBrowsers(v.ID)
	awaitEvent(t, feed, audit.LoginEnded)
	if v, err = s.SaveIdentity(t.Context(), user, "a"); err != nil || v.State != fleet.Ready {
		t.Errorf("save: %+v %v", v, err)
	}
}

// TestWatchAdopted protects a service that was restarted: what it took over is
// watched as what it started.
func TestWatchAdopted(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	s.end()
	s = h.start()
	defer s.end()
	if err := s.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	feed := s.Watch(t.Context())
	h.rt.KillBrowsers(s.profileOf("s"))
	awaitEvent(t, feed, audit.SessionEnded)
}

// TestStoppedByOperator protects an operator's stop through systemd: it is told
// as theirs, and it holds until the next use, over a restart of the service too.
// One that comes from a shutdown does not hold.
func TestStoppedByOperator(t *testing.T) {
	for _, down := range []bool{false, true} {
		for _, shutdown := range []bool{false, true} {
			t.Run(fmt.Sprintf("service down %v, shutdown %v", down, shutdown), func(t *testing.T) {
				h := newTestHost(t)
				s := h.start()
				defer func() { s.end() }()
				s.saved("a")
				s.use("s", "a")
				p := s.profileOf("s")
				if down {
					s.end()
					h.rt.StopUnits(p, shutdown)
					s = h.start()
				} else {
					feed := s.Watch(t.Context())
					h.rt.StopUnits(p, shutdown)
					awaitEvent(t, feed, audit.SessionStopped, audit.SessionEnded)
				}
				if err := s.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				events, err := s.Events(t.Context(), 0, 1000)
				if err != nil {
					t.Fatal(err)
				}
				i := slices.IndexFunc(events, func(e audit.Event) bool { return e.Type == audit.SessionStopped })
				v, err := s.Session(t.Context(), "s")
				if err != nil {
					t.Fatal(err)
				}
				if shutdown {
					if v.State != fleet.Controllable || v.Wanted != fleet.WantedRunning || i >= 0 {
						t.Errorf("after a shutdown: %+v, events %v", v, s.types())
					}
					return
				}
				if v.State != fleet.Stopped || v.Wanted != fleet.WantedStopped || v.LastExit == nil || v.LastExit.Trigger != fleet.TriggerOperator {
					t.Errorf("after an operator's stop: %+v", v)
				}
				if i < 0 || events[i].Actor.Kind != audit.KindOperator || events[i].Actor.How != "systemd" {
					t.Errorf("events: %+v", events)
				}
				mustBrowser(t, s, "s")
				if v, err = s.Session(t.Context(), "s"); err != nil || v.Wanted != fleet.WantedRunning {
					t.Errorf("after the next use: %+v %v", v, err)
				}
			})
		}
	}
}

// TestUseAfterOperatorsStop protects the next use of a browser whose end it is
// the first to notice: it is wanted again when it runs.
func TestUseAfterOperatorsStop(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	p := s.profileOf("s")
	s.end()
	h.rt.StopUnits(p, false)
	s = h.start()
	defer s.end()
	mustBrowser(t, s, "s")
	if v, err := s.Session(t.Context(), "s"); err != nil || v.Wanted != fleet.WantedRunning {
		t.Errorf("after the use: %+v %v", v, err)
	}
}

// TestWatchKeepsOut protects operations from those who watch: a stop, a switch
// and a restart are told once, as what they are.
func TestWatchKeepsOut(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.saved("b")
	for range 20 {
		s.use("s", "a")
		s.use("s", "b")
		if _, err := s.StopSession(t.Context(), user, "s"); err != nil {
			t.Fatal(err)
		}
	}
	for _, typ := range s.types() {
		if typ == audit.SessionEnded || typ == audit.RuntimeUnverified {
			t.Fatalf("events: %v", s.types())
		}
	}
	if v := h.rt.Violations(); len(v) != 0 {
		t.Error(v)
	}
}

// TestWatchManyAtOnce protects a host that loses all its browsers at one time.
func TestWatchManyAtOnce(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	feed := s.Watch(t.Context())
	const n = 12
	for i := range n {
		s.use(fmt.Sprint("s", i), "a")
	}
	h.rt.PowerCut()
	ended := map[string]bool{}
	for len(ended) < n {
		e := awaitEvent(t, feed, audit.SessionEnded)
		if ended[e.Session] {
			t.Errorf("the end of %s is told twice", e.Session)
		}
		ended[e.Session] = true
	}
}

// TestRestartsLeaveRoom protects who asks for a browser while a start of the service
// brings back all that a power cut ended: half of the places are left, which is one
// restart per two processors.
func TestRestartsLeaveRoom(t *testing.T) {
	h := newTestHost(t)
	s := h.start() // with two places
	s.saved("a")
	const n = 5
	for i := range n {
		s.use(fmt.Sprint("s", i), "a")
	}
	h.rt.PowerCut()
	s.end()
	entered, release := make(chan string, n+1), make(chan struct{})
	h.rt.FailStart = func(req fleet.StartRequest) error {
		entered <- req.Profile
		<-release
		return nil
	}
	s = h.start()
	defer s.end()
	s.must(s.Fleet.Reconcile(t.Context()))
	restarted := make(chan error)
	go func() { restarted <- s.RestartWanted(t.Context()) }()
	<-entered
	asked := make(chan error, 1)
	go func() {
		_, err := s.UseIdentity(t.Context(), user, "new", "a")
		asked <- err
	}()
	select {
	case profile := <-entered:
		if !strings.HasSuffix(profile, s.profileOf("new")) {
			t.Error("a second restart took the place that is left")
		}
	case <-time.After(10 * time.Second):
		t.Error("who asks waits for the restarts")
	}
	close(release)
	s.must(<-restarted)
	s.must(<-asked)
	if running, _ := s.Counts(); running != n+1 {
		t.Errorf("%d of %d run", running, n+1)
	}
}

// TestWatchUndecided protects an end that comes while systemd cannot be asked: it
// is told when it can be, without a use.
func TestWatchUndecided(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	feed := s.Watch(t.Context())
	var looks atomic.Int32
	h.rt.Change(func() {
		h.rt.FailObserve = func(string) error {
			if looks.Add(1) <= 4 {
				return fleet.ErrUndecided
			}
			return nil
		}
	})
	h.rt.KillBrowsers(s.profileOf("s"))
	awaitEvent(t, feed, audit.SessionEnded)
	if n := looks.Load(); n <= 4 {
		t.Errorf("it was told after %d looks", n)
	}
}

// TestCloseEndsWatching protects the store from those who watch: after Close
// nobody writes, whatever ends.
func TestCloseEndsWatching(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("s", "a")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
	before := len(s.types())
	h.rt.PowerCut()
	if n := fleet.Watchers(s.Fleet); n != 0 {
		t.Errorf("%d are watched after Close", n)
	}
	if after := len(s.types()); after != before {
		t.Errorf("events after Close: %v", s.types()[before:])
	}
	s.end()
}

// TestWatchUnlooked protects the record of an end that could not be looked into
// at once, for whatever reason: on a busy machine an answer takes its time.
func TestWatchUnlooked(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	looks := 0
	failed := make(chan struct{})
	h.rt.Change(func() {
		h.rt.FailObserve = func(string) error {
			if looks++; looks == 3 {
				close(failed)
			}
			if looks <= 3 {
				return fmt.Errorf("no answer in time")
			}
			return nil
		}
	})
	events := s.Watch(t.Context())
	h.rt.KillBrowsers(s.profileOf("s"))
	<-failed
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		select {
		case e := <-events:
			if e.Type == audit.SessionEnded && e.Session == "s" {
				return
			}
		case <-ctx.Done():
			t.Fatal("its end is never recorded")
		}
	}
}

// TestWatchFailing protects a browser that cannot be watched for a while, as in a
// process without free descriptors: it is looked at, and watched again.
func TestWatchFailing(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	tries, again := 0, make(chan struct{})
	h.rt.FailWatch = func(string) error {
		if tries++; tries == 1 {
			return fmt.Errorf("too many open files")
		}
		if tries == 2 {
			close(again)
		}
		return nil
	}
	events := s.Watch(t.Context())
	s.use("s", "a")
	select {
	case <-again:
	case <-time.After(10 * time.Second):
		t.Fatal("it is never watched again")
	}
	h.rt.KillBrowsers(s.profileOf("s"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		select {
		case e := <-events:
			if e.Type == audit.SessionEnded && e.Session == "s" {
				return
			}
		case <-ctx.Done():
			t.Fatal("its end is never recorded")
		}
	}
}
