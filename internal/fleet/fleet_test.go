package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// TestMainPath protects the product's one path: create, log in, save, use.
func TestMainPath(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	ctx := t.Context()

	v, err := s.CreateIdentity(ctx, user, "  Mara  ")
	if err != nil {
		t.Fatal(err)
	}
	if v.Name != "Mara" || v.State != fleet.NeedsLogin || v.Login.State != fleet.Stopped || !strings.HasPrefix(v.ID, "identity-") || len(v.ID) != 25 {
		t.Errorf("created: %+v", v)
	}
	_, err = s.UseIdentity(ctx, agent, "s1", "Mara")
	wantCode(t, "use before login", err, fault.IdentityNotReady)
	if hint := fault.HintOf(err); !strings.HasSuffix(hint, "abfleet identity login Mara, then abfleet identity save Mara") {
		t.Errorf("use before login: hint %q", hint)
	}
	_, err = s.SaveIdentity(ctx, user, v.ID)
	wantCode(t, "save before login", err, fault.LoginNotRunning)
	if hint := fault.HintOf(err); !strings.HasSuffix(hint, "abfleet identity login Mara") {
		t.Errorf("save before login: hint %q", hint)
	}
	_, err = s.SessionUnits(ctx, "s1")
	wantCode(t, "units before use", err, fault.SessionNotFound)
	_, err = s.LoginBrowser(ctx, v.ID)
	wantCode(t, "login browser before login", err, fault.LoginNotRunning)
	_, err = s.Browser(ctx, "s1")
	wantCode(t, "browser before use", err, fault.IdentityNotSelected)

	if v, err = s.StartLogin(ctx, user, "MARA", "https://example.org/"); err != nil {
		t.Fatal(err)
	}
	if v.Login.State != fleet.Controllable || !v.Login.Unsaved || v.Login.StartedAt.IsZero() {
		t.Errorf("login: %+v", v.Login)
	}
	login, err := s.LoginBrowser(ctx, v.ID)
	if err != nil {
		t.Fatal(err)
	}
	if v, err = s.StartLogin(ctx, user, "mara", ""); err != nil {
		t.Fatal(err)
	}
	if again, err := s.LoginBrowser(ctx, "mara"); err != nil || again.Key() != login.Key() {
		t.Errorf("a second start of the login is another browser: %v", err)
	}
	if err := h.rt.Put(v.ID+"/template", "cookie", "one"); err != nil {
		t.Fatal(err)
	}
	if v, err = s.SaveIdentity(ctx, user, "Mara"); err != nil {
		t.Fatal(err)
	}
	if v.State != fleet.Ready || v.SnapshotAt.IsZero() || v.Login.Unsaved || v.Login.State != fleet.Stopped {
		t.Errorf("saved: %+v", v)
	}
	if err := login.Running(ctx); fault.CodeOf(err) != fault.BrowserStopped {
		t.Errorf("the login browser after save: %v", err)
	}
	_, err = s.SaveIdentity(ctx, user, "Mara")
	wantCode(t, "second save", err, fault.LoginNotRunning)

	sv := s.use("s1", "mara")
	if sv.State != fleet.Controllable || sv.Wanted != fleet.WantedRunning || sv.IdentityName != "Mara" || sv.IdentityID != v.ID {
		t.Errorf("session: %+v", sv)
	}
	units, err := s.SessionUnits(ctx, "s1")
	if err != nil || units.Instance == "" || units.Slice != "abfleet-"+units.Instance+".slice" {
		t.Errorf("units: %+v %v", units, err)
	}
	b, err := s.Browser(ctx, "s1")
	if err != nil {
		t.Fatal(err)
	}
	if b.Session() != "s1" || b.Identity() != "Mara" || b.IdentityID() != v.ID || b.Running(ctx) != nil {
		t.Errorf("browser: %q %q %q", b.Session(), b.Identity(), b.IdentityID())
	}
	conn, err := b.OpenCDP(ctx)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	view, err := b.OpenViewer(ctx)
	if err != nil {
		t.Fatal(err)
	}
	view.Conn.Close()
	if got, err := h.rt.Get(s.profileOf("s1"), "cookie"); got != "one" {
		t.Errorf("the session's cookie is %q: %v", got, err)
	}
	s.use("s1", v.ID)
	if again, err := s.Browser(ctx, "s1"); err != nil || again.Key() != b.Key() {
		t.Errorf("the same Identity again is another browser: %v", err)
	}

	// A second session has its own Profile.
	s.use("s2", "mara")
	if s.profileOf("s1") == s.profileOf("s2") {
		t.Error("two sessions share a Profile")
	}
	if err := h.rt.Put(s.profileOf("s1"), "cookie", "changed"); err != nil {
		t.Fatal(err)
	}
	if got, _ := h.rt.Get(s.profileOf("s2"), "cookie"); got != "one" {
		t.Errorf("a change in one session shows in the other: %q", got)
	}
	if list, err := s.Sessions(ctx); err != nil || len(list) != 2 || list[0].Session != "s1" || list[1].State != fleet.Controllable {
		t.Errorf("sessions: %+v %v", list, err)
	}
	if running, quarantined := s.Counts(); running != 2 || quarantined != 0 {
		t.Errorf("counts %d %d", running, quarantined)
	}

	// Stop keeps everything and the next use starts it again.
	if sv, err = s.StopSession(ctx, user, "s1"); err != nil || sv.State != fleet.Stopped || sv.Wanted != fleet.WantedStopped || sv.LastExit == nil || !sv.LastExit.Clean {
		t.Errorf("stopped: %+v %v", sv, err)
	}
	if err := b.Running(ctx); fault.CodeOf(err) != fault.BrowserStopped {
		t.Errorf("the old browser after a stop: %v", err)
	}
	if _, err := b.OpenCDP(ctx); fault.CodeOf(err) != fault.BrowserStopped {
		t.Errorf("the old browser's CDP after a stop: %v", err)
	}
	if _, err := s.RunningBrowser(ctx, "s1"); fault.CodeOf(err) != fault.BrowserStopped {
		t.Errorf("looking at a stopped browser: %v", err)
	}
	b2, err := s.Browser(ctx, "s1")
	if err != nil {
		t.Fatal(err)
	}
	if b2.Key() == b.Key() {
		t.Error("a new generation has the old key")
	}
	if got, _ := h.rt.Get(s.profileOf("s1"), "cookie"); got != "changed" {
		t.Errorf("after stop and start the cookie is %q", got)
	}
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

// TestNames protects the list of Identities from twins and impostors.
func TestNames(t *testing.T) {
	s := newTestHost(t).start()
	defer s.end()
	ctx := t.Context()
	first, err := s.CreateIdentity(ctx, user, "Straße ÄÖ K")
	if err != nil {
		t.Fatal(err)
	}
	for _, twin := range []string{"Straße ÄÖ K", "STRAßE äö k", " straße äö \u212a ", "\ufeffStraße ÄÖ K", "Stra\u00adße Ä\u200bÖ K", "Ｓｔｒａße A\u0308Ö K", "Straße Ä\ufe0fÖ K", "Straße \u3164ÄÖ K", "Straße a\u034f\u0308Ö K"} {
		_, err := s.CreateIdentity(ctx, user, twin)
		wantCode(t, twin, err, fault.DuplicateIdentity)
		if v, err := s.Identity(ctx, twin); err != nil || v.ID != first.ID {
			t.Errorf("%q is not found: %v", twin, err)
		}
	}
	for name, bad := range map[string]string{
		"empty": "", "blank": " \t ", "long": strings.Repeat("ä", 81), "newline": "a\nb", "escape": "a\x1b[1m",
		"direction": "a\u202eb", "line": "a\u2028b", "bytes": "a\xff", "id": first.ID, "other id": "Identity-AAAAAAAAAAAAAAAA",
		"unseen": "\u200b", "lost": "a\ufffd",
	} {
		_, err := s.CreateIdentity(ctx, user, bad)
		wantCode(t, name, err, fault.InvalidName)
	}
	if _, err := s.CreateIdentity(ctx, user, strings.Repeat("ä", 80)); err != nil {
		t.Error(err)
	}
	_, err = s.Identity(ctx, "nobody")
	wantCode(t, "unknown", err, fault.IdentityNotFound)
	_, err = s.UseIdentity(ctx, agent, "s", "nobody")
	wantCode(t, "use unknown", err, fault.IdentityNotFound)
}

// TestSessionIDs protects the key of everything a session has.
func TestSessionIDs(t *testing.T) {
	s := newTestHost(t).start()
	defer s.end()
	s.saved("a")
	for name, bad := range map[string]string{
		"empty": "", "long": strings.Repeat("x", 201), "control": "a\x00b", "newline": "a\n", "delete": "a\x7f", "bytes": "\xff",
		"direction": "a\u202eb", "line": "a\u2028b",
	} {
		_, err := s.UseIdentity(t.Context(), agent, bad, "a")
		wantCode(t, name, err, fault.InvalidSession)
		_, err = s.Browser(t.Context(), bad)
		wantCode(t, name, err, fault.InvalidSession)
	}
	for _, good := range []string{"x", strings.Repeat("x", 200), "a/../b c", "Ärger:🦊"} {
		s.use(good, "a")
		if _, err := s.Browser(t.Context(), good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	_, err := s.Session(t.Context(), "unknown")
	wantCode(t, "unknown", err, fault.SessionNotFound)
	_, err = s.StopSession(t.Context(), user, "unknown")
	wantCode(t, "stop unknown", err, fault.SessionNotFound)
}

// TestLoginURL protects Chromium's command line from what a caller calls a URL.
func TestLoginURL(t *testing.T) {
	s := newTestHost(t).start()
	defer s.end()
	if _, err := s.CreateIdentity(t.Context(), user, "a"); err != nil {
		t.Fatal(err)
	}
	for url, code := range map[string]fault.Code{
		"--no-sandbox": fault.BlockedURL, "file:///etc/passwd": fault.BlockedURL, "chrome://settings": fault.BlockedURL,
		"javascript:alert(1)": fault.BlockedURL, "https://a b": fault.InvalidArgument, "https://a/\n--x": fault.InvalidArgument,
		"https://" + strings.Repeat("x", 9000): fault.InvalidArgument,
	} {
		_, err := s.StartLogin(t.Context(), user, "a", url)
		wantCode(t, url[:min(20, len(url))], err, code)
	}
	if left := s.h.rt.Remains(); len(left) > 0 {
		t.Errorf("running: %v", left)
	}
}

// TestResaveKeepsSnapshot protects a good login from a bad one: whatever goes
// wrong with a later save, sessions still get the last good snapshot.
func TestResaveKeepsSnapshot(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(h *host, id string)
		code  fault.Code
	}{
		"unclean stop": {func(h *host, id string) { h.rt.UncleanStop = func(string) bool { return true } }, fault.UncleanExit},
		"killed":       {func(h *host, id string) { h.rt.KillBrowsers(id + "/template") }, fault.UncleanExit},
		"power cut":    {func(h *host, id string) { h.rt.PowerCut() }, fault.UncleanExit},
		"disk full": {func(h *host, id string) {
			h.rt.Change(func() {
				h.rt.FailTree = func(op, dir string) error {
					if op == "capture snapshot" {
						return fault.New(fault.NoSpace, "save identity", "Free space", "no space for %s", dir)
					}
					return nil
				}
			})
		}, fault.NoSpace},
	} {
		t.Run(name, func(t *testing.T) {
			h := newTestHost(t)
			s := h.start()
			defer s.end()
			v := s.saved("a")
			if _, err := s.StartLogin(t.Context(), user, "a", ""); err != nil {
				t.Fatal(err)
			}
			if err := h.rt.Put(v.ID+"/template", "cookie", "bad"); err != nil {
				t.Fatal(err)
			}
			c.spoil(h, v.ID)
			_, err := s.SaveIdentity(t.Context(), user, "a")
			wantCode(t, "save", err, c.code)
			if strings.Contains(err.Error(), h.cfg.Home) {
				t.Errorf("the error tells a path: %v", err)
			}
			h.rt.Change(func() { h.rt.UncleanStop, h.rt.FailTree = nil, nil })
			v, err = s.Identity(t.Context(), "a")
			if err != nil || v.State != fleet.Ready || v.Problem == nil || v.Problem.Code != c.code || !v.Login.Unsaved {
				t.Errorf("after a failed save: %+v %v", v, err)
			}
			s.use("s", "a")
			if got, _ := h.rt.Get(s.profileOf("s"), "cookie"); got != "login of a" {
				t.Errorf("the session has cookie %q", got)
			}
			// The way the hint names works.
			if _, err := s.StartLogin(t.Context(), user, "a", ""); err != nil {
				t.Fatal(err)
			}
			if v, err = s.SaveIdentity(t.Context(), user, "a"); err != nil || v.Problem != nil {
				t.Errorf("save after a new login: %+v %v", v.Problem, err)
			}
			s.use("t", "a")
			if got, _ := h.rt.Get(s.profileOf("t"), "cookie"); got != "bad" {
				t.Errorf("the new session has cookie %q", got)
			}
		})
	}
}

// TestSaveAfterClose protects a person who closes the login window before
// saving, or stops the login.
func TestSaveAfterClose(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	v, err := s.CreateIdentity(t.Context(), user, "a")
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []func(){
		func() { h.rt.CloseBrowsers(v.ID) },
		func() {
			if _, err := s.StopLogin(t.Context(), user, "a"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		if _, err := s.StartLogin(t.Context(), user, "a", ""); err != nil {
			t.Fatal(err)
		}
		end()
		if v, err := s.SaveIdentity(t.Context(), user, "a"); err != nil || v.State != fleet.Ready {
			t.Errorf("save: %+v %v", v, err)
		}
	}
	if left := h.rt.Remains(); len(left) > 0 {
		t.Errorf("left running: %v", left)
	}
}

// TestSwitch protects the browser a user has from the one they ask for.
func TestSwitch(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	ctx := t.Context()
	s.saved("a")
	bID := s.saved("b").ID
	s.use("s", "a")
	first, profileA := mustBrowser(t, s, "s"), s.profileOf("s")

	intact := func(what string) {
		t.Helper()
		if b := mustBrowser(t, s, "s"); b.Key() != first.Key() || b.Identity() != "a" {
			t.Errorf("%s: the session has another browser", what)
		}
		if left := h.rt.Remains(); len(left) != 1 {
			t.Errorf("%s: running %v", what, left)
		}
	}
	if _, err := s.CreateIdentity(ctx, user, "new"); err != nil {
		t.Fatal(err)
	}
	for what, ref := range map[string]string{"unknown": "nobody", "not ready": "new"} {
		if _, err := s.UseIdentity(ctx, agent, "s", ref); err == nil {
			t.Errorf("%s: no error", what)
		}
		intact(what)
	}

	trees := len(h.rt.Trees())
	h.rt.Change(func() {
		h.rt.FailStart = func(req fleet.StartRequest) error { return errors.New("no display for " + req.Profile) }
	})
	_, err := s.UseIdentity(ctx, agent, "s", "b")
	wantCode(t, "failed start", err, fault.BrowserStartFailed)
	h.rt.Change(func() { h.rt.FailStart = nil })
	intact("failed start")
	if n := len(h.rt.Trees()); n != trees {
		t.Errorf("a failed switch left %d trees", n-trees)
	}

	h.rt.Change(func() {
		h.rt.FailTree = func(op, _ string) error {
			if op == "clone" {
				return fault.New(fault.NoSpace, "clone profile", "Free space and try again", "no space left on device")
			}
			return nil
		}
	})
	_, err = s.UseIdentity(ctx, agent, "s", "b")
	wantCode(t, "full disk", err, fault.NoSpace)
	h.rt.Change(func() { h.rt.FailTree = nil })
	intact("full disk")

	if v := s.use("s", "B"); v.IdentityID != bID || v.State != fleet.Controllable {
		t.Errorf("switched: %+v", v)
	}
	if b := mustBrowser(t, s, "s"); b.Identity() != "b" || b.Key() == first.Key() {
		t.Error("the browser is not that of the new Identity")
	}
	if len(h.rt.Remains()) != 1 {
		t.Errorf("running after a switch: %v", h.rt.Remains())
	}
	// Back again, the session gets its own Profile, also if another session
	// could have it.
	s.use("other", "a")
	if s.profileOf("other") != profileA {
		t.Error("a free Profile was not used again")
	}
	if _, err := s.StopSession(ctx, user, "other"); err != nil {
		t.Fatal(err)
	}
	s.use("s", "a")
	if s.profileOf("s") == profileA {
		t.Error("a bound Profile was given away")
	}
	own := s.profileOf("s")
	s.use("s", "b")
	s.use("s", "a")
	if s.profileOf("s") != own {
		t.Error("the session did not get its Profile back")
	}
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

// TestSwitchFromStuck protects the user whose old browser cannot be stopped:
// the switch fails as a whole; and once it can, the switch is the way out.
func TestSwitchFromStuck(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.saved("b")
	s.use("s", "a")
	stuck, own := mustBrowser(t, s, "s").InstanceOf(), s.profileOf("s")
	h.rt.Change(func() {
		h.rt.FailStop = func(instance string) error {
			if instance == stuck {
				return fault.New(fault.BrowserStopUnproven, "stop browser", "Look", "its cgroup is populated")
			}
			return nil
		}
	})
	_, err := s.UseIdentity(t.Context(), agent, "s", "b")
	wantCode(t, "switch", err, fault.BrowserStopUnproven)
	v, err := s.Session(t.Context(), "s")
	if err != nil || v.IdentityName != "a" || v.State != fleet.Broken || v.Problem == nil {
		t.Errorf("after the failed switch: %+v %v", v, err)
	}
	if left := h.rt.Remains(); len(left) != 1 || left[0] != stuck {
		t.Errorf("running: %v", left)
	}
	_, err = s.Browser(t.Context(), "s")
	wantCode(t, "use of a BROKEN browser", err, fault.BrowserNotControllable)
	if hint := fault.HintOf(err); !strings.Contains(hint, ": abfleet recover s") {
		t.Errorf("use of a BROKEN browser: hint %q", hint)
	}
	if _, err := s.UseIdentity(t.Context(), agent, "other", "a"); err != nil {
		t.Fatal(err)
	}
	if s.profileOf("other") == s.profileOf("s") {
		t.Error("a BROKEN Profile was given away")
	}

	h.rt.Change(func() { h.rt.FailStop = nil })
	// An ordinary stop cleans it, does not make it READY, and says so.
	_, err = s.StopSession(t.Context(), user, "s")
	wantCode(t, "stop of a BROKEN browser", err, fault.BrowserNotControllable)
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Broken {
		t.Errorf("after the stop: %+v %v", v, err)
	}
	if len(h.rt.Remains()) != 1 {
		t.Errorf("running: %v", h.rt.Remains())
	}
	if v := s.use("s", "b"); v.State != fleet.Controllable {
		t.Errorf("switch: %+v", v)
	}
	// An agent's switch recovers nothing, and neither does its switch back.
	if v := s.use("s", "a"); v.State != fleet.Controllable {
		t.Errorf("switch back: %+v", v)
	}
	if s.profileOf("s") == own || slices.Contains(s.types(), audit.RuntimeRecovered) {
		t.Error("an agent recovered a BROKEN Profile")
	}
	// A person's selection does.
	s.use("s", "b")
	if _, err := s.UseIdentity(t.Context(), user, "third", "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.UseIdentity(t.Context(), user, "s", "a"); err != nil {
		t.Fatal(err)
	}
	if s.profileOf("s") != own && s.profileOf("third") != own || !slices.Contains(s.types(), audit.RuntimeRecovered) {
		t.Error("a person did not get the BROKEN Profile back, or the audit trail is silent about it")
	}
}

// TestSwitchFromUnfinished protects the disk: a Profile whose browser never
// started goes when its session switches away.
func TestSwitchFromUnfinished(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.saved("b")
	h.rt.FailStart = func(fleet.StartRequest) error { return errors.New("no start") }
	_, err := s.UseIdentity(t.Context(), agent, "s", "a")
	wantCode(t, "first use", err, fault.BrowserStartFailed)
	h.rt.FailStart = nil
	s.use("s", "b")
	if left := fleet.Settled(s.store); len(left) > 0 {
		t.Error(left)
	}
}

// TestPersonSwitchesFromStuck protects the Profile of a browser that could not be
// stopped: the switch of a person, once it works, returns it to allocation.
func TestPersonSwitchesFromStuck(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.saved("b")
	s.use("s", "a")
	own := s.profileOf("s")
	s.makeBroken("s")
	if _, err := s.UseIdentity(t.Context(), user, "s", "b"); err != nil {
		t.Fatal(err)
	}
	s.use("other", "a")
	if s.profileOf("other") != own {
		t.Error("the Profile did not return to allocation")
	}
}

// TestReplacementStaysBroken protects the login in a Profile whose browser could
// be neither started for a switch nor cleaned up: no session has it, so that the
// person's next selection of its Identity brings it back once nothing is left of
// it.
func TestReplacementStaysBroken(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.saved("b")
	s.use("s", "a")
	s.use("s", "b")
	own := s.profileOf("s")
	s.use("s", "a")
	fail := func(with func(string) error) {
		h.rt.Change(func() {
			h.rt.FailStop = with
			h.rt.FailStart = nil
			if with != nil {
				h.rt.FailStart = func(req fleet.StartRequest) error { return with(req.Instance) }
			}
		})
	}
	bound := mustBrowser(t, s, "s").InstanceOf()
	fail(func(instance string) error {
		if instance == bound {
			return nil
		}
		return errors.New("populated")
	})
	if _, err := s.UseIdentity(t.Context(), user, "s", "b"); err == nil {
		t.Fatal("it switched")
	}
	use := func() string {
		t.Helper()
		if _, err := s.UseIdentity(t.Context(), user, "t", "b"); err != nil {
			t.Fatal(err)
		}
		return s.profileOf("t")
	}
	fail(nil)
	if use() == own {
		t.Error("a Profile was allocated on which something may run")
	}
	s.end()
	s = h.start()
	defer s.end()
	s.must(s.Reconcile(t.Context()))
	s.use("by an agent", "b")
	if s.profileOf("by an agent") == own {
		t.Error("an agent got a BROKEN Profile")
	}
	if _, err := s.UseIdentity(t.Context(), user, "s", "b"); err != nil || s.profileOf("s") != own {
		t.Errorf("the person did not get it back: %v", err)
	}
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

// TestUndecided protects sessions from a service manager that cannot be asked,
// as while the host shuts down: what could not be found out is no fault of the
// browser, and the next use goes on from what is true then.
func TestUndecided(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	h.rt.Change(func() {
		h.rt.FailStop = func(string) error {
			return fmt.Errorf("%w: connection closed", fleet.ErrUndecided)
		}
	})
	if _, err := s.StopSession(t.Context(), user, "s"); err == nil {
		t.Error("a stop that proved nothing succeeded")
	}
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State == fleet.Broken {
		t.Errorf("after it: %+v %v", v, err)
	}
	h.rt.Change(func() { h.rt.FailStop = nil })
	if v, err := s.UseIdentity(t.Context(), agent, "s", "a"); err != nil || v.State != fleet.Controllable {
		t.Errorf("the next use: %+v %v", v, err)
	}
}

// TestStartFailure protects a Profile from the environment: a failed start
// with a proven cleanup leaves it usable and bound; one without is BROKEN, and
// says so.
func TestStartFailure(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	ctx := t.Context()
	s.saved("a")
	for _, c := range []struct {
		cause error
		code  fault.Code
	}{
		{errors.New("chromium: not ready"), fault.BrowserStartFailed},
		{fault.New(fault.ProgramMissing, "start session browser", "Install chromium", "there is no %s/chromium", h.cfg.RuntimeDir), fault.ProgramMissing},
		{fault.New(fault.Timeout, "start session browser", "Wait", "not ready within 45s"), fault.BrowserStartFailed},
	} {
		h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return c.cause } })
		_, err := s.UseIdentity(ctx, agent, "s", "a")
		wantCode(t, "start", err, c.code)
		if strings.Contains(err.Error(), h.cfg.RuntimeDir) {
			t.Errorf("the error tells a path: %v", err)
		}
		v, verr := s.Session(ctx, "s")
		if verr != nil || v.State != fleet.Stopped || v.Wanted != fleet.WantedRunning || v.Problem == nil || v.Problem.Code != c.code {
			t.Errorf("after a failed start: %+v %v", v, verr)
		}
		if left := h.rt.Remains(); len(left) != 0 {
			t.Errorf("left running: %v", left)
		}
	}
	h.rt.Change(func() { h.rt.FailStart = nil })
	s.use("s", "a")
	if got, _ := h.rt.Get(s.profileOf("s"), "cookie"); got != "login of a" {
		t.Errorf("after failed starts the cookie is %q", got)
	}
	if v, _ := s.Session(ctx, "s"); v.Problem != nil {
		t.Errorf("a running browser has a problem: %+v", v.Problem)
	}

	// The Runtime's own cleanup is not proven, a second one is.
	stops := 0
	h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return errors.New("not ready") } })
	h.rt.Change(func() {
		h.rt.FailStop = func(string) error {
			if stops++; stops == 1 {
				return errors.New("populated")
			}
			return nil
		}
	})
	_, err := s.UseIdentity(ctx, agent, "r", "a")
	wantCode(t, "cleaned up late", err, fault.BrowserStartFailed)
	if v, err := s.Session(ctx, "r"); err != nil || v.State != fleet.Stopped {
		t.Errorf("cleaned up late: %+v %v", v, err)
	}

	// Unconfirmed.
	h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return errors.New("not ready") } })
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return errors.New("populated") } })
	_, err = s.UseIdentity(ctx, agent, "t", "a")
	wantCode(t, "unconfirmed", err, fault.BrowserStartFailed)
	h.rt.Change(func() { h.rt.FailStart, h.rt.FailStop = nil, nil })
	if v, err := s.Session(ctx, "t"); err != nil || v.State != fleet.Broken {
		t.Errorf("unconfirmed: %+v %v", v, err)
	}
	if running, quarantined := s.Counts(); running != 2 || quarantined != 1 {
		t.Errorf("counts: %d %d", running, quarantined)
	}
	_, err = s.UseIdentity(ctx, agent, "t", "a")
	wantCode(t, "use of BROKEN", err, fault.BrowserNotControllable)
}

