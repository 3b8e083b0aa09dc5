package fleettest

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// contractTimeout bounds one call of the contract. Real browsers on a busy
// machine are slow.
const contractTimeout = 2 * time.Minute

// Subject is what Contract is about.
type Subject struct {
	Runtime fleet.Runtime
	// Dir is a directory, below the state directory, in which it makes the trees of
	// its cases, each in a directory of its own.
	Dir string
	// Headless means that its browsers have no display.
	Headless bool
}

// Contract is what the fleet relies on in a Runtime. All cases are of one Runtime,
// as in the service, and those that need any snapshot share one.
func Contract(t *testing.T, s Subject) {
	shared := &shared{}
	cases := map[string]func(*contract){
		"a login runs, stops and is seen to":         (*contract).login,
		"a snapshot needs a clean end":               (*contract).capture,
		"two clones of one snapshot run at once":     (*contract).clones,
		"a refused record aborts a start":            (*contract).recordRefused,
		"a cancelled start leaves nothing":           (*contract).cancelled,
		"one Profile has one browser":                (*contract).exclusive,
		"old evidence is no power over a new Stack":  (*contract).oldEvidence,
		"trees can be made, removed and made again":  (*contract).trees,
		"a Stack is watched until it ends":           (*contract).watched,
		"evidence that says nothing is an error":     (*contract).noEvidence,
		"a start without its snapshot says so":       (*contract).noSnapshot,
		"a browser that is gone exposes no endpoint": (*contract).noEndpoint,
	}
	for name, run := range cases {
		t.Run(name, func(t *testing.T) {
			c := &contract{T: t, rt: s.Runtime, dir: filepath.Join(s.Dir, instance()), headless: s.Headless, shared: shared}
			ctx, cancel := context.WithTimeout(context.Background(), contractTimeout)
			c.ctx = ctx
			defer cancel()
			defer c.stopAll()
			run(c)
		})
	}
}

// shared is what the cases of one Runtime have in common.
type shared struct {
	snapshot string // once a case has captured it
}

type contract struct {
	*testing.T
	*shared
	ctx context.Context
	rt  fleet.Runtime
	dir string
	// headless: its browsers have no display.
	headless bool

	mu      sync.Mutex
	started []fleet.Evidence
}

// stopAll ends what a failed case left.
func (c *contract) stopAll() {
	ctx, cancel := context.WithTimeout(context.Background(), contractTimeout)
	defer cancel()
	for _, ev := range c.started {
		if obs, err := c.rt.Observe(ctx, ev); err == nil && obs.State != fleet.Stopped {
			if _, err := c.rt.Stop(ctx, ev, "end of the case"); err != nil {
				c.Logf("left running: %v", err)
			}
		}
	}
}

func (c *contract) path(name string) string { return filepath.Join(c.dir, name) }

func instance() string {
	const alphabet = "abcdefghijklmnopqrstuvwxyz234567"
	b := make([]byte, 10)
	rand.Read(b)
	for i := range b {
		b[i] = alphabet[b[i]%32]
	}
	return string(b)
}

func (c *contract) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

// start starts a Stack and checks what every start has to do.
func (c *contract) start(req fleet.StartRequest) fleet.Evidence {
	c.Helper()
	records := 0
	req.Record = func(_ context.Context, ev fleet.Evidence) error {
		records++
		if len(ev) == 0 {
			c.Error("a role was recorded without evidence")
		}
		return nil
	}
	if req.Identity == "" {
		req.Identity = "identity-contract"
	}
	ev, err := c.rt.Start(c.ctx, req)
	if err != nil {
		c.Fatalf("start: %v", err)
	}
	c.mu.Lock()
	c.started = append(c.started, ev)
	c.mu.Unlock()
	if records == 0 {
		c.Error("a role was released without a record")
	}
	return ev
}

func (c *contract) observe(ev fleet.Evidence, want fleet.State) fleet.Observation {
	c.Helper()
	obs, err := c.rt.Observe(c.ctx, ev)
	if err != nil {
		c.Fatalf("observe: %v", err)
	}
	if obs.State != want {
		c.Fatalf("observed %s (%s), want %s", obs.State, obs.Reason, want)
	}
	return obs
}

