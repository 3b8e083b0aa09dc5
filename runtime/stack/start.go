package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/safefs"
	"abfleet/runtime/holder"
	"abfleet/runtime/profile"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// cleanupTimeout bounds the proven cleanup after a failed start; it has its
// own time because the start's deadline may be what failed.
const cleanupTimeout = 30 * time.Second

// displayTries is how many display numbers one start goes through when other
// X servers take them first.
const displayTries = 32

// Start brings up the Stack of req and returns once the browser is proven ours
// and answers. A failure is a *fleet.StartError that says whether its cleanup
// was proven.
func (r *Runtime) Start(ctx context.Context, req fleet.StartRequest) (fleet.Evidence, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.cfg.StartTimeout, fault.New(fault.Timeout, "start session browser",
		"try again; if it persists, see `journalctl --user -u '"+r.cfg.UnitPrefix+"*'` and `abfleet doctor`", "not ready within %s", r.cfg.StartTimeout))
	defer cancel()

	s := &starting{Runtime: r, req: req, files: r.files(req.Instance), ev: evidence{
		Instance: req.Instance, Generation: req.Generation, Key: newKey(), Profile: req.Profile, Manager: r.started,
	}}
	if err := s.admit(ctx); err != nil {
		return nil, &fleet.StartError{Confirmed: true, Err: err}
	}
	err := s.run(ctx)
	if err == nil {
		return s.ev.encode(), nil
	}
	if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w (while %w)", cause, err)
	}
	cctx, ccancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer ccancel()
	_, cleanup := r.Stop(cctx, s.ev.encode(), "start failed")
	if cleanup != nil {
		r.log.Error("cannot clean up after a failed start", "instance", req.Instance, "error", cleanup)
		err = errors.Join(err, cleanup)
	}
	return s.ev.encode(), &fleet.StartError{Confirmed: cleanup == nil, Err: err}
}

// starting is the state of one Start.
type starting struct {
	*Runtime
	req   fleet.StartRequest
	files files
	ev    evidence
	// vnc and browser are what runs beside the display, nil until they are in
	// their scopes. There is no vnc for a display that serves VNC itself.
	vnc, browser *placed
	// displayReady waits until a display that listens answers, X clients as
	// well as viewers.
	displayReady func(context.Context) error
}

// admit refuses, before anything is spawned, what would only fail later and
// less clearly.
func (s *starting) admit(ctx context.Context) error {
	type program struct{ path, pkg string }
	programs := []program{{s.cfg.Chromium, "chromium"}, {s.cfg.RoleHelper, "abfleet"}}
	switch s.cfg.Display {
	case config.DisplayXvnc:
		programs = append(programs, program{s.cfg.Xvnc, "tigervnc-standalone-server"})
	case config.DisplayXvfb:
		programs = append(programs, program{s.cfg.Xvfb, "xvfb"}, program{s.cfg.X11vnc, "x11vnc"})
	}
	for _, p := range programs {
		if err := role.CheckProgram(p.path, p.pkg); err != nil {
			return err
		}
	}
	if !s.namespaces.Load() {
		if err := role.CheckUserNamespaces(ctx, s.cfg.RoleHelper); err != nil {
			return err
		}
		s.namespaces.Store(true)
	}
	if pid, what, held := s.verifier.ProfileHolder(s.req.Profile, s.req.Profile+".lock"); held {
		return fault.New(fault.ProfileBusy, "start session browser", "do not retry: a person has to end that process, or use another Identity; nothing was signalled",
			"its Profile is held by %s (pid %d)", what, pid)
	}
	return nil
}

func (s *starting) run(ctx context.Context) error {
	// Leftovers of an earlier generation go first, and only against proof
	// that nothing of it lives.
	if _, err := s.verifier.Vacant(ctx, s.claim(evidence{Instance: s.req.Instance, Profile: s.req.Profile})); err != nil {
		return fmt.Errorf("the last run of this browser is not proven ended: %w", err)
	}
	if err := s.prepareDirs(ctx); err != nil {
		return err
	}
	if err := s.bound(ctx); err != nil {
		return err
	}
	cloned := make(chan error, 1)
	go func() { cloned <- s.prepareProfile(ctx) }()
	defer s.abandon()
	if err := errors.Join(s.startDisplay(ctx), <-cloned); err != nil {
		return err
	}
	// The X server gets ready while the browser loads: what connects to it
	// meanwhile is served as soon as it can.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	display := make(chan error, 1)
	go func() {
		err := s.displayReady(ctx)
		if err != nil {
			cancel() // no browser comes up without it
		}
		display <- err
	}()
	err := s.startChromium(ctx)
	if err != nil {
		cancel()
	}
	// A browser that fails beside its display mostly fails for that.
	if derr := <-display; derr != nil && !errors.Is(derr, context.Canceled) {
		return derr
	}
	return err
}

