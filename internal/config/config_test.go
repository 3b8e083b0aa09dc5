package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"abfleet/internal/fault"
)

func env(pairs ...string) func(string) string {
	m := map[string]string{"HOME": "/home/tester", "XDG_RUNTIME_DIR": "/run/user/1500"}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return func(key string) string { return m[key] }
}

// load reads a configuration with the given text.
func load(t *testing.T, text string, pairs ...string) (*Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(path, env(pairs...))
}

// TestDefaults protects the user who configures nothing.
func TestDefaults(t *testing.T) {
	c, err := Load("", env("XDG_CONFIG_HOME", t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Home: "/home/tester/.local/state/abfleet", RuntimeDir: "/run/user/1500/abfleet", TmpRoot: "/home/tester/.local/state/abfleet/tmp",
		Socket: "/run/user/1500/abfleet/control.sock", UnitPrefix: "abfleet", Manager: "user", Display: "xvnc", ScreenWidth: 1280, ScreenHeight: 800,
		Stealth: true, CDP: "pipe", Chromium: "/usr/lib/chromium/chromium", Xvnc: "/usr/bin/Xvnc", Xvfb: "/usr/bin/Xvfb", X11vnc: "/usr/bin/x11vnc",
		RoleHelper: filepath.Join(filepath.Dir(exe), "abfleet-role"), StartTimeout: 45 * time.Second, StopTimeout: 20 * time.Second,
		IdleExit: 10 * time.Minute, WebListen: "127.0.0.1:0", Snapshot: "file",
	}
	if *c != want {
		t.Errorf("got  %+v\nwant %+v", *c, want)
	}
	for got, want := range map[string]string{
		c.InstanceDir("abcdefghij"):         "/run/user/1500/abfleet/abcdefghij",
		c.TmpDir("abcdefghij"):              c.Home + "/tmp/abcdefghij",
		c.TemplateDir("identity-x"):         c.Home + "/identities/identity-x/template",
		c.SnapshotDir("identity-x"):         c.Home + "/identities/identity-x/snapshot",
		c.ProfileDir("identity-x", "p"):     c.Home + "/identities/identity-x/profiles/p",
		c.StateFile():                       c.Home + "/state.db",
		c.TokenFile():                       c.Home + "/access-token",
		filepath.Dir(c.OutputDir("../../")): c.Home + "/output",
	} {
		if got != want {
			t.Errorf("path %s, want %s", got, want)
		}
	}
	if again := c.OutputDir("a"); c.OutputDir("a") != again || c.OutputDir("b") == again {
		t.Error("output directories are not one per session")
	}
}

// TestEverySetting protects each key: it arrives where it belongs.
func TestEverySetting(t *testing.T) {
	c, err := load(t, `
home = "/srv/state"
runtime_dir = "/run/x"
tmp_dir = "/var/x"
socket = "/run/x.sock"
unit_prefix = "demo"
manager = "system"
display = "xvfb"
cdp = "port"
stealth = false
start_timeout = "1m"
stop_timeout = "2m"
idle_exit = "0s"
[screen]
width = 1920
height = 1080
[programs]
chromium = "/a"
xvnc = "/b"
xvfb = "/e"
x11vnc = "/f"
role_helper = "/d"
[web]
listen = "[::1]:7411"
[tools]
snapshot = "inline"
`)
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		File: c.File, Home: "/srv/state", RuntimeDir: "/run/x", TmpRoot: "/var/x", Socket: "/run/x.sock", UnitPrefix: "demo", Manager: "system", Display: "xvfb",
		ScreenWidth: 1920, ScreenHeight: 1080, CDP: "port", Chromium: "/a", Xvnc: "/b", Xvfb: "/e", X11vnc: "/f", RoleHelper: "/d",
		StartTimeout: time.Minute, StopTimeout: 2 * time.Minute, WebListen: "[::1]:7411", Snapshot: "inline",
	}
	if *c != want {
		t.Errorf("got  %+v\nwant %+v", *c, want)
	}
}

