// Package config reads the settings of the fleet: one TOML file, the XDG
// directories and two environment variables. Everything that can be wrong with
// a setting is found here, when the service or the CLI starts, and never later
// when a browser does: unknown keys, socket paths the kernel cannot bind and
// temporary directories that Chromium dies from.
package config

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"abfleet/internal/fault"

	"github.com/BurntSushi/toml"
)

// Managers, displays and snapshot modes that exist.
const (
	ManagerUser   = "user"
	ManagerSystem = "system"

	DisplayXvnc = "xvnc" // X server and VNC server in one
	DisplayXvfb = "xvfb" // an X server and a VNC server beside it
	DisplayNone = "none" // headless: nothing to see or operate but the page

	CDPPipe = "pipe" // the browser is driven over its pipe alone
	CDPPort = "port" // it also listens on a loopback port

	SnapshotFile   = "file"   // a page snapshot in a tool answer may be a link to a file
	SnapshotInline = "inline" // it is always in the answer itself
)

// Limits of the kernel and of Chromium.
const (
	// maxSocketPath is sun_path without its terminating NUL.
	maxSocketPath = 107
	// maxTmpDir keeps the socket that Chromium makes in its TMPDIR, 45
	// characters longer, below maxSocketPath; beyond it Chromium dies with
	// SIGTRAP.
	maxTmpDir = 60
	// instanceLength is the length of a Stack's short id.
	instanceLength = 10
)

// Config is what the fleet was told. All paths are absolute.
type Config struct {
	// File is the file that was read, "" when there was none.
	File string

	// Home is the state directory, RuntimeDir the directory of sockets and
	// other files that do not outlive a boot, TmpRoot the parent of the
	// Stacks' TMPDIRs.
	Home       string
	RuntimeDir string
	TmpRoot    string
	// Socket is the control socket when it is not in RuntimeDir.
	Socket string

	// UnitPrefix starts the name of every unit. It has no dash: a dash in a
	// slice name is a level.
	UnitPrefix string
	// Manager says whose systemd runs the Stacks: "user" or "system".
	Manager string

	// Display is the display role, ScreenWidth and ScreenHeight its size in
	// pixels, or that of the window of a browser without one.
	Display      string
	ScreenWidth  int
	ScreenHeight int
	// Stealth keeps navigator.webdriver false.
	Stealth bool
	// CDP is "pipe" or "port".
	CDP string

	// The programs of a Stack. Xvnc is used with its display, Xvfb and X11vnc with
	// theirs.
	Chromium   string
	Xvnc       string
	Xvfb       string
	X11vnc     string
	RoleHelper string

	// Limits are those of every Stack whose Identity has no others.
	Limits Limits

	// StartTimeout bounds the start of a Stack, StopTimeout its clean stop, also
	// when systemd stops it.
	StartTimeout time.Duration
	StopTimeout  time.Duration
	// IdleExit is how long the service stays without a Stack, a viewer or a
	// client; 0 means for ever.
	IdleExit time.Duration

	// WebListen is the loopback address of the web listener, host:port. Port
	// 0 lets setup choose and record one.
	WebListen string
	// Snapshot is "file" or "inline".
	Snapshot string
}

// file is the TOML form of Config. Pointers tell "absent" from "empty".
type file struct {
	Home         *string   `toml:"home"`
	RuntimeDir   *string   `toml:"runtime_dir"`
	TmpDir       *string   `toml:"tmp_dir"`
	Socket       *string   `toml:"socket"`
	UnitPrefix   *string   `toml:"unit_prefix"`
	Manager      *string   `toml:"manager"`
	Display      *string   `toml:"display"`
	Stealth      *bool     `toml:"stealth"`
	CDP          *string   `toml:"cdp"`
	StartTimeout *duration `toml:"start_timeout"`
	StopTimeout  *duration `toml:"stop_timeout"`
	IdleExit     *duration `toml:"idle_exit"`
	Screen       struct {
		Width  *int `toml:"width"`
		Height *int `toml:"height"`
	} `toml:"screen"`
	Programs struct {
		Chromium   *string `toml:"chromium"`
		Xvnc       *string `toml:"xvnc"`
		Xvfb       *string `toml:"xvfb"`
		X11vnc     *string `toml:"x11vnc"`
		RoleHelper *string `toml:"role_helper"`
	} `toml:"programs"`
	Web struct {
		Listen *string `toml:"listen"`
	} `toml:"web"`
	Tools struct {
		Snapshot *string `toml:"snapshot"`
	} `toml:"tools"`
	Limits struct {
		MemoryHigh Limit `toml:"memory_high"`
		MemoryMax  Limit `toml:"memory_max"`
		TasksMax   Limit `toml:"tasks_max"`
		CPUWeight  Limit `toml:"cpu_weight"`
	} `toml:"limits"`
}

