package main

import (
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fleet"
	"abfleet/internal/server"
	"abfleet/internal/tools"
	"abfleet/internal/tools/agent"
	"abfleet/internal/tools/playwright"
)

// instructions are what a model reads before the tools.
const instructions = `These tools drive this session's own browser: a real, logged-in Chromium that lasts as long as the session and that a person may watch and operate at the same time (Shared Control).
First list the Identities with agent_browser_identities and choose one with agent_browser_use_identity; then use the browser_* tools.
Errors say whether repeating a call can help. There is no other way to the browser: do not look for its endpoints or processes.`

// newMCP returns the MCP server with all its tools, and the host that keeps
// their connections to browsers.
func newMCP(cfg *config.Config, f *fleet.Fleet) (*mcp.Server, *tools.Host) {
	s := mcp.NewServer(&mcp.Implementation{Name: "abfleet", Title: "Agent Browser Fleet", Version: api.Version}, &mcp.ServerOptions{
		Instructions: instructions,
		// What is not named here is not offered: the SDK would add logging,
		// and a promise to tell of changes to the list.
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}},
	})
	host := tools.NewHost(tools.Options{
		Fleet: server.ToolFleet{Fleet: f}, OutputDir: cfg.OutputDir, Snapshot: tools.SnapshotMode(cfg.Snapshot),
	})
	host.Register(s, agent.Tools()...)
	host.Register(s, playwright.Tools()...)
	return s, host
}
