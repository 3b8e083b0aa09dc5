package unit

import (
	"context"
	"errors"
	"fmt"

	"github.com/godbus/dbus/v5"
)

// Slice describes a transient slice that bounds what is in it together. A field
// that is 0 is left to systemd's default; math.MaxUint64 means no bound.
type Slice struct {
	// Name ends in ".slice" and has a dash for each level above it.
	Name        string
	Description string
	// MemoryHigh and MemoryMax are bytes: above the first the kernel slows
	// processes down and takes memory back, at the second it kills.
	MemoryHigh, MemoryMax uint64
	// TasksMax counts processes and threads.
	TasksMax uint64
	// CPUWeight is the share of a busy processor, 1 to 10000; others have 100.
	CPUWeight uint64
}

func (s Slice) properties() []property {
	props := []property{{"Description", dbus.MakeVariant(s.Description)}}
	for _, p := range []struct {
		name  string
		value uint64
	}{
		{"MemoryHigh", s.MemoryHigh}, {"MemoryMax", s.MemoryMax}, {"TasksMax", s.TasksMax}, {"CPUWeight", s.CPUWeight},
	} {
		if p.value != 0 {
			props = append(props, property{p.name, dbus.MakeVariant(p.value)})
		}
	}
	return props
}

// StartSlice makes a slice before its first scope is. The caller knows that
// nothing is in it: one that is loaded is stopped first, since its bounds are of
// an earlier time. It goes with StopSlice, bounds and all.
func (m *Manager) StartSlice(ctx context.Context, s Slice) error {
	if err := validName(s.Name, ".slice"); err != nil {
		return err
	}
	err := m.start(ctx, s.Name, s.properties(), nil)
	if errors.Is(err, ErrExists) {
		if err = m.stop(ctx, s.Name); err == nil {
			err = m.start(ctx, s.Name, s.properties(), nil)
		}
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", s.Name, err)
	}
	return nil
}
