package fleet_test

import (
	"sync"
	"testing"

	"abfleet/internal/config"
	"abfleet/internal/fleet"
)

// TestLimits protects the host: every browser is started with the configured
// limits, and with its Identity's own where it has some.
func TestLimits(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Limits = config.Limits{MemoryMax: 2 << 30, TasksMax: 900}
	s := h.start()
	defer s.end()
	var mu sync.Mutex
	var got config.Limits
	h.rt.Change(func() {
		h.rt.FailStart = func(req fleet.StartRequest) error {
			mu.Lock()
			defer mu.Unlock()
			got = req.Limits
			return nil
		}
	})
	v := s.saved("a")
	if got != h.cfg.Limits {
		t.Errorf("the login browser has %+v", got)
	}
	fleet.SetLimits(s.store, v.ID, config.Limits{TasksMax: config.Infinity})
	s.use("s", "a")
	if want := (config.Limits{MemoryMax: 2 << 30, TasksMax: config.Infinity}); got != want {
		t.Errorf("a Session Browser has %+v, want %+v", got, want)
	}
}
