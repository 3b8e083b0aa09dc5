package audit

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
)

// TestFeedOrder protects watchers: everybody gets everything from their
// subscription on, in order.
func TestFeedOrder(t *testing.T) {
	f := NewFeed(func() int { return -1 })
	first := f.Subscribe(t.Context(), 10)
	f.Publish(1, 2)
	second := f.Subscribe(t.Context(), 10)
	f.Publish(3)
	f.Close()
	var got [2][]int
	for i, ch := range []<-chan int{first, second} {
		for v := range ch {
			got[i] = append(got[i], v)
		}
	}
	if len(got[0]) != 3 || got[0][2] != 3 || len(got[1]) != 1 || got[1][0] != 3 {
		t.Errorf("got %v", got)
	}
	if _, open := <-f.Subscribe(t.Context(), 2); open {
		t.Error("a closed feed has values")
	}
}

// TestSlowWatcher protects publishers from slow watchers, and slow watchers
// from missing anything without being told.
func TestSlowWatcher(t *testing.T) {
	f := NewFeed(func() int { return -1 })
	slow := f.Subscribe(t.Context(), 4)
	for i := range 100 {
		f.Publish(i)
	}
	want := []int{0, 1, 2, -1}
	for _, w := range want {
		if v := <-slow; v != w {
			t.Fatalf("got %d, want %d of %v", v, w, want)
		}
	}
	// It has read the gap, and with it everything up to now.
	f.Publish(100, 101)
	if a, b := <-slow, <-slow; a != 100 || b != 101 {
		t.Errorf("after the gap: %d %d", a, b)
	}
}

// TestUnsubscribe protects the feed from watchers that went away.
func TestUnsubscribe(t *testing.T) {
	f := NewFeed(func() int { return -1 })
	ctx, cancel := context.WithCancel(t.Context())
	ch := f.Subscribe(ctx, 2)
	cancel()
	for range ch {
		t.Error("a value after the end")
	}
	f.Publish(1)
	if len(f.subs) != 0 {
		t.Error("the subscription is still there")
	}
}

// TestPublic protects what may never leave in an answer.
func TestPublic(t *testing.T) {
	e := Event{ID: 1, Type: SessionStarted, Actor: Actor{Kind: KindAgent, PID: 77}, Session: "s", Summary: "it started", Details: map[string]string{"instance": "abcdefghij"}}
	b, err := json.Marshal(e.Public())
	if err != nil {
		t.Fatal(err)
	}
	if s := string(b); strings.Contains(s, "abcdefghij") || strings.Contains(s, "77") || !strings.Contains(s, "it started") {
		t.Errorf("public: %s", s)
	}
	if e.Details["instance"] == "" || e.Actor.PID != 77 {
		t.Error("the event itself was changed")
	}
}