// TestLoginRecovery protects the person whose login browser is BROKEN: their
// next start of it cleans up first. An agent's does not.
func TestLoginRecovery(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	if _, err := s.CreateIdentity(t.Context(), user, "a"); err != nil {
		t.Fatal(err)
	}
	h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { return errors.New("not ready") } })
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return errors.New("populated") } })
	_, err := s.StartLogin(t.Context(), user, "a", "")
	wantCode(t, "start", err, fault.BrowserStartFailed)
	h.rt.Change(func() { h.rt.FailStart = nil })
	_, err = s.StartLogin(t.Context(), user, "a", "")
	wantCode(t, "start while stuck", err, fault.BrowserStopUnproven)
	h.rt.Change(func() { h.rt.FailStop = nil })
	_, err = s.StartLogin(t.Context(), agent, "a", "")
	wantCode(t, "start by an agent", err, fault.BrowserNotControllable)
	if v, err := s.StartLogin(t.Context(), operator, "a", ""); err != nil || v.Login.State != fleet.Controllable {
		t.Errorf("start by a person: %+v %v", v, err)
	}
}

// TestLoginReconstruction protects the login of an Identity whose login browser an
// ordinary cleanup cannot prove gone, however it is kept: as BROKEN, quarantined,
// or quarantined in memory. Only a person who starts a login recovers it.
func TestLoginReconstruction(t *testing.T) {
	stuck := func(s *service) {
		s.h.rt.Change(func() { s.h.rt.FailStop = func(string) error { return errors.New("populated") } })
	}
	for name, keep := range map[string]func(h *host, s *service) *service{
		"BROKEN": func(h *host, s *service) *service {
			stuck(s)
			if _, err := s.StopLogin(t.Context(), user, "a"); err == nil {
				t.Fatal("it stopped")
			}
			return s
		},
		"quarantined": func(h *host, s *service) *service {
			s.end()
			s = h.start()
			stuck(s)
			h.rt.Change(func() { h.rt.FailObserve = func(string) error { return errors.New("no answer") } })
			s.must(s.Reconcile(t.Context()))
			return s
		},
		"quarantined in memory": func(h *host, s *service) *service {
			stuck(s)
			n := 0
			fleet.FailStore(s.Fleet, func() error {
				if n++; n > 1 {
					return errors.New("disk")
				}
				return nil
			})
			if _, err := s.StopLogin(t.Context(), user, "a"); err == nil {
				t.Fatal("it stopped")
			}
			fleet.FailStore(s.Fleet, nil)
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newTestHost(t)
			s := h.start()
			_, err := s.CreateIdentity(t.Context(), user, "a")
			s.must(err)
			_, err = s.StartLogin(t.Context(), user, "a", "")
			s.must(err)
			s = keep(h, s)
			defer s.end()
			if id, err := s.Identity(t.Context(), "a"); err != nil || !strings.EqualFold(string(id.Login.State), strings.Fields(name)[0]) {
				t.Fatalf("it is %s, %v", id.Login.State, err)
			}
			if _, err := s.StartLogin(t.Context(), user, "a", ""); err == nil {
				t.Error("a login started beside one that is not proven gone")
			}
			h.rt.Change(func() { h.rt.Reconstruct = func(string) bool { return true } })
			if _, err := s.StartLogin(t.Context(), agent, "a", ""); err == nil || len(h.rt.Remains()) != 1 {
				t.Errorf("an agent recovered it: %v, running %v", err, h.rt.Remains())
			}
			h.rt.Change(func() {
				h.rt.FailStart = func(fleet.StartRequest) error { h.rt.FailObserve, h.rt.FailStop = nil, nil; return nil }
			})
			if v, err := s.StartLogin(t.Context(), user, "a", ""); err != nil || v.Login.State != fleet.Controllable || v.Login.Problem != nil {
				t.Errorf("start by a person: %+v %v", v, err)
			}
			if v := h.rt.Violations(); len(v) > 0 {
				t.Error(v)
			}
		})
	}
}

