package stack

import (
	"crypto/des"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
)

// wrapper makes a program that is called in the place of another.
func (w *world) wrapper(script string) string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "wrapper")
	if err := os.WriteFile(path, []byte("#!/bin/bash\n"+script), 0o700); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// refused starts a browser that must be refused with the code, and cleaned up.
func (w *world) refused(name, instance string, code fault.Code) {
	w.t.Helper()
	dir := w.cfg.TemplateDir("identity-1")
	if err := w.CreateProfile(w.t.Context(), dir); err != nil {
		w.t.Fatal(err)
	}
	ev, err := w.Start(w.t.Context(), fleet.StartRequest{Instance: instance, Generation: 1, Profile: dir})
	var se *fleet.StartError
	if !errors.As(err, &se) || !se.Confirmed || fault.CodeOf(err) != code || fault.HintOf(err) == "" {
		w.t.Errorf("%s: %v (code %s, hint %q), want a confirmed %s", name, err, fault.CodeOf(err), fault.HintOf(err), code)
	}
	if obs, err := w.Observe(w.t.Context(), ev); err != nil || obs.State != fleet.Stopped {
		w.t.Errorf("%s: observed %+v %v", name, obs, err)
	}
	if out := w.listed(instance); out != "" {
		w.t.Errorf("%s: left running: %s", name, out)
	}
}

// listed is what systemd has of an instance.
func (w *world) listed(instance string) string {
	w.t.Helper()
	out, err := exec.Command("systemctl", "--user", "list-units", "--no-legend", "--plain", w.cfg.UnitPrefix+"-"+instance+"-*").Output()
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// args is the command line of a process.
func (w *world) args(pid int) []string {
	w.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Split(string(data), "\x00")
}

// TestVNCServerListensOnNothing protects the screen from the network: an x11vnc
// that listens on TCP, as it does on all interfaces without one of its options,
// never becomes part of a Stack.
func TestVNCServerListensOnNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cfg.Display = config.DisplayXvfb
	w.cfg.X11vnc = w.wrapper(`
for a; do shift; case $a in -noipv6|-no6) ;; -rfbportv6) skip=1 ;; *) [ "$skip" ] && skip= || set -- "$@" "$a" ;; esac; done
exec /usr/bin/x11vnc "$@"
`)
	w.refused("x11vnc on [::]", "vaaaaaaaaa", fault.EndpointUnsafe)
	w.cfg.X11vnc = w.wrapper(`exec /usr/bin/x11vnc "$@" -rfbport 5971`)
	w.refused("x11vnc on a loopback port", "vbbbbbbbbb", fault.EndpointUnsafe)
	if conn, err := net.DialTimeout("tcp", "127.0.0.1:5971", time.Second); err == nil {
		conn.Close()
		t.Error("the refused x11vnc still listens")
	}
}

// TestVNCServerEnds protects the browser from its viewer's server, whose end it
// outlives: nobody can see it then, so that it is not controllable, and its stop
// is as clean as ever.
func TestVNCServerEnds(t *testing.T) {
	w := newWorld(t)
	w.cfg.Display = config.DisplayXvfb
	for i, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		ev := w.start(fmt.Sprintf("vcccccccc%d", i), w.cfg.TemplateDir("identity-1"))
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(e.VNC.Leader.PID, sig); err != nil {
			t.Fatal(err)
		}
		if sig == syscall.SIGKILL {
			if err := w.Watch(t.Context(), ev); err != nil {
				t.Fatal(err)
			}
			if v, err := w.OpenViewer(t.Context(), ev); err == nil {
				v.Conn.Close()
				t.Error("a display without its VNC server can be viewed")
			}
		}
		obs, err := w.Observe(t.Context(), ev)
		if err != nil || obs.State != fleet.Unverified {
			t.Errorf("after %v of the VNC server: %+v %v", sig, obs, err)
		}
		w.setCookie(ev, sig.String())
		report, err := w.Stop(t.Context(), ev, "test")
		if err != nil || !report.Clean {
			t.Fatalf("stop after %v of the VNC server: %+v %v", sig, report, err)
		}
		if shm, err := os.ReadFile("/proc/sysvipc/shm"); err != nil || strings.Count(string(shm), "\n") > 1 {
			t.Errorf("shared memory is left after %v: %v\n%s", sig, err, shm)
		}
	}
}

