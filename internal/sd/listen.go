package sd

import (
	"net"
	"os"
	"slices"
	"sort"
	"strings"

	"github.com/coreos/go-systemd/v22/activation"

	"abfleet/internal/fault"
)

// The descriptor names of the two socket units (FileDescriptorName=).
const (
	ControlSocket = "control"
	WebSocket     = "web"
)

// Listeners returns the sockets this process was started with, by descriptor
// name, and takes them out of the environment. It fails on a name that is not
// in want, on a missing name, and on a socket of the wrong kind: a service that
// serves the wrong thing on a socket is worse than one that does not start.
//
// A process that was not socket-activated gets nil and no error.
func Listeners(want ...string) (map[string][]net.Listener, error) {
	const op = "take over the sockets of the service"
	const hint = "Start the service through its socket units: systemctl --user start abfleetd-control.socket abfleetd-web.socket"
	files := activation.Files(true)
	if len(files) == 0 {
		return nil, nil
	}
	found := make(map[string][]net.Listener)
	fail := func(format string, args ...any) (map[string][]net.Listener, error) {
		for _, file := range files {
			_ = file.Close()
		}
		for _, listeners := range found {
			for _, listener := range listeners {
				_ = listener.Close()
			}
		}
		return nil, fault.New(fault.InvalidConfig, op, hint, format, args...)
	}
	for _, file := range files {
		name := file.Name()
		if !slices.Contains(want, name) {
			return fail("systemd passed a socket named %q, known are %s", name, strings.Join(want, ", "))
		}
		listener, err := net.FileListener(file)
		if err != nil {
			return fail("the socket %q cannot be listened on: %w", name, err)
		}
		found[name] = append(found[name], listener)
		if err := checkKind(name, listener); err != "" {
			return fail("the socket %q %s", name, err)
		}
	}
	var missing []string
	for _, name := range want {
		if len(found[name]) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		sort.Strings(missing)
		return fail("systemd passed no socket named %s", strings.Join(missing, ", "))
	}
	for _, file := range files {
		// FileListener made its own copy.
		_ = file.Close()
	}
	return found, nil
}

// checkKind says what is wrong with a socket for its name, "" for nothing.
func checkKind(name string, listener net.Listener) string {
	switch name {
	case ControlSocket:
		addr, ok := listener.Addr().(*net.UnixAddr)
		if !ok {
			return "is not a unix socket"
		}
		if !strings.HasPrefix(addr.Name, "/") {
			return "has no path: anybody on the host could connect to an abstract socket"
		}
	case WebSocket:
		addr, ok := listener.Addr().(*net.TCPAddr)
		if !ok {
			return "is not a TCP socket"
		}
		if !addr.IP.IsLoopback() {
			return "listens beyond the loopback interface"
		}
	}
	return ""
}

// ListenWeb opens a loopback TCP socket, for a service without socket units.
func ListenWeb(address string) (net.Listener, error) {
	const op = "listen for the web page"
	addr, err := net.ResolveTCPAddr("tcp", address)
	if err != nil || addr.IP == nil || !addr.IP.IsLoopback() {
		return nil, fault.New(fault.InvalidArgument, op, "Give a loopback address, such as 127.0.0.1:0", "%q is not one", address)
	}
	listener, err := net.ListenTCP("tcp", addr)
	if err != nil {
		return nil, fault.New(fault.PortTaken, op, "Choose another port", "%w", err)
	}
	return listener, nil
}

// ListenControl opens a unix socket at path, mode 0600, for a service without
// socket units. It takes the place of a socket that nobody listens on any more.
func ListenControl(path string) (net.Listener, error) {
	const op = "listen for control"
	addr := &net.UnixAddr{Name: path, Net: "unix"}
	if conn, err := net.DialUnix("unix", nil, addr); err == nil {
		_ = conn.Close()
		return nil, fault.New(fault.StateInUse, op, "Stop the service that uses it", "another service listens on %s", path)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
	listener, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, fault.New(fault.UnsafePath, op, "Choose a path in a private directory", "%w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = listener.Close()
		return nil, fault.New(fault.UnsafePath, op, "", "%w", err)
	}
	return listener, nil
}
