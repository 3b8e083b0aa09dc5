package unit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"

	"abfleet/internal/fault"
)

// Deadlines and back-off of the bus. Tests shrink them.
var (
	// CallTimeout bounds one method call, re-dialling included. systemd answers
	// in milliseconds; it is silent for seconds only during a daemon-reload on
	// a very large host.
	CallTimeout = 30 * time.Second
	// JobTimeout bounds the wait for a job. It has to leave room for a unit's
	// TimeoutStopSec and the SIGKILL after it.
	JobTimeout = 90 * time.Second
	// jobRecheck is how often a waiting job's unit is queried although nothing
	// was heard, in case that a signal was lost on its way.
	jobRecheck = 5 * time.Second
	// redialFirst and redialMost are the first and the longest pause between
	// attempts to reach the bus again. Each pause doubles.
	redialFirst = 50 * time.Millisecond
	redialMost  = 2 * time.Second
	// nameGrace is how long a bus may be without a systemd. The first client of
	// a user bus starts dbus-daemon by its socket, and the manager joins only
	// then; during daemon-reexec it is away for some milliseconds.
	nameGrace = 5 * time.Second
)

const (
	busName      = "org.freedesktop.systemd1"
	managerPath  = dbus.ObjectPath("/org/freedesktop/systemd1")
	managerIface = "org.freedesktop.systemd1.Manager"
	unitIface    = "org.freedesktop.systemd1.Unit"
	propsIface   = "org.freedesktop.DBus.Properties"
	driverName   = "org.freedesktop.DBus"
)

// Options selects the manager to talk to.
type Options struct {
	// System selects PID 1 instead of the user's own manager.
	System bool
	// Address is a D-Bus address. Empty means the user bus
	// ($DBUS_SESSION_BUS_ADDRESS, else $XDG_RUNTIME_DIR/bus) or, with System,
	// the system bus.
	Address string
}

// Manager is a client of one systemd manager. It owns one bus connection, which
// it makes again when it breaks. All methods may be called concurrently.
type Manager struct {
	address string
	done    chan struct{} // closed by Close
	dialing chan struct{} // held by whoever makes the connection

	mu      sync.Mutex // guards what follows
	closed  bool
	current *link
	jobs    map[*jobWait]struct{}
	watches map[*changes]struct{}
	refused map[string]bool // properties that this systemd does not know
}

// Dial connects to the manager and subscribes to its signals. Without a bus or
// without systemd on it, it fails at once with fault.SystemdUnavailable.
func Dial(ctx context.Context, opts Options) (*Manager, error) {
	address := opts.Address
	if address == "" {
		address = defaultAddress(opts.System)
	}
	m := &Manager{
		address: address,
		done:    make(chan struct{}),
		dialing: make(chan struct{}, 1),
		jobs:    make(map[*jobWait]struct{}),
		watches: make(map[*changes]struct{}),
		refused: make(map[string]bool),
	}
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	l, err := m.dial(ctx)
	if err != nil {
		hint := "run 'systemctl --user status' as this user; without a user manager install dbus-user-session, run 'loginctl enable-linger' and log in again"
		if opts.System {
			hint = "run 'systemctl status'; the host must run systemd with the D-Bus system bus"
		}
		return nil, fault.New(fault.SystemdUnavailable, "reach systemd over D-Bus", hint, "%w", err)
	}
	m.mu.Lock()
	m.current = l
	m.mu.Unlock()
	return m, nil
}

func defaultAddress(system bool) string {
	if system {
		if a := os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"); a != "" {
			return a
		}
		return "unix:path=/run/dbus/system_bus_socket"
	}
	if a := os.Getenv("DBUS_SESSION_BUS_ADDRESS"); a != "" {
		return a
	}
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = "/run/user/" + strconv.Itoa(os.Getuid())
	}
	return "unix:path=" + dbus.EscapeBusAddressValue(filepath.Join(dir, "bus"))
}

// Close ends the connection. Waits in progress end with ErrClosed.
func (m *Manager) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	close(m.done)
	if m.current != nil {
		m.current.conn.Close()
	}
	return nil
}

// link is one bus connection. godbus hands every signal to DeliverSignal on its
// reading goroutine, in the order of the wire and before any later method
// reply; so DeliverSignal must never block.
type link struct {
	m    *Manager
	conn *dbus.Conn

	mu    sync.Mutex    // guards what follows
	owner string        // unique bus name of the manager, "" while it has none
	moved bool          // NameOwnerChanged was seen and knows better than GetNameOwner
	owned chan struct{} // closed once owner was known for the first time
}

