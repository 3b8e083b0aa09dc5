package server

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/sd"
)

func TestTeller(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	t.Setenv("NOTIFY_SOCKET", path)

	f := &fakeFleet{running: 1}
	var journal bytes.Buffer
	teller := NewTeller(f, slog.New(slog.NewJSONHandler(&journal, nil)))
	events := make(chan audit.Event, 2)
	events <- audit.Event{Type: audit.SessionStarted, Actor: audit.Actor{Kind: audit.KindAgent, How: "mcp"}, Session: "s", Identity: "i", Summary: "started", Details: map[string]string{"role": "chromium"}}
	events <- audit.Event{Type: audit.SessionStartFailed, Actor: audit.System("next use"), Summary: "failed"}
	close(events)
	teller.Tell(events)

	decoder := json.NewDecoder(&journal)
	for _, want := range []map[string]any{
		{"level": "INFO", "msg": "started", sd.EventKey: "session_browser.started", "session": "s", "identity": "i", "actor": "agent", "how": "mcp", "role": "chromium"},
		{"level": "WARN", "msg": "failed", sd.EventKey: "session_browser.start_failed", "session": nil, "actor": "system"},
	} {
		var got map[string]any
		if err := decoder.Decode(&got); err != nil {
			t.Fatal(err)
		}
		for key, value := range want {
			if got[key] != value {
				t.Errorf("%s: %s is %v, want %v", want["msg"], key, got[key], value)
			}
		}
	}
	buf := make([]byte, 1024)
	_ = manager.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := manager.Read(buf)
	if err != nil || string(buf[:n]) != "STATUS=1 browser, 0 quarantined" {
		t.Errorf("systemd was told %q, %v", buf[:n], err)
	}
}
