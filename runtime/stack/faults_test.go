package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
	"abfleet/runtime/unit"
)

// session opens a CDP connection that ends with the test.
func (w *world) session(ev fleet.Evidence) *cdp.Session {
	w.t.Helper()
	conn, err := w.OpenCDP(w.t.Context(), ev)
	if err != nil {
		w.t.Fatal(err)
	}
	c := cdp.New(conn)
	w.t.Cleanup(func() { c.Close() })
	return c.Root()
}

func (w *world) setCookie(ev fleet.Evidence, value string) {
	w.t.Helper()
	err := w.session(ev).Call(w.t.Context(), "Storage.setCookies", map[string]any{"cookies": []map[string]any{{
		"name": "login", "value": value, "domain": "site.example", "path": "/", "expires": time.Now().Add(24 * time.Hour).Unix(),
	}}}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) cookie(ev fleet.Evidence) string {
	w.t.Helper()
	var out struct {
		Cookies []struct{ Name, Value string }
	}
	if err := w.session(ev).Call(w.t.Context(), "Storage.getCookies", nil, &out); err != nil {
		w.t.Fatal(err)
	}
	for _, c := range out.Cookies {
		if c.Name == "login" {
			return c.Value
		}
	}
	return ""
}

func (w *world) restart(ev fleet.Evidence, generation uint64) fleet.Evidence {
	w.t.Helper()
	e, err := decode(ev)
	if err != nil {
		w.t.Fatal(err)
	}
	obs, err := w.Observe(w.t.Context(), ev)
	if err != nil {
		w.t.Fatal(err)
	}
	w.lastExit = obs.Exit
	if _, err := w.Stop(w.t.Context(), ev, "test"); err != nil {
		w.t.Fatal(err)
	}
	ev, err = w.Start(w.t.Context(), fleet.StartRequest{Instance: e.Instance, Generation: generation, Profile: e.Profile})
	if err != nil {
		w.t.Fatal(err)
	}
	return ev
}

// TestLoginSurvives protects the one thing users lose when a stop is wrong:
// a cookie set just before it, whoever stops what.
func TestLoginSurvives(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stops := map[string]func(e evidence) error{
		"our own stop": func(e evidence) error { _, err := w.Stop(t.Context(), e.encode(), "test"); return err },
		"our own stop of a stopped browser": func(e evidence) error {
			if err := errors.Join(syscall.Kill(e.Chromium.Browser.PID, syscall.SIGSTOP), syscall.Kill(e.Chromium.Leader.PID, syscall.SIGSTOP)); err != nil {
				return err
			}
			report, err := w.Stop(t.Context(), e.encode(), "test")
			if err == nil && !report.Clean {
				err = errors.New(report.Detail)
			}
			return err
		},
		"our own stop of a holder that is stopped while it is asked": func(e evidence) error {
			// Frozen, it is woken in vain and answers nobody.
			freezer := filepath.Join("/sys/fs/cgroup", e.Chromium.Cgroup, "cgroup.freeze")
			sockets := func() int {
				table, err := os.ReadFile("/proc/net/unix")
				if err != nil {
					return -1
				}
				return strings.Count(string(table), " "+w.files(e.Instance).cdp()+"\n")
			}
			if err := os.WriteFile(freezer, []byte("1"), 0); err != nil {
				return err
			}
			before := sockets()
			stopped := make(chan error, 1)
			go func() {
				for sockets() == before && t.Context().Err() == nil {
					runtime.Gosched()
				}
				err := syscall.Kill(e.Chromium.Leader.PID, syscall.SIGSTOP)
				stopped <- errors.Join(err, os.WriteFile(freezer, []byte("0"), 0))
			}()
			report, err := w.Stop(t.Context(), e.encode(), "test")
			if err == nil && !report.Clean {
				err = errors.New(report.Detail)
			}
			return errors.Join(err, <-stopped)
		},
		"our own stop beside a stopped display": func(e evidence) error {
			conn, err := w.OpenCDP(t.Context(), e.encode())
			if err != nil {
				return err
			}
			c := cdp.New(conn)
			defer c.Close()
			if err := syscall.Kill(e.Display.Leader.PID, syscall.SIGSTOP); err != nil {
				return err
			}
			// A new window has it wait for the display.
			c.Root().Start(t.Context(), "Target.createTarget", map[string]any{"url": "about:blank", "newWindow": true})
			report, err := w.Stop(t.Context(), e.encode(), "test")
			if err == nil && !report.Clean {
				err = errors.New(report.Detail)
			}
			return err
		},
		"our own stop without its pidfile": func(e evidence) error {
			if err := os.Remove(w.files(e.Instance).pidfile(role.NameChromium)); err != nil {
				return err
			}
			_, err := w.Stop(t.Context(), e.encode(), "test")
			return err
		},
		"our own stop of a holder that was moved": func(e evidence) error {
			_, err := w.units.StartScope(t.Context(), unit.Scope{Name: "foreign.scope", Slice: "foreign.slice", PID: e.Chromium.Leader.PID, KillSignal: syscall.SIGTERM, TimeoutStop: time.Second})
			if err == nil {
				_, err = w.Stop(t.Context(), e.encode(), "test")
			}
			return err
		},
		"systemctl stop of the slice": func(e evidence) error {
			return exec.Command("systemctl", "--user", "stop", w.cfg.Slice(e.Instance)).Run()
		},
		"systemctl stop of the display scope": func(e evidence) error {
			return exec.Command("systemctl", "--user", "stop", e.Display.Unit).Run()
		},
		"systemctl stop of a stopped holder": func(e evidence) error {
			if err := syscall.Kill(e.Chromium.Leader.PID, syscall.SIGSTOP); err != nil {
				return err
			}
			return exec.Command("systemctl", "--user", "stop", e.Chromium.Unit).Run()
		},
		"our own stop right after SIGKILL of the holder": func(e evidence) error {
			if err := syscall.Kill(e.Chromium.Leader.PID, syscall.SIGKILL); err != nil {
				return err
			}
			_, err := w.Stop(t.Context(), e.encode(), "test")
			return err
		},
		"our own stop of a stopped browser after SIGKILL of its holder": func(e evidence) error {
			if err := errors.Join(syscall.Kill(e.Chromium.Browser.PID, syscall.SIGSTOP), syscall.Kill(e.Chromium.Leader.PID, syscall.SIGKILL)); err != nil {
				return err
			}
			_, err := w.Stop(t.Context(), e.encode(), "test")
			return err
		},
		"SIGKILL of the holder": func(e evidence) error { return syscall.Kill(e.Chromium.Leader.PID, syscall.SIGKILL) },
	}
	ev := w.start("cccccccccc", w.cfg.TemplateDir("identity-1"))
	generation := uint64(1)
	for name, stop := range stops {
		want := strings.ReplaceAll(name, " ", "-")
		w.setCookie(ev, want)
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		if err := stop(e); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := (unit.Cgroup{Path: e.Chromium.Cgroup}).WaitEmpty(ctx); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		cancel()
		generation++
		ev = w.restart(ev, generation)
		if x := w.lastExit; strings.HasPrefix(name, "systemctl") && (x == nil || !x.Clean || x.Trigger != fleet.TriggerOperator) {
			t.Errorf("after %s the browser's end is %+v", name, x)
		}
		if got := w.cookie(ev); got != want {
			t.Errorf("after %s the cookie is %q, want %q", name, got, want)
		}
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestUnaskedManager protects a browser from a stop that cannot reach systemd:
// it says so and leaves the browser as it was.
func TestUnaskedManager(t *testing.T) {
	w := newWorld(t)
	ev := w.start("kkkkkkkkkk", w.cfg.TemplateDir("identity-1"))
	cut, err := New(t.Context(), w.cfg, w.log)
	if err != nil {
		t.Fatal(err)
	}
	cut.Close()
	if obs, err := cut.Observe(t.Context(), ev); !errors.Is(err, fleet.ErrUndecided) {
		t.Errorf("a look without systemd: %+v %v", obs, err)
	}
	begin := time.Now()
	if _, err := cut.Stop(t.Context(), ev, "test"); !errors.Is(err, fleet.ErrUndecided) {
		t.Errorf("a stop without systemd: %v", err)
	}
	if took := time.Since(begin); took > w.holderCloseWait()/2 {
		t.Errorf("it took %s", took)
	}
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Controllable {
		t.Errorf("the browser after it: %+v %v", obs, err)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestUnreadableCgroupKeepsTheDisplay protects a browser from losing its X
// server while nobody can tell whether the browser is gone.
func TestUnreadableCgroupKeepsTheDisplay(t *testing.T) {
	w := newWorld(t)
	ev := w.start("nnnnnnnnnn", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	lost := *e.Chromium
	lost.Cgroup = ""
	e.Chromium = &lost
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := w.Stop(ctx, e.encode(), "test"); !fault.Is(err, fault.BrowserStopUnproven) || errors.Is(err, fleet.ErrUndecided) {
		t.Errorf("a stop that cannot see the browser's cgroup: %v", err)
	}
	if err := w.prove(t.Context(), e.Display); err != nil {
		t.Errorf("its display: %v", err)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestDisplayNumberIsNoIdentity protects a stop from another Stack of ours that
// took the display number after it came free.
func TestDisplayNumberIsNoIdentity(t *testing.T) {
	w := newWorld(t)
	first := w.start("llllllllll", w.cfg.TemplateDir("identity-1"))
	a, err := decode(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := exec.Command("systemctl", "--user", "stop", w.cfg.Slice(a.Instance)).Run(); err != nil {
		t.Fatal(err)
	}
	second := w.start("mmmmmmmmmm", w.cfg.TemplateDir("identity-2"))
	b, err := decode(second)
	if err != nil {
		t.Fatal(err)
	}
	if a.Display.Display != b.Display.Display {
		t.Fatalf("displays %d and %d: the number was not used again", a.Display.Display, b.Display.Display)
	}
	if obs, err := w.Observe(t.Context(), first); err != nil || obs.State != fleet.Stopped {
		t.Errorf("the first: %+v %v", obs, err)
	}
	if _, err := w.Stop(t.Context(), first, "test"); err != nil {
		t.Errorf("stop of the first: %v", err)
	}
	if obs, err := w.Observe(t.Context(), second); err != nil || obs.State != fleet.Controllable {
		t.Errorf("the second: %+v %v", obs, err)
	}
	if _, err := w.Stop(t.Context(), second, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestStaleSingletonLock protects Profiles from locks that a crash left: one of
// another host name, as after a power cut and a new name, and one whose number
// now belongs to another browser of ours.
func TestStaleSingletonLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.start("iiiiiiiiii", w.cfg.TemplateDir("identity-2"))
	o, err := decode(other)
	if err != nil {
		t.Fatal(err)
	}
	ev := w.start("jjjjjjjjjj", w.cfg.TemplateDir("identity-1"))
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for i, target := range []string{"another-host-12345", fmt.Sprintf("%s-%d", host, o.Chromium.Browser.PID)} {
		w.setCookie(ev, target)
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, filepath.Join(e.Profile, "SingletonLock")); err != nil {
			t.Fatal(err)
		}
		ev, err = w.Start(t.Context(), fleet.StartRequest{Instance: e.Instance, Generation: uint64(i + 2), Profile: e.Profile})
		if err != nil {
			t.Fatalf("lock of %s: %v", target, err)
		}
		if got := w.cookie(ev); got != target {
			t.Errorf("lock of %s: the cookie is %q", target, got)
		}
	}
	for _, ev := range []fleet.Evidence{ev, other} {
		if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
			t.Error(err)
		}
	}
}

// TestTwentyDisplays protects the choice of display numbers: twenty at once
// are all distinct, and a foreign server that holds our next number with a
// lock file and no abstract socket is left alone.
func TestTwentyDisplays(t *testing.T) {
	w := newWorld(t)
	rfb := filepath.Join(t.TempDir(), "rfb")
	foreign := exec.Command("Xvnc", ":"+strconv.Itoa(role.FirstDisplay+3), "-rfbport", "-1", "-rfbunixpath", rfb, "-SecurityTypes", "None", "-nolisten", "local", "-nolisten", "tcp")
	if err := foreign.Start(); err != nil {
		t.Fatal(err)
	}
	defer foreign.Wait()
	defer foreign.Process.Signal(syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	err := await(ctx, "/tmp/.X11-unix", nil, func(ctx context.Context) error {
		if !role.DisplayTaken(role.FirstDisplay + 3) {
			return role.ErrNotReady
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	var wg sync.WaitGroup
	stacks := make([]*starting, 20)
	for i := range stacks {
		instance := fmt.Sprintf("dddddddd%c%c", 'a'+i/10, 'a'+i%10)
		dir := filepath.Join(w.cfg.Home, instance)
		s := &starting{Runtime: w.Runtime, req: fleet.StartRequest{Instance: instance, Generation: 1, Profile: dir}, files: w.files(instance), ev: evidence{Instance: instance, Generation: 1, Profile: dir}}
		stacks[i] = s
		wg.Go(func() {
			if err := s.prepareDirs(ctx); err != nil {
				t.Error(err)
				return
			}
			if err := s.startDisplay(ctx); err != nil {
				t.Errorf("display %d: %v", i, err)
			}
			s.abandon()
		})
	}
	wg.Wait()
	seen := map[int]bool{role.FirstDisplay + 3: true}
	for _, s := range stacks {
		if s.ev.Display == nil {
			continue
		}
		if seen[s.ev.Display.Display] {
			t.Errorf("display %d is used twice", s.ev.Display.Display)
		}
		seen[s.ev.Display.Display] = true
	}
	for _, s := range stacks {
		wg.Go(func() {
			if _, err := w.Stop(ctx, s.ev.encode(), "test"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for n := range seen {
		if n != role.FirstDisplay+3 && role.DisplayTaken(n) {
			t.Errorf("display %d leaves files", n)
		}
	}
	lock, err := os.ReadFile(role.XLock(role.FirstDisplay + 3))
	if err != nil || strings.TrimSpace(string(lock)) != strconv.Itoa(foreign.Process.Pid) {
		t.Errorf("the foreign server's lock: %q %v", lock, err)
	}
	if err := role.RFBReady(ctx, rfb, foreign.Process.Pid); err != nil {
		t.Errorf("the foreign server serves nobody any more: %v", err)
	}
}

// TestDisplayFailsBesideTheBrowser protects the part of a start in which both
// come up: a display that ends or hangs then fails the start by its name, soon
// and at the latest with the start's time, and nothing of either is left.
func TestDisplayFailsBesideTheBrowser(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dir := w.cfg.TemplateDir("identity-1")
	if err := w.CreateProfile(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	usual := w.cfg.StartTimeout
	for _, c := range []struct {
		instance string
		signal   syscall.Signal
		timeout  time.Duration
	}{
		{"pppppppppp", syscall.SIGKILL, usual},
		{"qqqqqqqqqq", syscall.SIGSTOP, 5 * time.Second},
	} {
		w.cfg.StartTimeout = c.timeout
		_, err := w.Start(t.Context(), fleet.StartRequest{Instance: c.instance, Generation: 1, Profile: dir,
			Record: func(_ context.Context, ev fleet.Evidence) error {
				e, err := decode(ev)
				if err != nil || e.Chromium == nil {
					return err
				}
				return syscall.Kill(e.Display.Leader.PID, c.signal)
			}})
		var failed *fleet.StartError
		if !errors.As(err, &failed) || !failed.Confirmed || !strings.Contains(err.Error(), "display: ") {
			t.Errorf("%v: %v, want the display named and a confirmed cleanup", c.signal, err)
		}
		out, _ := exec.Command("systemctl", "--user", "list-units", "--no-legend", "--plain", w.cfg.UnitPrefix+"-"+c.instance+"-*").Output()
		if len(out) > 0 {
			t.Errorf("%v: left\n%s", c.signal, out)
		}
	}
	w.cfg.StartTimeout = usual
	ev := w.start("rrrrrrrrrr", dir)
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if err := role.XListens(t.Context(), e.Display.Display, e.Display.Leader.PID); err != nil {
		t.Errorf("the display is not told as its own listener: %v", err)
	}
	if err := role.XListens(t.Context(), e.Display.Display, e.Chromium.Leader.PID); !errors.Is(err, role.ErrNotReady) {
		t.Errorf("another process is told as the display's listener: %v", err)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// TestServiceDiesBeforeRelease protects against orphans: the service is killed
// when a role sits in its scope, recorded and not yet released.
func TestServiceDiesBeforeRelease(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := w.CreateProfile(t.Context(), w.cfg.TemplateDir("identity-1")); err != nil {
		t.Fatal(err)
	}
	at := func(rl string, e evidence) *proof.Generation {
		return map[string]*proof.Generation{role.NameDisplay: e.Display, role.NameVNC: e.VNC, role.NameChromium: e.Chromium}[rl]
	}
	if os.Getenv("ABF_DIE") != "" {
		if os.Getenv("ABF_DIE_AT") == role.NameVNC {
			w.cfg.Display = config.DisplayXvfb
		}
		w.Start(t.Context(), fleet.StartRequest{Instance: "eeeeeeeeee", Generation: 1, Profile: w.cfg.TemplateDir("identity-1"),
			Record: func(_ context.Context, ev fleet.Evidence) error {
				if e, err := decode(ev); err != nil || at(os.Getenv("ABF_DIE_AT"), e) == nil {
					return err
				}
				os.WriteFile(os.Getenv("ABF_DIE"), ev, 0o600)
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}})
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, rl := range []string{role.NameDisplay, role.NameVNC, role.NameChromium} {
		file := filepath.Join(t.TempDir(), "evidence")
		cmd := exec.Command(exe, "-test.run=^TestServiceDiesBeforeRelease$")
		cmd.Env = append(os.Environ(), "ABF_DIE="+file, "ABF_DIE_AT="+rl)
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Fatalf("at %s, the service survived: %s", rl, out)
		}
		ev, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := (unit.Cgroup{Path: at(rl, e).Cgroup}).WaitEmpty(ctx); err != nil {
			t.Fatalf("the trampoline of %s outlives its service: %v", rl, err)
		}
		if _, err := w.Stop(ctx, ev, "reconcile"); err != nil {
			t.Errorf("at %s, what is recorded of it cannot be cleaned: %v", rl, err)
		}
		out, err := exec.Command("systemctl", "--user", "list-units", "--all", "--no-legend", "--plain", w.cfg.UnitPrefix+"-eeeeeeeeee*").Output()
		if err != nil || len(bytes.TrimSpace(out)) != 0 {
			t.Errorf("at %s, units stay: %s %v", rl, out, err)
		}
	}
}

// TestRefusals protects Profiles and people from starts that cannot work: each
// gives its code, leaves the Profile as it is, and nothing running.
func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dir := w.cfg.TemplateDir("identity-1")
	if err := w.CreateProfile(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	frozen := "" // the role that is stopped dead before its release
	start := func() error {
		_, err := w.Start(t.Context(), fleet.StartRequest{Instance: "ffffffffff", Generation: uint64(time.Now().UnixNano()), Profile: dir,
			Record: func(_ context.Context, ev fleet.Evidence) error {
				e, err := decode(ev)
				if err != nil || e.Chromium != nil && e.Chromium.Browser != nil {
					return err
				}
				if g := map[string]*proof.Generation{role.NameDisplay: e.Display, role.NameVNC: e.VNC, role.NameChromium: e.Chromium}[frozen]; g != nil {
					return syscall.Kill(g.Leader.PID, syscall.SIGSTOP)
				}
				return nil
			}})
		return err
	}
	check := func(name string, err error, code fault.Code) {
		t.Helper()
		var se *fleet.StartError
		if !errors.As(err, &se) || !se.Confirmed || !fault.Is(err, code) {
			t.Errorf("%s: %v (code %s), want a confirmed %s", name, err, fault.CodeOf(err), code)
		}
		if fault.HintOf(err) == "" {
			t.Errorf("%s: no hint", name)
		}
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("%s: the Profile is gone: %v", name, err)
		}
		out, _ := exec.Command("systemctl", "--user", "list-units", "--no-legend", "--plain", w.cfg.UnitPrefix+"-ffffffffff-*").Output()
		if len(bytes.TrimSpace(out)) != 0 {
			t.Errorf("%s: left running: %s", name, out)
		}
	}
	chromium, xvnc := w.cfg.Chromium, w.cfg.Xvnc
	w.cfg.Chromium = "/nonexistent/chromium"
	check("no Chromium", start(), fault.ProgramMissing)
	w.cfg.Chromium, w.cfg.Xvnc = chromium, "/nonexistent/Xvnc"
	check("no Xvnc", start(), fault.ProgramMissing)

	w.cfg.Xvnc = xvnc
	if err := os.Chmod(w.cfg.RuntimeDir, 0o777); err != nil {
		t.Fatal(err)
	}
	check("a runtime directory that others may write to", start(), fault.UnsafePath)
	if err := os.Chmod(w.cfg.RuntimeDir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.cfg.StartTimeout = 3 * time.Second
	for _, rl := range []string{role.NameDisplay, role.NameChromium} {
		frozen = rl
		check("a "+rl+" that never becomes ready", start(), fault.Timeout)
	}
	w.cfg.Display, frozen = config.DisplayXvfb, role.NameVNC
	check("a VNC server that never becomes ready", start(), fault.Timeout)
	w.cfg.Xvfb = "/nonexistent/Xvfb"
	check("no Xvfb", start(), fault.ProgramMissing)
	w.cfg.Display, frozen, w.cfg.StartTimeout = config.DisplayXvnc, "", 45*time.Second

	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	check("a Profile locked by another process", start(), fault.ProfileBusy)
	lock.Close()

	foreign := exec.Command(chromium, "--headless=new", "--user-data-dir="+dir, "--remote-debugging-port=0", "about:blank")
	foreign.Env = append(os.Environ(), "DBUS_SESSION_BUS_ADDRESS=disabled:", "BREAKPAD_DUMP_LOCATION="+t.TempDir())
	if err := foreign.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := await(ctx, dir, nil, func(context.Context) error {
		if _, _, ok := proof.ReadSingleton(dir); !ok {
			return role.ErrNotReady
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	check("a Profile held by a foreign browser", start(), fault.ProfileBusy)
	if err := foreign.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the foreign browser was touched: %v", err)
	}
	foreign.Process.Signal(syscall.SIGTERM)
	foreign.Wait()
}

// TestEnvironment protects roles from the environment of whoever started the
// service.
func TestEnvironment(t *testing.T) {
	for _, kv := range []string{"CHROME_EXTRA_ARGS=--no-sandbox", "http_proxy=http://192.0.2.1:1", "ALL_PROXY=socks5://192.0.2.1:1",
		"NOTIFY_SOCKET=/run/notify", "LISTEN_FDS=2", "LISTEN_PID=1", "CHROME_DEBUG_PORT=9222", "VNC_NOPW=1", "LD_BIND_NOW=1", "CHROMIUM_FLAGS=--no-sandbox"} {
		name, value, _ := strings.Cut(kv, "=")
		t.Setenv(name, value)
	}
	w := newWorld(t)
	ev := w.start("gggggggggg", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(os.Getenv("HOME"), ".config", "chromium")); err == nil {
		t.Error("the browser writes to the user's own Chromium configuration")
	}
	for _, m := range []int{e.Display.Leader.PID, e.Chromium.Leader.PID, e.Chromium.Browser.PID} {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", m))
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range strings.Split(string(env), "\x00") {
			name, _, _ := strings.Cut(kv, "=")
			switch name {
			case "", "HOME", "PATH", "LANG", "DISPLAY", "XAUTHORITY", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS", "NO_AT_BRIDGE", "BREAKPAD_DUMP_LOCATION":
			case "CHROME_WRAPPER", "GTK_MODULES", "CHROME_DESKTOP", "NO_PROXY": // set by Chromium in its own process
			default:
				t.Errorf("pid %d has %s in its environment", m, kv)
			}
		}
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}