func (c *contract) stop(ev fleet.Evidence) fleet.StopReport {
	c.Helper()
	report, err := c.rt.Stop(c.ctx, ev, "contract")
	if err != nil {
		c.Fatalf("stop: %v", err)
	}
	return report
}

// template runs a login on a new profile and stops it.
func (c *contract) template() (dir string) {
	c.Helper()
	dir = c.path("template")
	c.must(c.rt.CreateProfile(c.ctx, dir))
	ev := c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: dir})
	if report := c.stop(ev); !report.Clean {
		c.Fatalf("the login did not end cleanly: %s", report.Detail)
	}
	return dir
}

// captured returns a snapshot that its case must not change.
func (c *contract) captured() string {
	c.Helper()
	if c.snapshot == "" {
		snapshot := c.path("snapshot")
		c.must(c.rt.CaptureSnapshot(c.ctx, c.template(), snapshot))
		c.snapshot = snapshot
	}
	return c.snapshot
}

func (c *contract) login() {
	dir := c.path("template")
	c.must(c.rt.CreateProfile(c.ctx, dir))
	c.must(c.rt.CreateProfile(c.ctx, dir))
	id := instance()
	ev := c.start(fleet.StartRequest{Instance: id, Generation: 1, Profile: dir, URL: "about:blank"})
	c.observe(ev, fleet.Controllable)

	conn, err := c.rt.OpenCDP(c.ctx, ev)
	c.must(err)
	c.must(conn.SetDeadline(time.Now().Add(30 * time.Second)))
	_, err = io.WriteString(conn, `{"id":7,"method":"Browser.getVersion"}`+"\x00")
	c.must(err)
	in := bufio.NewReader(conn)
	for {
		frame, err := in.ReadString(0)
		c.must(err)
		if strings.Contains(frame, `"id":7`) {
			break
		}
	}
	conn.Close()

	c.viewer(ev)
	c.observe(ev, fleet.Controllable)

	if report := c.stop(ev); !report.Clean {
		c.Errorf("not clean: %s", report.Detail)
	}
	c.observe(ev, fleet.Stopped)
	c.stop(ev) // again

	ev2 := c.start(fleet.StartRequest{Instance: id, Generation: 2, Profile: dir})
	c.observe(ev2, fleet.Controllable)
	c.stop(ev2)
}

// viewer checks that the display can be seen, or that a Runtime without one says
// so.
func (c *contract) viewer(ev fleet.Evidence) {
	c.Helper()
	v, err := c.rt.OpenViewer(c.ctx, ev)
	if c.headless {
		if fault.CodeOf(err) != fault.ViewerUnavailable || fault.HintOf(err) == "" {
			c.Errorf("viewer of a browser without a display: %v", err)
		}
		return
	}
	c.must(err)
	defer v.Conn.Close()
	c.must(v.Conn.SetDeadline(time.Now().Add(30 * time.Second)))
	banner := make([]byte, 12)
	_, err = io.ReadFull(v.Conn, banner)
	c.must(err)
	if !strings.HasPrefix(string(banner), "RFB ") || len(v.Password) == 0 {
		c.Errorf("viewer: banner %q, password of %d bytes", banner, len(v.Password))
	}
}

func (c *contract) capture() {
	fresh := c.path("fresh")
	c.must(c.rt.CreateProfile(c.ctx, fresh))
	snapshot := c.path("snapshot")
	if err := c.rt.CaptureSnapshot(c.ctx, fresh, snapshot); fault.CodeOf(err) != fault.UncleanExit {
		c.Errorf("capture of a profile no browser has used: %v", err)
	}
	dir := c.path("template")
	c.must(c.rt.CreateProfile(c.ctx, dir))
	ev := c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: dir})
	if err := c.rt.CaptureSnapshot(c.ctx, dir, snapshot); err == nil {
		c.Error("a running profile was captured")
	}
	if err := c.rt.RemoveTree(c.ctx, dir); fault.CodeOf(err) != fault.ProfileBusy {
		c.Errorf("removal of a running profile: %v", err)
	}
	c.observe(ev, fleet.Controllable)
	c.stop(ev)
	c.must(c.rt.CaptureSnapshot(c.ctx, dir, snapshot))
	c.must(c.rt.CaptureSnapshot(c.ctx, dir, snapshot)) // replaces
	c.must(c.rt.Sweep(c.ctx, c.dir))
	ev = c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: c.path("clone"), CloneFrom: snapshot, Session: "s"})
	c.stop(ev)
}

