package unit

import (
	"context"
	"fmt"

	"github.com/godbus/dbus/v5"
)

// changes is one who wants to hear of some units.
type changes struct {
	paths map[dbus.ObjectPath]bool
	kick  chan struct{} // capacity 1
}

func (c *changes) note() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// Changes returns a channel that gets a value when a property of one of the
// units has changed, its state, its job or its processes among them, and when
// signals may have been lost. What is so now, Info tells; several changes may be
// told as one. It ends with ctx, without closing the channel.
//
// An error means that systemd could not be asked. The channel works then too,
// from the next connection on.
func (m *Manager) Changes(ctx context.Context, names ...string) (<-chan struct{}, error) {
	c := &changes{paths: make(map[dbus.ObjectPath]bool, len(names)), kick: make(chan struct{}, 1)}
	for _, name := range names {
		c.paths[unitPath(name)] = true
	}
	m.mu.Lock()
	m.watches[c] = struct{}{}
	m.mu.Unlock()
	context.AfterFunc(ctx, func() { m.dropChanges(c) })

	cctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	l, err := m.link(cctx)
	if err == nil {
		err = l.match(cctx, c)
	}
	// Whatever happened before the rules were in place was not heard.
	c.note()
	if err != nil {
		return c.kick, fmt.Errorf("watch %v: %w", names, err)
	}
	return c.kick, nil
}

// match installs the rules for c on this connection.
func (l *link) match(ctx context.Context, c *changes) error {
	for path := range c.paths {
		if err := l.addMatch(ctx, changesRule(path)); err != nil {
			return err
		}
	}
	return nil
}

func changesRule(path dbus.ObjectPath) string {
	return matchRule(busName, path, propsIface, "PropertiesChanged")
}

// dropChanges forgets c. The bus need not be told in time, so nobody waits.
func (m *Manager) dropChanges(c *changes) {
	m.mu.Lock()
	delete(m.watches, c)
	m.mu.Unlock()
	l, err := m.live()
	if l == nil || err != nil {
		return // the rules went with the connection
	}
	ctx, cancel := context.WithTimeout(context.Background(), CallTimeout)
	defer cancel()
	for path := range c.paths {
		// The bus counts rules: another watcher of the same unit keeps its own.
		if err := l.call(ctx, driverName, "/org/freedesktop/DBus", driverName+".RemoveMatch", []any{changesRule(path)}); err != nil {
			return // a rule too many costs a message nobody reads
		}
	}
}

// changed tells who watches the unit at path.
func (m *Manager) changed(path dbus.ObjectPath) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.watches {
		if c.paths[path] {
			c.note()
		}
	}
}

// rewatch installs on a new connection what was heard over the old one.
func (m *Manager) rewatch(ctx context.Context, l *link) error {
	m.mu.Lock()
	all := make([]*changes, 0, len(m.watches))
	for c := range m.watches {
		all = append(all, c)
	}
	m.mu.Unlock()
	for _, c := range all {
		if err := l.match(ctx, c); err != nil {
			return err
		}
		c.note()
	}
	return nil
}

// watched reports whether somebody waits for signals who asks for nothing.
func (m *Manager) watched() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.watches) > 0
}
