package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/sd"
	"abfleet/tests/rig"
)

// ready is a machine with the product set up and an Identity "work" that is
// saved, without a person: for what is not about logging in.
func ready(t *testing.T, opts rig.Options) *world {
	t.Helper()
	w := boot(t, opts)
	w.setup()
	w.must("identity", "create", "work")
	w.must("identity", "login", "work", "--url", siteURL+"/form")
	w.must("identity", "save", "work")
	return w
}

// cookie sets a persistent cookie through the agent; hasCookie looks for it.
func (a *agent) cookie(value string) {
	a.w.t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.must("browser_evaluate", map[string]any{"function": fmt.Sprintf(`() => { document.cookie = "stamp=%s; max-age=86400; path=/" }`, value)})
}

func (a *agent) hasCookie(value string) {
	a.w.t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.mustContain("browser_evaluate", map[string]any{"function": "() => document.cookie"}, "stamp="+value)
}

// TestServiceRestarts protects browsers, pages, clients and viewers from
// everything that happens to the service and to systemd.
func TestServiceRestarts(t *testing.T) {
	w := ready(t, rig.Options{Name: "restarts"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.must("browser_evaluate", map[string]any{"function": "() => { window.kept = 1 }"})
	pids := w.browserPIDs()
	if len(pids) != 1 {
		t.Fatalf("%d browsers run", len(pids))
	}
	p := w.newPerson()
	p.open(w.must("view", "--session", "alpha").View.URL)
	p.live()

	b := w.bridge("alpha")
	for i, event := range []struct {
		name, script string
		replaces     bool // the service
		moves        bool // the page
	}{
		{name: "restart", script: "systemctl --user restart abfleetd.service", replaces: true},
		{name: "SIGKILL", script: "pid=$(systemctl --user show -P MainPID abfleetd.service); kill -KILL $pid; while kill -0 $pid 2>/dev/null; do :; done", replaces: true},
		{name: "restart again", script: "for i in 1 2; do systemctl --user restart --no-block abfleetd.service; done; systemctl --user restart abfleetd.service", replaces: true},
		{name: "daemon-reload", script: "systemctl --user daemon-reload"},
		{name: "daemon-reexec", script: "systemctl --user daemon-reexec"},
		{name: "upgrade", script: "cp -r " + rig.BinDir + " ~/next; abfleet setup --bin-dir ~/next --now", replaces: true},
		{name: "setup with another port", script: "abfleet setup --bin-dir ~/next --port 19999 --now", replaces: true, moves: true},
	} {
		before := w.servicePID()
		w.sh(event.script)
		a.mustContain("browser_evaluate", map[string]any{"function": "() => window.kept"}, "1")
		b.mustContain("browser_evaluate", map[string]any{"function": "() => window.kept"}, "1")
		if after := w.browserPIDs(); !slices.Equal(pids, after) {
			t.Fatalf("after %s the browser is %v, was %v", event.name, after, pids)
		}
		if after := w.servicePID(); (after != before) != event.replaces {
			t.Errorf("%s: the service was process %s and is %s", event.name, before, after)
		}
		if event.moves {
			view := w.must("view", "--session", "alpha").View.URL
			if !strings.Contains(view, ":19999/") {
				t.Errorf("after %s the page is at %s", event.name, view)
			}
			p.open(view)
		}
		// The viewer is live again when it shows what happens from now on.
		color := fmt.Sprintf("#40%02xc0", 30*i)
		a.paint(color)
		p.sees(color)
	}
	if exe := w.sh("readlink /proc/" + w.servicePID() + "/exe"); exe != w.UserHome()+"/next/abfleetd" {
		t.Errorf("after the upgrade %s runs", exe)
	}

	// A call in flight says whether it may have taken effect. Of a service that
	// is killed only the bridge can say so.
	relayed, passed := w.relay("alpha")
	inFlight := func(c *client, tool string, begun <-chan struct{}, end string) {
		t.Helper()
		args, want := map[string]any{"time": 25}, "no effect"
		if tool == "browser_evaluate" {
			args, want = map[string]any{"function": `() => { fetch("/slow?ms=1"); return new Promise(() => {}) }`}, string(fault.EffectUnknown)
		}
		done := make(chan error, 1)
		go func() {
			_, err := c.call(tool, args)
			done <- err
		}()
		w.await(tool, begun)
		w.sh(end)
		if err := <-done; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s cut off by %s: %v, want %q", tool, end, err, want)
		}
		c.mustContain("browser_evaluate", map[string]any{"function": "() => window.kept"}, "1")
	}
	const restart = "systemctl --user restart abfleetd.service"
	inFlight(&a.client, "browser_evaluate", w.site.seen("/slow?ms=1"), restart)
	inFlight(&a.client, "browser_wait_for", a.sent(), restart)
	relayed.mustContain("browser_evaluate", map[string]any{"function": "() => window.kept"}, "1")
	for _, end := range []string{restart, "kill -KILL $(systemctl --user show -P MainPID abfleetd.service)"} {
		inFlight(&relayed.client, "browser_evaluate", w.site.seen("/slow?ms=1"), end)
		inFlight(&relayed.client, "browser_wait_for", passed("browser_wait_for"), end)
	}
}

func (w *world) servicePID() string {
	w.t.Helper()
	return w.sh("systemctl --user show -P MainPID abfleetd.service")
}

// relay is a bridge that reaches the service through a socket of the test. The
// returned function gives a channel that is closed when the next call of a tool
// has been passed on to the service.
func (w *world) relay(session string) (*bridge, func(tool string) <-chan struct{}) {
	w.t.Helper()
	path := w.RuntimeDir() + "/relay.sock"
	l, err := w.Listen(w.t.Context(), "unix", path)
	w.check(err)
	w.t.Cleanup(func() { l.Close() })
	var mu sync.Mutex
	waiting := make(map[string]chan struct{})
	pass := func(from, to net.Conn) {
		defer to.Close()
		defer from.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
			mu.Lock()
			for tool, ch := range waiting {
				if bytes.Contains(buf[:n], []byte(`"`+tool+`"`)) {
					close(ch)
					delete(waiting, tool)
				}
			}
			mu.Unlock()
		}
	}
	go func() {
		for {
			theirs, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				ours, err := w.Dial(context.WithoutCancel(w.t.Context()), "unix", w.controlSocket())
				if err != nil {
					theirs.Close()
					return
				}
				go pass(ours, theirs)
				pass(theirs, ours)
			}()
		}
	}()
	return w.bridge(session, "AGENT_BROWSER_FLEET_SOCKET="+path), func(tool string) <-chan struct{} {
		mu.Lock()
		defer mu.Unlock()
		waiting[tool] = make(chan struct{})
		return waiting[tool]
	}
}

