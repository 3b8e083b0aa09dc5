package doctor

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/godbus/dbus/v5"

	"abfleet/internal/config"
	"abfleet/internal/fault"
)

const (
	managerName = "org.freedesktop.systemd1"
	managerPath = dbus.ObjectPath("/org/freedesktop/systemd1")
	managerFace = "org.freedesktop.systemd1.Manager"
)

// connect opens a bus connection of its own to the manager that the
// configuration names.
func connect(ctx context.Context, env *Env) (*dbus.Conn, error) {
	const op = "connect to D-Bus"
	address := env.Getenv("DBUS_SYSTEM_BUS_ADDRESS")
	hint := "Install and start the system bus: sudo apt-get install dbus"
	if address == "" {
		address = "unix:path=/run/dbus/system_bus_socket"
	}
	if env.Config.Manager == config.ManagerUser {
		hint = "Run: sudo apt-get install dbus-user-session; then log in again, or run: loginctl enable-linger"
		dir := env.Getenv("XDG_RUNTIME_DIR")
		if dir == "" {
			return nil, failed(fault.SystemdUnavailable, op, "Run: export XDG_RUNTIME_DIR=/run/user/$(id -u)", "XDG_RUNTIME_DIR is not set")
		}
		// The manager's own bus: DBUS_SESSION_BUS_ADDRESS may be another one,
		// or "disabled:".
		address = "unix:path=" + dbus.EscapeBusAddressValue(filepath.Join(dir, "bus"))
	}
	conn, err := dbus.Dial(address, dbus.WithContext(ctx))
	if err != nil {
		return nil, failed(fault.SystemdUnavailable, op, hint, "%w", err)
	}
	if err = conn.Auth(nil); err == nil {
		err = conn.Hello()
	}
	if err != nil {
		_ = conn.Close()
		return nil, failed(fault.SystemdUnavailable, op, hint, "%w", err)
	}
	return conn, nil
}

func checkBus(ctx context.Context, env *Env) (string, error) {
	conn, err := connect(ctx, env)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return env.Config.Manager + " bus", nil
}

func checkManager(ctx context.Context, env *Env) (string, error) {
	conn, err := connect(ctx, env)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	var version dbus.Variant
	call := conn.Object(managerName, managerPath).CallWithContext(ctx, "org.freedesktop.DBus.Properties.Get", 0, managerFace, "Version")
	if err := call.Store(&version); err != nil {
		return "", failed(fault.SystemdUnavailable, "reach the systemd manager", "Run: loginctl enable-linger; then systemctl start user@"+strconv.Itoa(env.UID), "%w", err)
	}
	return fmt.Sprintf("%s manager, systemd %v", env.Config.Manager, version.Value()), nil
}

type property struct {
	Name  string
	Value dbus.Variant
}

// scopeProperties are the settings that the fleet's scopes need, beside the
// process. Whether a systemd has them is asked by using them: Debian's 252 has
// some that upstream's does not.
func scopeProperties(pid int, description string) []property {
	return []property{
		{"Description", dbus.MakeVariant(description)},
		{"PIDs", dbus.MakeVariant([]uint32{uint32(pid)})},
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
		{"KillSignal", dbus.MakeVariant(int32(28))}, // SIGWINCH
		{"SendSIGKILL", dbus.MakeVariant(true)},
		{"TimeoutStopUSec", dbus.MakeVariant(uint64(5_000_000))},
		{"OOMPolicy", dbus.MakeVariant("continue")},
	}
}

// checkScopes puts a child of ours into a scope with all properties that the
// fleet uses, and lets both end.
func checkScopes(ctx context.Context, env *Env) (string, error) {
	const op = "start a transient scope"
	const hint = "Use systemd 252 of Debian 12 or later"
	conn, err := connect(ctx, env)
	if err != nil {
		return "", err
	}
	defer conn.Close()

	probe := exec.CommandContext(ctx, "/proc/self/exe")
	probe.Args = []string{scopeProbe}
	probe.Env = []string{}
	probe.Dir = "/"
	release, err := probe.StdinPipe()
	if err != nil {
		return "", failed(fault.Internal, op, "", "%w", err)
	}
	if err := probe.Start(); err != nil {
		return "", failed(fault.Internal, op, "", "%w", err)
	}
	defer func() {
		_ = release.Close()
		_ = probe.Wait()
	}()

	signals := make(chan *dbus.Signal, 64)
	conn.Signal(signals)
	manager := conn.Object(managerName, managerPath)
	if err := conn.AddMatchSignalContext(ctx, dbus.WithMatchInterface(managerFace), dbus.WithMatchMember("JobRemoved")); err != nil {
		return "", failed(fault.SystemdUnavailable, op, hint, "%w", err)
	}
	if err := manager.CallWithContext(ctx, managerFace+".Subscribe", 0).Err; err != nil {
		return "", failed(fault.SystemdUnavailable, op, hint, "%w", err)
	}
	id := make([]byte, 5)
	_, _ = rand.Read(id)
	name := env.Config.UnitPrefix + "-doctor" + strings.ToLower(base32.StdEncoding.EncodeToString(id)) + ".scope"
	var job dbus.ObjectPath
	call := manager.CallWithContext(ctx, managerFace+".StartTransientUnit", 0, name, "fail",
		scopeProperties(probe.Process.Pid, "probe of abfleet doctor"), []struct {
			Name       string
			Properties []property
		}{})
	if err := call.Store(&job); err != nil {
		return "", failed(fault.SystemdUnavailable, op, hint, "%w", err)
	}
	for {
		select {
		case <-ctx.Done():
			return "", failed(fault.Timeout, op, "Look at the manager: systemctl --user list-jobs", "the manager did not finish the job")
		case signal, open := <-signals:
			if !open {
				return "", failed(fault.SystemdUnavailable, op, hint, "%w", errors.New("the bus connection ended"))
			}
			if len(signal.Body) < 4 || signal.Body[1] != job {
				continue
			}
			if result := signal.Body[3]; result != "done" {
				return "", failed(fault.SystemdUnavailable, op, hint, "the job ended as %v", result)
			}
			return inScope(probe.Process.Pid, name, op, hint)
		}
	}
}

// inScope verifies where the kernel has the process.
func inScope(pid int, name, op, hint string) (string, error) {
	file, err := os.Open("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return "", failed(fault.Internal, op, "", "%w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, 64<<10))
	if err != nil {
		return "", failed(fault.Internal, op, "", "%w", err)
	}
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok && filepath.Base(path) == name {
			return "scopes with all needed properties", nil
		}
	}
	return "", failed(fault.CgroupUnsupported, op, hint, "the process was not moved into %s", name)
}
