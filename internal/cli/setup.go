package cli

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/doctor"
	"abfleet/internal/fault"
	"abfleet/units"
)

const (
	// marker is the first line of every file that setup writes. Only files
	// that have it are ever replaced or removed.
	marker = "# Written by abfleet setup; changes are lost. Put yours into a drop-in directory.\n"
	// Ports are chosen from a range below the one from which the kernel
	// hands out ephemeral ports.
	firstPort, portCount = 20000, 10000
	// systemctlTimeout bounds one systemctl call. Starting the service takes
	// as long as finding its browsers again.
	systemctlTimeout = 2 * time.Minute
)

// setup is what the setup and uninstall commands work on.
type setup struct {
	*app
	binDir   string
	stateDir string
	port     int
	now      bool
	unitDir  string
}

func (a *app) newSetup() *setup {
	return &setup{app: a, unitDir: filepath.Join(a.configDir(), "systemd", "user")}
}

func (a *app) setupCommand() *cobra.Command {
	s := a.newSetup()
	cmd := &cobra.Command{
		Use: "setup", Short: "Install the fleet's units for this user", Args: cobra.NoArgs,
		Long: `setup writes the unit files of the fleet into this user's unit directory, chooses
a loopback port for the page, and enables the sockets, through which the service
starts when it is needed. It may be run again at any time, also for an upgrade:
running browsers stay.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s.unitDir = filepath.Join(a.configDir(), "systemd", "user")
			return s.run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&s.binDir, "bin-dir", "", "directory of abfleetd and abfleet-role (default the one of this command)")
	flags.StringVar(&s.stateDir, "state-dir", "", "state directory (default: the recorded one, else $XDG_STATE_HOME/<prefix>)")
	flags.IntVar(&s.port, "port", 0, "loopback port of the page (default: the recorded one, else a free one)")
	flags.BoolVar(&s.now, "now", false, "start the sockets and the service now")
	return cmd
}

func (a *app) uninstallCommand() *cobra.Command {
	return &cobra.Command{
		Use: "uninstall", Short: "Stop the fleet and remove what setup wrote; state and logins stay", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.newSetup().remove(cmd.Context()) },
	}
}

// unitNames returns the units that are enabled, sockets first.
func (s *setup) unitNames() (sockets []string, service, slice string) {
	name := func(unit string) string { return units.Name(s.prefix, unit) }
	return []string{name("abfleetd-control.socket"), name("abfleetd-web.socket")}, name("abfleetd.service"), name("abfleet.slice")
}

func (s *setup) run(ctx context.Context) error {
	const op = "set up the fleet"
	if os.Geteuid() == 0 {
		return fault.New(fault.InvalidArgument, op, "Run it as the normal user whose browsers these are", "root cannot run Chromium's sandbox")
	}
	if s.stateDir == "" {
		// The service does not have this shell's environment.
		s.stateDir = s.getenv("AGENT_BROWSER_FLEET_HOME")
	}
	if s.stateDir == "" {
		s.stateDir = s.recordedState()
	}
	if s.stateDir != "" {
		var err error
		if s.stateDir, err = filepath.Abs(s.stateDir); err != nil {
			return err
		}
	}
	if s.binDir == "" {
		s.binDir = executableDir()
	}
	for _, program := range []string{"abfleetd", "abfleet-role"} {
		path := filepath.Join(s.binDir, program)
		if err := unix.Access(path, unix.X_OK); err != nil || !filepath.IsAbs(path) {
			return fault.New(fault.ProgramMissing, op, "Build it (make build), or name its directory with --bin-dir", "there is no program %s", path)
		}
	}
	if err := s.checkHost(ctx, op); err != nil {
		return err
	}
	configFile, err := s.writeConfig()
	if err != nil {
		return err
	}
	s.app.config = configFile
	cfg, err := s.load()
	if err != nil {
		return err
	}
	if cfg.UnitPrefix != s.prefix {
		return fault.New(fault.InvalidConfig, op, "Give the same prefix in both places", "the configuration has unit_prefix %q, setup has --prefix %q", cfg.UnitPrefix, s.prefix)
	}
	address, err := s.chooseAddress(cfg)
	if err != nil {
		return err
	}
	changed, err := s.writeUnits(cfg, configFile, address)
	if err != nil {
		return err
	}
	sockets, service, _ := s.unitNames()
	if err := s.systemctl(ctx, "daemon-reload"); err != nil {
		return err
	}
	if err := s.systemctl(ctx, append([]string{"enable", service}, sockets...)...); err != nil {
		return err
	}
	if s.now {
		if err := s.start(ctx, changed, address); err != nil {
			return err
		}
	}
	return s.tell(ctx, cfg, address)
}

// checkHost refuses what would make the units useless.
func (s *setup) checkHost(ctx context.Context, op string) error {
	if s.getenv("XDG_RUNTIME_DIR") == "" {
		return fault.New(fault.SystemdUnavailable, op, "Log in through systemd-logind (ssh, not su), or run: export XDG_RUNTIME_DIR=/run/user/$(id -u)", "XDG_RUNTIME_DIR is not set")
	}
	return doctor.Refusal(ctx, doctor.NewEnv(&config.Config{Manager: config.ManagerUser}, ""))
}

// writeConfig makes the configuration of a fleet under another prefix, and
// returns the file to name in the unit, "" for the default one.
func (s *setup) writeConfig() (string, error) {
	if s.app.config != "" {
		return filepath.Abs(s.app.config)
	}
	if s.prefix == "abfleet" {
		return "", nil
	}
	path := s.configFile()
	state := filepath.Join(s.getenv("HOME"), ".local", "state", s.prefix)
	if dir := s.getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		state = filepath.Join(dir, s.prefix)
	}
	if s.stateDir != "" {
		state = s.stateDir
	}
	content := fmt.Sprintf("%sunit_prefix = %q\nhome = %q\n", marker, s.prefix, state)
	if existing, err := os.ReadFile(path); err == nil && !strings.HasPrefix(string(existing), marker) {
		// The user's own; checked by whoever loads it.
		return path, nil
	}
	return path, writeFile(path, content)
}

// chooseAddress returns the address of the page, of the configured host: with
// the port asked for, the one of an earlier setup, or the first free one after a
// number that depends on the user and the prefix, so that a second try finds the
// same.
func (s *setup) chooseAddress(cfg *config.Config) (netip.AddrPort, error) {
	const op = "choose the port of the page"
	configured, err := netip.ParseAddrPort(cfg.WebListen)
	if err != nil {
		return netip.AddrPort{}, fault.New(fault.InvalidConfig, op, "Correct web.listen in the configuration", "%w", err)
	}
	if s.port < 0 || s.port > 65535 {
		return netip.AddrPort{}, usageError{fmt.Errorf("--port %d: use a number from 1 to 65535", s.port)}
	}
	at := func(port int) netip.AddrPort { return netip.AddrPortFrom(configured.Addr(), uint16(port)) }
	recorded := s.recordedAddress()
	asked := configured
	if s.port != 0 {
		asked = at(s.port)
	}
	if asked.Port() != 0 {
		if asked == recorded {
			return asked, nil
		}
		return asked, available(asked, op, "Leave out --port and the port in web.listen to have a free one chosen")
	}
	// On another host than before, the port stays if it can.
	if again := at(int(recorded.Port())); again.Port() != 0 && (again == recorded || listenable(again) == nil) {
		return again, nil
	}
	hash := fnv.New32a()
	_, _ = fmt.Fprintf(hash, "%d %s", os.Geteuid(), s.prefix)
	start := int(hash.Sum32() % portCount)
	for i := range portCount {
		address := at(firstPort + (start+i)%portCount)
		if err := available(address, op, ""); !fault.Is(err, fault.PortTaken) {
			return address, err
		}
	}
	return netip.AddrPort{}, fault.New(fault.PortTaken, op, "Name a free port with --port", "no port from %d to %d is free", firstPort, firstPort+portCount-1)
}

// listenable returns why nothing can listen at an address.
func listenable(address netip.AddrPort) error {
	listener, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(address))
	if err != nil {
		return err
	}
	return listener.Close()
}

// available is listenable for people; the hint is for a port that is in use.
func available(address netip.AddrPort, op, hint string) error {
	err := listenable(address)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EADDRINUSE):
		return fault.New(fault.PortTaken, op, hint, "port %d is in use", address.Port())
	}
	return fault.New(fault.InvalidConfig, op, "Correct web.listen in the configuration, or --port", "%w", err)
}

var listenStream = regexp.MustCompile(`(?m)^ListenStream=(\S+)$`)

var stateVariable = regexp.MustCompile(`(?m)^Environment="AGENT_BROWSER_FLEET_HOME=(.*)"$`)

// recordedState reads the state directory that an earlier setup named in the
// unit, "" for none: a second setup must not make all Identities seem gone.
func (s *setup) recordedState() string {
	_, service, _ := s.unitNames()
	data, err := os.ReadFile(filepath.Join(s.unitDir, service))
	if err != nil || !strings.HasPrefix(string(data), marker) {
		return ""
	}
	found := stateVariable.FindSubmatch(data)
	if found == nil {
		return ""
	}
	return units.Unquote(string(found[1]))
}

var configFlag = regexp.MustCompile(`(?m)^ExecStart=.* --config (\S+)$`)

// installed returns the configuration file that the installed service was given,
// "" for its default one, and its state directory, "" where its configuration
// does not tell. Nothing is known, and ok false, when setup installed none.
func (s *setup) installed() (configFile, home string, ok bool) {
	_, service, _ := s.unitNames()
	data, err := os.ReadFile(filepath.Join(s.unitDir, service))
	if err != nil || !strings.HasPrefix(string(data), marker) {
		return "", "", false
	}
	if found := configFlag.FindSubmatch(data); found != nil {
		configFile = units.UnescapePath(string(found[1]))
	}
	if home = s.recordedState(); home == "" {
		home = s.serviceHome(configFile)
	}
	return configFile, home, true
}

// recordedAddress reads the address of an earlier setup; its port is 0 for none.
func (s *setup) recordedAddress() netip.AddrPort {
	data, err := os.ReadFile(filepath.Join(s.unitDir, units.WebPort(s.prefix, netip.AddrPort{}).Name))
	if err != nil {
		return netip.AddrPort{}
	}
	found := listenStream.FindSubmatch(data)
	if found == nil {
		return netip.AddrPort{}
	}
	address, _ := netip.ParseAddrPort(string(found[1]))
	return address
}

// serviceHome is the state directory that the service finds by itself. Its
// manager knows nothing of what a shell sets; only the directory of the units
// and the configuration is found by the same variable.
func (s *setup) serviceHome(configFile string) string {
	cfg, err := config.Load(configFile, func(name string) string {
		switch name {
		case "HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR":
			return s.getenv(name)
		}
		return ""
	})
	if err != nil {
		return ""
	}
	return cfg.Home
}

// writeUnits writes the unit files and reports whether a socket's changed.
func (s *setup) writeUnits(cfg *config.Config, configFile string, address netip.AddrPort) (changed bool, err error) {
	params := units.Params{Prefix: s.prefix, BinDir: s.binDir, Config: configFile}
	if socket := cfg.ControlSocket(); socket != filepath.Join(s.getenv("XDG_RUNTIME_DIR"), s.prefix, "control.sock") {
		params.Socket = socket
	}
	state := s.home(cfg)
	if s.stateDir != "" || state != s.serviceHome(configFile) {
		params.Environment = append(params.Environment, "AGENT_BROWSER_FLEET_HOME="+state)
	}
	files, err := units.Render(params)
	if err != nil {
		return false, err
	}
	for _, file := range append(files, units.WebPort(s.prefix, address)) {
		path := filepath.Join(s.unitDir, file.Name)
		content := marker + file.Content
		existing, err := os.ReadFile(path)
		if err == nil && string(existing) == content {
			continue
		}
		if err == nil && !strings.HasPrefix(string(existing), marker) {
			return false, fault.New(fault.UnsafePath, "write unit file", "Move it away, or choose another --prefix", "%s is there and not from setup", path)
		}
		if strings.Contains(file.Name, ".socket") {
			changed = true
		}
		if err := writeFile(path, content); err != nil {
			return false, err
		}
	}
	return changed, nil
}

// writeFile writes a configuration file that appears complete or not at all.
func writeFile(path, content string) error {
	const op = "write a file of the setup"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fault.Wrap(err, fault.UnsafePath, op, "Check the directory's owner and mode")
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".abfleet-*")
	if err != nil {
		return fault.Wrap(err, fault.UnsafePath, op, "Check the directory's owner and mode")
	}
	defer os.Remove(temp.Name())
	_, err = temp.WriteString(content)
	err = errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	return fault.Wrap(err, fault.NoSpace, op, "Free space in "+filepath.Dir(path))
}

// start starts the sockets and the service, of the new binaries and units.
func (s *setup) start(ctx context.Context, socketsChanged bool, address netip.AddrPort) error {
	sockets, service, _ := s.unitNames()
	// Failed units of an earlier try would be refused for their start limit.
	_ = s.systemctl(ctx, append([]string{"reset-failed", service}, sockets...)...)
	verb := "start"
	if socketsChanged {
		// systemd restarts no socket whose service runs. Its browsers stay.
		if err := s.systemctl(ctx, "stop", service); err != nil {
			return err
		}
		verb = "restart"
	}
	if err := s.systemctl(ctx, append([]string{verb}, sockets...)...); err != nil {
		if !s.active(ctx, sockets[1]) {
			if taken := available(address, "start the web socket", "Run: abfleet setup --now --port N, with another number"); taken != nil {
				return taken
			}
		}
		return err
	}
	if err := s.systemctl(ctx, "restart", service); err != nil {
		status := s.property(ctx, service, "StatusText")
		if status == "" {
			return err
		}
		return fault.New(fault.ServiceUnavailable, "start the service", "See: journalctl --user -u "+service, "%s", status)
	}
	return nil
}

// tell says what exists now.
func (s *setup) tell(ctx context.Context, cfg *config.Config, address netip.AddrPort) error {
	type unitState struct {
		Unit   string `json:"unit"`
		State  string `json:"state"`
		Serves string `json:"serves"`
	}
	sockets, service, slice := s.unitNames()
	states := []unitState{
		{sockets[0], "", cfg.ControlSocket() + " (control and MCP)"},
		{sockets[1], "", "http://" + address.String() + "/ (page)"},
		{service, "", "the service, started through its sockets"},
		{slice, "", "the browsers, below it"},
	}
	for i := range states {
		states[i].State = s.property(ctx, states[i].Unit, "ActiveState")
	}
	examined := *cfg
	examined.Home = s.home(cfg)
	findings := doctor.Run(ctx, doctor.NewEnv(&examined, ""), doctor.Checks())
	if s.json {
		s.writeJSON(map[string]any{"ok": true, "units": states, "port": address.Port(), "unit_dir": s.unitDir, "doctor": api.Doctor{OK: doctor.OK(findings), Findings: findings}})
		return nil
	}
	s.printf("installed in %s, with state and logins in %s:\n", s.unitDir, s.home(cfg))
	for _, state := range states {
		s.printf("  %-28s %-9s %s\n", state.Unit, state.State, state.Serves)
	}
	for _, f := range findings {
		if f.Status == doctor.StatusFailed {
			s.printf("note: %s\nhint: %s\n", f.Text, f.Hint)
		}
	}
	if !s.now {
		s.printf("start with: systemctl --user start %s\n", strings.Join(sockets, " "))
	}
	return nil
}

// home is the state directory of the service that is set up.
func (s *setup) home(cfg *config.Config) string {
	if s.stateDir == "" {
		return cfg.Home
	}
	return s.stateDir
}

// remove stops everything and removes what setup wrote. Browsers close first,
// in order, so that no login is lost.
func (s *setup) remove(ctx context.Context) error {
	sockets, service, slice := s.unitNames()
	var written []string
	for _, unit := range append(append([]string{}, sockets...), service, slice, units.WebPort(s.prefix, netip.AddrPort{}).Name) {
		path := filepath.Join(s.unitDir, unit)
		data, err := os.ReadFile(path)
		if err == nil && strings.HasPrefix(string(data), marker) {
			written = append(written, path)
		}
	}
	if data, err := os.ReadFile(s.configFile()); err == nil && strings.HasPrefix(string(data), marker) {
		written = append(written, s.configFile())
	}
	_, state, _ := s.installed()
	if len(written) == 0 {
		return fault.New(fault.NotFound, "uninstall the fleet", "Name its --prefix", "setup wrote nothing in %s", s.unitDir)
	}
	if err := s.systemctl(ctx, append([]string{"disable", "--now", service}, sockets...)...); err != nil {
		return err
	}
	if err := s.systemctl(ctx, "stop", slice); err != nil {
		return err
	}
	for _, path := range written {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fault.Wrap(err, fault.UnsafePath, "remove a file of the setup", "Remove it yourself")
		}
		// Drop-in and configuration directories that are empty now were ours.
		if dir := filepath.Dir(path); dir != s.unitDir {
			_ = os.Remove(dir)
		}
	}
	if dir := s.getenv("XDG_RUNTIME_DIR"); dir != "" {
		// systemd leaves the path of a socket behind, and browsers that it
		// stopped leave cookies and passwords that open nothing any more.
		if err := os.RemoveAll(filepath.Join(dir, s.prefix)); err != nil {
			return fault.Wrap(err, fault.UnsafePath, "remove runtime files", "Remove them yourself")
		}
	}
	if err := s.systemctl(ctx, "daemon-reload"); err != nil {
		return err
	}
	if s.json {
		s.writeJSON(map[string]any{"ok": true, "removed": written})
		return nil
	}
	for _, path := range written {
		s.printf("removed %s\n", path)
	}
	if state != "" {
		s.printf("the state stays, with all logins, in %s\n", state)
	}
	return nil
}

// systemctl asks the user manager.
func (s *setup) systemctl(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, systemctlTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "systemctl", append([]string{"--user", "--quiet", "--no-ask-password"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if errors.Is(err, exec.ErrNotFound) {
		return fault.New(fault.SystemdUnavailable, "ask the user manager", "Run: sudo apt-get install systemd", "%w", err)
	}
	return fault.New(fault.SystemdUnavailable, "run systemctl --user "+args[0], "Run `abfleet doctor`, and see: journalctl --user -u "+units.Name(s.prefix, "abfleetd.service"),
		"%s", strings.Join(strings.Fields(string(out)+" ("+err.Error()+")"), " "))
}

// property returns a property of a unit, "" when it cannot be read.
func (s *setup) property(ctx context.Context, unit, name string) string {
	ctx, cancel := context.WithTimeout(ctx, systemctlTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", "--user", "show", "--value", "--property="+name, unit).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func (s *setup) active(ctx context.Context, unit string) bool {
	return s.property(ctx, unit, "ActiveState") == "active"
}
