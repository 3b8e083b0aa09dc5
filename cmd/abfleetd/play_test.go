package main

import (
	"testing"
	"time"

	"abfleet/tests/rig"
)

func TestPlay(t *testing.T) {
	m := newMachine(t, rig.Options{Name: "play"})
	for _, c := range []string{"abfleet setup --now", "systemctl --user stop abfleetd; mkdir -p .config/abfleet && echo 'colour = 1' > .config/abfleet/config.toml",
		"abfleet identity list", "systemctl --user status abfleetd abfleetd-control.socket", "echo '{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":\"browser_click\"}}' | abfleet mcp --session s",
		"rm .config/abfleet/config.toml && abfleet setup --now", "journalctl --user -o short-monotonic -n 60"} {
		start := time.Now()
		out, err := m.Sh(t.Context(), c)
		t.Logf("$ %s (%v)\n%s%v", c, time.Since(start), out, err)
	}
}
