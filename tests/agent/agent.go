// Package agent is an MCP client of one session over the stdio bridge, for
// programs that try the product from outside.
package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Agent uses the Session Browser of the session that its bridge names.
type Agent struct{ session *mcp.ClientSession }

// Connect starts bridge, which is "abfleet mcp --session NAME", and shakes hands
// with the service behind it.
func Connect(ctx context.Context, bridge *exec.Cmd) (*Agent, error) {
	client := mcp.NewClient(&mcp.Implementation{Name: "agent", Version: "1"}, nil)
	session, err := client.Connect(ctx, &mcp.CommandTransport{Command: bridge}, nil)
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the service: %w", err)
	}
	return &Agent{session}, nil
}

// Close ends the bridge; the Session Browser stays.
func (a *Agent) Close() error { return a.session.Close() }

// Call runs a tool and returns the text of its answer. An answer that says
// that the tool failed is an error, too.
func (a *Agent) Call(ctx context.Context, tool string, args map[string]any) (string, error) {
	if args == nil {
		args = map[string]any{}
	}
	result, err := a.session.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		return "", fmt.Errorf("cannot call %s: %w", tool, err)
	}
	var text strings.Builder
	for _, c := range result.Content {
		if t, ok := c.(*mcp.TextContent); ok {
			text.WriteString(t.Text)
		}
	}
	if result.IsError {
		return text.String(), fmt.Errorf("cannot call %s: %s", tool, text.String())
	}
	return text.String(), nil
}

// Evaluate runs a JavaScript function in the current page and decodes what it
// returns into result, unless that is nil.
func (a *Agent) Evaluate(ctx context.Context, function string, result any) error {
	text, err := a.Call(ctx, "browser_evaluate", map[string]any{"function": function})
	if err != nil || result == nil {
		return err
	}
	_, value, found := strings.Cut(text, "### Result\n")
	if !found {
		return fmt.Errorf("cannot read the answer of browser_evaluate: no result in %q", text)
	}
	value, _, _ = strings.Cut(value, "\n### ")
	if err := json.Unmarshal([]byte(value), result); err != nil {
		return fmt.Errorf("cannot read the answer of browser_evaluate: %w: %s", err, value)
	}
	return nil
}