// TestEnvironment protects the two variables that are public, and XDG's rule
// that relative values do not count.
func TestEnvironment(t *testing.T) {
	c, err := load(t, "home = \"/a\"\nsocket = \"/b\"", "AGENT_BROWSER_FLEET_HOME", "/x/", "AGENT_BROWSER_FLEET_SOCKET", "/y/s")
	if err != nil || c.Home != "/x" || c.ControlSocket() != "/y/s" {
		t.Errorf("%+v %v", c, err)
	}
	c, err = load(t, "", "XDG_STATE_HOME", "relative")
	if err != nil || c.Home != "/home/tester/.local/state/abfleet" {
		t.Errorf("%+v %v", c, err)
	}
	c, err = load(t, "", "XDG_STATE_HOME", "/s")
	if err != nil || c.Home != "/s/abfleet" {
		t.Errorf("%+v %v", c, err)
	}
	c, err = load(t, `unit_prefix = "other"`)
	if err != nil || c.RuntimeDir != "/run/user/1500/other" {
		t.Errorf("%+v %v", c, err)
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "abfleet"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "abfleet", "config.toml"), []byte("stealth = false"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load("", env("XDG_CONFIG_HOME", dir)); err != nil || c.Stealth || c.File == "" {
		t.Errorf("the default file is not read: %+v %v", c, err)
	}
}

// TestRefusals protects the user from finding out later: everything wrong is
// refused when it is read, with what is wrong and what to do.
func TestRefusals(t *testing.T) {
	long := func(n int) string { return "/" + strings.Repeat("x", n-1) }
	for name, c := range map[string]struct {
		text  string
		pairs []string
		says  string
	}{
		"unknown key":          {text: "colour = 1", says: `"colour"`},
		"unknown nested key":   {text: "[screen]\ndepth = 24\n[vnc]\nport = 1", says: `"screen.depth", "vnc"`},
		"syntax":               {text: "a = 1\nb = [", says: "line 2"},
		"type":                 {text: `stealth = "yes"`, says: "stealth"},
		"prefix with a dash":   {text: `unit_prefix = "a-b"`, says: "unit_prefix"},
		"empty prefix":         {text: `unit_prefix = ""`, says: "unit_prefix"},
		"manager":              {text: `manager = "root"`, says: "manager"},
		"display":              {text: `display = "wayland"`, says: "display"},
		"snapshot":             {text: "[tools]\nsnapshot = \"x\"", says: "tools.snapshot"},
		"narrow":               {text: "[screen]\nwidth = 10", says: "screen.width"},
		"tall":                 {text: "[screen]\nheight = 100000", says: "screen.height"},
		"no time":              {text: `start_timeout = "0s"`, says: "start_timeout"},
		"no time to save":      {text: `stop_timeout = "19s"`, says: "stop_timeout"},
		"a bare number":        {text: `stop_timeout = "20"`, says: "20"},
		"relative program":     {text: "[programs]\nchromium = \"chromium\"", says: "programs.chromium"},
		"relative home":        {text: `home = "state"`, says: "home"},
		"relative environment": {pairs: []string{"AGENT_BROWSER_FLEET_HOME", "state"}, says: "AGENT_BROWSER_FLEET_HOME"},
		"open to the network":  {text: "[web]\nlisten = \"0.0.0.0:80\"", says: "loopback"},
		"a mapped address":     {text: "[web]\nlisten = \"[::ffff:127.0.0.1]:80\"", says: "loopback"},
		"a name":               {text: "[web]\nlisten = \"localhost:80\"", says: "loopback"},
		"no port":              {text: "[web]\nlisten = \"127.0.0.1\"", says: "web.listen"},
		"port by name":         {text: "[web]\nlisten = \"127.0.0.1:http\"", says: "web.listen"},
		"port too high":        {text: "[web]\nlisten = \"127.0.0.1:65536\"", says: "web.listen"},
		"no runtime directory": {pairs: []string{"XDG_RUNTIME_DIR", ""}, says: "XDG_RUNTIME_DIR"},
		"no home":              {pairs: []string{"HOME", ""}, says: "HOME"},
		"socket path":          {text: `socket = "` + long(108) + `"`, says: "107"},
		"runtime path":         {text: `runtime_dir = "` + long(107-len("/xxxxxxxxxx/rfb.sock")+1) + `"`, says: "107"},
		"TMPDIR":               {text: `tmp_dir = "` + long(60-11+1) + `"`, says: "60"},
		"long home":            {pairs: []string{"HOME", "/home/faculty/of/long/names/firstname.lastname"}, says: "60"},
	} {
		_, err := load(t, c.text, c.pairs...)
		if fault.CodeOf(err) != fault.InvalidConfig || fault.HintOf(err) == "" || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v (hint %q)", name, err, fault.HintOf(err))
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "missing.toml"), env()); fault.CodeOf(err) != fault.InvalidConfig {
		t.Errorf("a named file that is missing: %v", err)
	}
	// At the limits.
	_, err := load(t, `runtime_dir = "`+long(107-len("/xxxxxxxxxx/rfb.sock"))+"\"\ntmp_dir = \""+long(60-11)+`"`)
	if err != nil {
		t.Errorf("paths at the limit: %v", err)
	}
	if _, err := load(t, `tmp_dir = "/var/tmp/abf"`, "HOME", "/home/faculty/of/long/names/firstname.lastname"); err != nil {
		t.Errorf("what the hint says does not help: %v", err)
	}
}

// Doctor looks at a host whose configuration does not load.
func TestDefaultsNeedNoConfiguration(t *testing.T) {
	env := map[string]string{"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/u"}
	c := Defaults("demo", func(name string) string { return env[name] })
	if c.Home != "/home/u/.local/state/demo" || c.ControlSocket() != "/run/u/demo/control.sock" || c.UnitPrefix != "demo" || c.Chromium == "" || c.RoleHelper == "" {
		t.Errorf("%+v", c)
	}
	env["AGENT_BROWSER_FLEET_HOME"] = "/srv/x"
	if c = Defaults("demo", func(name string) string { return env[name] }); c.Home != "/srv/x" {
		t.Errorf("home %s", c.Home)
	}
	if c = Defaults("abfleet", func(string) string { return "" }); c.Home != "" || c.Manager != ManagerUser {
		t.Errorf("of nothing: %+v", c)
	}
}