// bound has the limits of the Stack in force before the first of its processes.
// Without any, systemd makes the slice with the first scope.
func (s *starting) bound(ctx context.Context) error {
	l := s.req.Limits
	if l == (config.Limits{}) {
		return nil
	}
	return s.units.StartSlice(ctx, unit.Slice{
		Name: s.cfg.Slice(s.req.Instance), Description: s.description("limits"),
		MemoryHigh: uint64(l.MemoryHigh), MemoryMax: uint64(l.MemoryMax), TasksMax: uint64(l.TasksMax), CPUWeight: uint64(l.CPUWeight),
	})
}

// prepareDirs makes the instance's directories anew, and in them the file that
// every role keeps open as evidence of where it belongs.
func (s *starting) prepareDirs(ctx context.Context) error {
	for _, dir := range []string{s.cfg.Home, s.cfg.RuntimeDir, s.cfg.TmpRoot} {
		// They were private when the service began; what is in them counts on it.
		if err := safefs.EnsureDir(dir); err != nil {
			return err
		}
	}
	if err := profile.Remove(ctx, s.files.dir); err != nil {
		return err
	}
	for _, dir := range []string{s.files.dir, s.tempDir(s.req.Instance)} {
		if err := safefs.EnsureDir(dir); err != nil {
			return err
		}
	}
	return safefs.WriteFile(s.files.root(), []byte(s.req.Instance+"\n"), 0o400)
}

// prepareProfile makes the Profile out of the Template Snapshot where it does
// not exist yet.
func (s *starting) prepareProfile(ctx context.Context) error {
	if s.req.CloneFrom != "" {
		if _, err := os.Lstat(s.req.Profile); errors.Is(err, os.ErrNotExist) {
			if err := safefs.EnsureDir(filepath.Dir(s.req.Profile)); err != nil {
				return err
			}
			_, err := profile.Clone(ctx, s.req.CloneFrom, s.req.Profile)
			return err
		}
	}
	return safefs.CheckPrivate(s.req.Profile)
}

// placed is a role that sits in its scope, blocked and recorded.
type placed struct {
	child    *holder.Spawned
	role     string
	spec     holder.Spec
	released bool
}

// place spawns a role blocked, scopes it and writes its pidfile. adopt stores
// the generation in the evidence.
func (s *starting) place(ctx context.Context, scope unit.Scope, base proof.Generation, adopt func(proof.Generation)) (*placed, error) {
	child, err := holder.Spawn(ctx, s.cfg.RoleHelper)
	if err != nil {
		return nil, fmt.Errorf("spawn %s: %w", base.Role, err)
	}
	p := &placed{child: child, role: base.Role}
	scope.PID, scope.Slice = child.PID(), s.cfg.Slice(s.req.Instance)
	info, err := s.units.StartScope(ctx, scope)
	if err != nil {
		p.abandon()
		return nil, fmt.Errorf("scope for %s: %w", base.Role, err)
	}
	base.Instance, base.Number, base.Root = s.req.Instance, s.req.Generation, s.files.root()
	gen, err := proof.Capture(info, child.PID(), base)
	if err == nil {
		err = proof.WritePidfile(s.files.pidfile(base.Role), gen)
	}
	if err != nil {
		p.abandon()
		return nil, err
	}
	adopt(gen)
	p.spec = holder.Spec{
		Role: base.Role, Instance: s.req.Instance, Generation: s.req.Generation, Unit: info.Name,
		RootFile: s.files.root(), Journal: journalStream,
		Labels: map[string]string{
			"ABF_ROLE": base.Role, "ABF_INSTANCE": s.req.Instance, "ABF_GENERATION": strconv.FormatUint(s.req.Generation, 10),
			"ABF_SESSION": s.req.Session, "ABF_IDENTITY": s.req.Identity,
		},
	}
	return p, nil
}

// description tells an operator in a list of units whose browser a scope is of.
func (s *starting) description(what string) string {
	// A session may be called anything: quoted, it is one line of valid UTF-8.
	const most = 60
	of, name := "Session Browser of session", s.req.Session
	if name == "" {
		of, name = "login browser of", s.req.Identity
	}
	r := []rune(name)
	if len(r) > most {
		r = append(r[:most], '…')
	}
	return fmt.Sprintf("%s for the %s %q", what, of, string(r))
}