// setOwner records the manager's bus name. What a signal says is newer than any
// answer that is still to be read.
func (l *link) setOwner(name string, bySignal bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.moved && !bySignal {
		return
	}
	l.owner, l.moved = name, bySignal
	if name == "" {
		return
	}
	select {
	case <-l.owned:
	default:
		close(l.owned)
	}
}

// link returns the connection, making it again if it is lost.
func (m *Manager) link(ctx context.Context) (*link, error) {
	for pause := redialFirst; ; pause = min(2*pause, redialMost) {
		if l, err := m.live(); l != nil || err != nil {
			return l, err
		}
		select {
		case m.dialing <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-m.done:
			return nil, ErrClosed
		}
		l, err := m.live()
		if l == nil && err == nil {
			l, err = m.dial(ctx)
			if err == nil {
				err = m.adopt(l)
			}
		}
		<-m.dialing
		if err == nil {
			return l, nil
		}
		if errors.Is(err, ErrClosed) {
			return nil, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", ctx.Err(), err)
		case <-m.done:
			return nil, ErrClosed
		}
	}
}

// live returns the current connection if it still stands.
func (m *Manager) live() (*link, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ErrClosed
	}
	if m.current != nil && m.current.conn.Context().Err() == nil {
		return m.current, nil
	}
	return nil, nil
}

func (m *Manager) adopt(l *link) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		l.conn.Close()
		return ErrClosed
	}
	m.current = l
	return nil
}

// dial makes one connection: authenticate, say Hello, install the match rules,
// and only then Subscribe, so that no signal of a later job can be missed.
func (m *Manager) dial(ctx context.Context) (*link, error) {
	l := &link{m: m, owned: make(chan struct{})}
	conn, err := dbus.Dial(m.address, dbus.WithSignalHandler(l))
	if err != nil {
		return nil, err
	}
	l.conn = conn
	ready := false
	defer func() {
		if !ready {
			conn.Close()
		}
	}()
	// Auth and Hello take no context: closing the connection ends them.
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
		return nil, contextFirst(ctx, err)
	}
	if err := conn.Hello(); err != nil {
		return nil, contextFirst(ctx, err)
	}
	for _, rule := range []string{
		matchRule(driverName, "/org/freedesktop/DBus", driverName, "NameOwnerChanged") + ",arg0='" + busName + "'",
		matchRule(busName, managerPath, managerIface, "JobRemoved"),
	} {
		if err := l.addMatch(ctx, rule); err != nil {
			return nil, fmt.Errorf("add match: %w", err)
		}
	}
	if err := l.awaitOwner(ctx); err != nil {
		return nil, err
	}
	if err := l.subscribe(ctx); err != nil {
		return nil, err
	}
	if err := m.rewatch(ctx, l); err != nil {
		return nil, fmt.Errorf("add match: %w", err)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	ready = true
	go func() {
		<-conn.Context().Done()
		m.doubt()
		m.relisten()
	}()
	return l, nil
}

