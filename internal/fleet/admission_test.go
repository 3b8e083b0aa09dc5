package fleet_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"abfleet/internal/audit"
)

// TestStartsBesideASave protects the other Identities from a save that takes
// long: starts that wait for the new snapshot take no place among the starts.
func TestStartsBesideASave(t *testing.T) {
	h := newTestHost(t)
	s := h.start() // two starts at once
	defer s.end()
	a := s.saved("a")
	s.saved("b")
	s.must(ignore(s.StartLogin(t.Context(), user, "a", "")))
	saving, finish := make(chan struct{}), make(chan struct{})
	h.rt.Change(func() {
		h.rt.FailTree = func(op, dir string) error {
			if op == "capture snapshot" && strings.Contains(dir, a.ID) {
				close(saving)
				<-finish
			}
			return nil
		}
	})
	results := make(chan error, 3)
	go func() { results <- ignore(s.SaveIdentity(context.Background(), user, "a")) }()
	<-saving
	events := s.Watch(t.Context())
	for _, session := range []string{"s", "t"} {
		go func() { results <- ignore(s.UseIdentity(context.Background(), agent, session, "a")) }()
		for e := range events {
			if e.Type == audit.BindingCreated {
				break // what follows is its start
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := s.UseIdentity(ctx, agent, "u", "b"); err != nil {
		t.Errorf("a start of another Identity waits for a save: %v", err)
	}
	close(finish)
	for range 3 {
		s.must(<-results)
	}
}