// release records the role and tells it to go.
func (s *starting) release(ctx context.Context, p *placed) error {
	if err := s.record(ctx); err != nil {
		return err
	}
	p.released = true
	if err := p.child.Release(p.spec); err != nil {
		return fmt.Errorf("release %s: %w", p.role, err)
	}
	if err := p.child.Ready(ctx); err != nil {
		return roleFailure(p.role, err)
	}
	return nil
}

// abandon ends the role if it was never released, and gives back what the
// service holds of it.
func (p *placed) abandon() {
	if !p.released {
		p.child.Abort()
	}
	p.child.Close()
}

// abandon lets go of what is placed beside the display.
func (s *starting) abandon() {
	for _, p := range []**placed{&s.vnc, &s.browser} {
		if *p != nil {
			(*p).abandon()
			*p = nil
		}
	}
}

func (s *starting) record(ctx context.Context) error {
	if s.req.Record == nil {
		return nil
	}
	return s.req.Record(ctx, s.ev.encode())
}

// startDisplay has the display listen on a number that nobody has, places the
// browser beside it meanwhile, and the VNC server of a display that has none.
func (s *starting) startDisplay(ctx context.Context) error {
	if s.cfg.Display == config.DisplayNone {
		s.displayReady = func(context.Context) error { return nil }
		return s.placeChromium(ctx, 0)
	}
	password := role.NewVNCPassword()
	cookie := role.NewCookie()
	if err := safefs.WriteFile(s.files.password(), role.VNCPasswordFile(password), 0o600); err != nil {
		return err
	}
	number := 0
	var last error
	for try := range displayTries {
		var err error
		if number, err = s.takeDisplay(number); err != nil {
			return err
		}
		err = s.tryDisplay(ctx, number, try, cookie)
		s.releaseDisplay(number)
		if err == nil {
			return nil
		}
		s.abandon()
		if ctx.Err() != nil || !errors.Is(err, errDied) {
			return err
		}
		// The server ended at once: another one got the number first. The
		// scopes are empty by now, and the next try has names of its own.
		s.ev.Display, s.ev.VNC, s.ev.Chromium, last = nil, nil, nil, err
	}
	return fmt.Errorf("%w after %d tries: %w", errNoDisplay, displayTries, last)
}

// server is a role that nothing but its command line configures.
type server interface {
	Args() []string
	Env() []string
}

// xServer returns the display's server and the sockets it serves VNC on.
func (s *starting) xServer(number int) (server, []string) {
	if s.cfg.Display == config.DisplayXvfb {
		return role.Xvfb{
			Program: s.cfg.Xvfb, Number: number, Width: s.cfg.ScreenWidth, Height: s.cfg.ScreenHeight,
			Authority: s.files.authority(), Home: s.files.dir,
		}, nil
	}
	return role.Display{
		Program: s.cfg.Xvnc, Number: number, Width: s.cfg.ScreenWidth, Height: s.cfg.ScreenHeight,
		Name: "Shared Control", Authority: s.files.authority(), PasswordFile: s.files.password(),
		RFBSocket: s.files.rfb(), Home: s.files.dir,
	}, []string{s.files.rfb()}
}

func (s *starting) tryDisplay(ctx context.Context, number, try int, cookie []byte) error {
	x, sockets := s.xServer(number)
	if err := safefs.WriteFile(s.files.authority(), role.Authority(number, cookie), 0o600); err != nil {
		return err
	}
	display, err := s.place(ctx, unit.Scope{
		Name: s.scope(role.NameDisplay, try), Description: s.description("display"), KillSignal: syscall.SIGTERM, TimeoutStop: s.cfg.StopTimeout,
	}, proof.Generation{Role: role.NameDisplay, Display: number, Sockets: sockets},
		func(g proof.Generation) { s.ev.Display = &g })
	if err != nil {
		return err
	}
	defer display.abandon()
	display.spec.Args, display.spec.Env, display.spec.Dir = x.Args(), x.Env(), s.files.dir
	if err := s.release(ctx, display); err != nil {
		if isDone(display.child.Done()) {
			err = fmt.Errorf("%w: %w", errDied, err)
		}
		return err
	}
	// The other scopes are made while the X server starts.
	if s.cfg.Display == config.DisplayXvfb {
		if err := s.placeVNC(ctx, try); err != nil {
			return err
		}
	}
	if err := s.placeChromium(ctx, try); err != nil {
		return err
	}
	pid, died := display.child.PID(), display.child.Done()
	listens := func(ctx context.Context) error { return role.XListens(ctx, number, pid) }
	if err := awaitXSocket(ctx, number, died, listens); err != nil {
		return fmt.Errorf("display: %w", err)
	}
	viewer := display
	if s.vnc != nil {
		if err := s.release(ctx, s.vnc); err != nil {
			return err
		}
		viewer = s.vnc
	}
	s.displayReady = func(ctx context.Context) error {
		err := s.viewerReady(ctx, viewer)
		if err == nil {
			err = role.XReady(ctx, number, cookie)
		}
		if err != nil {
			return fmt.Errorf("display: %w", err)
		}
		return nil
	}
	return nil
}

