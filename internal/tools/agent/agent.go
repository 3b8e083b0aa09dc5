// Package agent is the catalog with which an agent chooses what browser it
// drives: agent_browser_identities and agent_browser_use_identity.
package agent

import (
	"context"
	"encoding/json"
	"time"

	"abfleet/internal/tools"
)

// Tools returns the catalog.
func Tools() []tools.Tool {
	return []tools.Tool{
		{
			Name: "agent_browser_identities", Title: "List Identities", ReadOnly: true,
			Description: "List the Identities (reusable browser logins) and which one this session uses. Call agent_browser_use_identity with one that is READY before any browser_* tool.",
			Schema:      json.RawMessage(`{"type":"object","properties":{},"$schema":"https://json-schema.org/draft/2020-12/schema","additionalProperties":false}`),
			Run:         identities,
		},
		{
			Name: "agent_browser_use_identity", Title: "Use Identity",
			Description: "Select the Identity for this session and start its Session Browser, which is kept until it is stopped or released. Calling it again with the same Identity changes nothing. The person can see and use the same browser (Shared Control).",
			Schema:      json.RawMessage(`{"type":"object","properties":{"identity_id":{"type":"string","description":"id or exact name from agent_browser_identities"}},"required":["identity_id"],"$schema":"https://json-schema.org/draft/2020-12/schema","additionalProperties":false}`),
			Timeout:     3 * time.Minute, // a clone, a display and a browser are started
			Run:         useIdentity,
		},
	}
}

type identity struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"template_state"`
}

func identities(ctx context.Context, c *tools.Call) error {
	list, err := c.Fleet().Identities(ctx, c.Caller.Session)
	if err != nil {
		return err
	}
	out := struct {
		Current    string     `json:"current_identity_id"`
		Running    bool       `json:"session_browser_running"`
		Identities []identity `json:"identities"`
	}{list.Current, list.Running, []identity{}}
	for _, i := range list.Identities {
		out.Identities = append(out.Identities, identity{i.ID, i.Name, i.State})
	}
	return answer(c, out)
}

func useIdentity(ctx context.Context, c *tools.Call) error {
	var args struct {
		Identity string `json:"identity_id"`
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	bound, err := c.Fleet().UseIdentity(ctx, c.Caller.Session, args.Identity)
	if err != nil {
		return err
	}
	// It may be another browser now than the one this session had.
	c.Rebound()
	return answer(c, struct {
		Identity string `json:"identity_id"`
		Ready    bool   `json:"session_browser_ready"`
		Shared   bool   `json:"shared_control"`
	}{bound.Identity, true, true})
}

func answer(c *tools.Call, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	c.Result(string(text))
	return nil
}