// TestDeath protects the agent from a dead browser: its next use starts it
// again with its Profile, and the audit trail says how it ended.
func TestDeath(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	b := mustBrowser(t, s, "s")
	if err := h.rt.Put(s.profileOf("s"), "cookie", "mine"); err != nil {
		t.Fatal(err)
	}
	h.rt.KillBrowsers(s.profileOf("s"))
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Stopped || v.LastExit == nil || v.LastExit.Signal != "SIGKILL" {
		t.Errorf("status of a dead browser: %+v %v", v, err)
	}
	if _, err := s.RunningBrowser(t.Context(), "s"); fault.CodeOf(err) != fault.BrowserStopped {
		t.Errorf("looking at a dead browser: %v", err)
	}
	if b2 := mustBrowser(t, s, "s"); b2.Key() == b.Key() {
		t.Error("the dead browser was handed out")
	}
	if got, _ := h.rt.Get(s.profileOf("s"), "cookie"); got != "mine" {
		t.Errorf("after a restart the cookie is %q", got)
	}
	events, err := s.Events(t.Context(), 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(events, func(e audit.Event) bool { return e.Type == audit.SessionEnded })
	if i < 0 || !strings.Contains(events[i].Summary, "SIGKILL") || events[i].Session != "s" {
		t.Errorf("events: %+v", events)
	}
}

// TestSlowObservation protects a healthy browser on a busy machine: one look
// that proves nothing does not end it, and looks that fail never do.
func TestSlowObservation(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	b := mustBrowser(t, s, "s")
	var looks atomic.Int32
	h.rt.Change(func() {
		h.rt.FailObserve = func(string) error {
			if looks.Add(1) == 1 {
				return errors.New("deadline exceeded")
			}
			return nil
		}
	})
	if again := mustBrowser(t, s, "s"); again.Key() != b.Key() {
		t.Error("one failed look ended the browser")
	}
	h.rt.Change(func() { h.rt.FailObserve = func(string) error { return errors.New("no bus") } })
	_, err := s.Browser(t.Context(), "s")
	wantCode(t, "no bus", err, fault.BrowserNotControllable)
	h.rt.Change(func() { h.rt.FailObserve = nil })
	if again := mustBrowser(t, s, "s"); again.Key() != b.Key() {
		t.Error("failed looks ended the browser")
	}
}

// TestConcurrency protects sessions from each other and from themselves.
func TestConcurrency(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.saved("b")
	var wg sync.WaitGroup
	for i := range 8 {
		for _, ref := range []string{"a", "b", "a"} {
			wg.Go(func() {
				if _, err := s.UseIdentity(t.Context(), agent, fmt.Sprint("s", i), ref); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				if _, err := s.Browser(t.Context(), fmt.Sprint("s", i)); err != nil && fault.CodeOf(err) != fault.IdentityNotSelected {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if n := len(h.rt.Remains()); n != 8 {
		t.Errorf("%d browsers for 8 sessions", n)
	}
	if wrong := append(h.rt.Violations(), fleet.StoreInvariants(s.store)...); len(wrong) > 0 {
		t.Error(wrong)
	}
}

// TestAdmission protects the machine: no more Stacks start at once than are
// admitted, here two, and one that fails gives its place back.
func TestAdmission(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	entered, release := make(chan struct{}), make(chan struct{})
	h.rt.Change(func() {
		h.rt.FailStart = func(fleet.StartRequest) error {
			entered <- struct{}{}
			<-release
			return errors.New("no display")
		}
	})
	done := make(chan error, 3)
	for i := range 3 {
		go func() {
			_, err := s.UseIdentity(t.Context(), agent, fmt.Sprint("s", i), "a")
			done <- err
		}()
	}
	<-entered
	if !fleet.MayStart(s.Fleet) {
		t.Log("the second start was admitted already")
	}
	<-entered
	if fleet.MayStart(s.Fleet) {
		t.Error("two starts are under way and a third is admitted")
	}
	release <- struct{}{}
	<-entered
	close(release)
	for range 3 {
		wantCode(t, "start", <-done, fault.BrowserStartFailed)
	}
	if !fleet.MayStart(s.Fleet) {
		t.Error("failed starts keep their places")
	}
}

// TestCancelledCaller protects the 200 ms in which a cancelled call returns,
// and the work it began, which is brought to an end.
func TestCancelledCaller(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	entered, release := make(chan struct{}), make(chan struct{})
	h.rt.Change(func() {
		h.rt.FailStart = func(fleet.StartRequest) error {
			close(entered)
			<-release
			return nil
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := s.UseIdentity(ctx, agent, "s", "a")
		done <- err
	}()
	<-entered
	cancel()
	select {
	case err := <-done:
		wantCode(t, "cancelled", err, fault.Canceled)
	case <-time.After(10 * time.Second):
		t.Fatal("a cancelled call does not return")
	}
	// One that waits for the same session and gives up changes nothing.
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := s.StopSession(short, user, "s")
	wantCode(t, "impatient", err, fault.Timeout)
	close(release)
	h.rt.Change(func() { h.rt.FailStart = nil })
	if v := s.use("s", "a"); v.State != fleet.Controllable {
		t.Errorf("the start was not brought to its end: %+v", v)
	}
}

// TestClose protects what is under way when the service stops: starts are
// broken off and cleaned up, and nothing new begins.
func TestClose(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	s.saved("a")
	s.use("kept", "a")
	entered := make(chan struct{})
	var once sync.Once
	gate := make(chan struct{})
	h.rt.Step = func(point string) error {
		if point == "before record of browser" {
			once.Do(func() { close(entered) })
			<-gate
		}
		return nil
	}
	done := make(chan error)
	go func() {
		_, err := s.UseIdentity(context.Background(), agent, "s", "a")
		done <- err
	}()
	<-entered
	s.Refuse()
	_, err := s.Browser(t.Context(), "kept")
	wantCode(t, "use while closing", err, fault.ServiceUnavailable)
	close(gate)
	if err := <-done; err == nil {
		t.Error("the start went on")
	}
	s.end()
	if left := h.rt.Remains(); len(left) != 1 {
		t.Errorf("running after close: %v", left)
	}
	s = h.start()
	defer s.end()
	if err := s.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, session := range []string{"kept", "s"} {
		if v, err := s.Session(t.Context(), session); err != nil || v.State != fleet.Controllable {
			t.Errorf("%s after the restart: %+v %v", session, v, err)
		}
	}
}

// TestStoreFailure protects a browser whose state cannot be written: it is not
// exposed, it is ended, and the next use starts it properly.
func TestStoreFailure(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	full := fault.New(fault.NoSpace, "write fleet state", "Free space", "no space left on device")
	for commit := 1; commit < 12; commit++ {
		session := fmt.Sprint("s", commit)
		n := 0
		fleet.FailStore(s.Fleet, func() error {
			if n++; n >= commit {
				return full
			}
			return nil
		})
		_, err := s.UseIdentity(t.Context(), agent, session, "a")
		done := err == nil
		if !done {
			wantCode(t, session, err, fault.NoSpace)
			if p := fleet.ProfileOf(s.store, session); p != "" && slices.ContainsFunc(h.rt.Running(), func(dir string) bool { return strings.HasSuffix(dir, p) }) {
				t.Errorf("%s: commit %d: it runs and its state is not stored", session, commit)
			}
			if _, err := s.Browser(t.Context(), session); err == nil {
				t.Errorf("%s: exposed while its state cannot be written", session)
			}
		}
		fleet.FailStore(s.Fleet, nil)
		if b, err := s.Browser(t.Context(), session); err == nil {
			if b.Running(t.Context()) != nil {
				t.Errorf("%s: handed out dead", session)
			}
		} else if fault.CodeOf(err) != fault.IdentityNotSelected {
			t.Errorf("%s: after the disk is free: %v", session, err)
		}
		s.use(session, "a")
		if done {
			if commit < 4 {
				t.Errorf("a use takes %d commits only", commit)
			}
			break
		}
	}
	if wrong := append(h.rt.Violations(), fleet.StoreInvariants(s.store)...); len(wrong) > 0 {
		t.Error(wrong)
	}
}

// TestMemoryQuarantine protects everybody from a browser that runs, cannot be
// stopped and cannot be written down: it is exposed to nobody until both work
// again.
func TestMemoryQuarantine(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	s.saved("a")
	s.use("s", "a")
	if _, err := s.StopSession(t.Context(), user, "s"); err != nil {
		t.Fatal(err)
	}
	running := false
	h.rt.Change(func() { h.rt.FailStart = func(fleet.StartRequest) error { running = true; return nil } })
	fleet.FailStore(s.Fleet, func() error {
		if running {
			return fault.New(fault.NoSpace, "write fleet state", "Free space", "no space left on device")
		}
		return nil
	})
	h.rt.Change(func() { h.rt.FailStop = func(string) error { return errors.New("no bus") } })
	if _, err := s.Browser(t.Context(), "s"); err == nil {
		t.Error("handed out though its state cannot be stored")
	}
	fleet.FailStore(s.Fleet, nil)
	if len(h.rt.Running()) != 1 {
		t.Fatal("the case needs a browser that runs")
	}
	if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Quarantined {
		t.Errorf("%+v %v", v, err)
	}
	if _, err := s.Browser(t.Context(), "s"); fault.CodeOf(err) != fault.BrowserNotControllable {
		t.Errorf("use: %v", err)
	}
	if _, quarantined := s.Counts(); quarantined != 1 {
		t.Errorf("%d quarantined", quarantined)
	}
	h.rt.Change(func() { h.rt.FailStop, h.rt.FailStart = nil, nil })
	mustBrowser(t, s, "s")
	if _, quarantined := s.Counts(); quarantined != 0 || len(h.rt.Running()) != 1 {
		t.Errorf("%d quarantined, running %v", quarantined, h.rt.Running())
	}
	if v := h.rt.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

// TestObservationThatCannotBeStored protects everybody from a browser that a new
// run can prove and not record: it is ended, as far as that is proven, and
// never handed out on the old record.
func TestObservationThatCannotBeStored(t *testing.T) {
	for _, stops := range []bool{true, false} {
		h := newTestHost(t)
		s := h.start()
		s.saved("a")
		s.use("s", "a")
		b := mustBrowser(t, s, "s")
		s.end()
		s = h.start()
		fleet.FailStore(s.Fleet, func() error {
			return fault.New(fault.NoSpace, "write fleet state", "Free space", "no space left on device")
		})
		if !stops {
			h.rt.Change(func() { h.rt.FailStop = func(string) error { return errors.New("populated") } })
		}
		if err := s.Reconcile(t.Context()); err == nil {
			t.Error("an observation that could not be stored is no error")
		}
		if left := len(h.rt.Remains()); (left == 0) != stops {
			t.Errorf("it can be stopped: %v, %d are left running", stops, left)
		}
		if v, err := s.Session(t.Context(), "s"); err != nil || v.State != fleet.Quarantined || v.IdentityName != "a" {
			t.Errorf("it can be stopped: %v, the session is %+v %v", stops, v, err)
		}
		if _, err := s.Browser(t.Context(), "s"); err == nil {
			t.Error("it is handed out")
		}
		fleet.FailStore(s.Fleet, nil)
		h.rt.Change(func() { h.rt.FailStop = nil })
		if again := mustBrowser(t, s, "s"); again.Key() == b.Key() {
			t.Error("what could not be recorded was kept")
		}
		if wrong := append(h.rt.Violations(), fleet.StoreInvariants(s.store)...); len(wrong) > 0 {
			t.Error(wrong)
		}
		s.end()
	}
}

// TestNothingLeaks protects the inside of the fleet: no view, no error and no
// public event names it, whatever went wrong.
func TestNothingLeaks(t *testing.T) {
	h := newTestHost(t)
	s := h.start()
	defer s.end()
	ctx := t.Context()
	s.saved("a")
	s.saved("b")
	var out bytes.Buffer
	say := func(v any, err error) {
		if err != nil {
			fmt.Fprintln(&out, err, fault.HintOf(err))
		}
		if err := json.NewEncoder(&out).Encode(v); err != nil {
			t.Fatal(err)
		}
	}
	use := func(session, ref string) {
		v, err := s.UseIdentity(ctx, agent, session, ref)
		say(v, err)
	}
	use("s", "a")
	b := mustBrowser(t, s, "s")
	nasty := func(instance string) error {
		return fault.New(fault.BrowserStopUnproven, "stop browser", "look at `systemctl --user status abfleet-"+instance+".slice`",
			"unit abfleet-%s-chromium-1.scope on %s at 127.0.0.1:9222, [::]:5900, [::1]:5901 and 0.0.0.0:5902, %s/%s/rfb.sock", instance, s.profileOf("s"), h.cfg.RuntimeDir, instance)
	}
	h.rt.Change(func() { h.rt.FailStart = func(req fleet.StartRequest) error { return nasty(req.Instance) } })
	use("s", "b")
	use("t", "b")
	h.rt.Change(func() { h.rt.FailStop = nasty })
	use("u", "b")
	stopped, err := s.StopSession(ctx, user, "s")
	say(stopped, err)
	if full := fleet.Unredacted(err); !strings.Contains(full.Error(), ".scope") || fault.HintOf(full) == "" || fault.CodeOf(full) != fault.CodeOf(err) {
		t.Errorf("the operator reads %q with hint %q", full, fault.HintOf(full))
	}
	h.rt.Change(func() { h.rt.FailObserve = nasty })
	_, err = s.Browser(ctx, "s")
	say(nil, err)
	say(nil, b.Running(ctx))
	say(s.StartLogin(ctx, user, "a", ""))
	say(s.Identities(ctx))
	say(s.Sessions(ctx))
	events, err := s.Events(ctx, 0, 1000)
	for _, e := range events {
		say(e.Public(), err)
	}
	text := out.String()
	for _, secret := range []string{h.cfg.Home, h.cfg.RuntimeDir, b.InstanceOf(), "profile-", ".slice", ".scope", ":9222", ":590"} {
		if i := strings.Index(text, secret); i >= 0 {
			t.Errorf("%q is told: ...%s...", secret, text[max(0, i-150):min(len(text), i+80)])
		}
	}
	if !strings.Contains(text, "(internal)") {
		t.Error("nothing was left out, so nothing was tried")
	}
	if !strings.Contains(s.log.String(), ".scope") {
		t.Error("the log does not have the full text")
	}
}

func mustBrowser(t *testing.T, s *service, session string) *fleet.Browser {
	t.Helper()
	b, err := s.Browser(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if !s.proven(b.EvidenceOf()) {
		t.Error("a Browser was handed out that this run has no proof of")
	}
	return b
}