type duration struct{ time.Duration }

func (d *duration) UnmarshalText(text []byte) (err error) {
	d.Duration, err = time.ParseDuration(string(text))
	return err
}

// op is the verb and object of every fault of this package.
const op = "load configuration"

func invalid(hint, format string, args ...any) error {
	return fault.New(fault.InvalidConfig, op, hint, format, args...)
}

// Load reads the configuration. An empty path means
// $XDG_CONFIG_HOME/abfleet/config.toml, which may be absent; a path that was
// named must exist. env looks up environment variables, as os.Getenv does.
func Load(path string, env func(string) string) (*Config, error) {
	var f file
	used, err := read(&f, path, env)
	if err != nil {
		return nil, err
	}
	c, err := f.values()
	if err != nil {
		return nil, err
	}
	c.File = used
	if err := c.checkValues(); err != nil {
		return nil, err
	}
	if err := c.directories(&f, env); err != nil {
		return nil, err
	}
	if err := c.checkPaths(); err != nil {
		return nil, err
	}
	return c, nil
}

// Defaults returns what a fleet with this prefix has without a configuration, as
// far as the environment tells: for looking at a host whose configuration does
// not load.
func Defaults(prefix string, env func(string) string) *Config {
	f := file{UnitPrefix: &prefix}
	if state := xdg(env, "XDG_STATE_HOME", ".local/state"); state != "" {
		home := filepath.Join(state, prefix)
		f.Home = &home
	}
	c, err := f.values()
	if err != nil {
		c = &Config{UnitPrefix: prefix, Manager: ManagerUser}
	}
	_ = c.directories(&f, env)
	return c
}

// values is the configuration without its directories.
func (f *file) values() (*Config, error) {
	c := &Config{
		UnitPrefix:   or(f.UnitPrefix, "abfleet"),
		Manager:      or(f.Manager, ManagerUser),
		Display:      or(f.Display, DisplayXvnc),
		ScreenWidth:  or(f.Screen.Width, 1280),
		ScreenHeight: or(f.Screen.Height, 800),
		Stealth:      or(f.Stealth, true),
		CDP:          or(f.CDP, CDPPipe),
		Chromium:     or(f.Programs.Chromium, "/usr/lib/chromium/chromium"),
		Xvnc:         or(f.Programs.Xvnc, "/usr/bin/Xvnc"),
		Xvfb:         or(f.Programs.Xvfb, "/usr/bin/Xvfb"),
		X11vnc:       or(f.Programs.X11vnc, "/usr/bin/x11vnc"),
		StartTimeout: or(f.StartTimeout, duration{45 * time.Second}).Duration,
		StopTimeout:  or(f.StopTimeout, duration{leastStop}).Duration,
		IdleExit:     or(f.IdleExit, duration{10 * time.Minute}).Duration,
		WebListen:    or(f.Web.Listen, "127.0.0.1:0"),
		Snapshot:     or(f.Tools.Snapshot, SnapshotFile),
		Limits:       Limits(f.Limits),
	}
	if c.RoleHelper = or(f.Programs.RoleHelper, ""); c.RoleHelper == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, invalid("Set programs.role_helper in the configuration file", "find abfleet-role: %w", err)
		}
		c.RoleHelper = filepath.Join(filepath.Dir(exe), "abfleet-role")
	}
	return c, nil
}

// read fills f from the file and returns the path it read, "" for none.
func read(f *file, path string, env func(string) string) (string, error) {
	named := path != ""
	if !named {
		dir := xdg(env, "XDG_CONFIG_HOME", ".config")
		if dir == "" {
			return "", nil
		}
		path = filepath.Join(dir, "abfleet", "config.toml")
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !named {
		return "", nil
	}
	if err != nil {
		return "", invalid("Name a readable file with --config, or leave it out for the defaults", "%w", err)
	}
	meta, err := toml.Decode(string(data), f)
	if err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return "", invalid("Correct the file", "%s: line %d: %s", path, parse.Position.Line, parse.Message)
		}
		return "", invalid("Correct the file", "%s: %w", path, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		names := make([]string, len(unknown))
		for i, k := range unknown {
			names[i] = strconv.Quote(k.String())
		}
		sort.Strings(names)
		return "", invalid("Remove the key or correct its spelling", "%s: unknown key %s", path, strings.Join(names, ", "))
	}
	return path, nil
}

// leastStop is the shortest stop_timeout. systemd kills a browser that has not
// ended within stop_timeout, and its holder may need 18 s to close it: 8 s for
// the clean close, 3 s after closing the debugging socket, 2 s after TERM and 5 s
// after KILL, then 1.3 s for its last words. What is cut off there is a login.
// A stop by the service has 15 s more, for its own escalation and the display.
const leastStop = 20 * time.Second