// awaitXSocket runs check until it is content with what is on the path socket of
// a display. The first X server since the boot makes the directory of all.
func awaitXSocket(ctx context.Context, number int, died <-chan struct{}, check func(context.Context) error) error {
	dir := filepath.Dir(role.XSocket(number))
	there := func(context.Context) error {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%w: %w", role.ErrNotReady, err)
		}
		return nil
	}
	if there(ctx) != nil {
		if err := await(ctx, filepath.Dir(dir), died, there); err != nil {
			return err
		}
	}
	return await(ctx, dir, died, check)
}

// viewerReady waits until the role that serves VNC does. Neither it nor the
// display may listen on anything else by then.
func (s *starting) viewerReady(ctx context.Context, viewer *placed) error {
	pid := viewer.child.PID()
	err := await(ctx, s.files.dir, viewer.child.Done(), func(ctx context.Context) error { return role.RFBReady(ctx, s.files.rfb(), pid) })
	if err == nil && viewer == s.vnc {
		// It has no option for that, unlike an Xvnc. The directory is private.
		err = os.Chmod(s.files.rfb(), 0o600)
	}
	for _, g := range []*proof.Generation{s.ev.Display, s.ev.VNC} {
		if err == nil && g != nil {
			err = s.listensNowhere(ctx, *g)
		}
	}
	if err != nil && viewer == s.vnc {
		return fmt.Errorf("VNC server: %w", err)
	}
	return err
}

func (s *starting) listensNowhere(ctx context.Context, g proof.Generation) error {
	live, err := s.verifier.Live(ctx, g)
	if err != nil {
		return err
	}
	defer live.Close()
	return endpoints(ctx, live)
}

// placeVNC puts the VNC server beside the display.
func (s *starting) placeVNC(ctx context.Context, try int) (err error) {
	s.vnc, err = s.place(ctx, unit.Scope{
		Name: s.scope(role.NameVNC, try), Description: s.description("VNC server"),
		Requires: []string{s.ev.Display.Unit}, After: []string{s.ev.Display.Unit},
		KillSignal: syscall.SIGTERM, TimeoutStop: s.cfg.StopTimeout,
	}, proof.Generation{Role: role.NameVNC, Display: s.ev.Display.Display, Sockets: []string{s.files.rfb()}},
		func(g proof.Generation) { s.ev.VNC = &g })
	if err != nil {
		return err
	}
	x := role.X11vnc{
		Program: s.cfg.X11vnc, Display: s.ev.Display.Display, Authority: s.files.authority(),
		PasswordFile: s.files.password(), RFBSocket: s.files.rfb(), Home: s.files.dir,
	}
	s.vnc.spec.Args, s.vnc.spec.Env, s.vnc.spec.Dir = x.Args(), x.Env(), s.files.dir
	return nil
}

func (s *starting) placeChromium(ctx context.Context, try int) (err error) {
	scope := unit.Scope{
		Name: s.scope(role.NameChromium, try), Description: s.description("Chromium"),
		// SIGWINCH does nothing to a process that does not ask for it, and
		// the holder turns it into a clean close; SIGTERM would lose up to
		// 30 s of cookies.
		KillSignal: syscall.SIGWINCH, TimeoutStop: s.cfg.StopTimeout,
	}
	display := 0
	if s.ev.Display != nil {
		display = s.ev.Display.Display
		scope.Requires = []string{s.ev.Display.Unit}
	}
	// It is stopped before all that it started after.
	for _, g := range s.ev.generations() {
		scope.After = append(scope.After, g.Unit)
	}
	s.browser, err = s.place(ctx, scope, proof.Generation{
		Role: role.NameChromium, Profile: s.req.Profile, LockFile: s.req.Profile + ".lock",
		Display: display, Sockets: []string{s.files.cdp()},
	}, func(g proof.Generation) { s.ev.Chromium = &g })
	return err
}