func (c *contract) clones() {
	snapshot := c.captured()
	evs := make([]fleet.Evidence, 2)
	var wg sync.WaitGroup
	for i := range evs {
		wg.Go(func() {
			ev, err := c.rt.Start(c.ctx, fleet.StartRequest{
				Instance: instance(), Generation: 1, Profile: c.path(fmt.Sprintf("clone%d", i)), CloneFrom: snapshot,
				Session: fmt.Sprintf("session %d", i), Identity: "identity-contract",
			})
			if err != nil {
				c.Errorf("start: %v", err)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			evs[i] = ev
			c.started = append(c.started, ev)
		})
	}
	wg.Wait()
	if c.Failed() {
		c.FailNow()
	}
	for _, ev := range evs {
		c.observe(ev, fleet.Controllable)
	}
	c.stop(evs[0])
	c.observe(evs[1], fleet.Controllable)
	c.stop(evs[1])
}

// failed checks the error of a start that must have cleaned up after itself.
func (c *contract) failed(err error) {
	c.Helper()
	var se *fleet.StartError
	if !errors.As(err, &se) || !se.Confirmed {
		c.Fatalf("start: %v, want a StartError with a confirmed cleanup", err)
	}
}

func (c *contract) recordRefused() {
	snapshot := c.captured()
	refused := errors.New("refused")
	for after := range 2 {
		id, dir := instance(), c.path(fmt.Sprintf("clone%d", after))
		var last fleet.Evidence
		calls := 0
		_, err := c.rt.Start(c.ctx, fleet.StartRequest{
			Instance: id, Generation: 1, Profile: dir, CloneFrom: snapshot, Session: "s", Identity: "identity-contract",
			Record: func(_ context.Context, ev fleet.Evidence) error {
				if calls++; calls > after {
					return refused
				}
				last = ev
				return nil
			},
		})
		c.failed(err)
		if !errors.Is(err, refused) {
			c.Errorf("start: %v, want the record's error", err)
		}
		if last != nil {
			c.observe(last, fleet.Stopped)
		}
		c.must(c.rt.RemoveTree(c.ctx, dir))
		ev := c.start(fleet.StartRequest{Instance: id, Generation: 2, Profile: dir, CloneFrom: snapshot, Session: "s"})
		c.stop(ev)
	}
}

func (c *contract) cancelled() {
	snapshot := c.captured()
	id, dir := instance(), c.path("clone")
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	var last fleet.Evidence
	_, err := c.rt.Start(ctx, fleet.StartRequest{
		Instance: id, Generation: 1, Profile: dir, CloneFrom: snapshot, Session: "s", Identity: "identity-contract",
		Record: func(_ context.Context, ev fleet.Evidence) error {
			last = ev
			cancel()
			return nil
		},
	})
	c.failed(err)
	if last != nil {
		c.observe(last, fleet.Stopped)
	}
}

func (c *contract) exclusive() {
	snapshot := c.captured()
	dir := c.path("clone")
	ev := c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: dir, CloneFrom: snapshot, Session: "s"})
	_, err := c.rt.Start(c.ctx, fleet.StartRequest{Instance: instance(), Generation: 1, Profile: dir, Session: "t", Identity: "identity-contract"})
	c.failed(err)
	if fault.CodeOf(err) != fault.ProfileBusy {
		c.Errorf("second browser on a Profile: %v", err)
	}
	c.observe(ev, fleet.Controllable)
	c.stop(ev)
}

func (c *contract) oldEvidence() {
	snapshot := c.captured()
	id, dir := instance(), c.path("clone")
	first := c.start(fleet.StartRequest{Instance: id, Generation: 1, Profile: dir, CloneFrom: snapshot, Session: "s"})
	c.stop(first)
	second := c.start(fleet.StartRequest{Instance: id, Generation: 2, Profile: dir, Session: "s"})
	obs, err := c.rt.Observe(c.ctx, first)
	if err == nil && obs.State == fleet.Controllable {
		c.Error("old evidence proves a new Stack")
	}
	if _, err := c.rt.Stop(c.ctx, first, "old"); err == nil {
		c.Error("old evidence proves a new Stack stopped")
	}
	if _, err := c.rt.OpenCDP(c.ctx, first); err == nil {
		c.Error("old evidence opens a new Stack")
	}
	c.observe(second, fleet.Controllable)
	c.stop(second)
}