// TestPoweroff protects logins from the ends that come from outside: the
// user's manager is stopped, and the machine is.
func TestPoweroff(t *testing.T) {
	home := t.TempDir()
	w := ready(t, rig.Options{Name: "poweroff", Home: home})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")

	a.cookie("slice")
	w.sh("systemctl --user stop $(systemctl --user list-units --plain --no-legend 'abfleet-*.slice' | awk '{print $1}')")
	a.hasCookie("slice")

	a.cookie("manager")
	w.relogin()
	w.agent("alpha").hasCookie("manager")

	// The user's manager goes while a browser starts, and while one stops.
	for _, args := range [][]string{{"session", "use", "beta", "work"}, {"session", "stop", "beta"}} {
		w.meanwhile(args, w.relogin)
		if s := w.must("session", "use", "beta", "work").Session; s.State != "controllable" {
			t.Errorf("after a logout in the middle of %v the session is %+v", args, s)
		}
	}

	w.agent("alpha").cookie("poweroff")
	w.collect(t.Context())
	w.check(w.Poweroff(t.Context()))
	w.check(w.Close())
	again := boot(t, rig.Options{Name: "poweroff", Home: home})
	again.agent("alpha").hasCookie("poweroff")
}

// relogin stops the user's manager and starts it again. The runtime directory is
// named too, since systemctl would not wait for it.
func (w *world) relogin() {
	w.t.Helper()
	if out, err := w.RootSh(w.t.Context(), fmt.Sprintf("systemctl stop user@%[1]d.service user-runtime-dir@%[1]d.service && systemctl start user@%[1]d.service", w.UID())); err != nil {
		w.fail(fmt.Errorf("%w: %s", err, out))
	}
}

