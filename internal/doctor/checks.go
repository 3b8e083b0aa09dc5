package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// Space below which a Profile can hardly be cloned, and below which it is time
// to look, in bytes.
const (
	leastSpace = 512 << 20
	lowSpace   = 2 << 30
)

// Checks returns the registry, in the order in which the checks build on each
// other.
func Checks() []Check {
	return []Check{
		{Code: "configuration", Title: "configuration", Severity: SeverityError, Run: checkConfig},
		{Code: "user", Title: "normal user", Severity: SeverityError, Run: checkUser},
		{Code: "cgroup", Title: "cgroup v2", Severity: SeverityError, Required: true, Run: checkCgroup},
		{Code: "systemd", Title: "systemd", Severity: SeverityError, Run: checkBooted},
		{Code: "runtime_dir", Title: "runtime directory", Severity: SeverityError, Run: checkRuntimeDir},
		{Code: "dbus", Title: "D-Bus", Severity: SeverityError, Needs: []string{"systemd"}, Run: checkBus},
		{Code: "systemd_manager", Title: "systemd manager", Severity: SeverityError, Needs: []string{"dbus"}, Run: checkManager},
		{Code: "systemd_scopes", Title: "systemd scopes", Severity: SeverityError, Needs: []string{"systemd_manager"}, Run: checkScopes},
		{Code: "linger", Title: "linger", Severity: SeverityWarning, Needs: []string{"systemd"}, Run: checkLinger},
		{Code: "role_helper", Title: "abfleet-role", Severity: SeverityError, Run: checkRoleHelper},
		{Code: "chromium", Title: "Chromium", Severity: SeverityError, Run: checkChromium},
		{Code: "user_namespaces", Title: "user namespaces", Severity: SeverityError, Run: checkUserNamespaces},
		{Code: "xvnc", Title: "Xvnc", Severity: SeverityError, Run: checkXvnc},
		{Code: "xvfb", Title: "Xvfb", Severity: SeverityError, Run: checkXvfb},
		{Code: "x11vnc", Title: "x11vnc", Severity: SeverityError, Run: checkX11vnc},
		{Code: "x11_sockets", Title: "X socket directory", Severity: SeverityWarning, Run: checkX11Sockets},
		{Code: "fonts", Title: "fonts", Severity: SeverityWarning, Run: checkFonts},
		{Code: "state_dir", Title: "state directory", Severity: SeverityError, Run: checkStateDir},
		{Code: "state_copy", Title: "copy of the state", Severity: SeverityWarning, Run: checkStateCopy},
		{Code: "disk", Title: "disk space", Severity: SeverityError, Run: checkDisk},
		{Code: "disk_low", Title: "disk reserve", Severity: SeverityWarning, Needs: []string{"disk"}, Run: checkDiskReserve},
		{Code: "service", Title: "service", Severity: SeverityError, Run: checkService},
	}
}

func checkConfig(_ context.Context, env *Env) (string, error) {
	if env.ConfigError != nil {
		return "", env.ConfigError
	}
	if env.Config.File == "" {
		return "defaults", nil
	}
	return env.Config.File, nil
}

func checkUser(_ context.Context, env *Env) (string, error) {
	if env.UID == 0 {
		return "", failed(fault.UserNamespacesDenied, "run browsers as this user", "Use the fleet as a normal user",
			"Chromium's sandbox does not work for root")
	}
	return "uid " + strconv.Itoa(env.UID), nil
}

// checkCgroup tells the unified hierarchy from the hybrid and the legacy one by
// what is mounted.
func checkCgroup(_ context.Context, _ *Env) (string, error) {
	return cgroupAt("/sys/fs/cgroup")
}

func cgroupAt(root string) (string, error) {
	const op = "use control groups"
	const hint = "Boot with the kernel parameter systemd.unified_cgroup_hierarchy=1 and without systemd.legacy_systemd_cgroup_controller"
	var mount unix.Statfs_t
	if err := unix.Statfs(root, &mount); err != nil {
		return "", failed(fault.CgroupUnsupported, op, "Mount the cgroup2 file system on "+root, "%s: %w", root, err)
	}
	if mount.Type == unix.CGROUP2_SUPER_MAGIC {
		return "unified on " + root, nil
	}
	if err := unix.Statfs(filepath.Join(root, "unified"), &mount); err == nil && mount.Type == unix.CGROUP2_SUPER_MAGIC {
		return "", failed(fault.CgroupUnsupported, op, hint, "the hierarchy is hybrid, it has to be unified (cgroup v2 only)")
	}
	return "", failed(fault.CgroupUnsupported, op, hint, "the hierarchy is cgroup v1, it has to be unified (cgroup v2 only)")
}

func checkBooted(_ context.Context, _ *Env) (string, error) {
	return bootedAt("/run/systemd/system", "/proc/1/comm")
}

// bootedAt is sd_booted(3): the directory is there when systemd is PID 1.
func bootedAt(runDir, comm string) (string, error) {
	if info, err := os.Lstat(runDir); err == nil && info.IsDir() {
		return "it is PID 1", nil
	}
	name, _ := os.ReadFile(comm)
	return "", failed(fault.SystemdUnavailable, "use systemd", "Use a host, VM or container that systemd boots",
		"PID 1 is %q, not systemd", strings.TrimSpace(string(name)))
}

