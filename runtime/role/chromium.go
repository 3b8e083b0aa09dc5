package role

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// Chromium describes one browser.
type Chromium struct {
	Program       string // the browser itself, not the distribution's shell wrapper, which costs 0.15 s
	Profile       string // user data directory
	Display       int    // X display number; 0 for a headless browser
	Authority     string // path of the Xauthority file
	Width, Height int    // pixels; the window fills the screen
	Port          bool   // listen on a loopback port too, see DebuggingPort
	Home          string // the user's home directory
	TempDir       string // private, on disk, at most 60 characters: Chromium adds 45 for a socket
	Stealth       bool   // keep navigator.webdriver false
	Restore       bool   // reopen the last session, which also keeps session cookies
	URL           string // first page of a browser that restores nothing; about:blank when empty
}

// disabledFeatures are switched off because each opens a bubble, a prompt or a
// background download that a browser nobody installed by hand should not show.
var disabledFeatures = []string{
	"Translate", "MediaRouter", "OptimizationHints", "GlobalMediaControls", "ImprovedCookieControls",
	"InterestFeedContentSuggestions", "DialMediaRouteProvider", "HttpsUpgrades", "AutofillServerCommunication",
	"PasswordLeakDetection", "PrivacySandboxSettings4", "ChromeWhatsNewUI",
}

// Args returns the command line. --no-sandbox is never part of it.
func (c Chromium) Args() []string {
	url := c.URL
	if url == "" {
		url = "about:blank"
	}
	args := []string{
		c.Program,
		"--user-data-dir=" + c.Profile,
		"--remote-debugging-pipe",
		"--password-store=basic",
		"--no-default-browser-check",
		"--window-position=0,0", fmt.Sprintf("--window-size=%d,%d", c.Width, c.Height),
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
		"--disable-breakpad", "--disable-dev-shm-usage", "--metrics-recording-only", "--no-pings",
		"--hide-crash-restore-bubble", "--disable-search-engine-choice-screen",
		"--disable-features=" + strings.Join(disabledFeatures, ","),
		// Without it, Chromium acknowledges and drops a press into a page whose
		// first frame is not on the screen yet: the agent's click is lost.
		"--allow-pre-commit-input",
	}
	if c.Display > 0 {
		args = append(args, "--ozone-platform=x11")
	} else {
		args = append(args, "--headless=new", fmt.Sprintf("--screen-info={%dx%d}", c.Width, c.Height))
	}
	if c.Port {
		// One of its own choice, which nobody can have taken before.
		args = append(args, "--remote-debugging-port=0")
	}
	if c.Stealth {
		args = append(args, "--disable-blink-features=AutomationControlled")
		if !warningsHidden() {
			args = append(args, "--test-type")
		}
	}
	if c.Restore {
		args = append(args, "--restore-last-session")
		if c.URL == "" {
			return args
		}
	}
	return append(args, "--", url)
}

// portFile is where Chromium says which port it has chosen: the number on the
// first line, the path of its browser websocket on the second.
const portFile = "DevToolsActivePort"

// ForgetPort removes what an earlier browser on the Profile said of its port.
func ForgetPort(profile string) error {
	err := os.Remove(filepath.Join(profile, portFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// DebuggingPort returns the port that the browser on the Profile has chosen. It
// returns ErrNotReady while it has not said so.
func DebuggingPort(profile string) (int, error) {
	data, err := os.ReadFile(filepath.Join(profile, portFile))
	if errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	if err != nil {
		return 0, err
	}
	line, path, whole := strings.Cut(string(data), "\n")
	if !whole || !strings.HasPrefix(path, "/") {
		return 0, fmt.Errorf("%w: %s is not whole", ErrNotReady, portFile)
	}
	port, err := strconv.ParseUint(line, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("%s names the port %q", portFile, line)
	}
	return int(port), nil
}

// policyDir is where Chromium reads the machine's managed policies.
var policyDir = "/etc/chromium/policies/managed"

// warningsHidden reports whether a managed policy hides the bar that warns of
// command-line flags.
func warningsHidden() bool {
	files, _ := filepath.Glob(filepath.Join(policyDir, "*.json"))
	for _, file := range files {
		data, err := os.ReadFile(file)
		var policy struct {
			Enabled *bool `json:"CommandLineFlagSecurityWarningsEnabled"`
		}
		if err == nil && json.Unmarshal(data, &policy) == nil && policy.Enabled != nil && !*policy.Enabled {
			return true
		}
	}
	return false
}

// Env returns the whole environment of the role. Both bus addresses are
// disabled: with the session bus Chromium moves itself into a scope of its
// own, and with the system bus it hears logind's shutdown signal and quits
// uncleanly before its holder is told to close it.
func (c Chromium) Env() []string {
	env := []string{
		"HOME=" + c.Home,
		"PATH=/usr/local/bin:/usr/bin:/bin",
		"LANG=C.UTF-8",
		"TMPDIR=" + c.TempDir,
		// Crash reports would go to the user's own Chromium configuration.
		"BREAKPAD_DUMP_LOCATION=" + c.TempDir,
		"DBUS_SESSION_BUS_ADDRESS=disabled:",
		"DBUS_SYSTEM_BUS_ADDRESS=disabled:",
		"NO_AT_BRIDGE=1",
	}
	if c.Display > 0 {
		env = append(env, "DISPLAY="+XDisplay(c.Display), "XAUTHORITY="+c.Authority)
	}
	return env
}

// ChromiumNoise marks the lines in which Chromium complains, some thirty times
// at each start, that there is no bus: see Env.
var ChromiumNoise = []string{"ERROR:dbus/bus.cc", "ERROR:dbus/object_proxy.cc"}

// CheckUserNamespaces starts helper in a new user namespace. Chromium's
// sandbox needs one; where the kernel or a sandbox around the service denies
// it, starting is refused rather than the sandbox given up. No error means that
// it was seen to work.
func CheckUserNamespaces(ctx context.Context, helper string) error {
	cmd := exec.CommandContext(ctx, helper, "--version")
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}},
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exit) && exit.Exited():
		return nil // it ran, whatever it thinks of its argument
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return fault.New(fault.UserNamespacesDenied, "start session browser",
			"allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns) and remove RestrictNamespaces= from the service; `abfleet doctor` names the knob",
			"no user namespace for Chromium's sandbox: %w", err)
	}
	return fault.New(fault.BrowserStartFailed, "start session browser", "try again; `abfleet doctor` shows what keeps programs from starting",
		"user namespaces could not be tried: %w", err)
}

// CheckProgram reports a missing program with the package that brings it.
func CheckProgram(path, pkg string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return fault.New(fault.ProgramMissing, "start session browser", "install it: apt-get install "+pkg, "no program %s: %w", path, err)
	case st.IsDir() || st.Mode()&0o111 == 0:
		return fault.New(fault.ProgramMissing, "start session browser", "install it again: apt-get install --reinstall "+pkg, "%s is not executable", path)
	}
	return nil
}
