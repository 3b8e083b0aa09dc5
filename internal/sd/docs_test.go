package sd

import (
	"maps"
	"os"
	"regexp"
	"testing"
)

// TestDocs protects who filters a journal: docs/OPERATIONS.md has the MESSAGE_ID
// of every event.
func TestDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| `([0-9a-f]{32})` \\|").FindAllSubmatch(page, -1) {
		told[string(row[1])] = string(row[2])
	}
	have := map[string]string{}
	for event, id := range messageIDs {
		have[string(event)] = id
	}
	if !maps.Equal(told, have) {
		t.Errorf("docs/OPERATIONS.md has the events\n%q, want\n%q", told, have)
	}
}
