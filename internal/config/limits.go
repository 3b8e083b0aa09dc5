package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Limits bound what all processes of one Stack may take together. A Limit that
// is not set is systemd's default.
type Limits struct {
	// MemoryHigh and MemoryMax are bytes: above the first the kernel slows the
	// Stack down and takes memory back, at the second it kills.
	MemoryHigh Limit `json:"memory_high,omitzero"`
	MemoryMax  Limit `json:"memory_max,omitzero"`
	// TasksMax counts processes and threads.
	TasksMax Limit `json:"tasks_max,omitzero"`
	// CPUWeight is the share of a busy processor, from 1 to 10000; others have
	// 100.
	CPUWeight Limit `json:"cpu_weight,omitzero"`
}

// Over returns the limits of base with those that l sets in their place.
func (l Limits) Over(base Limits) Limits {
	pick := func(own, other Limit) Limit {
		if own != 0 {
			return own
		}
		return other
	}
	return Limits{
		MemoryHigh: pick(l.MemoryHigh, base.MemoryHigh), MemoryMax: pick(l.MemoryMax, base.MemoryMax),
		TasksMax: pick(l.TasksMax, base.TasksMax), CPUWeight: pick(l.CPUWeight, base.CPUWeight),
	}
}

// Check refuses what systemd would, and a browser that could never start.
func (l Limits) Check() error {
	const most = 10000
	if l.CPUWeight > most {
		return fmt.Errorf("cpu_weight %s is not from 1 to %d", l.CPUWeight, most)
	}
	return nil
}

// Limit is one bound: a number, Infinity, or 0 when it is not set. As text it is
// what systemd writes: "infinity", or a number with K, M, G or T for powers of
// 1024.
type Limit uint64

// Infinity is no bound, where a default would be one.
const Infinity Limit = math.MaxUint64

func (l Limit) String() string {
	if l == Infinity {
		return "infinity"
	}
	return strconv.FormatUint(uint64(l), 10)
}

// MarshalText implements encoding.TextMarshaler.
func (l Limit) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. 0 is refused: it would let
// nothing run.
func (l *Limit) UnmarshalText(text []byte) error {
	s := string(text)
	if s == "infinity" {
		*l = Infinity
		return nil
	}
	digits := strings.TrimRight(s, "KMGT")
	shift := 0
	if unit := s[len(digits):]; unit != "" {
		shift = 10 * (1 + strings.Index("KMGT", unit))
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	switch {
	case err != nil || len(s)-len(digits) > 1 || n > uint64(Infinity-1)>>shift:
		return fmt.Errorf("%q is no limit: use a number, with K, M, G or T behind it if need be, or infinity", s)
	case n == 0:
		return fmt.Errorf("a limit of %s lets nothing run: use infinity for none", s)
	}
	*l = Limit(n << shift)
	return nil
}
