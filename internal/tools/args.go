package tools

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
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

// maxIssues is how many issues are told of one call.
const maxIssues = 20

// schema is the part of JSON Schema that the catalogs use.
type schema struct {
	Type       string          `json:"type"`
	Properties properties      `json:"properties"`
	Required   []string        `json:"required"`
	Enum       []string        `json:"enum"`
	Default    json.RawMessage `json:"default"`
	Minimum    *float64        `json:"minimum"`
	Items      *schema         `json:"items"`
}

// properties keep the order of the schema, which is the order of the issues.
type properties []property

type property struct {
	name   string
	schema schema
}

func (p *properties) UnmarshalJSON(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	if _, err := dec.Token(); err != nil { // {
		return err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		name, _ := key.(string) // keys are strings
		var s schema
		if err := dec.Decode(&s); err != nil {
			return err
		}
		*p = append(*p, property{name, s})
	}
	return nil
}

// Decode checks the call's arguments against the tool's schema and decodes them
// into v. Fields with a default may be left out although the schema lists them
// as required; unknown ones are ignored, as the peer does with both.
func (c *Call) Decode(v any) error {
	var s schema
	if err := json.Unmarshal(c.tool.Schema, &s); err != nil {
		return fmt.Errorf("schema of %s: %w", c.tool.Name, err)
	}
	raw := bytes.TrimSpace(c.args)
	if len(raw) == 0 || string(raw) == "null" {
		raw = []byte("{}")
	}
	bad := &InvalidArguments{Tool: c.tool.Name}
	clean, issues := s.apply(raw, "")
	if len(issues) > 0 {
		bad.Issues = issues[:min(len(issues), maxIssues)]
		return bad
	}
	return json.Unmarshal(clean, v)
}

// apply checks a value and returns it with defaults set and unknown members
// dropped.
func (s schema) apply(value json.RawMessage, path string) (json.RawMessage, []Issue) {
	got := kind(value)
	if got != s.Type && s.Type != "" && !(s.Type == "integer" && got == "number") {
		return nil, []Issue{{s.expected(got), path}}
	}
	switch got {
	case "object":
		return s.applyObject(value, path)
	case "array":
		var items []json.RawMessage
		if err := json.Unmarshal(value, &items); err != nil {
			return nil, []Issue{{s.expected(got), path}}
		}
		var issues []Issue
		for i := range items {
			if s.Items == nil {
				break
			}
			clean, bad := s.Items.apply(items[i], path+"["+strconv.Itoa(i)+"]")
			items[i] = clean
			issues = append(issues, bad...)
		}
		if len(issues) > 0 {
			return nil, issues
		}
		return marshal(items), nil
	case "string":
		var text string
		if err := json.Unmarshal(value, &text); err != nil || len(s.Enum) > 0 && !slices.Contains(s.Enum, text) {
			return nil, []Issue{{s.expected(got), path}}
		}
	case "number":
		var n float64
		if err := json.Unmarshal(value, &n); err != nil {
			return nil, []Issue{{s.expected(got), path}}
		}
		switch {
		case s.Type == "integer" && n != math.Trunc(n):
			return nil, []Issue{{"Invalid input: expected int, received number", path}}
		case s.Minimum != nil && n < *s.Minimum:
			return nil, []Issue{{fmt.Sprintf("Too small: expected number to be >=%v", *s.Minimum), path}}
		}
	}
	return value, nil
}

func (s schema) applyObject(value json.RawMessage, path string) (json.RawMessage, []Issue) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(value, &members); err != nil {
		return nil, []Issue{{s.expected("object"), path}}
	}
	if s.Properties == nil { // a map of anything
		return value, nil
	}
	clean := make(map[string]json.RawMessage)
	var issues []Issue
	for _, p := range s.Properties {
		at := p.name
		if path != "" {
			at = path + "." + p.name
		}
		member, given := members[p.name]
		switch {
		case given:
			v, bad := p.schema.apply(member, at)
			clean[p.name] = v
			issues = append(issues, bad...)
		case p.schema.Default != nil:
			clean[p.name] = p.schema.Default
		case slices.Contains(s.Required, p.name):
			issues = append(issues, Issue{p.schema.expected("undefined"), at})
		}
	}
	if len(issues) > 0 {
		return nil, issues
	}
	return marshal(clean), nil
}

// marshal encodes what was decoded a moment ago.
func marshal(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

func (s schema) expected(got string) string {
	if len(s.Enum) == 0 {
		return fmt.Sprintf("Invalid input: expected %s, received %s", s.Type, got)
	}
	quoted := make([]string, len(s.Enum))
	for i, e := range s.Enum {
		quoted[i] = strconv.Quote(e)
	}
	return "Invalid option: expected one of " + strings.Join(quoted, "|")
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
