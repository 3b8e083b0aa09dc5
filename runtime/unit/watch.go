package unit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// watch follows one unit.
type watch struct {
	name string
	path dbus.ObjectPath
	kick chan struct{} // capacity 1: something below changed

	mu      sync.Mutex // guards what follows
	info    Info
	changed bool
	removed bool // systemd unloaded the unit
	doubt   bool // signals may have been lost: query the unit
}

func (w *watch) note(change func()) {
	w.mu.Lock()
	change()
	w.mu.Unlock()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (m *Manager) unitRemoved(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for w := range m.watches {
		if w.name == name {
			w.note(func() { w.removed = true })
		}
	}
}

func (m *Manager) propertiesChanged(path dbus.ObjectPath, props map[string]dbus.Variant) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for w := range m.watches {
		if w.path == path {
			w.note(func() {
				before := w.info
				w.info.merge(props)
				w.changed = w.changed || w.info != before
			})
		}
	}
}

// Watch reports the state of a loaded scope or slice now and whenever it
// changes. States that follow each other quickly are merged: the receiver gets
// the latest. The last value has an ActiveState of "inactive" or "failed" and
// the Result that systemd gave; then the channel is closed. It is also closed
// when ctx ends or the Manager is closed.
func (m *Manager) Watch(ctx context.Context, name string) (<-chan Info, error) {
	w := &watch{name: name, path: unitPath(name), kick: make(chan struct{}, 1)}
	m.mu.Lock()
	m.watches[w] = struct{}{}
	m.mu.Unlock()
	on, err := m.refresh(ctx, w, nil)
	w.mu.Lock()
	if err == nil && w.removed {
		err = ErrNotLoaded
	}
	w.mu.Unlock()
	if err != nil {
		m.dropWatch(w, on)
		return nil, fmt.Errorf("watch %s: %w", name, err)
	}
	out := make(chan Info)
	go m.follow(ctx, w, on, out)
	return out, nil
}

// rule selects the property signals of the watched unit.
func (w *watch) rule() string {
	return matchRule(busName, w.path, propsIface, "PropertiesChanged")
}

// refresh makes sure that the current connection delivers the unit's signals,
// then queries the unit. It returns the connection.
func (m *Manager) refresh(ctx context.Context, w *watch, had *link) (*link, error) {
	for {
		l, err := m.link(ctx)
		if err != nil {
			return had, err
		}
		if l != had {
			if err := m.onLink(ctx, l, w.rule()); isLost(err) {
				continue
			} else if err != nil {
				return had, err
			}
			had = l
		}
		info, err := m.Info(ctx, w.name)
		switch {
		case errors.Is(err, ErrNotLoaded):
			w.note(func() { w.removed = true })
		case err != nil:
			return had, err
		default:
			w.note(func() { w.info, w.changed = info, true })
		}
		return had, nil
	}
}

func (m *Manager) onLink(ctx context.Context, l *link, rule string) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	return l.addMatch(ctx, rule)
}

func (m *Manager) dropWatch(w *watch, on *link) {
	m.mu.Lock()
	delete(m.watches, w)
	m.mu.Unlock()
	if on == nil {
		return
	}
	// Best effort: a rule that stays costs a few ignored signals, and goes with
	// the connection.
	ctx, cancel := context.WithTimeout(context.Background(), CallTimeout)
	defer cancel()
	_ = on.removeMatch(ctx, w.rule())
}

func (m *Manager) follow(ctx context.Context, w *watch, on *link, out chan<- Info) {
	defer close(out)
	defer func() { m.dropWatch(w, on) }()
	var pending Info
	var send chan<- Info // out while pending holds something unsent
	last := false
	for {
		w.mu.Lock()
		doubt := w.doubt
		w.doubt = false
		if w.changed || w.removed {
			if w.removed && w.info.Active() {
				// Its last state was not told, or not to us.
				w.info.ActiveState, w.info.SubState = "inactive", "dead"
			}
			pending, send = w.info, out
			last = !w.info.Active()
			w.changed = false
		}
		w.mu.Unlock()
		if doubt && !last {
			var err error
			if on, err = m.refresh(ctx, w, on); err != nil {
				if ctx.Err() != nil || errors.Is(err, ErrClosed) {
					return
				}
				// systemd answered with an error: ask again, but not at once.
				time.AfterFunc(redialMost, func() { w.note(func() { w.doubt = true }) })
			}
			continue
		}
		select {
		case send <- pending:
			if send = nil; last {
				return
			}
		case <-w.kick:
		case <-m.done:
			return
		case <-ctx.Done():
			return
		}
	}
}
