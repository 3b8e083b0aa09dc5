package playwright

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/tools"
)

// TestCatalog protects what clients have learned: over a real MCP connection,
// each tool has the schema and the annotations of the pinned release, byte for
// byte but for white space.
func TestCatalog(t *testing.T) {
	server := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	tools.NewHost(tools.Options{}).Register(server, Tools()...)
	here, there := mcp.NewInMemoryTransports()
	if _, err := server.Connect(t.Context(), there, nil); err != nil {
		t.Fatal(err)
	}
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), here, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	got := map[string]*mcp.Tool{}
	for tool, err := range session.Tools(t.Context(), nil) {
		if err != nil {
			t.Fatal(err)
		}
		got[tool.Name] = tool
	}
	if len(got) != len(implemented) {
		t.Errorf("%d tools are offered, %d are implemented", len(got), len(implemented))
	}
	var catalog struct {
		Tools []struct {
			Name        string
			InputSchema json.RawMessage
			Annotations struct {
				Title                                        string
				ReadOnlyHint, DestructiveHint, OpenWorldHint bool
			}
		}
	}
	if err := json.Unmarshal(catalogJSON, &catalog); err != nil {
		t.Fatal(err)
	}
	for _, want := range catalog.Tools {
		tool := got[want.Name]
		if tool == nil {
			continue
		}
		if a, b := canonical(t, tool.InputSchema), canonical(t, want.InputSchema); !bytes.Equal(a, b) {
			t.Errorf("%s: schema\n%s, want\n%s", want.Name, a, b)
		}
		a := tool.Annotations
		if a == nil || a.Title != want.Annotations.Title || a.ReadOnlyHint != want.Annotations.ReadOnlyHint ||
			a.DestructiveHint == nil || *a.DestructiveHint != want.Annotations.DestructiveHint || a.OpenWorldHint == nil || *a.OpenWorldHint != want.Annotations.OpenWorldHint {
			t.Errorf("%s: annotations %+v, want %+v", want.Name, a, want.Annotations)
		}
		if tool.Description == "" {
			t.Errorf("%s has no description", want.Name)
		}
	}
}

// canonical is v as JSON with sorted keys, so that only content is compared.
func canonical(t *testing.T, v any) []byte {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var any any
	if err := json.Unmarshal(raw, &any); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(any)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestQuote protects the code section from text that would break its quotes.
func TestQuote(t *testing.T) {
	for in, want := range map[string]string{
		"a":              `'a'`,
		"it's":           `'it\'s'`,
		`say "x"`:        `'say "x"'`,
		"a\nb\\":         `'a\nb\\'`,
		"<b>&</b>":       `'<b>&</b>'`,
		"\u2028":         `'\u2028'`,
		`back\"quote\\"`: `'back\\"quote\\\\"'`,
	} {
		if got := quote(in); got != want {
			t.Errorf("quote(%q) = %s, want %s", in, got, want)
		}
	}
}
