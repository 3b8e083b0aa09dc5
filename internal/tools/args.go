package tools

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// InvalidArguments is a call whose arguments do not fit the tool's schema.
type InvalidArguments struct {
	Tool   string
	Issues []Issue
}

// Issue is one thing that is wrong, and where.
type Issue struct{ Message, Path string }

func (e *InvalidArguments) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Invalid arguments for tool %q:", e.Tool)
	for _, i := range e.Issues {
		fmt.Fprintf(&b, "\n✖ %s", i.Message)
		if i.Path != "" {
			fmt.Fprintf(&b, "\n  → at %s", i.Path)
		}
	}
	return b.String()
}

// schema is the part of JSON Schema that the catalogs use.
type schema struct {
	Type       string            `json:"type"`
	Properties map[string]schema `json:"properties"`
	Required   []string          `json:"required"`
	Enum       []string          `json:"enum"`
	Default    json.RawMessage   `json:"default"`
	Items      *schema           `json:"items"`
}

// Decode checks the call's arguments against the tool's schema and decodes them
// into v. Fields with a default may be left out although the schema lists them
// as required; unknown ones are ignored, as the peer does with both.
func (c *Call) Decode(v any) error {
	var s schema
	if err := json.Unmarshal(c.tool.Schema, &s); err != nil {
		return fmt.Errorf("schema of %s: %w", c.tool.Name, err)
	}
	raw := c.Args
	if len(bytes.TrimSpace(raw)) == 0 || string(bytes.TrimSpace(raw)) == "null" {
		raw = json.RawMessage("{}")
	}
	var args map[string]json.RawMessage
	if err := json.Unmarshal(raw, &args); err != nil {
		return &InvalidArguments{Tool: c.tool.Name, Issues: []Issue{{Message: "Invalid input: expected object, received " + kind(raw)}}}
	}
	bad := &InvalidArguments{Tool: c.tool.Name}
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range s.Properties {
			if !yield(name) {
				return
			}
		}
	})
	for _, name := range names {
		p := s.Properties[name]
		value, given := args[name]
		if !given {
			if p.Default != nil {
				args[name] = p.Default
			} else if slices.Contains(s.Required, name) {
				bad.Issues = append(bad.Issues, Issue{missing(p), name})
			}
			continue
		}
		bad.Issues = append(bad.Issues, p.check(value, name)...)
	}
	if len(bad.Issues) > 0 {
		return bad
	}
	merged, err := json.Marshal(args)
	if err != nil {
		return err
	}
	return json.Unmarshal(merged, v)
}

func missing(p schema) string {
	if len(p.Enum) > 0 {
		return enumMessage(p)
	}
	return fmt.Sprintf("Invalid input: expected %s, received undefined", p.Type)
}

func enumMessage(p schema) string {
	quoted := make([]string, len(p.Enum))
	for i, e := range p.Enum {
		quoted[i] = fmt.Sprintf("%q", e)
	}
	return "Invalid option: expected one of " + strings.Join(quoted, "|")
}

func (s schema) check(value json.RawMessage, path string) []Issue {
	got := kind(value)
	if want := s.Type; want != "" && got != want && !(want == "integer" && got == "number") {
		if len(s.Enum) > 0 {
			return []Issue{{enumMessage(s), path}}
		}
		return []Issue{{fmt.Sprintf("Invalid input: expected %s, received %s", want, got), path}}
	}
	var issues []Issue
	switch got {
	case "string":
		var text string
		if json.Unmarshal(value, &text) == nil && len(s.Enum) > 0 && !slices.Contains(s.Enum, text) {
			issues = append(issues, Issue{enumMessage(s), path})
		}
	case "array":
		var items []json.RawMessage
		if s.Items != nil && json.Unmarshal(value, &items) == nil {
			for i, item := range items {
				issues = append(issues, s.Items.check(item, fmt.Sprintf("%s[%d]", path, i))...)
			}
		}
	}
	return issues
}

// kind names the JSON type of a value, the way a JavaScript client would.
func kind(value json.RawMessage) string {
	value = bytes.TrimSpace(value)
	if len(value) == 0 {
		return "undefined"
	}
	switch value[0] {
	case '{':
		return "object"
	case '[':
		return "array"
	case '"':
		return "string"
	case 't', 'f':
		return "boolean"
	case 'n':
		return "null"
	}
	return "number"
}
