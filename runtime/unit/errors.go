package unit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/godbus/dbus/v5"
)

// Errors a caller branches on. They are found with errors.Is.
var (
	// ErrNotLoaded says that systemd knows no unit of that name.
	ErrNotLoaded = errors.New("unit is not loaded")
	// ErrExists says that a unit of that name is loaded already. Names of
	// generations are never reused, so this is somebody else's unit or a
	// leftover, and never a reason to adopt it.
	ErrExists = errors.New("unit exists already")
	// ErrNoProcess says that there is no process of that number.
	ErrNoProcess = errors.New("no such process")
	// ErrNotMember says that the process is not listed in the cgroup it was
	// to be put into: it is a zombie, or somebody moved it.
	ErrNotMember = errors.New("process is not in the unit's cgroup")
	// ErrClosed says that the Manager was closed.
	ErrClosed = errors.New("connection to systemd is closed")
)

// JobError is a job that ended otherwise than "done".
type JobError struct {
	Unit string
	// Result is systemd's word: canceled, timeout, failed, dependency, skipped.
	Result string
}

func (e *JobError) Error() string {
	return fmt.Sprintf("job for %s ended as %q", e.Unit, e.Result)
}

// The D-Bus error names that the package tells apart.
const (
	nameNoSuchUnit        = "org.freedesktop.systemd1.NoSuchUnit"
	nameUnitExists        = "org.freedesktop.systemd1.UnitExists"
	nameAlreadySubscribed = "org.freedesktop.systemd1.AlreadySubscribed"
	nameNoProcess         = "org.freedesktop.DBus.Error.UnixProcessIdUnknown"
	nameErrnoNoProcess    = "System.Error.ESRCH"
	namePropertyReadOnly  = "org.freedesktop.DBus.Error.PropertyReadOnly"
	nameInvalidArgs       = "org.freedesktop.DBus.Error.InvalidArgs"
	nameUnknownProperty   = "org.freedesktop.DBus.Error.UnknownProperty"
	nameNoReply           = "org.freedesktop.DBus.Error.NoReply"
	nameServiceUnknown    = "org.freedesktop.DBus.Error.ServiceUnknown"
	nameNoOwner           = "org.freedesktop.DBus.Error.NameHasNoOwner"
	nameDisconnected      = "org.freedesktop.DBus.Error.Disconnected"
)

// errorName returns the D-Bus error name in err's chain, or "".
func errorName(err error) string {
	var e dbus.Error
	if errors.As(err, &e) {
		return e.Name
	}
	var p *dbus.Error
	if errors.As(err, &p) {
		return p.Name
	}
	return ""
}

// isLost reports whether err means that the answer to a call will never come
// although the call may have been carried out: the connection broke, or the
// manager left the bus (daemon-reexec does that for some milliseconds).
func isLost(err error) bool {
	switch errorName(err) {
	case nameNoReply, nameServiceUnknown, nameNoOwner, nameDisconnected:
		return true
	case "":
	default:
		return false
	}
	var op *net.OpError
	return errors.Is(err, dbus.ErrClosed) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) ||
		(errors.As(err, &op) && !errors.Is(err, context.DeadlineExceeded))
}

// translate gives a D-Bus error the sentinel that callers look for.
func translate(err error) error {
	switch errorName(err) {
	case nameNoSuchUnit:
		return fmt.Errorf("%w (%w)", ErrNotLoaded, err)
	case nameUnitExists:
		return fmt.Errorf("%w (%w)", ErrExists, err)
	case nameNoProcess, nameErrnoNoProcess:
		return fmt.Errorf("%w (%w)", ErrNoProcess, err)
	}
	return err
}

// validName keeps a slip of the caller from reaching another unit: systemd
// would take a name without suffix for a service and a pattern for many.
func validName(name, suffix string) error {
	stem, ok := strings.CutSuffix(name, suffix)
	if !ok || stem == "" || len(name) > 255 || strings.ContainsAny(name, "/*?[]\x00 ") {
		return fmt.Errorf("%q is not the name of a %s unit", name, strings.TrimPrefix(suffix, "."))
	}
	return nil
}
