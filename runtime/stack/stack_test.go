package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/fleet/fleettest"
	"abfleet/runtime/proof"
	"abfleet/tests/rig"
)

// TestInRig runs every other test of the package inside a private systemd.
func TestInRig(t *testing.T) {
	switch {
	case rig.Inside() != "":
		t.Skip("this is the run inside the rig")
	case testing.Short():
		t.Skip("boots a rig and real browsers; run without -short")
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "abfleet/cmd/abfleet-role")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	run := rig.InsideRun{How: "user", Tests: os.Getenv("ABF_RUN"), Least: 1, MaySkip: "^TestLimits/[a-z]+[.][a-z]+$"}
	if run.Tests == "" {
		run.Least = 14
	}
	rig.TestInside(t, rig.Options{Name: "stack", Binds: map[string]string{bin: rig.BinDir}}, run)
}

type world struct {
	*Runtime
	t        *testing.T
	cfg      *config.Config
	lastExit *fleet.ExitReport // of the Stack that restart found
}

func newWorld(t *testing.T) *world {
	rig.NeedInside(t)
	home, err := os.MkdirTemp(os.Getenv("HOME"), "s")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.toml")
	err = os.WriteFile(file, []byte("home = \""+home+"\"\ntmp_dir=\""+os.Getenv("HOME")+"/t\"\n[programs]\nrole_helper = \""+rig.BinDir+"/abfleet-role\"\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file, os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(t.Context(), cfg, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return &world{Runtime: r, t: t, cfg: cfg}
}

func (w *world) start(instance string, profile string) fleet.Evidence {
	w.t.Helper()
	if err := w.CreateProfile(w.t.Context(), profile); err != nil {
		w.t.Fatal(err)
	}
	begin := time.Now()
	ev, err := w.Start(w.t.Context(), fleet.StartRequest{Instance: instance, Generation: 1, Profile: profile, URL: "about:blank", Session: "s", Identity: "i",
		Record: func(context.Context, fleet.Evidence) error { return nil }})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("start took %s", time.Since(begin))
	return ev
}

// Whose browser a scope is of, an operator reads in systemd's lists.
func TestDescription(t *testing.T) {
	for _, c := range []struct{ session, identity, want string }{
		{"my-session", "identity-1", `Chromium for the Session Browser of session "my-session"`},
		{"", "identity-1", `Chromium for the login browser of "identity-1"`},
		{"a\nb\xff\x1b[1m", "identity-1", `Chromium for the Session Browser of session "a\nb�\x1b[1m"`},
		{strings.Repeat("é", 199), "identity-1", `Chromium for the Session Browser of session "` + strings.Repeat("é", 60) + `…"`},
	} {
		s := &starting{req: fleet.StartRequest{Session: c.session, Identity: c.identity}}
		if got := s.description("Chromium"); got != c.want {
			t.Errorf("%q: %s, want %s", c.session, got, c.want)
		}
	}
}

// TestStartStop protects the whole path of one Stack.
func TestStartStop(t *testing.T) {
	w := newWorld(t)
	ev := w.start("aaaaaaaaaa", w.cfg.TemplateDir("identity-1"))
	out, err := exec.Command("systemctl", "--user", "list-units", "--no-legend", "--plain", w.cfg.UnitPrefix+"-aaaaaaaaaa-*").CombinedOutput()
	if err != nil || strings.Count(string(out), `Session Browser of session "s"`) != 2 {
		t.Errorf("systemd lists %v\n%s", err, out)
	}
	obs, err := w.Observe(t.Context(), ev)
	if err != nil || obs.State != fleet.Controllable {
		t.Fatalf("observe: %+v %v", obs, err)
	}
	conn, err := w.OpenCDP(t.Context(), ev)
	if err != nil {
		t.Fatal(err)
	}
	c := cdp.New(conn)
	var version struct{ Product string }
	if err := c.Root().Call(t.Context(), "Browser.getVersion", nil, &version); err != nil {
		t.Fatal(err)
	}
	c.Close()
	v, err := w.OpenViewer(t.Context(), ev)
	if err != nil {
		t.Fatal(err)
	}
	banner := make([]byte, 12)
	if _, err := io.ReadFull(v.Conn, banner); err != nil || len(v.Password) != 8 {
		t.Fatalf("viewer: %q %q %v", banner, v.Password, err)
	}
	v.Conn.Close()
	begin := time.Now()
	report, err := w.Stop(t.Context(), ev, "test")
	if err != nil || !report.Clean {
		t.Fatalf("stop: %+v %v", report, err)
	}
	t.Logf("stop took %s: %s", time.Since(begin), report.Detail)
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Stopped {
		t.Fatalf("observe after stop: %+v %v", obs, err)
	}
}

// TestContract protects the use cases, whose own tests run on a fake: the fake
// and real Stacks keep the same promises, whatever display and debugging
// transport they have.
func TestContract(t *testing.T) {
	rig.NeedInside(t)
	for _, b := range []struct{ display, cdp string }{
		{config.DisplayXvnc, config.CDPPipe},
		{config.DisplayXvfb, config.CDPPort},
		{config.DisplayNone, config.CDPPipe},
	} {
		t.Run(b.display+" "+b.cdp, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.cfg.Display, w.cfg.CDP = b.display, b.cdp
			fleettest.Contract(t, fleettest.Subject{Runtime: w.Runtime, Dir: w.cfg.Home, Headless: b.display == config.DisplayNone})
		})
	}
}

// TestConfiguredBrowserHoldsItsProfile protects a Profile whose browser has a
// name of its own: a live lock of it is no leftover.
func TestConfiguredBrowserHoldsItsProfile(t *testing.T) {
	program := filepath.Join(t.TempDir(), "fancy-browser")
	sleep, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, sleep, 0o755); err != nil {
		t.Fatal(err)
	}
	browser := exec.Command(program, "60")
	if err := browser.Start(); err != nil {
		t.Fatal(err)
	}
	defer browser.Wait()
	defer browser.Process.Kill()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "profile")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(fmt.Sprintf("%s-%d", host, browser.Process.Pid), filepath.Join(dir, "SingletonLock")); err != nil {
		t.Fatal(err)
	}
	cfg := &config.Config{Chromium: program}
	r := &Runtime{cfg: cfg, verifier: &proof.Verifier{Chromium: cfg.Chromium}}
	if err := r.CaptureSnapshot(t.Context(), dir, dir+".snapshot"); !fault.Is(err, fault.ProfileBusy) {
		t.Errorf("a snapshot of a Profile in use: %v", err)
	}
	s := &starting{Runtime: r, req: fleet.StartRequest{Profile: dir}}
	if err := s.startChromium(t.Context()); !fault.Is(err, fault.ProfileBusy) {
		t.Errorf("a start on a Profile in use: %v", err)
	}
	if _, _, ok := proof.ReadSingleton(dir); !ok {
		t.Error("the live lock was removed")
	}
}

// TestNamespacesAreNotAssumed protects the check of user namespaces, which is
// made once only: a start that was cancelled meanwhile has seen nothing.
func TestNamespacesAreNotAssumed(t *testing.T) {
	r := &Runtime{cfg: &config.Config{Chromium: "/bin/true", Xvnc: "/bin/true", RoleHelper: "/bin/true"}, verifier: &proof.Verifier{}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := &starting{Runtime: r, req: fleet.StartRequest{Profile: filepath.Join(t.TempDir(), "profile")}}
	if err := s.admit(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("admitted with %v", err)
	}
	if r.namespaces.Load() {
		t.Error("user namespaces count as seen to work")
	}
}