// awaitOwner returns when the manager is on the bus. The match rule for its name
// is in place already.
func (l *link) awaitOwner(ctx context.Context) error {
	var owner string
	err := l.call(ctx, driverName, "/org/freedesktop/DBus", driverName+".GetNameOwner", []any{busName}, &owner)
	if err == nil {
		l.setOwner(owner, false)
	} else if errorName(err) != nameNoOwner {
		return fmt.Errorf("look for systemd on the bus: %w", err)
	}
	select {
	case <-l.owned:
		return nil
	case <-time.After(nameGrace):
		return fmt.Errorf("systemd is not on the bus: %w", err)
	case <-l.conn.Context().Done():
		return dbus.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func contextFirst(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func matchRule(sender string, path dbus.ObjectPath, iface, member string) string {
	return fmt.Sprintf("type='signal',sender='%s',path='%s',interface='%s',member='%s'", sender, path, iface, member)
}

func (l *link) addMatch(ctx context.Context, rule string) error {
	return l.call(ctx, driverName, "/org/freedesktop/DBus", driverName+".AddMatch", []any{rule})
}

// subscribe asks the manager to send signals at all: it sends none while no
// client has asked, which on a lingering host is the normal case.
func (l *link) subscribe(ctx context.Context) error {
	err := l.call(ctx, busName, managerPath, managerIface+".Subscribe", nil)
	if err != nil && errorName(err) != nameAlreadySubscribed {
		return fmt.Errorf("subscribe: %w", err)
	}
	return nil
}

// call makes one method call. The message is written by a goroutine of its own,
// because a bus that does not read blocks the writer and no context reaches it.
func (l *link) call(ctx context.Context, dest string, path dbus.ObjectPath, method string, args []any, out ...any) error {
	reply := make(chan *dbus.Call, 1)
	// Auto-start is off: activating systemd by D-Bus cannot work and its error
	// would hide the plain "nobody owns that name".
	go l.conn.Object(dest, path).GoWithContext(ctx, method, dbus.FlagNoAutoStart, reply, args...)
	select {
	case c := <-reply:
		if c.Err != nil {
			return c.Err
		}
		return c.Store(out...)
	case <-ctx.Done():
		return ctx.Err()
	case <-l.conn.Context().Done():
		return dbus.ErrClosed
	}
}

// call makes a call that may safely be made twice, over the next connection
// too if this one breaks.
func (m *Manager) call(ctx context.Context, path dbus.ObjectPath, method string, args []any, out ...any) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	var last error
	for pause := redialFirst; ; pause = min(2*pause, redialMost) {
		l, err := m.link(ctx)
		if err == nil {
			err = l.call(ctx, busName, path, method, args, out...)
		}
		if err == nil || !isLost(err) {
			if last != nil && ctx.Err() != nil {
				err = fmt.Errorf("%w (%w)", err, last)
			}
			return translate(err)
		}
		last = err
		select {
		case <-time.After(pause):
		case <-m.done:
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", ctx.Err(), last)
		}
	}
}

// DeliverSignal implements dbus.SignalHandler.
func (l *link) DeliverSignal(iface, member string, s *dbus.Signal) {
	if s.Sender == driverName {
		if iface == driverName && member == "NameOwnerChanged" {
			l.ownerChanged(s)
		}
		return
	}
	l.mu.Lock()
	genuine := l.owner != "" && s.Sender == l.owner
	l.mu.Unlock()
	if !genuine {
		// Any client of the bus may send us a message that looks like PID 1's.
		return
	}
	m := l.m
	switch iface + "." + member {
	case propsIface + ".PropertiesChanged":
		m.changed(s.Path)
	case managerIface + ".JobRemoved":
		var id uint32
		var job dbus.ObjectPath
		var unit, result string
		if dbus.Store(s.Body, &id, &job, &unit, &result) == nil {
			m.jobRemoved(job, unit, result)
		}
	}
}

// ownerChanged follows the manager to its new bus name. daemon-reexec gives it
// one, and with it the subscription may be lost.
func (l *link) ownerChanged(s *dbus.Signal) {
	var name, from, to string
	if dbus.Store(s.Body, &name, &from, &to) != nil || name != busName {
		return
	}
	l.setOwner(to, true)
	if to == "" {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), CallTimeout)
		defer cancel()
		if err := l.subscribe(ctx); err != nil && !isLost(err) {
			// Without signals the connection is of no use; a new one starts over.
			l.conn.Close()
		}
		// Signals of the time in between never came.
		l.m.doubt()
	}()
}

// doubt tells everybody who waits for signals that some may have been lost.
func (m *Manager) doubt() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for w := range m.jobs {
		w.note(func() { w.doubt = true })
	}
	for c := range m.watches {
		c.note()
	}
}

// relisten makes a lost connection again while somebody watches units: nobody
// else may have a reason to for hours. If the bus stays away, the next call does.
func (m *Manager) relisten() {
	if !m.watched() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), CallTimeout)
	defer cancel()
	_, _ = m.link(ctx)
}

// unitPath turns a unit name into the last element of its object path.
func unitPath(name string) dbus.ObjectPath {
	var b strings.Builder
	b.WriteString(string(managerPath) + "/unit/")
	for i, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "_%02x", c)
		}
	}
	return dbus.ObjectPath(b.String())
}

// Ping asks the manager for a sign of life over the whole way: connection, bus
// and manager.
func (m *Manager) Ping(ctx context.Context) error {
	return m.call(ctx, managerPath, "org.freedesktop.DBus.Peer.Ping", nil)
}
