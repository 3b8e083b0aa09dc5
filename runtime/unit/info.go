package unit

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"github.com/godbus/dbus/v5"
)

// Info is what systemd and the cgroup tree say about a loaded unit.
type Info struct {
	Name string
	// InvocationID is 32 hexadecimal digits, new with every start of the unit.
	InvocationID string
	// ControlGroup is the path of the unit's cgroup from the root of the
	// hierarchy, empty while it has none.
	ControlGroup string
	// ActiveState, SubState and Result are systemd's words.
	ActiveState, SubState, Result string
	Slice                         string
	// CgroupID is the inode of the cgroup's directory, 0 while it has none.
	CgroupID uint64
}

// Active reports whether the unit may have processes: every state but
// inactive and failed counts.
func (i Info) Active() bool {
	return i.ActiveState != "inactive" && i.ActiveState != "failed"
}

// Cgroup returns the unit's cgroup. Its methods fail while the unit has none.
func (i Info) Cgroup() Cgroup { return Cgroup{Path: i.ControlGroup} }

// Info reads a scope or slice back. Of a unit that is not loaded the error is
// ErrNotLoaded.
func (m *Manager) Info(ctx context.Context, name string) (Info, error) {
	var path dbus.ObjectPath
	err := m.call(ctx, managerPath, managerIface+".GetUnit", []any{name}, &path)
	if err != nil {
		return Info{}, fmt.Errorf("look up %s: %w", name, err)
	}
	return m.infoAt(ctx, name, path)
}

// infoAt reads the unit at an object path: all properties of all its interfaces
// in one call, so that they belong together. One call for some and single ones
// for the rest were no faster.
func (m *Manager) infoAt(ctx context.Context, name string, path dbus.ObjectPath) (Info, error) {
	var props map[string]dbus.Variant
	if err := m.call(ctx, path, propsIface+".GetAll", []any{""}, &props); err != nil {
		return Info{}, fmt.Errorf("read %s: %w", name, err)
	}
	info := Info{Name: name}
	info.merge(props)
	if load, _ := props["LoadState"].Value().(string); load != "loaded" {
		// Asking for the properties of a name that was unloaded a moment ago
		// makes systemd load an empty unit for it.
		return Info{}, fmt.Errorf("read %s: %w", name, ErrNotLoaded)
	}
	if info.ControlGroup == "" {
		return info, nil
	}
	id, err := info.Cgroup().ID()
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			// A unit that has just ended keeps the path for a moment.
			return info, nil
		}
		return Info{}, fmt.Errorf("read %s: %w", name, err)
	}
	if told, ok := props["ControlGroupId"].Value().(uint64); ok && told != 0 && told != id {
		return Info{}, fmt.Errorf("read %s: its cgroup %s has number %d, systemd says %d", name, info.ControlGroup, id, told)
	}
	info.CgroupID = id
	return info, nil
}

// merge takes over the properties that are there.
func (i *Info) merge(props map[string]dbus.Variant) {
	for name, to := range map[string]*string{
		"ActiveState": &i.ActiveState, "SubState": &i.SubState, "Result": &i.Result,
		"ControlGroup": &i.ControlGroup, "Slice": &i.Slice,
	} {
		if s, ok := props[name].Value().(string); ok {
			*to = s
		}
	}
	if id, ok := props["InvocationID"].Value().([]byte); ok && len(id) == 16 {
		i.InvocationID = hex.EncodeToString(id)
	}
}
