package unit

import (
	"context"
	"fmt"

	"github.com/godbus/dbus/v5"
)

// Started tells which run of the manager this is: when it began, in
// microseconds since the boot. It stays the same over a reload and a re-exec of
// the manager, and differs for any two runs within one boot.
func (m *Manager) Started(ctx context.Context) (uint64, error) {
	var at uint64
	if err := m.property(ctx, "UserspaceTimestampMonotonic", &at); err != nil {
		return 0, err
	}
	return at, nil
}

// Stopping reports whether the manager is going down, with the host or because
// its user has left.
func (m *Manager) Stopping(ctx context.Context) (bool, error) {
	var state string
	err := m.property(ctx, "SystemState", &state)
	return state == "stopping", err
}

// property reads a property of the manager itself.
func (m *Manager) property(ctx context.Context, name string, value any) error {
	var v dbus.Variant
	err := m.call(ctx, managerPath, propsIface+".Get", []any{managerIface, name}, &v)
	if err == nil {
		err = v.Store(value)
	}
	if err != nil {
		return fmt.Errorf("read %s of systemd: %w", name, err)
	}
	return nil
}
