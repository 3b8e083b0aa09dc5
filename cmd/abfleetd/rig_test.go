package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/tests/rig"
)

// machine is a booted rig with the programs of this tree.
type machine struct {
	*rig.Rig
	t *testing.T
}

func newMachine(t *testing.T, opts rig.Options) *machine {
	t.Helper()
	if testing.Short() {
		t.Skip("boots a rig; run without -short")
	}
	rig.Require(t)
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", dir+"/", "abfleet/cmd/...")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m := &machine{Rig: rig.BootTest(t, opts), t: t}
	if err := m.Install(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	return m
}

// sh runs a script as the user; it must succeed.
func (m *machine) sh(script string) string {
	m.t.Helper()
	out, err := m.Sh(m.t.Context(), script)
	if err != nil {
		journal, _ := m.Journal(m.t.Context(), "-n", "40")
		m.t.Fatalf("%s: %v\n%s\njournal:\n%s", script, err, out, journal)
	}
	return strings.TrimSpace(out)
}

// fails runs a command that must exit with code, and returns what it says.
func (m *machine) fails(code int, name string, args ...string) string {
	m.t.Helper()
	out, err := m.User(m.t.Context(), name, args...).CombinedOutput()
	if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != code {
		m.t.Errorf("%s %v: %v, want exit code %d\n%s", name, args, err, code, out)
	}
	return string(out)
}

func (m *machine) contains(text string, wants ...string) {
	m.t.Helper()
	for _, want := range wants {
		if !strings.Contains(text, want) {
			m.t.Errorf("no %q in:\n%s", want, text)
		}
	}
}

func (m *machine) property(name string) string {
	m.t.Helper()
	return m.sh("systemctl --user show --value -p " + name + " abfleetd.service")
}

// until runs a script until it prints want.
func (m *machine) until(script, want string) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 30*time.Second)
	defer cancel()
	got := ""
	for ctx.Err() == nil {
		out, _ := m.Sh(ctx, script)
		if got = strings.TrimSpace(out); got == want {
			return
		}
		// What is waited for is systemd's, which has no event for a shell.
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	m.t.Fatalf("%s prints %q, want %q", script, got, want)
}

// dropIn adds a drop-in to a unit until the end of the test.
func (m *machine) dropIn(t *testing.T, unit, content string) {
	dir := ".config/systemd/user/" + unit + ".d"
	m.sh(fmt.Sprintf("mkdir -p %s && printf '%%b' %q > %s/test.conf && systemctl --user daemon-reload", dir, content, dir))
	t.Cleanup(func() {
		m.sh("rm -f " + dir + "/test.conf; rmdir --ignore-fail-on-non-empty " + dir + "; systemctl --user daemon-reload; abfleet setup --now")
	})
}

