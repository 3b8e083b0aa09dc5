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
		Instance: req.Instance, Generation: req.Generation, Key: newKey(), Profile: req.Profile,
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
	// displayReady waits until a display that listens answers, X clients as
	// well as viewers.
	displayReady func(context.Context) error
}

// admit refuses, before anything is spawned, what would only fail later and
// less clearly.
func (s *starting) admit(ctx context.Context) error {
	for _, p := range []struct{ path, pkg string }{
		{s.cfg.Chromium, "chromium"}, {s.cfg.Xvnc, "tigervnc-standalone-server"}, {s.cfg.RoleHelper, "abfleet"},
	} {
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
		return fault.New(fault.ProfileBusy, "start session browser", "end that process, or use another Identity; nothing was signalled",
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
	cloned := make(chan error, 1)
	go func() { cloned <- s.prepareProfile(ctx) }()
	browser, displayErr := s.startDisplay(ctx)
	if browser != nil {
		defer browser.abandon()
	}
	if err := errors.Join(displayErr, <-cloned); err != nil {
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
	err := s.startChromium(ctx, browser)
	if err != nil {
		cancel()
	}
	// A browser that fails beside its display mostly fails for that.
	if derr := <-display; derr != nil && !errors.Is(derr, context.Canceled) {
		return derr
	}
	return err
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

func (s *starting) record(ctx context.Context) error {
	if s.req.Record == nil {
		return nil
	}
	return s.req.Record(ctx, s.ev.encode())
}

// startDisplay has the display listen on a number that nobody has, and places
// the browser beside it meanwhile.
func (s *starting) startDisplay(ctx context.Context) (*placed, error) {
	password := role.NewVNCPassword()
	cookie := role.NewCookie()
	if err := safefs.WriteFile(s.files.password(), role.VNCPasswordFile(password), 0o600); err != nil {
		return nil, err
	}
	number := 0
	var last error
	for try := range displayTries {
		var err error
		if number, err = s.takeDisplay(number); err != nil {
			return nil, err
		}
		browser, err := s.tryDisplay(ctx, number, try, cookie)
		s.releaseDisplay(number)
		if err == nil {
			return browser, nil
		}
		if browser != nil {
			browser.abandon()
		}
		if ctx.Err() != nil || !errors.Is(err, errDied) {
			return nil, err
		}
		// The server ended at once: another one got the number first. The
		// scopes are empty by now, and the next try has names of its own.
		s.ev.Display, s.ev.Chromium, last = nil, nil, err
	}
	return nil, fmt.Errorf("%w after %d tries: %w", errNoDisplay, displayTries, last)
}

func (s *starting) tryDisplay(ctx context.Context, number, try int, cookie []byte) (*placed, error) {
	d := role.Display{
		Program: s.cfg.Xvnc, Number: number, Width: s.cfg.ScreenWidth, Height: s.cfg.ScreenHeight,
		Name: "Shared Control", Authority: s.files.authority(), PasswordFile: s.files.password(),
		RFBSocket: s.files.rfb(), Home: s.files.dir,
	}
	if err := safefs.WriteFile(s.files.authority(), role.Authority(number, cookie), 0o600); err != nil {
		return nil, err
	}
	display, err := s.place(ctx, unit.Scope{
		Name: s.scope(role.NameDisplay, try), Description: s.description("display"), KillSignal: syscall.SIGTERM, TimeoutStop: s.cfg.StopTimeout,
	}, proof.Generation{Role: role.NameDisplay, Display: number, Sockets: []string{s.files.rfb()}},
		func(g proof.Generation) { s.ev.Display = &g })
	if err != nil {
		return nil, err
	}
	defer display.abandon()
	display.spec.Args, display.spec.Env, display.spec.Dir = d.Args(), d.Env(), s.files.dir
	if err := s.release(ctx, display); err != nil {
		if isDone(display.child.Done()) {
			err = fmt.Errorf("%w: %w", errDied, err)
		}
		return nil, err
	}
	// The browser's scope is made while the X server starts.
	browser, err := s.placeChromium(ctx, try)
	if err != nil {
		return nil, err
	}
	pid, died := display.child.PID(), display.child.Done()
	s.displayReady = func(ctx context.Context) error {
		err := await(ctx, s.files.dir, died, func(ctx context.Context) error { return role.RFBReady(ctx, s.files.rfb()) })
		if err == nil {
			err = role.XReady(ctx, number, cookie)
		}
		if err != nil {
			return fmt.Errorf("display: %w", err)
		}
		return nil
	}
	sockets := filepath.Dir(role.XSocket(number))
	if _, err := os.Stat(sockets); err != nil {
		// The first X server since the boot makes it, and there is nothing to
		// watch until then.
		return browser, s.displayReady(ctx)
	}
	if err := await(ctx, sockets, died, func(ctx context.Context) error { return role.XListens(ctx, number, pid) }); err != nil {
		return browser, fmt.Errorf("display: %w", err)
	}
	return browser, nil
}

func (s *starting) placeChromium(ctx context.Context, try int) (*placed, error) {
	return s.place(ctx, unit.Scope{
		Name: s.scope(role.NameChromium, try), Description: s.description("Chromium"),
		Requires: []string{s.ev.Display.Unit}, After: []string{s.ev.Display.Unit},
		// SIGWINCH does nothing to a process that does not ask for it, and
		// the holder turns it into a clean close; SIGTERM would lose up to
		// 30 s of cookies.
		KillSignal: syscall.SIGWINCH, TimeoutStop: s.cfg.StopTimeout,
	}, proof.Generation{
		Role: role.NameChromium, Profile: s.req.Profile, LockFile: s.req.Profile + ".lock",
		Display: s.ev.Display.Display, Sockets: []string{s.files.cdp()},
	}, func(g proof.Generation) { s.ev.Chromium = &g })
}

func (s *starting) startChromium(ctx context.Context, browser *placed) error {
	restore, _ := profile.ExitedCleanly(s.req.Profile)
	if pid, what, held := s.verifier.ProfileHolder(s.req.Profile, s.req.Profile+".lock"); held {
		return fault.New(fault.ProfileBusy, "start session browser", "end that process, or use another Identity; nothing was signalled",
			"its Profile was taken by %s (pid %d) meanwhile", what, pid)
	}
	if err := profile.Unlock(s.req.Profile); err != nil {
		return err
	}
	c := role.Chromium{
		Program: s.cfg.Chromium, Profile: s.req.Profile, Display: s.ev.Display.Display, Authority: s.files.authority(),
		Width: s.cfg.ScreenWidth, Height: s.cfg.ScreenHeight, Home: home(), TempDir: s.tempDir(s.req.Instance),
		Stealth: s.cfg.Stealth, Restore: restore, URL: s.req.URL,
	}
	spec := &browser.spec
	spec.Args, spec.Env, spec.Dir, spec.LockFile, spec.NoFile = c.Args(), c.Env(), home(), s.req.Profile+".lock", browserNoFile
	spec.Holder = &holder.HolderSpec{
		Socket: s.files.cdp(), Key: s.ev.Key, PeerCgroup: s.peerCgroup, ExitFile: s.files.exit(), Mute: role.ChromiumNoise,
		Display: role.XDisplay(c.Display), Authority: c.Authority,
	}
	if err := s.release(ctx, browser); err != nil {
		return err
	}
	var conn net.Conn
	var hello holder.Hello
	err := await(ctx, s.files.dir, browser.child.Done(), func(ctx context.Context) error {
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
