package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/doctor"
	"abfleet/internal/fault"
	"abfleet/units"
)

// abfleet runs the command with an environment of its own.
func abfleet(t *testing.T, env map[string]string, args ...string) (code int, out, errOut string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code = Main(t.Context(), args, strings.NewReader(""), &stdout, &stderr, func(name string) string { return env[name] })
	return code, stdout.String(), stderr.String()
}

// answering serves one answer for every path.
func answering(t *testing.T, status int, body string, seen *[]string) map[string]string {
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var sent bytes.Buffer
		_, _ = sent.ReadFrom(r.Body)
		if seen != nil {
			*seen = append(*seen, strings.TrimSpace(r.Method+" "+r.URL.String()+" "+sent.String()))
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	s.start()
	return map[string]string{"AGENT_BROWSER_FLEET_SOCKET": s.socket}
}

func TestCommandsAskTheService(t *testing.T) {
	const answer = `{"ok":true,"identity":{"id":"identity-1","name":"my work","state":"READY","login":{"state":"controllable"},"sessions":0,"prepared_profiles":0,"limits":{"memory_max":"3G"},"created_at":"2026-01-02T03:04:05Z","updated_at":"2026-01-02T03:04:05Z"},` +
		`"session":{"session":"s","identity_id":"identity-1","identity_name":"my work","wanted":"running","state":"controllable","instance":"abc","slice":"abfleet-abc.slice","bound_at":"2026-01-02T03:04:05Z","updated_at":"2026-01-02T03:04:05Z"},` +
		`"examination":{"vacant":false,"recoverable":true,"reason":"populated: its slice has processes","roles":[{"role":"chromium","verdict":"reconstructible","pid":42,"for":["holds the root file"],"against":["its scope is gone"]}]},` +
		`"identities":[],"sessions":[],"view":{"url":"http://127.0.0.1:1/#token=x"}}`
	for _, test := range []struct {
		args []string
		want []string
		out  string
	}{
		{[]string{"identity", "create", "my work"}, []string{`POST /v1/identities {"name":"my work"}`}, "abfleet identity login 'my work'"},
		{[]string{"identity", "login", "my work", "--url", "http://x/"}, []string{`POST /v1/identity/login {"identity":"my work","url":"http://x/"}`, "GET /v1/view?identity=identity-1"}, "http://127.0.0.1:1/#token=x"},
		{[]string{"identity", "save", "w"}, []string{`POST /v1/identity/save {"identity":"w"}`}, "it is READY"},
		{[]string{"identity", "stop", "w"}, []string{"GET /v1/identity?identity=w", `POST /v1/identity/stop-login {"identity":"w"}`}, "stopped the login browser of my work"},
		{[]string{"identity", "list"}, []string{"GET /v1/identities"}, "NAME"},
		{[]string{"identity", "status", "a&b"}, []string{"GET /v1/identity?identity=a%26b"}, "state: READY"},
		{[]string{"session", "use", "s", "w"}, []string{`POST /v1/session/use {"session":"s","identity":"w"}`}, "controllable"},
		{[]string{"session", "stop", "s"}, []string{`POST /v1/session/stop {"session":"s"}`}, "session s is"},
		{[]string{"session", "list"}, []string{"GET /v1/sessions"}, "SESSION"},
		{[]string{"identity", "rename", "w", "my work"}, []string{`POST /v1/identity/rename {"identity":"w","name":"my work"}`}, "my work"},
		{[]string{"identity", "limit", "w"}, []string{"GET /v1/identity?identity=w"}, "memory-high: default\nmemory-max: 3G\n"},
		{[]string{"identity", "limit", "w", "--memory-high", "2G", "--memory-max", "default"}, []string{"GET /v1/identity?identity=w",
			`POST /v1/identity/limits {"identity":"identity-1","limits":{"memory_high":"2G"}}`}, "cpu-weight: default"},
		{[]string{"identity", "delete", "w", "--yes"}, []string{"GET /v1/identity?identity=w", `POST /v1/identity/delete {"identity":"identity-1"}`}, "deleted Identity my work"},
		{[]string{"session", "restart", "s"}, []string{`POST /v1/session/restart {"session":"s"}`}, "restarted"},
		{[]string{"session", "release", "s", "-y"}, []string{"GET /v1/session?session=s", `POST /v1/session/release {"session":"s"}`}, "released from Identity my work"},
		{[]string{"session", "release", "s", "-y", "--logged-out"}, []string{"GET /v1/session?session=s", `POST /v1/session/release {"session":"s","logged_out":true}`}, "released"},
		{[]string{"recover", "s", "-y"}, []string{"GET /v1/session/recovery?session=s", `POST /v1/session/release {"session":"s"}`},
			"chromium: reconstructible, process 42\n  + holds the root file\n  - its scope is gone\n"},
		{[]string{"session", "show", "s"}, []string{"GET /v1/session?session=s"}, "units: abfleet-abc.slice\n"},
		{[]string{"view", "--session", "s"}, []string{"GET /v1/view?session=s", "GET /v1/session?session=s"}, "http://127.0.0.1:1/#token=x\n"},
		{[]string{"view", "--identity", "w"}, []string{"GET /v1/view?identity=w", "GET /v1/identity?identity=w"}, "http://"},
	} {
		var seen []string
		env := answering(t, http.StatusOK, answer, &seen)
		code, out, errOut := abfleet(t, env, test.args...)
		if code != ExitOK || errOut != "" || !strings.Contains(out, test.out) {
			t.Errorf("%v: exit code %d, printed %q, %q", test.args, code, out, errOut)
		}
		if strings.Join(seen, "; ") != strings.Join(test.want, "; ") {
			t.Errorf("%v asked %q, want %q", test.args, seen, test.want)
		}
		code, out, _ = abfleet(t, env, append(test.args, "--json")...)
		var parsed api.Answer
		if err := json.Unmarshal([]byte(out), &parsed); code != ExitOK || err != nil || !parsed.OK {
			t.Errorf("%v --json: exit code %d, %v, %s", test.args, code, err, out)
		}
		if !strings.Contains(out, `"identities": []`) || !strings.Contains(out, `"sessions": []`) {
			t.Errorf("%v --json: empty lists are missing: %s", test.args, out)
		}
	}
}

// What cannot be taken back is asked for first, and where nobody can be asked it
// is not done. Evidence that is not enough ends nothing, asked or not.
func TestConfirm(t *testing.T) {
	const answer = `{"ok":true,"identity":{"id":"identity-1","name":"w","state":"READY","login":{"state":"stopped"}},` +
		`"session":{"session":"s","identity_name":"w","state":"BROKEN"},"examination":{"vacant":false,"recoverable":false,"reason":"r"}}`
	for _, args := range [][]string{{"identity", "delete", "w"}, {"session", "release", "s"}, {"recover", "s"}, {"recover", "s", "--yes"}} {
		var seen []string
		code, _, errOut := abfleet(t, answering(t, http.StatusOK, answer, &seen), args...)
		if code != ExitFailed || !strings.Contains(errOut, "hint: ") || len(seen) != 1 || !strings.HasPrefix(seen[0], "GET ") {
			t.Errorf("%v: exit code %d, %q, asked %q", args, code, errOut, seen)
		}
	}
	for typed, done := range map[string]bool{"y\n": true, "Yes\n": true, "n\n": false, "\n": false, "": false} {
		person, terminal := pty(t)
		var seen []string
		env := answering(t, http.StatusOK, answer, &seen)
		if typed == "" {
			typed = "\x04" // end of file
		}
		if _, err := person.WriteString(typed); err != nil {
			t.Fatal(err)
		}
		var out, errOut bytes.Buffer
		code := Main(t.Context(), []string{"session", "release", "s"}, terminal, &out, &errOut, func(name string) string { return env[name] })
		if (code == ExitOK) != done || (len(seen) == 2) != done || !strings.Contains(errOut.String(), "[y/N]") {
			t.Errorf("%q: exit code %d, %q, asked %q", typed, code, errOut.String(), seen)
		}
	}
}

// pty returns both ends of a terminal.
func pty(t *testing.T) (person, terminal *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { person.Close() })
	n, err := unix.IoctlGetInt(int(person.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return person, terminal
}

// A link to a browser that does not run is good, and shows nothing; a stop of one
// stopped nothing.
func TestWhatDoesNotRunIsSaid(t *testing.T) {
	env := answering(t, http.StatusOK, `{"ok":true,"identity":{"id":"identity-1","name":"my work","login":{"state":"stopped"}},`+
		`"session":{"session":"s","identity_name":"my work","state":"stopped"},"view":{"url":"http://127.0.0.1:1/"}}`, nil)
	for _, test := range []struct {
		args        []string
		out, errOut string
	}{
		{[]string{"view", "--session", "s"}, "http://127.0.0.1:1/\n", "note: the browser of s is stopped\nhint: start it: abfleet session use s 'my work'\n"},
		{[]string{"view", "--identity", "my work"}, "http://127.0.0.1:1/\n", "note: the login browser of my work is stopped\nhint: start it: abfleet identity login 'my work'\n"},
		{[]string{"view"}, "http://127.0.0.1:1/\n", ""},
		{[]string{"identity", "stop", "my work"}, "no login browser of my work was running\n", ""},
	} {
		code, out, errOut := abfleet(t, env, test.args...)
		if code != ExitOK || out != test.out || errOut != test.errOut {
			t.Errorf("%v: exit code %d, %q, %q", test.args, code, out, errOut)
		}
	}
}

func TestFailuresAreTold(t *testing.T) {
	env := answering(t, http.StatusNotFound, `{"ok":false,"error":{"code":"identity_not_found","message":"cannot save identity: there is no \"x\"","hint":"List them"}}`, nil)
	code, out, errOut := abfleet(t, env, "identity", "save", "x", "--json")
	if want := "abfleet: cannot save identity: there is no \"x\"\nhint: List them\ncode: identity_not_found\n"; code != ExitFailed || errOut != want {
		t.Errorf("exit code %d, %q, want %q", code, errOut, want)
	}
	var parsed api.Answer
	if err := json.Unmarshal([]byte(out), &parsed); err != nil || parsed.OK || parsed.Error.Code != "identity_not_found" || parsed.Error.Hint != "List them" {
		t.Errorf("--json printed %s", out)
	}
	for _, test := range []struct {
		args []string
		env  map[string]string
		code int
		text string
	}{
		{[]string{"nonsense"}, nil, ExitUsage, `unknown command "nonsense"`},
		{[]string{"sesion"}, nil, ExitUsage, "Did you mean abfleet session?"},
		{[]string{"session", "lst"}, nil, ExitUsage, "Did you mean abfleet session list?"},
		{[]string{"session", "use"}, nil, ExitUsage, "run abfleet session use --help"},
		{[]string{"identity", "list", "--prefix", "other"}, map[string]string{"XDG_RUNTIME_DIR": "/nonexistent"}, ExitUnreachable, "`abfleet --prefix other setup --now`"},
		{[]string{"identity"}, nil, ExitUsage, "needs a command"},
		{[]string{"identity", "create"}, nil, ExitUsage, "accepts 1 arg"},
		{[]string{"session", "use", "s"}, nil, ExitUsage, "accepts 2 arg"},
		{[]string{"identity", "list", "--colour"}, nil, ExitUsage, "unknown flag"},
		{[]string{"view", "--session", "s", "--identity", "i"}, nil, ExitUsage, "not both"},
		{[]string{"mcp"}, nil, ExitUsage, "needs --session"},
		{[]string{"session", "list", "--prefix", "../x"}, nil, ExitUsage, `--prefix "../x": use 1 to 16 lower case letters and digits`},
		{[]string{"doctor", "--prefix", ""}, nil, ExitUsage, `--prefix ""`},
		{[]string{"session", "list", "--config", "/nonexistent"}, env, ExitFailed, "cannot load configuration: stat /nonexistent: no such file"},
		{[]string{"session", "list", "--config", "/nonexistent", "--socket", "/x"}, nil, ExitFailed, "code: invalid_config"},
		{[]string{"mcp", "--session", " s"}, nil, ExitUsage, "no space around it"},
		{[]string{"identity", "list"}, map[string]string{"AGENT_BROWSER_FLEET_SOCKET": "/nonexistent"}, ExitUnreachable, "there is no socket /nonexistent"},
		{[]string{"identity", "list"}, nil, ExitUnreachable, "XDG_RUNTIME_DIR is not set"},
		{[]string{"identity", "list", "--prefix", "other"}, map[string]string{"XDG_RUNTIME_DIR": "/nonexistent"}, ExitUnreachable, "/nonexistent/other/control.sock"},
	} {
		code, _, errOut := abfleet(t, test.env, test.args...)
		if code != test.code || !strings.Contains(errOut, test.text) || !strings.Contains(errOut, "hint: ") {
			t.Errorf("%v: exit code %d, %q, want %d and %q", test.args, code, errOut, test.code, test.text)
		}
	}
}

func TestVersionNeedsNoService(t *testing.T) {
	code, out, _ := abfleet(t, nil, "version")
	if code != ExitOK || !strings.Contains(out, "abfleet "+api.Version) || !strings.Contains(out, "not reachable") {
		t.Errorf("exit code %d, %s", code, out)
	}
}

func TestPortIsStable(t *testing.T) {
	s := &setup{app: &app{prefix: "abfleet", getenv: func(string) string { return "" }}, unitDir: t.TempDir()}
	cfg := &config.Config{WebListen: "127.0.0.1:0"}
	first, err := s.chooseAddress(cfg)
	if err != nil || first.Port() < firstPort || first.Port() >= firstPort+portCount {
		t.Fatal(first, err)
	}
	if again, err := s.chooseAddress(cfg); err != nil || again != first {
		t.Errorf("then %v, %v", again, err)
	}
	s.prefix = "other"
	if other, err := s.chooseAddress(cfg); err != nil || other == first {
		t.Errorf("another fleet gets the same port %v, %v", other, err)
	}
	s.prefix = "abfleet"
	// As every setup has written it.
	file := units.WebPort("abfleet", netip.MustParseAddrPort("127.0.0.1:12345"))
	if want := "[Socket]\nListenStream=\nListenStream=127.0.0.1:12345\n"; file.Content != want {
		t.Errorf("the drop-in is %q", file.Content)
	}
	if err := writeFile(filepath.Join(s.unitDir, file.Name), marker+file.Content); err != nil {
		t.Fatal(err)
	}
	if recorded, err := s.chooseAddress(cfg); err != nil || recorded.String() != "127.0.0.1:12345" {
		t.Errorf("the recorded port 12345 became %v, %v", recorded, err)
	}
	cfg.WebListen = "127.0.0.1:12346"
	if configured, err := s.chooseAddress(cfg); err != nil || configured.String() != "127.0.0.1:12346" {
		t.Errorf("the configured port became %v, %v", configured, err)
	}
	for port, code := range map[int]fault.Code{-1: fault.Internal, 70000: fault.Internal} {
		s.port = port
		if _, err := s.chooseAddress(cfg); fault.CodeOf(err) != code || err == nil {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

// The page listens where the configuration says, and a change of the host keeps
// the port that people know.
func TestPageListensAtTheConfiguredHost(t *testing.T) {
	for _, host := range []string{"127.0.0.2", "[::1]"} {
		taken, err := net.Listen("tcp", host+":0")
		if err != nil {
			t.Skipf("cannot listen on %s: %v", host, err)
		}
		defer taken.Close()
		s := &setup{app: &app{prefix: "demo", getenv: func(string) string { return "" }}, unitDir: t.TempDir()}
		_, port, _ := net.SplitHostPort(taken.Addr().String())
		// Free on 127.0.0.1, which nobody asked for.
		_, err = s.chooseAddress(&config.Config{WebListen: host + ":" + port})
		if fault.CodeOf(err) != fault.PortTaken {
			t.Errorf("%s:%s, which is taken: %v", host, port, err)
		}
		for _, step := range []struct{ configured, want string }{
			{"127.0.0.1:12345", "127.0.0.1:12345"},
			{host + ":0", host + ":12345"},
			{host + ":12346", host + ":12346"},
			{host + ":0", host + ":12346"},
			{"127.0.0.1:0", "127.0.0.1:12346"},
		} {
			cfg := &config.Config{WebListen: step.configured}
			address, err := s.chooseAddress(cfg)
			if err != nil || address.String() != step.want {
				t.Fatalf("with %s: %v, %v, want %s", step.configured, address, err, step.want)
			}
			if _, err := s.writeUnits(cfg, "", address); err != nil {
				t.Fatal(err)
			}
			drop, err := os.ReadFile(filepath.Join(s.unitDir, "demod-web.socket.d", "port.conf"))
			if err != nil || !strings.HasSuffix(string(drop), "\nListenStream=\nListenStream="+step.want+"\n") {
				t.Errorf("with %s: %q, %v", step.configured, drop, err)
			}
		}
	}
	s := &setup{app: &app{prefix: "demo", getenv: func(string) string { return "" }}, unitDir: t.TempDir()}
	if _, err := s.chooseAddress(&config.Config{WebListen: "192.0.2.1:0"}); fault.CodeOf(err) != fault.InvalidConfig || fault.HintOf(err) == "" {
		t.Errorf("a host that is not here: %v", err)
	}
}

// The service has none of a shell's environment: where the two would not find
// the same state, the unit says where it is.
func TestServiceFindsTheStateOfTheShell(t *testing.T) {
	own := filepath.Join(t.TempDir(), "own.toml")
	if err := os.WriteFile(own, []byte("home = \"/srv/own\"\ntmp_dir = \"/var/x\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		env      map[string]string
		config   string
		stateDir string
		want     string
	}{
		"nothing is set":                 {},
		"XDG_STATE_HOME":                 {env: map[string]string{"XDG_STATE_HOME": "/srv/state"}, want: "/srv/state/abfleet"},
		"XDG_STATE_HOME with spaces":     {env: map[string]string{"XDG_STATE_HOME": "/srv/a b"}, want: "/srv/a b/abfleet"},
		"XDG_STATE_HOME is the default":  {env: map[string]string{"XDG_STATE_HOME": "/nonexistent/.local/state"}},
		"AGENT_BROWSER_FLEET_HOME":       {env: map[string]string{"AGENT_BROWSER_FLEET_HOME": "/srv/fleet"}, want: "/srv/fleet"},
		"the configuration":              {env: map[string]string{"XDG_STATE_HOME": "/srv/state"}, config: own},
		"the configuration and the flag": {config: own, stateDir: "/srv/flag", want: "/srv/flag"},
	} {
		t.Run(name, func(t *testing.T) {
			env := map[string]string{"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/run/x"}
			maps.Copy(env, test.env)
			s := &setup{app: &app{prefix: "abfleet", config: test.config, getenv: func(name string) string { return env[name] }}, unitDir: t.TempDir(), binDir: "/opt/bin", stateDir: test.stateDir}
			cfg, err := s.load()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.writeUnits(cfg, test.config, netip.MustParseAddrPort("127.0.0.1:1")); err != nil {
				t.Fatal(err)
			}
			unit, err := os.ReadFile(filepath.Join(s.unitDir, "abfleetd.service"))
			if err != nil {
				t.Fatal(err)
			}
			line := "Environment=\"AGENT_BROWSER_FLEET_HOME=" + test.want + "\"\n"
			if strings.Contains(string(unit), "AGENT_BROWSER_FLEET_HOME") != (test.want != "") || test.want != "" && !strings.Contains(string(unit), line) {
				t.Errorf("want %q in the unit:\n%s", test.want, unit)
			}
			// The next setup, from another shell, goes on with it.
			again := &setup{app: &app{prefix: "abfleet", getenv: func(string) string { return "" }}, unitDir: s.unitDir}
			if got := again.recordedState(); got != test.want {
				t.Errorf("the recorded state is %q, want %q", got, test.want)
			}
		})
	}
}

func TestSetupKeepsForeignFiles(t *testing.T) {
	dir := t.TempDir()
	s := &setup{app: &app{prefix: "demo", getenv: func(name string) string { return map[string]string{"HOME": dir, "XDG_RUNTIME_DIR": "/run/x"}[name] }}, unitDir: filepath.Join(dir, "units"), binDir: "/opt/bin"}
	path, err := s.writeConfig()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if want := marker + "unit_prefix = \"demo\"\nhome = \"" + dir + "/.local/state/demo\"\n"; err != nil || string(content) != want {
		t.Errorf("configuration %q, %v, want %q", content, err, want)
	}
	if err := os.WriteFile(path, []byte("unit_prefix = \"demo\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := s.writeConfig(); err != nil || again != path {
		t.Error(again, err)
	}
	if content, _ := os.ReadFile(path); strings.Contains(string(content), marker) {
		t.Error("the user's own configuration was replaced")
	}
	cfg := &config.Config{Socket: "/run/x/demo/control.sock", Home: dir + "/.local/state/demo"}
	if changed, err := s.writeUnits(cfg, path, netip.MustParseAddrPort("127.0.0.1:1")); err != nil || !changed {
		t.Error(changed, err)
	}
	if changed, err := s.writeUnits(cfg, path, netip.MustParseAddrPort("127.0.0.1:1")); err != nil || changed {
		t.Errorf("the same again: changed %v, %v", changed, err)
	}
	if changed, err := s.writeUnits(cfg, path, netip.MustParseAddrPort("127.0.0.1:2")); err != nil || !changed {
		t.Errorf("another port: changed %v, %v", changed, err)
	}
	service := filepath.Join(s.unitDir, "demod.service")
	if err := os.WriteFile(service, []byte("[Service]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.writeUnits(cfg, path, netip.MustParseAddrPort("127.0.0.1:2")); fault.CodeOf(err) != fault.UnsafePath {
		t.Errorf("a foreign unit file: %v", err)
	}
}

// report is what doctor --json says, as a program sees it.
func report(t *testing.T, env map[string]string, args ...string) map[string]map[string]any {
	t.Helper()
	code, out, errOut := abfleet(t, env, append([]string{"doctor", "--json"}, args...)...)
	var answer struct {
		OK     bool
		Doctor struct {
			OK       bool
			Findings []map[string]any
		}
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || !answer.OK || (code == ExitOK) != answer.Doctor.OK {
		t.Fatalf("exit code %d, %v, %s, %s", code, err, out, errOut)
	}
	findings := make(map[string]map[string]any)
	for _, f := range answer.Doctor.Findings {
		findings[f["code"].(string)] = f
		for _, member := range []string{"code", "title", "severity", "status", "text", "hint"} {
			if text, ok := f[member].(string); !ok || text == "" && member != "hint" || member == "hint" && (text != "") != (f["status"] == "failed") {
				t.Errorf("%v has %s %v", f["code"], member, f[member])
			}
		}
	}
	for _, check := range doctor.Checks() {
		if findings[check.Code] == nil {
			t.Errorf("nothing is said of %s", check.Code)
		}
	}
	return findings
}

// What is broken first does not hide what is broken too.
func TestDoctorListsEveryCheck(t *testing.T) {
	home := t.TempDir()
	broken := filepath.Join(home, ".config", "abfleet", "config.toml")
	if err := writeFile(broken, "colour = 1\n"); err != nil {
		t.Fatal(err)
	}
	findings := report(t, map[string]string{"HOME": home})
	for code, want := range map[string][2]string{
		"configuration": {"failed", `unknown key "colour"`},
		"runtime_dir":   {"failed", "XDG_RUNTIME_DIR is not set"},
		"service":       {"failed", "there is no socket /run/user/"},
		"state_dir":     {"ok", home + "/.local/state/abfleet"},
		"disk":          {"ok", "MB free"},
	} {
		if f := findings[code]; f["status"] != want[0] || !strings.Contains(f["text"].(string), want[1]) {
			t.Errorf("%s: %v, want %v", code, f, want)
		}
	}
	for name, args := range map[string][]string{"named": {"--config", "/nonexistent"}, "prefix": {"--prefix", "other"}} {
		f := report(t, map[string]string{"HOME": home, "XDG_RUNTIME_DIR": home}, args...)["configuration"]
		if f["status"] != "failed" || name == "prefix" && f["hint"] != "Run: abfleet --prefix other setup --now" {
			t.Errorf("%s: %v", name, f)
		}
	}
	if f := report(t, nil)["state_dir"]; f["status"] != "skipped" {
		t.Errorf("without a home: %v", f)
	}
}

// Whoever only asks what is wrong finds everything as it was.
func TestDoctorChangesNothing(t *testing.T) {
	home := t.TempDir()
	for _, dir := range []string{".local/state/abfleet/identities", "run"} {
		if err := os.MkdirAll(filepath.Join(home, dir), 0o755); err != nil { // too open, which it finds
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{".config/abfleet/config.toml": "stealth = true\n", ".local/state/abfleet/fleet.db": "no store"} {
		if err := writeFile(filepath.Join(home, name), text); err != nil {
			t.Fatal(err)
		}
	}
	tree := func() (all []string) {
		err := filepath.WalkDir(home, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err == nil {
				all = append(all, fmt.Sprint(path, " ", info.Mode(), " ", info.Size(), " ", info.ModTime().UnixNano()))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := tree()
	if findings := report(t, map[string]string{"HOME": home, "XDG_RUNTIME_DIR": filepath.Join(home, "run")}); findings["state_dir"] == nil {
		t.Errorf("it did not look: %v", findings)
	}
	if after := tree(); !slices.Equal(before, after) {
		t.Errorf("before: %q\nafter: %q", before, after)
	}
}

// The service has none of a shell's environment, so neither decides where doctor
// looks.
func TestDoctorLooksAtTheStateOfTheService(t *testing.T) {
	configs := t.TempDir()
	own := filepath.Join(configs, "my own.toml")
	if err := writeFile(own, "home = \"/srv/own\"\ntmp_dir = \"/var/x\"\n"); err != nil {
		t.Fatal(err)
	}
	base := map[string]string{"HOME": "/nonexistent", "XDG_CONFIG_HOME": configs, "XDG_RUNTIME_DIR": "/run/x"}
	with := func(name, value string) map[string]string {
		env := maps.Clone(base)
		env[name] = value
		return env
	}
	for name, test := range map[string]struct {
		setup, shell map[string]string
		config, want string
	}{
		"recorded":      {with("XDG_STATE_HOME", "/srv/there"), base, "", "/srv/there/abfleet"},
		"default":       {base, with("XDG_STATE_HOME", "/srv/here"), "", "/nonexistent/.local/state/abfleet"},
		"configuration": {base, with("AGENT_BROWSER_FLEET_HOME", "/srv/here"), own, "/srv/own"},
	} {
		t.Run(name, func(t *testing.T) {
			s := (&app{prefix: "abfleet", config: test.config, getenv: func(name string) string { return test.setup[name] }}).newSetup()
			s.binDir = "/opt/bin"
			cfg, err := s.load()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.writeUnits(cfg, test.config, netip.MustParseAddrPort("127.0.0.1:1")); err != nil {
				t.Fatal(err)
			}
			a := &app{prefix: "abfleet", getenv: func(name string) string { return test.shell[name] }}
			if env := a.host(); env.Config.Home != test.want || env.ConfigError != nil {
				t.Errorf("doctor looks at %s, %v, want %s", env.Config.Home, env.ConfigError, test.want)
			}
		})
	}
}

// Setup's findings are of the state that it names.
func TestSetupExaminesTheStateOfTheService(t *testing.T) {
	systemd(t, "ActiveState=inactive")
	home := t.TempDir()
	var out bytes.Buffer
	s := &setup{app: &app{prefix: "abfleet", json: true, out: &out, getenv: func(string) string { return "" }}, stateDir: home + "/there"}
	cfg := &config.Config{Home: home + "/here", Manager: config.ManagerUser, UnitPrefix: "abfleet"}
	if err := s.tell(t.Context(), cfg, netip.MustParseAddrPort("127.0.0.1:1")); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), home+"/there is made at the first start") || cfg.Home != home+"/here" {
		t.Errorf("setup says %s", out.String())
	}
}

func TestHintsNameTheUnitsOfTheFleet(t *testing.T) {
	a := &app{prefix: "demo"}
	if got, want := a.ours("Run `abfleet setup --now`: systemctl --user status abfleetd"), "Run `abfleet --prefix demo setup --now`: systemctl --user status demod"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A service that is stopped takes connections and answers none.
func TestDoctorDoesNotWaitForAStoppedService(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ask := func(here ...api.Finding) {
		t.Helper()
		done := make(chan []api.Finding, 1)
		go func() { done <- askDoctor(t.Context(), socket, here) }()
		select {
		case more := <-done:
			if more != nil {
				t.Errorf("it found %v", more)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("it waits")
		}
	}
	ask(api.Finding{Code: "service", Status: doctor.StatusFailed})
	shorten(t, &doctorTimeout, 20*time.Millisecond)
	ask(api.Finding{Code: "service", Status: doctor.StatusOK})
}