var unitPrefix = regexp.MustCompile(`^[a-z][a-z0-9]{0,15}$`)

// checkValues checks what does not depend on where things are.
func (c *Config) checkValues() error {
	if !unitPrefix.MatchString(c.UnitPrefix) {
		return invalid("Use 1 to 16 lower case letters and digits, starting with a letter", "unit_prefix %q", c.UnitPrefix)
	}
	for _, e := range []struct {
		key, value string
		allowed    []string
	}{
		{"manager", c.Manager, []string{ManagerUser, ManagerSystem}},
		{"display", c.Display, []string{DisplayXvnc, DisplayXvfb, DisplayNone}},
		{"cdp", c.CDP, []string{CDPPipe, CDPPort}},
		{"tools.snapshot", c.Snapshot, []string{SnapshotFile, SnapshotInline}},
	} {
		if !slices.Contains(e.allowed, e.value) {
			return invalid("Use one of: "+strings.Join(e.allowed, ", "), "%s %q", e.key, e.value)
		}
	}
	for _, n := range []struct {
		key   string
		value int
	}{{"screen.width", c.ScreenWidth}, {"screen.height", c.ScreenHeight}} {
		if n.value < 320 || n.value > 7680 {
			return invalid("Use a number of pixels from 320 to 7680", "%s %d", n.key, n.value)
		}
	}
	for _, d := range []struct {
		key      string
		value    time.Duration
		min, max time.Duration
	}{
		{"start_timeout", c.StartTimeout, time.Second, 10 * time.Minute},
		{"stop_timeout", c.StopTimeout, leastStop, 10 * time.Minute},
		{"idle_exit", c.IdleExit, 0, 30 * 24 * time.Hour},
	} {
		if d.value < d.min || d.value > d.max {
			return invalid(fmt.Sprintf("Use a duration from %s to %s", d.min, d.max), "%s %s", d.key, d.value)
		}
	}
	if err := c.Limits.Check(); err != nil {
		return invalid("Correct the [limits]", "limits: %w", err)
	}
	for _, p := range []struct{ key, value string }{
		{"programs.chromium", c.Chromium}, {"programs.xvnc", c.Xvnc},
		{"programs.xvfb", c.Xvfb}, {"programs.x11vnc", c.X11vnc},
		{"programs.role_helper", c.RoleHelper},
	} {
		if !filepath.IsAbs(p.value) {
			return invalid("Use an absolute path", "%s %q", p.key, p.value)
		}
	}
	host, port, err := net.SplitHostPort(c.WebListen)
	if err != nil {
		return invalid("Use a loopback address and a port, like 127.0.0.1:7411", "web.listen %q: %w", c.WebListen, err)
	}
	addr, err := netip.ParseAddr(host)
	if err != nil || !addr.IsLoopback() || addr.Is4In6() || addr.Zone() != "" {
		return invalid("Use a loopback address: the page is reached through DSH, a tunnel or a local browser", "web.listen %q is not a loopback address", c.WebListen)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		return invalid("Use a port number from 0 to 65535; 0 lets setup choose one", "web.listen %q", c.WebListen)
	}
	return nil
}

// directories decides where state and runtime files are.
func (c *Config) directories(f *file, env func(string) string) error {
	pick := func(key string, configured *string, variable, fallback string) (string, error) {
		for _, s := range []struct{ from, value string }{
			{"$" + variable, lookup(env, variable)}, {key, or(configured, "")}, {"the default", fallback},
		} {
			if s.value == "" {
				continue
			}
			if !filepath.IsAbs(s.value) || strings.ContainsAny(s.value, "\x00\n") {
				return "", invalid("Use an absolute path", "%s %q", s.from, s.value)
			}
			return filepath.Clean(s.value), nil
		}
		return "", nil
	}
	var err error
	state := xdg(env, "XDG_STATE_HOME", ".local/state")
	if state != "" {
		state = filepath.Join(state, "abfleet")
	}
	if c.Home, err = pick("home", f.Home, "AGENT_BROWSER_FLEET_HOME", state); err != nil {
		return err
	}
	if c.Home == "" {
		return invalid("Set HOME, or AGENT_BROWSER_FLEET_HOME to an absolute path", "no state directory: neither HOME nor XDG_STATE_HOME is set")
	}
	run := xdg(env, "XDG_RUNTIME_DIR", "")
	if run == "" && c.Manager == ManagerSystem {
		run = "/run"
	}
	if run != "" {
		run = filepath.Join(run, c.UnitPrefix)
	}
	if c.RuntimeDir, err = pick("runtime_dir", f.RuntimeDir, "", run); err != nil {
		return err
	}
	if c.RuntimeDir == "" {
		return invalid("Log in through systemd-logind, or run: loginctl enable-linger; then XDG_RUNTIME_DIR is set", "no runtime directory: XDG_RUNTIME_DIR is not set")
	}
	if c.TmpRoot, err = pick("tmp_dir", f.TmpDir, "", filepath.Join(c.Home, "tmp")); err != nil {
		return err
	}
	c.Socket, err = pick("socket", f.Socket, "AGENT_BROWSER_FLEET_SOCKET", filepath.Join(c.RuntimeDir, "control.sock"))
	return err
}