// TestXvfbIsKilled protects the display number, which a killed server leaves
// looking taken, and the service from what goes down with it.
func TestXvfbIsKilled(t *testing.T) {
	w := newWorld(t)
	w.cfg.Display = config.DisplayXvfb
	ev := w.start("vjjjjjjjjj", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(e.Display.Leader.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := w.Watch(t.Context(), ev); err != nil {
		t.Fatal(err)
	}
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State == fleet.Controllable {
		t.Errorf("after the end of the X server: %+v %v", obs, err)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
	if role.DisplayTaken(e.Display.Display) {
		t.Errorf("display %d still looks taken", e.Display.Display)
	}
}

// TestRolesOfEachDisplay protects what an operator and systemd see of a Stack: a
// scope for each role, in an order in which systemd stops the browser first,
// whatever it stops.
func TestRolesOfEachDisplay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for display, roles := range map[string][]string{
		config.DisplayXvnc: {role.NameDisplay, role.NameChromium},
		config.DisplayXvfb: {role.NameDisplay, role.NameVNC, role.NameChromium},
		config.DisplayNone: {role.NameChromium},
	} {
		w.cfg.Display = display
		ev := w.start("vdddddddd"+display[1:2], w.cfg.TemplateDir("identity-"+display))
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, g := range e.generations() {
			got = append(got, g.Role)
			if want := fmt.Sprintf("%s-%s-%s-1.scope", w.cfg.UnitPrefix, e.Instance, g.Role); g.Unit != want {
				t.Errorf("%s: %s runs in %s", display, g.Role, g.Unit)
			}
		}
		if !slices.Equal(got, roles) || strings.Count(w.listed(e.Instance), ".scope") != len(roles) {
			t.Errorf("%s has the roles %q and the units\n%s\nwant %q", display, got, w.listed(e.Instance), roles)
		}
		stop := e.Chromium.Unit
		if e.Display != nil {
			stop = e.Display.Unit
			w.see(ev)
		}
		w.setCookie(ev, display)
		if out, err := exec.Command("systemctl", "--user", "stop", stop).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		ev = w.restart(ev, 2)
		if x := w.lastExit; x == nil || !x.Clean || x.Trigger != fleet.TriggerOperator {
			t.Errorf("%s: a stop of %s ended the browser with %+v", display, stop, x)
		}
		if got := w.cookie(ev); got != display {
			t.Errorf("%s: the cookie is %q after it", display, got)
		}
		if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
			t.Fatal(err)
		}
	}
}

// see opens the display with its password, as a viewer does.
func (w *world) see(ev fleet.Evidence) {
	w.t.Helper()
	e, err := decode(ev)
	if err != nil {
		w.t.Fatal(err)
	}
	if fi, err := os.Stat(w.files(e.Instance).rfb()); err != nil || fi.Mode().Perm() != 0o600 {
		w.t.Errorf("the VNC socket: %v %v", fi.Mode(), err)
	}
	v, err := w.OpenViewer(w.t.Context(), ev)
	if err != nil {
		w.t.Fatal(err)
	}
	defer v.Conn.Close()
	v.Conn.SetDeadline(time.Now().Add(30 * time.Second))
	take := func(n int) []byte {
		w.t.Helper()
		b := make([]byte, n)
		if _, err := io.ReadFull(v.Conn, b); err != nil {
			w.t.Fatalf("RFB handshake: %v", err)
		}
		return b
	}
	const vncAuth = 2
	banner := take(12)
	v.Conn.Write(banner)
	if types := take(int(take(1)[0])); !slices.Equal(types, []byte{vncAuth}) {
		w.t.Errorf("the display offers the security types %v", types)
	}
	v.Conn.Write([]byte{vncAuth})
	challenge := take(16)
	key := make([]byte, des.BlockSize)
	copy(key, v.Password)
	for i := range key {
		key[i] = bits.Reverse8(key[i])
	}
	block, err := des.NewCipher(key)
	if err != nil {
		w.t.Fatal(err)
	}
	for half := range slices.Chunk(challenge, des.BlockSize) {
		block.Encrypt(half, half)
	}
	v.Conn.Write(challenge)
	if result := take(4); !slices.Equal(result, make([]byte, 4)) {
		w.t.Errorf("the display refuses its password: %v", result)
	}
}

// TestHeadless protects the browser without a display: it has the size that is
// configured, no X server to ask for one, and the session it had before.
func TestHeadless(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cfg.Display = config.DisplayNone
	ev := w.start("veeeeeeeee", w.cfg.TemplateDir("identity-1"))
	see := func(ev fleet.Evidence) (seen string) {
		t.Helper()
		root := w.session(ev)
		var targets struct {
			TargetInfos []struct{ TargetID, Type string }
		}
		if err := root.Call(t.Context(), "Target.getTargets", nil, &targets); err != nil {
			t.Fatal(err)
		}
		for _, info := range targets.TargetInfos {
			if info.Type != "page" {
				continue
			}
			var attached struct{ SessionID string }
			if err := root.Call(t.Context(), "Target.attachToTarget", map[string]any{"targetId": info.TargetID, "flatten": true}, &attached); err != nil {
				t.Fatal(err)
			}
			var out struct{ Result struct{ Value string } }
			expression := `[outerWidth, outerHeight, screen.width, screen.height, document.visibilityState, navigator.webdriver].join()`
			if err := root.Conn().Session(attached.SessionID).Call(t.Context(), "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &out); err != nil {
				t.Fatal(err)
			}
			return out.Result.Value
		}
		return "no page"
	}
	want := fmt.Sprintf("%[1]d,%[2]d,%[1]d,%[2]d,visible,false", w.cfg.ScreenWidth, w.cfg.ScreenHeight)
	if got := see(ev); got != want {
		t.Errorf("a page sees %s, want %s", got, want)
	}
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", e.Chromium.Browser.PID))
	if err != nil || strings.Contains(string(env), "DISPLAY=") || strings.Contains(string(env), "XAUTHORITY=") {
		t.Errorf("its environment: %q %v", env, err)
	}
	// A cookie of the session is gone with a browser that restores none.
	if err := w.session(ev).Call(t.Context(), "Storage.setCookies", map[string]any{"cookies": []map[string]any{{
		"name": "login", "value": "session", "domain": "site.example", "path": "/",
	}}}, nil); err != nil {
		t.Fatal(err)
	}
	ev = w.restart(ev, 2)
	if got := w.cookie(ev); got != "session" {
		t.Errorf("the cookie of the session is %q after a stop", got)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("journalctl", "--user", "--no-pager", "-o", "cat", "ABF_INSTANCE=veeeeeeeee").CombinedOutput()
	if err != nil || strings.Contains(string(out), "cannot keep the windows") {
		t.Errorf("its journal: %v\n%s", err, out)
	}
}

// TestDebuggingPort protects the classic transport: it answers beside the pipe on
// a loopback address that is proven the browser's, no web page may use it, and
// once the browser has ended whoever has the port is nobody's concern.
func TestDebuggingPort(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cfg.Display, w.cfg.CDP = config.DisplayNone, config.CDPPort
	ev := w.start("vfffffffff", w.cfg.TemplateDir("identity-1"))
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	address := e.Chromium.Listener
	if slices.Contains(w.args(e.Chromium.Browser.PID), "--remote-allow-origins") {
		t.Error("pages of some origins may use the port")
	}
	if file, err := proof.ReadPidfile(w.files(e.Instance).pidfile(role.NameChromium)); err != nil || file.Listener != address {
		t.Errorf("the pidfile has the listener %q, the record %q (%v)", file.Listener, address, err)
	}
	response, err := http.Get("http://" + address + "/json/version")
	if err != nil {
		t.Fatal(err)
	}
	var version struct{ WebSocketDebuggerURL string }
	if err := json.NewDecoder(response.Body).Decode(&version); err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	ws, _, err := websocket.Dial(t.Context(), version.WebSocketDebuggerURL, nil)
	if err != nil {
		t.Errorf("a program cannot use the port: %v", err)
	} else {
		ws.CloseNow()
	}
	ws, _, err = websocket.Dial(t.Context(), version.WebSocketDebuggerURL, &websocket.DialOptions{HTTPHeader: http.Header{"Origin": {"http://site.example"}}})
	if err == nil {
		ws.CloseNow()
		t.Error("a web page can use the port")
	}
	w.setCookie(ev, "pipe")
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Controllable {
		t.Errorf("observed %+v %v", obs, err)
	}

	// A record that names another's address proves nothing.
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	none, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	none.Close()
	pidfile := w.files(e.Instance).pidfile(role.NameChromium)
	for _, c := range []struct {
		listener string
		as       func(error) bool
	}{
		{other.Addr().String(), func(err error) bool { return proof.ReasonOf(err) == proof.ListenerDiffers }},
		{none.Addr().String(), func(err error) bool { return fault.Is(err, fault.EndpointUnsafe) }},
		{address, func(err error) bool { return err == nil }},
	} {
		g, forged := *e.Chromium, e
		g.Listener, forged.Chromium = c.listener, &g
		if err := proof.WritePidfile(pidfile, g); err != nil {
			t.Fatal(err)
		}
		conn, err := w.OpenCDP(t.Context(), forged.encode())
		if err == nil {
			conn.Close()
		}
		if !c.as(err) {
			t.Errorf("with a record of %s, where the browser listens on %s: %v", c.listener, address, err)
		}
	}

	if report, err := w.Stop(t.Context(), ev, "test"); err != nil || !report.Clean {
		t.Fatalf("stop: %+v %v", report, err)
	}
	again, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatalf("the port after the stop: %v", err)
	}
	defer again.Close()
	if obs, err := w.Observe(t.Context(), ev); err != nil || obs.State != fleet.Stopped {
		t.Errorf("after the stop, with a stranger on the port: %+v %v", obs, err)
	}
}

// TestDebuggingPortIsProven protects from a port that is not what it should be:
// none, or another process's.
func TestDebuggingPortIsProven(t *testing.T) {
	old := portWait
	portWait = 2 * time.Second
	t.Cleanup(func() { portWait = old })
	w := newWorld(t)
	w.cfg.Display, w.cfg.CDP = config.DisplayNone, config.CDPPort
	const without = `
for a; do shift; case $a in --remote-debugging-port=*) ;; *) set -- "$@" "$a" ;; esac; case $a in --user-data-dir=*) dir=${a#*=} ;; esac; done
`
	const run = `exec /usr/lib/chromium/chromium "$@"`
	w.cfg.Chromium = w.wrapper(without + run)
	w.refused("no port", "vggggggggg", fault.EndpointUnsafe)

	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	_, port, _ := net.SplitHostPort(foreign.Addr().String())
	w.cfg.Chromium = w.wrapper(without + `printf '%s\n/devtools/browser/x' ` + port + ` > "$dir/DevToolsActivePort"` + "\n" + run)
	w.refused("another's port", "vhhhhhhhhh", fault.EndpointUnsafe)
}

// TestEndpoints protects from roles that listen where others reach them.
func TestEndpoints(t *testing.T) {
	const mine = "127.0.0.1:40000"
	vnc, browser := proof.Generation{Role: proof.RoleVNC}, proof.Generation{Role: proof.RoleChromium, Listener: mine}
	for _, c := range []struct {
		name  string
		g     proof.Generation
		addrs []string
		good  bool
	}{
		{"a display on a loopback address", proof.Generation{Role: proof.RoleDisplay}, []string{"127.0.0.1:6100"}, false},
		{"a browser without a port on none", proof.Generation{Role: proof.RoleChromium}, nil, true},
		{"a browser without a port, on one that others reach", proof.Generation{Role: proof.RoleChromium}, []string{"0.0.0.0:9222"}, false},
		{"a VNC server on no address", vnc, nil, true},
		{"a VNC server on a loopback address", vnc, []string{"[::1]:5900"}, false},
		{"a VNC server on every address", vnc, []string{"[::]:5900"}, false},
		{"a browser on its port", browser, []string{mine}, true},
		{"a browser on its port and one that a person had it open", browser, []string{"127.0.0.1:9222", mine}, true},
		{"a browser on no port", browser, nil, false},
		{"a browser on another port", browser, []string{"127.0.0.1:40001"}, false},
		{"a browser on its port of every address", browser, []string{"0.0.0.0:40000"}, false},
		{"a browser on its port, and on one that others reach", browser, []string{mine, "192.0.2.1:40001"}, false},
	} {
		var addrs []netip.AddrPort
		for _, a := range c.addrs {
			addrs = append(addrs, netip.MustParseAddrPort(a))
		}
		if err := allowed(c.g, addrs); (err == nil) != c.good || err != nil && !fault.Is(err, fault.EndpointUnsafe) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestOldEvidence protects a service upgrade: what an older release recorded of
// a running Stack means the same to this one.
func TestOldEvidence(t *testing.T) {
	const old = `{"instance":"aaaaaaaaaa","generation":3,"key":"00112233445566778899aabbccddeeff","profile":"/p",
		"display":{"instance":"aaaaaaaaaa","role":"display","generation":3,"unit":"u","root":"/r","display":101,"sockets":["/rfb"],"leader":{"pid":9}},
		"chromium":{"instance":"aaaaaaaaaa","role":"chromium","generation":3,"unit":"v","root":"/r","display":101,"sockets":["/cdp"],"leader":{"pid":10}}}`
	e, err := decode(fleet.Evidence(old))
	if err != nil {
		t.Fatal(err)
	}
	viewer, err := e.viewer()
	if err != nil || viewer != e.Display {
		t.Errorf("the viewer is %v %v, want the display", viewer, err)
	}
	if all := e.generations(); len(all) != 2 || all[0] != e.Display || all[1] != e.Chromium || e.Chromium.Listener != "" {
		t.Errorf("its roles are %v", all)
	}
	for name, change := range map[string]func(*evidence){
		"without its display":    func(e *evidence) { e.Display = nil },
		"without its browser":    func(e *evidence) { e.Chromium = nil },
		"without its VNC server": func(e *evidence) { d := *e.Display; d.Sockets = nil; e.Display = &d },
	} {
		broken := e
		change(&broken)
		if g, err := broken.viewer(); err == nil {
			t.Errorf("a Stack %s has the viewer %v", name, g)
		}
	}
}

// TestCloseTimeout protects the logins of who has set a longer stop_timeout for a
// slow disk: the clean close itself gets what was added.
func TestCloseTimeout(t *testing.T) {
	r := &Runtime{cfg: &config.Config{StopTimeout: 20 * time.Second}}
	if got := r.closeTimeout(); got != holder.DefaultCloseTimeout {
		t.Errorf("%s with the shortest stop timeout, want %s", got, holder.DefaultCloseTimeout)
	}
	r.cfg.StopTimeout += time.Minute
	if got := r.closeTimeout(); got != holder.DefaultCloseTimeout+time.Minute {
		t.Errorf("%s with a minute more", got)
	}
	if r.closeTimeout()+holderRest > r.cfg.StopTimeout || r.holderCloseWait() >= r.cfg.StopTimeout {
		t.Error("systemd kills a browser that its holder is still closing")
	}
}