func TestServiceUnderSystemd(t *testing.T) {
	m := newMachine(t, rig.Options{Name: "service"})

	t.Run("setup", func(t *testing.T) {
		if out, err := m.RootSh(t.Context(), "XDG_RUNTIME_DIR=/run abfleet setup"); err == nil {
			t.Errorf("root may set up: %s", out)
		} else {
			m.contains(err.Error(), "root cannot run Chromium's sandbox", "code: invalid_argument")
		}
		m.contains(m.sh("abfleet setup"), "abfleetd-control.socket", "inactive", "start with: systemctl --user start abfleetd-control.socket abfleetd-web.socket")
		port := m.sh("cat .config/systemd/user/abfleetd-web.socket.d/port.conf")
		out := m.sh("abfleet setup --now")
		m.contains(out, "abfleetd-control.socket", "abfleetd-web.socket", "abfleetd.service", "abfleet.slice", "/run/user/1500/abfleet/control.sock", "http://127.0.0.1:")
		if again := m.sh("cat .config/systemd/user/abfleetd-web.socket.d/port.conf"); again != port {
			t.Errorf("a second setup changed the port: %s, then %s", port, again)
		}
		for _, unit := range []string{"abfleetd-control.socket", "abfleetd-web.socket", "abfleetd.service"} {
			if state := m.sh("systemctl --user is-enabled " + unit + "; systemctl --user is-active " + unit); state != "enabled\nactive" {
				t.Errorf("%s is %q", unit, state)
			}
		}
		if got := m.property("StatusText"); got != "0 browsers, 0 quarantined" {
			t.Errorf("status %q", got)
		}
		if modes := m.sh("stat -c %a $XDG_RUNTIME_DIR/abfleet $XDG_RUNTIME_DIR/abfleet/control.sock .local/state/abfleet .local/state/abfleet/state.db .local/state/abfleet/access-token"); modes != "700\n600\n700\n600\n600" {
			t.Errorf("modes %q", modes)
		}
		// The user's own file in a unit's place is not touched.
		m.sh("mv .config/systemd/user/abfleet.slice saved && echo '[Slice]' > .config/systemd/user/abfleet.slice")
		m.contains(m.fails(1, "abfleet", "setup"), "is there and not from setup")
		m.sh("mv saved .config/systemd/user/abfleet.slice && systemctl --user daemon-reload")
		if out := m.sh("abfleet doctor"); strings.Contains(out, "FAIL") {
			t.Errorf("doctor: %s", out)
		}
	})

	t.Run("no listener but ours", func(t *testing.T) {
		port := regexp.MustCompile(`127\.0\.0\.1:[0-9]+`).FindString(m.sh("abfleet view"))
		out, err := m.RootSh(t.Context(), "ss -Hltnu | awk '{print $5}'; ss -Hxl | awk '$5 ~ /^@/ {print $5}'; ss -Hxlp")
		if err != nil {
			t.Fatal(err)
		}
		tcp, unixSockets, _ := strings.Cut(out, "\n")
		if tcp != port {
			t.Errorf("listeners: %q, want %q", tcp, port)
		}
		for line := range strings.Lines(unixSockets) {
			if strings.Contains(line, "@") && strings.Contains(line, "abfleetd") {
				t.Errorf("an abstract socket of ours: %s", line)
			}
		}
	})

	t.Run("socket activation", func(t *testing.T) {
		m.sh("systemctl --user stop abfleetd.service")
		if got := m.property("ActiveState"); got != "inactive" {
			t.Errorf("stopped service is %s (%s)", got, m.property("Result"))
		}
		m.sh("abfleet identity create one")
		if got := m.property("ActiveState"); got != "active" {
			t.Errorf("after a request the service is %s", got)
		}
		// By the page's socket too, and through the bridge.
		m.sh("systemctl --user stop abfleetd.service")
		m.contains(m.sh(`bash -c 'exec 3<>/dev/tcp/127.0.0.1/`+m.port()+`; printf "GET /api/agent-browser-fleet/auth/status HTTP/1.0\r\nHost: localhost:`+m.port()+`\r\n\r\n" >&3; cat <&3'`), "200 OK", `"authenticated":false`)
	})

	t.Run("journal", func(t *testing.T) {
		out, err := m.Journal(t.Context(), "-o", "json", "ABF_EVENT=identity.created")
		if err != nil {
			t.Fatal(err)
		}
		var entry map[string]any
		if err := json.Unmarshal([]byte(strings.SplitN(out, "\n", 2)[0]), &entry); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for name, want := range map[string]string{
			"MESSAGE_ID": "", "ABF_IDENTITY": "", "ABF_ACTOR": "operator", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "abfleetd",
			"_SYSTEMD_USER_UNIT": "abfleetd.service", "_TRANSPORT": "journal",
		} {
			got, _ := entry[name].(string)
			if got == "" || want != "" && got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
	})

	t.Run("restart and kill", func(t *testing.T) {
		cs := m.mcpClient(t)
		call := func() {
			t.Helper()
			result, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "agent_browser_identities"})
			if err != nil || result.IsError {
				t.Errorf("the client's next call: %v %+v", err, result)
			}
		}
		call()
		m.sh("systemctl --user restart abfleetd")
		call()
		before := m.property("MainPID")
		m.sh("kill -KILL " + before)
		// The same client object, at once.
		call()
		if after := m.property("MainPID"); after == before {
			t.Error("the service was not restarted")
		}
		if got := m.property("Result"); got != "success" {
			t.Errorf("result %s", got)
		}
		m.sh("systemctl --user daemon-reload && systemctl --user daemon-reexec")
		call()
	})

	t.Run("watchdog", func(t *testing.T) {
		m.dropIn(t, "abfleetd.service", `[Service]\nWatchdogSec=1s\n`)
		m.sh("systemctl --user restart abfleetd")
		pid := m.property("MainPID")
		for range 4 {
			last := m.property("WatchdogTimestampMonotonic")
			m.until("test $(systemctl --user show --value -p WatchdogTimestampMonotonic abfleetd.service) != "+last+" && echo alive", "alive")
		}
		if now := m.property("MainPID"); now != pid {
			t.Fatalf("a healthy service was restarted: %s, then %s", pid, now)
		}
		m.sh("kill -STOP " + pid)
		m.until("systemctl --user show --value -p NRestarts abfleetd.service", "1")
		m.sh("abfleet identity list")
	})

	t.Run("second service on the same state", func(t *testing.T) {
		m.sh("abfleet identity list")
		out := m.fails(exitUnavailable, "abfleetd", "--listen-control", "/run/user/1500/other.sock", "--listen-web", "127.0.0.1:0")
		m.contains(out, "state_in_use")
		out = m.fails(exitConfig, "abfleetd")
		m.contains(out, "cannot find the sockets of the service", "systemd passed none")
		m.fails(exitUsage, "abfleetd", "--nonsense")
		m.contains(m.sh("abfleetd --version"), "abfleetd ")
	})

	// systemd would start the service again for a request that nobody answers,
	// for as long as it waits.
	t.Run("state in use", func(t *testing.T) {
		m.sh("systemctl --user stop abfleetd && systemd-run --user --quiet --unit=other -p Type=notify $(command -v abfleetd) --listen-control $XDG_RUNTIME_DIR/other.sock --listen-web 127.0.0.1:0")
		stopOther := func() { m.sh("systemctl --user stop other") }
		defer func() { stopOther() }()
		start := time.Now()
		m.contains(m.fails(3, "abfleet", "identity", "list"), "it does not start", "another process holds it", "hint: Stop the other service first", "code: service_unavailable")
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("the answer took %v", took)
		}
		m.until("systemctl --user is-active abfleetd", "failed")
		if status := m.property("ExecMainStatus"); status != "69" {
			t.Errorf("exit status %s", status)
		}
		// No further start, which would take the lock's timeout and fail again.
		m.sh("sleep 4")
		if state := m.property("ActiveState"); state != "failed" {
			t.Errorf("with nobody asking, the service is %s", state)
		}
		answer, detail := m.bridgeFailure(t)
		m.contains(answer, "it does not answer", "ask the person to run `abfleet doctor`")
		m.contains(detail, "another process holds it")
		m.contains(m.fails(5, "abfleet", "doctor"), "FAIL  service", "another process holds it")
		stopOther()
		stopOther = func() {}
		m.until("systemctl --user is-active abfleetd", "failed")
		m.contains(m.sh("abfleet identity list"), "one")
	})

	// It is restarted below the start limit, while a request waits.
	t.Run("fails again and again", func(t *testing.T) {
		m.dropIn(t, "abfleetd.service", `[Service]\nExecStart=\nExecStart=/bin/false\n`)
		m.sh("systemctl --user stop abfleetd")
		for _, args := range [][]string{{"identity", "list"}, {"identity", "create", "never"}} {
			m.contains(m.fails(3, "abfleet", args...), "it does not start: it ended as exit-code (last tried: exit status 1, ", "code: service_unavailable", "hint: Repair that")
		}
	})

	t.Run("a socket too many", func(t *testing.T) {
		m.sh(`printf '[Socket]\nListenStream=%%t/more.sock\nFileDescriptorName=metrics\nService=abfleetd.service\n' > .config/systemd/user/more.socket && systemctl --user daemon-reload && systemctl --user stop abfleetd && systemctl --user start more.socket`)
		defer m.sh("systemctl --user stop more.socket; rm .config/systemd/user/more.socket; systemctl --user daemon-reload; abfleet setup --now")
		m.contains(m.fails(3, "abfleet", "identity", "list"), "it does not start", `a socket named "metrics"`)
		m.contains(m.fails(5, "abfleet", "doctor"), `a socket named "metrics"`, "(last tried: exit status 78, ", "abfleet setup --now, which also lifts systemd's start limit")
	})

	t.Run("broken configuration", func(t *testing.T) {
		m.sh("systemctl --user stop abfleetd; mkdir -p .config/abfleet && echo 'colour = 1' > .config/abfleet/config.toml")
		m.contains(m.fails(3, "abfleet", "identity", "list"), "it does not start", "colour", "code: service_unavailable")
		answer, detail := m.bridgeFailure(t)
		m.contains(answer, "it does not answer", "ask the person to run `abfleet doctor`")
		m.contains(detail, "it does not start", "colour")
		out := m.fails(5, "abfleet", "doctor")
		m.contains(out, "FAIL  configuration: ", "colour", "ok    systemd scopes", "FAIL  service: cannot reach the service: it does not start")
		m.sh("rm .config/abfleet/config.toml && abfleet setup --now")
		m.contains(m.sh("abfleet identity list"), "one")
	})

	t.Run("sandbox settings of the unit", func(t *testing.T) {
		m.dropIn(t, "abfleetd.service", `[Service]\nRestrictNamespaces=yes\n`)
		m.sh("systemctl --user restart abfleetd")
		out := m.fails(5, "abfleet", "doctor")
		m.contains(out, "FAIL  user namespaces (inside the service)", "seccomp filter", "hint: Remove RestrictNamespaces=")
		m.until("systemctl --user show --value -p StatusText abfleetd.service", "0 browsers, 0 quarantined; not ready: user_namespaces (run: abfleet doctor)")
	})

	t.Run("idle exit", func(t *testing.T) {
		m.sh("mkdir -p .config/abfleet && echo 'idle_exit = \"1s\"' > .config/abfleet/config.toml && systemctl --user restart abfleetd")
		defer m.sh("rm .config/abfleet/config.toml; systemctl --user stop abfleetd")
		m.until("systemctl --user is-active abfleetd.service", "inactive")
		if got := m.property("Result"); got != "success" {
			t.Errorf("result %s", got)
		}
		m.contains(m.sh("abfleet identity list"), "one")
	})

	t.Run("port taken", func(t *testing.T) {
		m.sh("systemctl --user stop abfleetd.service abfleetd-web.socket")
		listener, err := m.Listen(t.Context(), "tcp", "127.0.0.1:"+m.port())
		if err != nil {
			t.Fatal(err)
		}
		m.contains(m.fails(1, "abfleet", "setup", "--now"), "port "+m.port()+" is in use", "code: port_in_use", "--port")
		_ = listener.Close()
		m.sh("abfleet setup --now")
		other, err := m.Listen(t.Context(), "tcp", "127.0.0.1:28000")
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		m.contains(m.fails(1, "abfleet", "setup", "--port", "28000"), "port 28000 is in use", "code: port_in_use")
		m.sh("abfleet setup --now --port 28001")
		m.contains(m.sh("abfleet view"), "http://127.0.0.1:28001/")
	})

	t.Run("a session that no caller has", func(t *testing.T) {
		out := m.sh(`{ echo '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}'
			echo '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"browser_click"}}'; } | abfleet mcp --session ` + strings.Repeat("s", 201))
		lines := strings.Split(out, "\n")
		for _, line := range lines {
			m.contains(line, "201 characters", "invalid_session_id")
		}
		if len(lines) != 2 || strings.Contains(out, `"id":null`) {
			t.Errorf("two requests are answered with:\n%s", out)
		}
	})

	// The service has neither the variable nor, before setup, the address.
	t.Run("state and address of the shell", func(t *testing.T) {
		m.sh("mkdir -p .config/abfleet && printf '[web]\\nlisten = \"127.0.0.2:0\"\\n' > .config/abfleet/config.toml")
		m.contains(m.sh("XDG_STATE_HOME=$HOME/elsewhere abfleet setup --now"), "http://127.0.0.2:28001/")
		m.sh("abfleet identity list && test -f elsewhere/abfleet/state.db")
		m.contains(m.sh("abfleet doctor"), "state directory: /home/tester/elsewhere/abfleet\n")
		m.contains(m.sh("abfleet view"), "http://127.0.0.2:28001/")
		// The next shell does not have the variable; the state is still that one.
		m.contains(m.sh("rm .config/abfleet/config.toml && abfleet setup --now"), "/home/tester/elsewhere/abfleet")
		m.contains(m.sh("abfleet view"), "http://127.0.0.1:28001/")
		if list := m.sh("abfleet identity list"); strings.Contains(list, "one") {
			t.Errorf("a second setup went back to the default state: %s", list)
		}
		m.sh("abfleet setup --now --state-dir .local/state/abfleet")
		m.contains(m.sh("abfleet identity list"), "one")
	})

	t.Run("another prefix", func(t *testing.T) {
		m.contains(m.sh("abfleet --prefix demo setup --now"), "demod-control.socket", "demod.service", "demo.slice", "/run/user/1500/demo/control.sock")
		m.sh("abfleet --prefix demo identity create other")
		if list := m.sh("abfleet identity list"); strings.Contains(list, "other") {
			t.Errorf("two fleets share their state: %s", list)
		}
		m.contains(m.sh("abfleet --prefix demo uninstall"), "demod.service")
		if left := m.sh("systemctl --user list-units --all --plain --no-legend 'demo*'; ls .config/demo .config/systemd/user /run/user/1500 | grep demo || true"); left != "" {
			t.Errorf("uninstall left %q", left)
		}
		m.contains(m.sh("ls .local/state/demo"), "state.db")
		m.contains(m.sh("abfleet identity list"), "one")
	})

	t.Run("uninstall", func(t *testing.T) {
		m.sh("abfleet uninstall")
		if left := m.sh("systemctl --user list-units --all --plain --no-legend 'abfleet*'; find .config/systemd -type f -o -type l; ls /run/user/1500 | grep abfleet || true"); left != "" {
			t.Errorf("uninstall left %q", left)
		}
		m.contains(m.sh("ls .local/state/abfleet"), "state.db")
		m.contains(m.fails(1, "abfleet", "uninstall"), "setup wrote nothing")
		m.contains(m.fails(3, "abfleet", "identity", "list"), "there is no socket", "abfleet setup --now")
	})
}

