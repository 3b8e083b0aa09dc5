package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/tests/rig"
)

func TestPlay(t *testing.T) {
	m := newMachine(t, rig.Options{Name: "play"})
	for _, c := range []string{"abfleet setup --now", "abfleet identity create work", "abfleet identity login work", "abfleet identity save work", "abfleet session use s work", "abfleet session show s", "abfleet session show s --json", "systemctl --user status abfleetd | head -12"} {
		start := time.Now()
		out, err := m.Sh(t.Context(), c)
		t.Logf("$ %s (%v)\n%s%v", c, time.Since(start), out, err)
	}
	cs := m.mcpClient(t)
	list, err := cs.ListTools(t.Context(), nil)
	t.Log(len(list.Tools), err)
	call := func(name string, args map[string]any) {
		start := time.Now()
		r, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
		text := ""
		if err == nil {
			text = fmt.Sprint(r.IsError, r.Content[0].(*mcp.TextContent).Text)
		}
		t.Log(name, time.Since(start), err, text)
	}
	call("browser_navigate", map[string]any{"url": "data:text/html,<title>hi</title><button onclick='this.textContent=1'>x</button>"})
	pid := m.sh("pgrep -of chromium/chromium")
	for _, how := range []string{"systemctl --user restart abfleetd", "kill -9 $(systemctl --user show --value -p MainPID abfleetd)"} {
		for _, args := range []map[string]any{{"time": 25}} {
			done := make(chan struct{})
			go func() { call("browser_wait_for", args); close(done) }()
			time.Sleep(500 * time.Millisecond)
			start := time.Now()
			m.sh(how)
			t.Log(how, time.Since(start))
			<-done
		}
		call("browser_snapshot", nil)
	}
	if now := m.sh("pgrep -of chromium/chromium"); now != pid {
		t.Error("chromium restarted")
	}
	t.Log(m.sh("abfleet session stop s; abfleet session show s; journalctl --user -u abfleetd -o short-monotonic -n 60"))
}