func checkRuntimeDir(_ context.Context, env *Env) (string, error) {
	const op = "use the runtime directory"
	if env.Config.Manager == config.ManagerSystem {
		return "", skip("the system manager is used")
	}
	dir := env.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		return "", failed(fault.UnsafePath, op, "Log in through systemd-logind (ssh, not su), or run: export XDG_RUNTIME_DIR=/run/user/$(id -u)", "XDG_RUNTIME_DIR is not set")
	}
	if err := private(dir, env.UID); err != nil {
		return "", failed(fault.UnsafePath, op, "Log in through systemd-logind, which makes it with mode 0700", "%w", err)
	}
	return dir, nil
}

func checkStateDir(_ context.Context, env *Env) (string, error) {
	const op = "use the state directory"
	home := env.Config.Home
	if home == "" {
		return "", skip("none is known without a configuration")
	}
	if _, err := os.Lstat(home); errors.Is(err, fs.ErrNotExist) {
		return home + " is made at the first start", nil
	}
	if err := private(home, env.UID); err != nil {
		return "", failed(fault.UnsafePath, op, "Run: chmod 0700 "+home+"; it has to be a directory of yours and no symlink", "%w", err)
	}
	return home, nil
}

// checkStateCopy looks after what a damaged state would be restored from.
func checkStateCopy(ctx context.Context, env *Env) (string, error) {
	const op = "use the copy of the state"
	if env.Config.Home == "" {
		return "", skip("no state is known without a configuration")
	}
	state := env.Config.StateFile()
	path := store.CopyOf(state)
	again := "Make a backup: abfleet store backup FILE; the service renews its copy when it stops: systemctl --user restart abfleetd"
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(state); errors.Is(err, fs.ErrNotExist) {
			return "there is no state yet", nil
		}
		return "", failed(fault.StateCorrupt, op, again, "there is no %s", path)
	}
	err := store.CheckFile(ctx, path)
	var damaged *store.Damaged
	switch {
	case errors.As(err, &damaged):
		return "", failed(fault.StateCorrupt, op, again, "%s is damaged: %s", path, damaged.Reason)
	case err != nil:
		return "", skip("it could not be checked: " + err.Error())
	}
	return path, nil
}

// private returns why a directory is not ours alone to write to.
func private(dir string, uid int) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*unixStat)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	case ok && int(stat.Uid) != uid:
		return fmt.Errorf("%s belongs to uid %d", dir, stat.Uid)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s may be written to by others (mode %#o)", dir, info.Mode().Perm())
	}
	return nil
}

func checkLinger(_ context.Context, env *Env) (string, error) {
	if env.Config.Manager == config.ManagerSystem {
		return "", skip("the system manager is used")
	}
	name := strconv.Itoa(env.UID)
	if account, err := user.LookupId(name); err == nil {
		name = account.Username
	}
	if _, err := os.Stat(filepath.Join("/var/lib/systemd/linger", name)); err != nil {
		return "", failed(fault.SystemdUnavailable, "keep browsers running after logout", "Run: loginctl enable-linger", "linger is off for %s", name)
	}
	return "on for " + name, nil
}

// executable returns why a file cannot be run.
func executable(path, op, hint string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return failed(fault.ProgramMissing, op, hint, "%w", err)
	case !info.Mode().IsRegular():
		return failed(fault.ProgramMissing, op, hint, "%s is not a file", path)
	}
	if err := unix.Access(path, unix.X_OK); err != nil {
		return failed(fault.ProgramMissing, op, hint, "%s may not be executed: %w", path, err)
	}
	return nil
}

func checkRoleHelper(_ context.Context, env *Env) (string, error) {
	path := env.Config.RoleHelper
	return path, executable(path, "start roles", "Install abfleet-role beside abfleetd, or set programs.role_helper in the configuration")
}

func checkChromium(ctx context.Context, env *Env) (string, error) {
	const op = "run Chromium"
	const hint = "Run: sudo apt-get install chromium; or set programs.chromium in the configuration"
	path := env.Config.Chromium
	if err := executable(path, op, hint); err != nil {
		return "", err
	}
	return version(ctx, path, op, hint, "--version")
}

func checkXvnc(ctx context.Context, env *Env) (string, error) {
	const op = "run Xvnc"
	const hint = "Run: sudo apt-get install tigervnc-standalone-server; or set programs.xvnc in the configuration"
	if err := wants(env, config.DisplayXvnc); err != nil {
		return "", err
	}
	path := env.Config.Xvnc
	if err := executable(path, op, hint); err != nil {
		return "", err
	}
	return version(ctx, path, op, hint, "-version")
}

// checkXvfb does not ask for the version: an Xvfb tells none.
func checkXvfb(_ context.Context, env *Env) (string, error) {
	if err := wants(env, config.DisplayXvfb); err != nil {
		return "", err
	}
	return env.Config.Xvfb, executable(env.Config.Xvfb, "run Xvfb", "Run: sudo apt-get install xvfb; or set programs.xvfb in the configuration")
}