func (m *machine) port() string {
	m.t.Helper()
	return m.sh("sed -n 's/^ListenStream=127.0.0.1://p' .config/systemd/user/abfleetd-web.socket.d/port.conf")
}

// mcpClient connects the official SDK through the bridge.
func (m *machine) mcpClient(t *testing.T) *mcp.ClientSession {
	t.Helper()
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	cs, err := client.Connect(t.Context(), &mcp.CommandTransport{Command: m.User(t.Context(), "abfleet", "mcp", "--session", "s")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cs.Close() })
	return cs
}

// bridgeFailure returns how the bridge answers one call, and what it tells the
// person who started it.
func (m *machine) bridgeFailure(t *testing.T) (answer, detail string) {
	t.Helper()
	answer = m.sh(`echo '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"browser_click"}}' | abfleet mcp --session s 2>detail`)
	return answer, m.sh("cat detail; rm detail")
}

// A host that the fleet cannot work on is refused in one sentence, before
// anything is installed.
func TestHybridCgroupsAreRefused(t *testing.T) {
	m := newMachine(t, rig.Options{Name: "hybrid", HybridCgroup: true})
	m.contains(m.fails(1, "abfleet", "setup", "--now"), "cannot use control groups: the hierarchy is hybrid", "hint: Boot with the kernel parameter", "code: cgroup_unsupported")
	m.contains(m.fails(5, "abfleet", "doctor"), "FAIL  cgroup v2")
	m.contains(m.fails(exitUnavailable, "abfleetd", "--listen-control", "/run/user/"+strconv.Itoa(m.UID())+"/c.sock", "--listen-web", "127.0.0.1:0"), "hierarchy is hybrid")
	if left := m.sh("ls -A " + filepath.Join(m.UserHome(), ".config") + " 2>/dev/null || true"); left != "" {
		t.Errorf("a refused setup left %q", left)
	}
}