// meanwhile runs a command about a session and calls f once the service is seen
// to be in the middle of it. What becomes of the command is not looked at.
func (w *world) meanwhile(args []string, f func()) {
	w.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.abf(args...)
	}()
	for state := ""; state != "starting" && state != "stopping"; {
		select {
		case <-done:
			w.fail(fmt.Errorf("%v was over before it was seen to begin", args))
		default:
		}
		if answer, err := w.abf("session", "show", args[2]); err == nil {
			state = answer.Session.State
		}
	}
	f()
	<-done
}

// TestNothingExposed protects the host: what listens, what anybody else could
// open, and that the browser is sandboxed and where it belongs.
func TestNothingExposed(t *testing.T) {
	w := ready(t, rig.Options{Name: "exposed"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.must("browser_navigate", map[string]any{"url": siteURL + "/frames"})

	pid := w.browserPIDs()[0]
	cgroup := w.sh(fmt.Sprintf("cat /proc/%d/cgroup", pid))
	if !strings.Contains(cgroup, "-chromium-") || !strings.HasSuffix(cgroup, ".scope") {
		t.Errorf("the browser is in %s", cgroup)
	}
	if out := w.sh(`for p in $(pgrep -u "$(id -u)" chromium || true); do grep -H abfleet /proc/$p/cgroup || grep -H . /proc/$p/cgroup; done | grep -v -e '-chromium-' || true`); out != "" {
		t.Errorf("processes of the browser outside its scope: %s", out)
	}
	sandboxed := w.sh(`for p in $(pgrep -u "$(id -u)" -f 'type=rendere[r]'); do
		echo $(awk '/^Seccomp:/{print $2}' /proc/$p/status) $(test "$(readlink /proc/$p/ns/user)" = "$(readlink /proc/self/ns/user)" && echo shared || echo own) $(test "$(readlink /proc/$p/ns/pid)" = "$(readlink /proc/self/ns/pid)" && echo shared || echo own); done | sort -u`)
	if sandboxed != "2 own own" {
		t.Errorf("renderers are sandboxed like this (seccomp, user namespace, pid namespace): %q", sandboxed)
	}

	// No page can tell that it is driven: in frames of the page's own site, of no
	// site, and of another site, which has a process of its own, in a popup of
	// either site, and in a new tab.
	a.must("browser_navigate", map[string]any{"url": siteURL + "/webdriver"})
	a.mustContain("browser_evaluate", map[string]any{"function": `async () => {
		const told = [String(navigator.webdriver)];
		const frame = (src) => new Promise((done) => {
			addEventListener("message", (e) => { told.push(String(e.data)); done(); }, { once: true });
			document.body.append(Object.assign(document.createElement("iframe"), { src }));
		});
		await frame("/webdriver");
		await frame("data:text/html,<script>parent.postMessage('data ' + navigator.webdriver, '*')</script>");
		await frame("http://localhost:" + location.port + "/webdriver");
		try { told.push("own site: " + frames[2].document.title); } catch { told.push("other site"); }
		return told.join(", ");
	}`}, `"false, 127.0.0.1 false, data false, localhost false, other site"`)
	snap := a.must("browser_snapshot", nil)
	driven := map[string]any{"function": `() => location.hostname + " " + navigator.webdriver + " " + document.getElementById("driven")?.textContent`}
	for button, want := range map[string]string{"Popup of this site": `"127.0.0.1 false false"`, "Popup of another site": `"localhost false false"`} {
		a.must("browser_click", map[string]any{"target": ref(t, snap, `button "`+button+`"`)})
		a.must("browser_tabs", map[string]any{"action": "select", "index": 1})
		a.must("browser_wait_for", map[string]any{"text": "navigator.webdriver of"})
		a.mustContain("browser_evaluate", driven, want)
		a.must("browser_tabs", map[string]any{"action": "close", "index": 1})
	}
	a.must("browser_tabs", map[string]any{"action": "new", "url": siteURL + "/webdriver"})
	a.mustContain("browser_evaluate", driven, `"127.0.0.1 false false"`)
	a.must("browser_tabs", map[string]any{"action": "close"})
	a.mustContain("browser_evaluate", driven, `"127.0.0.1 false false"`)
	// The window fills the screen: 800 less 87 of tabs and address bar, and
	// no warning bar of 56.
	a.mustContain("browser_evaluate", map[string]any{"function": "() => innerWidth >= 1279 && innerHeight >= 710 && screenX === 0 && screenY === 0"}, "true")

	listeners := w.sh("ss -ltnuH | awk '{print $5}' | grep -v ':8800$' || true")
	view, err := url.Parse(w.must("view").View.URL)
	w.check(err)
	if listeners != view.Host {
		t.Errorf("listeners: %q, want only %s", listeners, view.Host)
	}
	// Every socket of a process of ours that somebody could connect or send to
	// is a path. (The kernel gives an abstract name to an end of a pair that
	// passes credentials, as Chromium's sandbox does; nobody can use that.)
	ours := strings.Fields(w.sh("grep -l abfleet /proc/[0-9]*/cgroup 2>/dev/null | cut -d/ -f3"))
	seen := 0
	for line := range strings.Lines(w.rootSh("ss -xapH")) {
		owner := slices.ContainsFunc(ours, func(pid string) bool { return strings.Contains(line, "pid="+pid+",") })
		if fields := strings.Fields(line); owner && fields[1] != "ESTAB" && fields[4] != "*" {
			seen++
			if !strings.HasPrefix(fields[4], "/") {
				t.Errorf("a socket that anybody can reach: %s", line)
			}
		}
	}
	if len(ours) < 4 || seen < 4 {
		t.Errorf("%d processes of ours with %d named sockets", len(ours), seen)
	}
	// Chromium makes its SingletonSocket itself.
	for _, dir := range []string{"$XDG_RUNTIME_DIR/abfleet", "$HOME/.local/state/abfleet"} {
		if out := w.sh(`find ` + dir + ` \( -type d -perm /077 \) -o \( -type s ! -perm 600 ! \( -name SingletonSocket -perm 700 \) \)`); out != "" {
			t.Errorf("open to others: %s", out)
		}
	}
	// X asks everybody for the cookie, the same user and another one. Its answer
	// starts with 0 when it refuses.
	probe := []string{"perl", "-MSocket", "-e", `socket(X, PF_UNIX, SOCK_STREAM, 0) && connect(X, sockaddr_un($ARGV[0])) or die $!;
		syswrite(X, "l\0\x0b\0\0\0\0\0\0\0\0\0"); sysread(X, my $answer, 1) or die "no answer"; exit ord $answer`, w.sh("ls /tmp/.X11-unix/X* | head -1")}
	if out, err := w.User(t.Context(), probe[0], probe[1:]...).CombinedOutput(); err != nil {
		t.Errorf("X lets the same user in without the cookie: %v %s", err, out)
	}
	if out, err := w.Root(t.Context(), "setpriv", append([]string{"--reuid", "65534", "--clear-groups"}, probe...)...).CombinedOutput(); err != nil {
		t.Errorf("X lets another user in without the cookie: %v %s", err, out)
	}
}

// TestNoGrowth protects a host that runs for months: cycles of start, switch and
// stop leave no process, socket, lock, scope, file, descriptor or memory behind.
func TestNoGrowth(t *testing.T) {
	cycles := 6
	if n, err := strconv.Atoi(os.Getenv("ABF_CYCLES")); err == nil {
		cycles = n
	}
	w := ready(t, rig.Options{Name: "growth"})
	w.must("identity", "create", "other")
	w.must("identity", "login", "other", "--url", siteURL+"/form")
	w.must("identity", "save", "other")
	count := func() [5]int {
		var n [5]int
		for i, f := range strings.Fields(w.sh(`systemctl --user list-units --all --plain --no-legend 'abfleet-*' | wc -l
			{ find "$XDG_RUNTIME_DIR/abfleet" "$HOME"/.local/state/abfleet/tmp; find "$HOME"/.local/state/abfleet/identities -maxdepth 3; find /tmp/.X11-unix /tmp -maxdepth 1; } | wc -l
			pid=$(systemctl --user show -P MainPID abfleetd.service); ls /proc/$pid/fd | wc -l
			awk '/^Pss:/{print $2}' /proc/$pid/smaps_rollup
			pgrep -u "$(id -u)" -c -e 'chromium|Xvnc|Xtigervnc|abfleet-role' || true`)) {
			v, err := strconv.Atoi(f)
			w.check(err)
			n[i] = v
		}
		return n
	}
	cycle := func() {
		w.must("session", "use", "alpha", "work")
		w.must("session", "use", "alpha", "other")
		w.must("session", "stop", "alpha")
	}
	cycle()
	before := count()
	for range cycles {
		cycle()
	}
	after := count()
	t.Logf("units, files, fds, PSS kB, processes: %v, after %d cycles %v", before, cycles, after)
	for i, name := range []string{"units", "files", "descriptors", "", "processes"} {
		if name != "" && after[i] > before[i]+map[bool]int{true: 2}[name == "descriptors"] {
			t.Errorf("%s grow: %d, then %d", name, before[i], after[i])
		}
	}
	if after[3] > before[3]+4096 {
		t.Errorf("memory grows: %d kB, then %d kB", before[3], after[3])
	}
	if after[0] != 0 || after[4] != 0 {
		t.Errorf("%d units and %d processes are left", after[0], after[4])
	}
	if out := w.sh(`find "$HOME"/.local/state/abfleet -name 'Singleton*'; ls /tmp/.X*-lock 2>/dev/null || true`); out != "" {
		t.Errorf("locks are left: %s", out)
	}
}

// TestJournal protects who looks into a session: its lines are found by its
// name, what the service did and what its Chromium said, and no other's.
func TestJournal(t *testing.T) {
	w := ready(t, rig.Options{Name: "journal"})
	instances, known := map[string]string{}, []int{}
	for _, session := range []string{"alpha", "beta"} {
		w.must("session", "use", session, "work")
		event := w.journal("ABF_SESSION="+session, "MESSAGE_ID="+sd.MessageID(string(audit.SessionStarted)))
		if event["SYSLOG_IDENTIFIER"] != "abfleetd" || event["ABF_INSTANCE"] == "" {
			t.Errorf("the service says of the start of %s: %v", session, event)
		}
		// A Chromium that is well says little, so it is made to speak.
		pids := w.browserPIDs()
		w.rootSh(fmt.Sprintf("echo 'the Chromium of %s' >/proc/%d/fd/2", session, pids[slices.IndexFunc(pids, func(pid int) bool { return !slices.Contains(known, pid) })]))
		known = pids
		said := w.journal("ABF_SESSION="+session, "ABF_ROLE=chromium", "MESSAGE=the Chromium of "+session)
		if said["ABF_INSTANCE"] != event["ABF_INSTANCE"] || said["ABF_IDENTITY"] != event["ABF_IDENTITY"] {
			t.Errorf("the Chromium of %s says %v, its start was %v", session, said, event)
		}
		instances[event["ABF_INSTANCE"]] = session
	}
	if len(instances) != 2 {
		t.Errorf("two sessions, one browser: %v", instances)
	}
}

// journal waits for a line of the user's journal that has all the fields, and
// returns the last one.
func (w *world) journal(matches ...string) map[string]string {
	w.t.Helper()
	out := w.sh(`end=$(($(date +%s) + 30))
		until line=$(journalctl --user -q -n 1 -o json '` + strings.Join(matches, "' '") + `'); test -n "$line"; do test $(date +%s) -lt $end || break; done
		printf '%s' "$line"`)
	var line map[string]string
	if err := json.Unmarshal([]byte(out), &line); err != nil {
		w.fail(fmt.Errorf("the journal has no line with %v: %w: %s", matches, err, out))
	}
	return line
}

// TestCancel protects an agent that gives a call up, by a notification or by
// hanging up: the call ends, what it ran in the page does too, and the page is
// there for the next one at once, not when the script would have been stopped.
func TestCancel(t *testing.T) {
	w := ready(t, rig.Options{Name: "cancel"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	ask := `const ask = new XMLHttpRequest(); ask.open("GET", "/slow?ms=1", false); ask.send();`
	for name, function := range map[string]string{
		"a promise": "() => { " + ask + " return new Promise(() => {}); }",
		"a loop":    "() => { " + ask + " for (;;); }",
	} {
		for _, notified := range []bool{true, false} {
			begun := w.site.seen("/slow?ms=1")
			ctx, hangUp := context.WithCancel(t.Context())
			type outcome struct {
				answer string
				err    error
			}
			done := make(chan outcome, 1)
			go func() {
				answer, err := a.post(ctx, map[string]any{"id": 7, "method": "tools/call", "params": map[string]any{
					"name": "browser_evaluate", "arguments": map[string]any{"function": function},
				}})
				done <- outcome{answer, err}
			}()
			w.await(name, begun)
			start := time.Now()
			if notified {
				_, err := a.post(t.Context(), map[string]any{"method": "notifications/cancelled", "params": map[string]any{"requestId": 7}})
				w.check(err)
			} else {
				hangUp()
			}
			o := <-done
			if notified && (o.err != nil || !strings.Contains(o.answer, string(fault.EffectUnknown)) || !strings.Contains(o.answer, "canceled")) {
				t.Errorf("%s, canceled: %v %s", name, o.err, o.answer)
			}
			a.mustContain("browser_evaluate", map[string]any{"function": "() => document.title"}, "Form")
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("%s, notified: %v: the page was usable after %v", name, notified, took)
			}
			hangUp()
		}
	}
}

// TestDiedBrowser protects a session whose browser died: the next use starts it
// again with its Profile, and says how it ended.
func TestDiedBrowser(t *testing.T) {
	w := ready(t, rig.Options{Name: "died"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	a.must("browser_evaluate", map[string]any{"function": `() => { localStorage.setItem("kept", "yes") }`})
	w.must("session", "stop", "alpha")
	w.must("session", "use", "alpha", "work")
	form := map[string]any{"url": siteURL + "/form"}
	afterDeath := func(kill string) {
		t.Helper()
		w.sh(fmt.Sprintf(kill, w.browserPIDs()[0]))
		// A call that was sent before the death is seen says that it may have
		// taken effect.
		if text, err := a.call("browser_navigate", form); err != nil && !strings.Contains(text, string(fault.EffectUnknown)) {
			t.Error(err)
		}
		a.must("browser_navigate", form)
		a.mustContain("browser_evaluate", map[string]any{"function": `() => localStorage.getItem("kept")`}, "yes")
	}
	afterDeath("kill -KILL %d")
	if s := w.must("session", "show", "alpha").Session; s.LastExit == nil || !strings.Contains(s.LastExit.Detail, "SIGKILL") {
		t.Errorf("the session says of its last browser: %+v", s.LastExit)
	}
	// With its display gone too, nobody else would clear what that leaves.
	afterDeath("kill -KILL %d; pkill -KILL -x Xvnc")
	if locks := w.sh("ls /tmp/.X*-lock"); len(strings.Fields(locks)) != 1 {
		t.Errorf("locks of displays: %s", locks)
	}
}

// TestHungBrowser protects agents from a browser that is there but answers
// nothing: the call says so instead of waiting as for a slow page, and the next
// one has a browser that works, with the login.
func TestHungBrowser(t *testing.T) {
	w := ready(t, rig.Options{Name: "hung"})
	w.must("session", "use", "alpha", "work")
	a := w.agent("alpha")
	a.cookie("kept")
	w.sh("kill -STOP " + strconv.Itoa(w.browserPIDs()[0]))
	text, err := a.call("browser_snapshot", nil)
	if err == nil || !strings.Contains(text, string(fault.BrowserNotControllable)) || !strings.Contains(text, "agent_browser_use_identity") {
		t.Errorf("a call to a hung browser: %v", err)
	}
	a.hasCookie("kept")
}

// TestRefusals protects people from their own mistakes: each has its code and a
// hint, and changes nothing.
func TestRefusals(t *testing.T) {
	w := ready(t, rig.Options{Name: "refusals"})
	w.refused(fault.IdentityNotFound, "session", "use", "alpha", "nobody")
	w.refused(fault.DuplicateIdentity, "identity", "create", "WORK")
	w.refused(fault.InvalidName, "identity", "create", " ")
	w.must("identity", "create", "fresh")
	w.refused(fault.LoginNotRunning, "identity", "save", "fresh")
	w.refused(fault.IdentityNotReady, "session", "use", "alpha", "fresh")
	w.refused(fault.SessionNotFound, "session", "stop", "alpha")
	if len(w.browserPIDs()) != 0 {
		t.Error("a refusal left a browser running")
	}
	// Logging in again uses the same profile, and a save replaces the last one.
	w.must("identity", "login", "work")
	w.must("identity", "save", "work")
	// A second service on the same state.
	out, err := w.Sh(t.Context(), `abfleetd --listen-control /tmp/second.sock --listen-web 127.0.0.1:0 2>&1`)
	if err == nil || !strings.Contains(out, string(fault.StateInUse)) {
		t.Errorf("a second service: %v %s", err, out)
	}
}

// TestManyAtOnce protects a host on which everybody comes at the same time: each
// session gets a browser with a display and a profile of its own, and until its
// turn comes it is shown where it is in the queue.
func TestManyAtOnce(t *testing.T) {
	many := 6
	if n, err := strconv.Atoi(os.Getenv("ABF_SESSIONS")); err == nil {
		many = n
	}
	w := ready(t, rig.Options{Name: "many"})
	var asked sync.WaitGroup
	for i := range many {
		asked.Go(func() {
			answer, err := w.abf("session", "use", fmt.Sprint("s", i), "work")
			if err != nil || answer.Session.State != "controllable" {
				t.Errorf("session s%d: %+v %v", i, answer.Session, err)
			}
		})
	}
	done := make(chan struct{})
	go func() { asked.Wait(); close(done) }()
	// One of them is an agent, which comes last.
	told, asking := "", false
	last := 0
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		default:
			for _, s := range w.must("session", "list").Sessions {
				last = max(last, s.Queued)
			}
			if last > 0 && !asking {
				asking = true
				asked.Go(func() {
					var err error
					told, err = w.agent("agent").post(t.Context(), map[string]any{"id": 1, "method": "tools/call", "params": map[string]any{
						"name": "agent_browser_use_identity", "arguments": map[string]any{"identity_id": "work"}, "_meta": map[string]any{"progressToken": "p"},
					}})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
	t.Logf("up to %d were queued", last)
	if last == 0 {
		t.Error("nobody was shown the queue")
	}
	if !strings.Contains(told, "notifications/progress") || !strings.Contains(told, "in the queue") || !strings.Contains(told, "session_browser_ready") {
		t.Errorf("the agent was told: %s", told)
	}
	many++
	for name, script := range map[string]string{
		"profiles": `for p in $(pgrep -u "$(id -u)" -x chromium); do tr '\0' '\n' </proc/$p/cmdline | grep -o -e '--user-data-dir=/[^ ]*'; done 2>/dev/null`,
		"displays": `for p in $(pgrep -u "$(id -u)" -x Xvnc); do tr '\0' '\n' </proc/$p/cmdline | grep -xE ':[0-9]+'; done`,
	} {
		if distinct := strings.Fields(w.sh(script + " | sort -u")); len(distinct) != many {
			t.Errorf("%d sessions have %d %s: %v", many, len(distinct), name, distinct)
		}
	}
	if pids := w.browserPIDs(); len(pids) != many {
		t.Errorf("%d sessions have %d browsers", many, len(pids))
	}
	for _, s := range w.must("session", "list").Sessions {
		asked.Go(func() {
			if answer, err := w.abf("session", "release", s.Session, "--yes"); err != nil {
				t.Errorf("release of %s: %+v %v", s.Session, answer.Session, err)
			}
		})
	}
	asked.Wait()
	if pids := w.browserPIDs(); len(pids) > 0 {
		t.Errorf("%d browsers are left", len(pids))
	}
	if prepared := w.must("identity", "status", "work").Identity.PreparedProfiles; prepared != many {
		t.Errorf("%d profiles are free, want %d", prepared, many)
	}
}