func (s *starting) startChromium(ctx context.Context) error {
	restore, _ := profile.ExitedCleanly(s.req.Profile)
	if pid, what, held := s.verifier.ProfileHolder(s.req.Profile, s.req.Profile+".lock"); held {
		return fault.New(fault.ProfileBusy, "start session browser", "do not retry: a person has to end that process, or use another Identity; nothing was signalled",
			"its Profile was taken by %s (pid %d) meanwhile", what, pid)
	}
	if err := profile.Unlock(s.req.Profile); err != nil {
		return err
	}
	c := role.Chromium{
		Program: s.cfg.Chromium, Profile: s.req.Profile, Display: s.ev.Chromium.Display, Authority: s.files.authority(),
		Width: s.cfg.ScreenWidth, Height: s.cfg.ScreenHeight, Home: home(), TempDir: s.tempDir(s.req.Instance),
		Port: s.cfg.CDP == config.CDPPort, Stealth: s.cfg.Stealth, Restore: restore, URL: s.req.URL,
	}
	if c.Port {
		if err := role.ForgetPort(s.req.Profile); err != nil {
			return err
		}
	}
	spec := &s.browser.spec
	spec.Args, spec.Env, spec.Dir, spec.LockFile, spec.NoFile = c.Args(), c.Env(), home(), s.req.Profile+".lock", browserNoFile
	spec.Holder = &holder.HolderSpec{
		Socket: s.files.cdp(), Key: s.ev.Key, PeerCgroup: s.peerCgroup, ExitFile: s.files.exit(), Mute: role.ChromiumNoise,
		CloseTimeout: s.closeTimeout(),
	}
	if c.Display > 0 {
		spec.Holder.Display, spec.Holder.Authority = role.XDisplay(c.Display), c.Authority
	}
	if err := s.release(ctx, s.browser); err != nil {
		return err
	}
	var conn net.Conn
	var hello holder.Hello
	err := await(ctx, s.files.dir, s.browser.child.Done(), func(ctx context.Context) error {
		var err error
		conn, hello, err = holder.Dial(ctx, s.files.cdp(), s.ev.Key)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("%w: %w", role.ErrNotReady, err)
		}
		return err
	})
	if err != nil {
		return s.browserFailure(err)
	}
	// The holder lets its first client in when the browser answers and shows a
	// page; that was all there is to see here.
	conn.Close()
	live, err := s.verifier.Live(ctx, *s.ev.Chromium)
	if err != nil {
		return err
	}
	defer live.Close()
	member, err := s.verifier.Browser(ctx, live, hello.BrowserPID)
	if err != nil {
		return err
	}
	gen := live.Generation()
	gen.Browser = &member
	if c.Port {
		gen.Listener, err = s.debuggingPort(ctx, live)
	} else {
		err = endpoints(ctx, live)
	}
	if err != nil {
		return fmt.Errorf("browser: %w", err)
	}
	if err := proof.WritePidfile(s.files.pidfile(role.NameChromium), gen); err != nil {
		return err
	}
	s.ev.Chromium = &gen
	return s.record(ctx)
}

// scope names a role's scope. A second try within one start gets a name of its
// own: scope names are never used again.
func (s *starting) scope(roleName string, try int) string {
	name := fmt.Sprintf("%s-%s-%s-%d", s.cfg.UnitPrefix, s.req.Instance, roleName, s.req.Generation)
	if try > 0 {
		name += fmt.Sprintf("r%d", try)
	}
	return name + ".scope"
}

// browserFailure adds how the browser ended, if it left word.
func (s *starting) browserFailure(err error) error {
	if exit, xerr := holder.ReadExit(s.files.exit()); xerr == nil {
		return fmt.Errorf("browser: %w (%s)", err, describe(exit))
	}
	return fmt.Errorf("browser: %w", err)
}

func (r *Runtime) dialHolder(ctx context.Context, e evidence) (net.Conn, error) {
	conn, hello, err := holder.Dial(ctx, r.files(e.Instance).cdp(), e.Key)
	if err != nil {
		return nil, fault.Wrap(err, fault.BrowserNotControllable, "reach browser", "it is started again on its next use")
	}
	if hello.Generation != e.Generation || e.Chromium.Browser == nil || hello.BrowserPID != e.Chromium.Browser.PID {
		conn.Close()
		return nil, fault.New(fault.BrowserNotControllable, "reach browser", "it is started again on its next use", "another generation answers on its socket")
	}
	return conn, nil
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