// checkPaths checks the longest path of each kind that will ever be used.
func (c *Config) checkPaths() error {
	instance := strings.Repeat("x", instanceLength)
	for _, s := range []struct{ path, hint string }{
		{c.ControlSocket(), "Use a shorter path for socket or runtime_dir"},
		{filepath.Join(c.InstanceDir(instance), "rfb.sock"), "Use a shorter path for runtime_dir or XDG_RUNTIME_DIR"},
		{filepath.Join(c.InstanceDir(instance), "cdp.sock"), "Use a shorter path for runtime_dir or XDG_RUNTIME_DIR"},
	} {
		if len(s.path) > maxSocketPath {
			return invalid(s.hint, "socket path %s has %d bytes, the kernel allows %d", s.path, len(s.path), maxSocketPath)
		}
	}
	if tmp := c.TmpDir(instance); len(tmp) > maxTmpDir {
		return invalid(fmt.Sprintf("Set tmp_dir to an absolute path of at most %d characters on a disk", maxTmpDir-instanceLength-1),
			"temporary directory %s has %d characters, Chromium allows %d", tmp, len(tmp), maxTmpDir)
	}
	return nil
}

// ControlSocket is the path of the control and MCP socket.
func (c *Config) ControlSocket() string { return c.Socket }

// InstanceDir is the runtime directory of a Stack.
func (c *Config) InstanceDir(instance string) string { return filepath.Join(c.RuntimeDir, instance) }

// Slice is the unit that holds a Stack.
func (c *Config) Slice(instance string) string { return c.UnitPrefix + "-" + instance + ".slice" }

// TmpDir is the TMPDIR of a Stack.
func (c *Config) TmpDir(instance string) string { return filepath.Join(c.TmpRoot, instance) }

// IdentitiesDir is the parent of all Identities' trees.
func (c *Config) IdentitiesDir() string { return filepath.Join(c.Home, "identities") }

// IdentityDir is the parent of an Identity's trees.
func (c *Config) IdentityDir(identity string) string {
	return filepath.Join(c.IdentitiesDir(), identity)
}

// TemplateDir is the login profile of an Identity.
func (c *Config) TemplateDir(identity string) string {
	return filepath.Join(c.IdentityDir(identity), "template")
}

// SnapshotDir is the Template Snapshot of an Identity.
func (c *Config) SnapshotDir(identity string) string {
	return filepath.Join(c.IdentityDir(identity), "snapshot")
}

// ProfilesDir is the parent of an Identity's Profiles.
func (c *Config) ProfilesDir(identity string) string {
	return filepath.Join(c.IdentityDir(identity), "profiles")
}

// ProfileDir is the directory of a Profile.
func (c *Config) ProfileDir(identity, profile string) string {
	return filepath.Join(c.ProfilesDir(identity), profile)
}

// OutputDir is where the tools of a session write files. The name is a hash:
// a session id may hold any character.
func (c *Config) OutputDir(session string) string {
	sum := sha256.Sum256([]byte(session))
	return filepath.Join(c.Home, "output", hex.EncodeToString(sum[:16]))
}

// StateFile is the store, TokenFile the access token.
func (c *Config) StateFile() string { return filepath.Join(c.Home, "state.db") }

// TokenFile is the host-local access token.
func (c *Config) TokenFile() string { return filepath.Join(c.Home, "access-token") }

// xdg returns an XDG directory, or its default below HOME. The specification
// has relative values ignored.
func xdg(env func(string) string, variable, fallback string) string {
	if dir := env(variable); filepath.IsAbs(dir) {
		return filepath.Clean(dir)
	}
	if home := env("HOME"); fallback != "" && filepath.IsAbs(home) {
		return filepath.Join(home, fallback)
	}
	return ""
}

func lookup(env func(string) string, variable string) string {
	if variable == "" {
		return ""
	}
	return env(variable)
}

func or[T any](p *T, fallback T) T {
	if p == nil {
		return fallback
	}
	return *p
}