func checkX11vnc(ctx context.Context, env *Env) (string, error) {
	const op = "run x11vnc"
	const hint = "Run: sudo apt-get install x11vnc; or set programs.x11vnc in the configuration"
	if err := wants(env, config.DisplayXvfb); err != nil {
		return "", err
	}
	path := env.Config.X11vnc
	if err := executable(path, op, hint); err != nil {
		return "", err
	}
	return version(ctx, path, op, hint, "-version")
}

// wants skips a check of what only another display needs.
func wants(env *Env, display string) error {
	if env.Config.Display != display {
		return skip(fmt.Sprintf("not needed with display = %q", env.Config.Display))
	}
	return nil
}

// version runs a program that prints its version, which also shows that its
// libraries are there.
func version(ctx context.Context, path, op, hint, flag string) (string, error) {
	cmd := exec.CommandContext(ctx, path, flag)
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin", "DBUS_SESSION_BUS_ADDRESS=disabled:", "DBUS_SYSTEM_BUS_ADDRESS=disabled:"}
	cmd.Dir = "/"
	// The program may be a wrapper, whose children end with it and may keep the
	// pipe. Its number is its own until it is waited for.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			return err
		}
		return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	line := firstLine(string(out))
	if err != nil {
		return "", failed(fault.ProgramMissing, op, hint, "%s %s: %w: %s", path, flag, err, line)
	}
	return line, nil
}

func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			return line
		}
	}
	return ""
}

func checkX11Sockets(_ context.Context, env *Env) (string, error) {
	if env.Config.Display == config.DisplayNone {
		return "", wants(env, "")
	}
	const dir = "/tmp/.X11-unix"
	const op = "make X sockets"
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return dir + " is made by the first X server", nil
	}
	if err != nil {
		return "", failed(fault.UnsafePath, op, "", "%w", err)
	}
	if !info.IsDir() || info.Mode()&os.ModeSticky == 0 || info.Mode().Perm() != 0o777 {
		return "", failed(fault.UnsafePath, op, "Run as root: systemd-tmpfiles --create --prefix="+dir, "%s has mode %v instead of 1777", dir, info.Mode())
	}
	return dir, nil
}

func checkFonts(_ context.Context, env *Env) (string, error) {
	dirs := []string{"/usr/share/fonts", "/usr/local/share/fonts"}
	if home := env.Getenv("HOME"); home != "" {
		dirs = append(dirs, filepath.Join(home, ".fonts"), filepath.Join(home, ".local/share/fonts"))
	}
	found := ""
	for _, dir := range dirs {
		_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return nil
			}
			switch strings.ToLower(filepath.Ext(path)) {
			case ".ttf", ".otf", ".ttc", ".woff2":
				if !entry.IsDir() {
					found = path
					return fs.SkipAll
				}
			}
			return nil
		})
		if found != "" {
			return found, nil
		}
	}
	return "", failed(fault.ProgramMissing, "draw text", "Run: sudo apt-get install fonts-liberation fonts-noto-core", "no scalable font is installed")
}

func checkDisk(_ context.Context, env *Env) (string, error)        { return space(env, leastSpace) }
func checkDiskReserve(_ context.Context, env *Env) (string, error) { return space(env, lowSpace) }

// space checks that the state directory's file system has least bytes left.
func space(env *Env, least uint64) (string, error) {
	const op = "store Profiles"
	dir := env.Config.Home
	if dir == "" {
		return "", skip("no state directory is known without a configuration")
	}
	for {
		if _, err := os.Stat(dir); err == nil || dir == "/" {
			break
		}
		dir = filepath.Dir(dir)
	}
	var mount unix.Statfs_t
	if err := unix.Statfs(dir, &mount); err != nil {
		return "", failed(fault.NoSpace, op, "", "%s: %w", dir, err)
	}
	free := mount.Bavail * uint64(mount.Bsize)
	if free < least {
		return "", failed(fault.NoSpace, op, "Free space there, or move the state with AGENT_BROWSER_FLEET_HOME", "%d MB left on %s, %d MB are wanted", free>>20, dir, least>>20)
	}
	if mount.Files > 0 && mount.Ffree < 20_000 {
		return "", failed(fault.NoSpace, op, "Remove files there, or move the state with AGENT_BROWSER_FLEET_HOME", "%d inodes left on %s", mount.Ffree, dir)
	}
	return fmt.Sprintf("%d MB free", free>>20), nil
}

func checkService(ctx context.Context, env *Env) (string, error) {
	if env.Socket == "" {
		return "", skip("the service itself is checking")
	}
	answer, err := api.NewClient(env.Socket).Get(ctx, api.VersionPath, nil)
	if err != nil {
		if env.Explain != nil {
			err = env.Explain(err)
		}
		return "", err
	}
	if answer.Version == nil {
		return "", failed(fault.ServiceUnavailable, "reach the service", "Check that service and CLI are of one release", "the answer holds no version")
	}
	build := answer.Version
	return fmt.Sprintf("version %s, pid %d, %d running", build.Version, build.PID, build.Running), nil
}