func TestDoctorNamesWhatIsMissing(t *testing.T) {
	m := newMachine(t, rig.Options{Name: "bare", Mask: []string{"/usr/lib/chromium/chromium", "/usr/bin/Xvnc", "/usr/share/fonts", "/usr/local/share/fonts"}})
	// logind would end a manager that nobody lingers for, sooner or later.
	if _, err := m.RootSh(t.Context(), "systemctl kill -s STOP systemd-logind.service; rm /var/lib/systemd/linger/*; chmod 0755 /tmp/.X11-unix 2>/dev/null || mkdir -m 0755 /tmp/.X11-unix"); err != nil {
		t.Fatal(err)
	}
	m.contains(m.sh("abfleet setup --now"), "note: cannot run Chromium", "hint: Run: loginctl enable-linger")
	out := m.fails(5, "abfleet", "doctor")
	m.contains(out, "FAIL  Chromium", "apt-get install chromium", "FAIL  Xvnc", "apt-get install tigervnc-standalone-server",
		"warn  fonts", "apt-get install fonts-", "warn  linger", "warn  X socket directory", "systemd-tmpfiles")
	var answer struct {
		OK     bool
		Doctor struct {
			OK       bool
			Findings []struct{ Code, Status, Hint string }
		}
	}
	raw, _ := m.User(t.Context(), "abfleet", "doctor", "--json").Output()
	if err := json.Unmarshal(raw, &answer); err != nil || !answer.OK || answer.Doctor.OK {
		t.Errorf("%v: %s", err, raw)
	}
	for _, f := range answer.Doctor.Findings {
		if f.Status == "failed" && f.Hint == "" {
			t.Errorf("%s has no hint", f.Code)
		}
	}
	m.until("systemctl --user show --value -p StatusText abfleetd.service", "0 browsers, 0 quarantined; not ready: chromium, xvnc (run: abfleet doctor)")
	m.sh("abfleet identity create x")
	m.contains(m.fails(1, "abfleet", "identity", "login", "x"), "code: program_missing", "hint: ")
}
