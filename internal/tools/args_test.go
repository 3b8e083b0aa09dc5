package tools

import (
	"encoding/json"
	"testing"
)

const testSchema = `{"type":"object","properties":{
	"target":{"type":"string"},
	"scale":{"default":"css","type":"string","enum":["css","device"]},
	"button":{"type":"string","enum":["left","right"]},
	"n":{"type":"number"},
	"list":{"type":"array","items":{"type":"string"}}},
	"required":["target","scale"],"additionalProperties":false}`

// TestDecode protects two things clients rely on: arguments are judged as the
// peer judges them (defaults first, unknown ones ignored), and what is wrong is
// said in its words.
func TestDecode(t *testing.T) {
	type args struct {
		Target, Scale, Button string
		N                     float64
		List                  []string
	}
	for in, want := range map[string]string{
		`{"target":"e1"}`:                             "",
		`{"target":"e1","scale":"device"}`:            "",
		`{"target":"e1","unknown":{"a":1},"_meta":2}`: "",
		``:                               "Invalid arguments for tool \"t\":\n✖ Invalid input: expected string, received undefined\n  → at target",
		`null`:                           "Invalid arguments for tool \"t\":\n✖ Invalid input: expected string, received undefined\n  → at target",
		`[]`:                             "Invalid arguments for tool \"t\":\n✖ Invalid input: expected object, received array",
		`{"target":7}`:                   "Invalid arguments for tool \"t\":\n✖ Invalid input: expected string, received number\n  → at target",
		`{"target":null}`:                "Invalid arguments for tool \"t\":\n✖ Invalid input: expected string, received null\n  → at target",
		`{"target":"e1","button":"up"}`:  "Invalid arguments for tool \"t\":\n✖ Invalid option: expected one of \"left\"|\"right\"\n  → at button",
		`{"target":"e1","button":1}`:     "Invalid arguments for tool \"t\":\n✖ Invalid option: expected one of \"left\"|\"right\"\n  → at button",
		`{"target":"e1","list":["a",2]}`: "Invalid arguments for tool \"t\":\n✖ Invalid input: expected string, received number\n  → at list[1]",
		`{"n":"x"}`:                      "Invalid arguments for tool \"t\":\n✖ Invalid input: expected number, received string\n  → at n\n✖ Invalid input: expected string, received undefined\n  → at target",
	} {
		c := &Call{Args: json.RawMessage(in), tool: Tool{Name: "t", Schema: json.RawMessage(testSchema)}}
		var a args
		err := c.Decode(&a)
		got := ""
		if err != nil {
			got = errorText(err)
		}
		if got != want {
			t.Errorf("%s:\n%s\nwant\n%s", in, got, want)
		}
		if err == nil && a.Scale == "" {
			t.Errorf("%s: the default is not applied", in)
		}
	}
}

// TestFile protects everything outside a session's output directory.
func TestFile(t *testing.T) {
	h := NewHost(Options{OutputDir: func(string) string { return "/out/s" }})
	for name, want := range map[string]string{
		"a.png": "/out/s/a.png", "sub/a.png": "/out/s/sub/a.png", "./a": "/out/s/a", "/out/s/b": "/out/s/b",
		"../a": "", "/etc/passwd": "", "sub/../../a": "", ".": "", "/out/sibling/a": "", "/out/s": "",
	} {
		got, err := h.file(Caller{Session: "s"}, name)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("file(%q) = %q, %v; want %q", name, got, err, want)
		}
	}
}