func (c *contract) watched() {
	ev := c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: c.template()})
	watch := func(ctx context.Context) <-chan error {
		done := make(chan error, 1)
		go func() { done <- c.rt.Watch(ctx, ev) }()
		return done
	}
	ctx, cancel := context.WithCancel(c.ctx)
	given, kept := watch(ctx), watch(c.ctx)
	cancel()
	if err := <-given; !errors.Is(err, context.Canceled) {
		c.Errorf("a watch that was given up: %v", err)
	}
	c.observe(ev, fleet.Controllable)
	select {
	case err := <-kept:
		c.Errorf("a Stack in order is told to have ended: %v", err)
	default:
	}
	c.stop(ev)
	if err := <-kept; err != nil {
		c.Errorf("the end of a Stack: %v", err)
	}
	if err := <-watch(c.ctx); err != nil {
		c.Errorf("a Stack that has ended: %v", err)
	}
}

func (c *contract) trees() {
	dir := c.path("some/deep/profile")
	c.must(c.rt.RemoveTree(c.ctx, dir))
	c.must(c.rt.Sweep(c.ctx, filepath.Dir(dir)))
	c.must(c.rt.CreateProfile(c.ctx, dir))
	c.must(c.rt.RemoveTree(c.ctx, dir))
	c.must(c.rt.RemoveTree(c.ctx, dir))
	c.must(c.rt.CreateProfile(c.ctx, dir))
	c.must(c.rt.Sweep(c.ctx, filepath.Dir(dir)))
	snapshot := c.path("snapshot")
	c.must(c.rt.CaptureSnapshot(c.ctx, c.template(), snapshot))
	c.must(c.rt.RemoveTree(c.ctx, snapshot))
}

func (c *contract) noEvidence() {
	for _, ev := range []fleet.Evidence{nil, fleet.Evidence(`{}`), fleet.Evidence(`"x"`)} {
		if obs, err := c.rt.Observe(c.ctx, ev); err == nil {
			c.Errorf("evidence %q is observed as %s", ev, obs.State)
		}
		if _, err := c.rt.Stop(c.ctx, ev, "contract"); err == nil {
			c.Errorf("evidence %q is stopped", ev)
		}
		if conn, err := c.rt.OpenCDP(c.ctx, ev); err == nil {
			conn.Close()
			c.Errorf("evidence %q is opened", ev)
		}
	}
}

func (c *contract) noSnapshot() {
	_, err := c.rt.Start(c.ctx, fleet.StartRequest{
		Instance: instance(), Generation: 1, Profile: c.path("clone"), CloneFrom: c.path("nothing"), Session: "s", Identity: "identity-contract",
	})
	c.failed(err)
}

func (c *contract) noEndpoint() {
	snapshot := c.captured()
	ev := c.start(fleet.StartRequest{Instance: instance(), Generation: 1, Profile: c.path("clone"), CloneFrom: snapshot, Session: "s"})
	open := func() (conns []net.Conn) {
		if conn, err := c.rt.OpenCDP(c.ctx, ev); err == nil {
			conns = append(conns, conn)
		}
		if v, err := c.rt.OpenViewer(c.ctx, ev); err == nil {
			conns = append(conns, v.Conn)
		}
		return conns
	}
	want := 2
	if c.headless {
		want = 1
	}
	before := open()
	if len(before) != want {
		c.Errorf("%d of %d endpoints of a running browser open", len(before), want)
	}
	for _, conn := range before {
		c.must(conn.SetReadDeadline(time.Now().Add(contractTimeout / 2)))
	}
	c.stop(ev)
	for _, conn := range before {
		if _, err := io.Copy(io.Discard, conn); isTimeout(err) {
			c.Error("a connection outlives its browser")
		}
		conn.Close()
	}
	for _, conn := range open() {
		conn.Close()
		c.Error("an endpoint of a stopped browser opens")
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
