package tools_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/fault"
	"abfleet/internal/tools"
	"abfleet/internal/tools/toolstest"
)

// tool makes a tool of a function, for a host without any browser.
func serve(t *testing.T, dir string, schema string, run func(ctx context.Context, c *tools.Call) error) func(args any) (string, bool) {
	t.Helper()
	host := tools.NewHost(tools.Options{
		OutputDir: func(session string) string { return filepath.Join(dir, "output", session) },
		Caller: func(context.Context, *mcp.CallToolRequest) (tools.Caller, error) {
			return tools.Caller{Session: "s"}, nil
		},
		Now: func() time.Time { return time.Date(2026, 11, 30, 22, 55, 51, 677e6, time.UTC) },
	})
	t.Cleanup(host.Close)
	client := toolstest.Connect(t, host, tools.Tool{Name: "try", Schema: json.RawMessage(schema), Run: run})
	return func(args any) (string, bool) {
		t.Helper()
		text, isError, _ := client.Call(t.Context(), "try", args)
		return text, isError
	}
}

const anything = `{"type":"object"}`

// Clients rely on the form of argument errors, and on defaults and unknown
// arguments being taken as the peer takes them.
func TestArguments(t *testing.T) {
	const schema = `{"type":"object","additionalProperties":false,"required":["target","scale","index","kind"],"properties":{
		"target":{"type":"string"},"scale":{"type":"string","enum":["css","device"],"default":"css"},"flag":{"type":"boolean"},
		"index":{"type":"integer","minimum":1},"kind":{"type":"string","enum":["a","b"]},"n":{"type":"number"},
		"list":{"type":"array","items":{"type":"string","enum":["x","y"]}},
		"fields":{"type":"array","items":{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}},
		"data":{"type":"object","additionalProperties":{"type":"string"}}}}`
	var got map[string]any
	call := serve(t, t.TempDir(), schema, func(_ context.Context, c *tools.Call) error {
		got = nil
		return c.Decode(&got)
	})
	good := map[string]any{"target": "t", "index": 1, "kind": "a"}
	with := func(key string, value any) map[string]any {
		m := map[string]any{}
		for k, v := range good {
			m[k] = v
		}
		m[key] = value
		return m
	}
	for _, c := range []struct {
		args any
		want string
	}{
		{good, ""},
		{with("nope", 1), ""},
		{with("flag", true), ""},
		{with("list", []string{"x", "y"}), ""},
		{with("data", map[string]string{"text/plain": "x"}), ""},
		{with("target", 5), "✖ Invalid input: expected string, received number\n  → at target"},
		{with("target", nil), "✖ Invalid input: expected string, received null\n  → at target"},
		{with("kind", "c"), "✖ Invalid option: expected one of \"a\"|\"b\"\n  → at kind"},
		{with("kind", 1), "✖ Invalid option: expected one of \"a\"|\"b\"\n  → at kind"},
		{with("index", 1.5), "✖ Invalid input: expected int, received number\n  → at index"},
		{with("index", 0), "✖ Too small: expected number to be >=1\n  → at index"},
		{with("list", []any{"x", "z"}), "✖ Invalid option: expected one of \"x\"|\"y\"\n  → at list[1]"},
		{with("list", "x"), "✖ Invalid input: expected array, received string\n  → at list"},
		{with("fields", []any{map[string]any{}}), "✖ Invalid input: expected string, received undefined\n  → at fields[0].name"},
		{map[string]any{}, "✖ Invalid input: expected string, received undefined\n  → at target\n✖ Invalid input: expected integer, received undefined\n  → at index\n✖ Invalid option: expected one of \"a\"|\"b\"\n  → at kind"},
	} {
		text, isError := call(c.args)
		if c.want == "" {
			if isError || got["scale"] != "css" || got["nope"] != nil {
				t.Errorf("%v: %s %v", c.args, text, got)
			}
			continue
		}
		if want := "### Error\nInvalid arguments for tool \"try\":\n" + c.want; text != want || !isError {
			t.Errorf("%v:\n%s\nwant\n%s", c.args, text, want)
		}
	}
}

// The three parts of a failure reach the model, each on its line.
func TestErrors(t *testing.T) {
	var fail error
	call := serve(t, t.TempDir(), anything, func(context.Context, *tools.Call) error { return fail })
	for _, c := range []struct {
		err  error
		want string
	}{
		{fault.New(fault.TargetNotFound, "click", "take a snapshot", "no %s", "such"), "### Error\nError: cannot click: no such\nCode: target_not_found\nHint: take a snapshot"},
		{fmt.Errorf("more: %w", fault.New(fault.NoSpace, "write", "free some", "full")), "### Error\nError: more: cannot write: full\nCode: no_space\nHint: free some"},
		{errors.New("odd"), "### Error\nError: odd"},
	} {
		fail = c.err
		if text, isError := call(nil); text != c.want || !isError {
			t.Errorf("%v: %q, want %q", c.err, text, c.want)
		}
	}
}

// A fault in a tool is answered and does not end the service, and says nothing
// of our insides.
func TestPanic(t *testing.T) {
	call := serve(t, t.TempDir(), anything, func(context.Context, *tools.Call) error { panic("secret") })
	text, isError := call(nil)
	if !isError || !strings.Contains(text, "Code: internal") && !strings.Contains(text, "cannot run try") || strings.Contains(text, "secret") {
		t.Errorf("%v %s", isError, text)
	}
}

func TestSectionsAndSurrogates(t *testing.T) {
	call := serve(t, t.TempDir(), `{"type":"object","properties":{"text":{"type":"string"}}}`, func(_ context.Context, c *tools.Call) error {
		var args struct{ Text string }
		if err := c.Decode(&args); err != nil {
			return err
		}
		c.Result(args.Text)
		c.Result("bad \xff byte")
		c.Code("await %s;", "x")
		c.LinkSnapshot("f.yml")
		return nil
	})
	text, _ := call(json.RawMessage(`{"text":"lone \ud800 surrogate"}`))
	if want := "### Result\nlone \ufffd surrogate\nbad \ufffd byte\n### Ran Playwright code\n```js\nawait x;\n```\n### Snapshot\n- [Snapshot](f.yml)"; text != want {
		t.Errorf("%q", text)
	}
}

// No file name leads out of the session's output directory.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "output", "s")
	outside := filepath.Join(dir, "outside")
	if err := os.Mkdir(outside, 0o700); err != nil {
		t.Fatal(err)
	}
	call := serve(t, dir, `{"type":"object","properties":{"name":{"type":"string"}}}`, func(_ context.Context, c *tools.Call) error {
		var args struct{ Name string }
		if err := c.Decode(&args); err != nil {
			return err
		}
		f, err := c.File(args.Name)
		if err != nil {
			return err
		}
		c.Result(f.Path)
		return c.SaveAs(f, []byte("data"))
	})
	for _, name := range []string{"a.txt", "./b.txt", "sub/dir/c.txt", filepath.Join(out, "d.txt"), "x/../e.txt"} {
		text, isError := call(map[string]any{"name": name})
		path := strings.TrimPrefix(text, "### Result\n")
		if data, err := os.ReadFile(path); isError || err != nil || string(data) != "data" {
			t.Errorf("%s: %s, %v", name, text, err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(out, "link")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"../x", "/etc/passwd", outside + "/x", "a/../../x", "", ".", "dir/", "link/x", "a\x00b"} {
		text, isError := call(map[string]any{"name": name})
		if !isError || !strings.Contains(text, "Code: file_access_denied") {
			t.Errorf("%q: %s", name, text)
		}
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("written outside: %v %v", left, err)
	}
}

// What tools write on their own is bounded; what callers named stays.
func TestOutputIsBounded(t *testing.T) {
	dir := t.TempDir()
	call := serve(t, dir, anything, func(_ context.Context, c *tools.Call) error {
		f, err := c.File("mine.txt")
		if err != nil {
			return err
		}
		if err := c.SaveAs(f, nil); err != nil {
			return err
		}
		for range 100 {
			if _, err := c.Save("page", "yml", []byte("x")); err != nil {
				return err
			}
		}
		return nil
	})
	// The clock stands still: after 99 names of one time there are no more.
	if text, isError := call(nil); !isError || !strings.Contains(text, "cannot write file") {
		t.Fatal(text)
	}
	out := filepath.Join(dir, "output", "s")
	for i := range 700 {
		name := fmt.Sprintf("element-2026-01-01T00-00-%02d-%03dZ.png", i/60, i)
		if err := os.WriteFile(filepath.Join(out, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 99 {
		os.Remove(filepath.Join(out, fmt.Sprintf("page-2026-11-30T22-55-51-677Z-%d.yml", i)))
	}
	os.Remove(filepath.Join(out, "page-2026-11-30T22-55-51-677Z.yml"))
	call(nil)
	left, err := os.ReadDir(out)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) > 600 {
		t.Errorf("%d files are left", len(left))
	}
	if _, err := os.Stat(filepath.Join(out, "mine.txt")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(out, "page-2026-11-30T22-55-51-677Z.yml")); err != nil {
		t.Errorf("the newest file is gone: %v", err)
	}
}

// Sessions come and go for as long as the service runs; what is kept of one goes
// with its browser. A call says that it uses a browser for as long as it does.
func TestSessionsAreForgotten(t *testing.T) {
	fleet := toolstest.NewFleet(t)
	var session string
	host := tools.NewHost(tools.Options{
		Fleet: fleet, OutputDir: func(string) string { return t.TempDir() },
		Caller: func(context.Context, *mcp.CallToolRequest) (tools.Caller, error) {
			return tools.Caller{Session: session}, nil
		},
	})
	t.Cleanup(host.Close)
	client := toolstest.Connect(t, host, tools.Tool{Name: "try", Schema: json.RawMessage(anything), Run: func(ctx context.Context, c *tools.Call) error {
		_, err := c.Tab(ctx)
		if n := fleet.Operating(); err == nil && n != 1 {
			err = fmt.Errorf("%d calls are told to use a browser", n)
		}
		return err
	}})
	try := func(name string, works bool) {
		t.Helper()
		session = name
		if text, isError, _ := client.Call(t.Context(), "try", nil); isError == works {
			t.Fatal(text)
		}
	}
	for i := range 5 {
		try(fmt.Sprintf("unbound %d", i), false)
	}
	if n := host.Sessions(); n != 0 {
		t.Errorf("%d sessions without a browser are kept", n)
	}
	for i := range 3 {
		name := fmt.Sprintf("bound %d", i)
		if _, err := fleet.UseIdentity(t.Context(), name, "Shop"); err != nil {
			t.Fatal(err)
		}
		try(name, true)
	}
	if n := host.Sessions(); n != 3 {
		t.Errorf("%d sessions are kept, want 3", n)
	}
	fleet.Disconnect()
	tick, deadline := time.NewTicker(10*time.Millisecond), time.After(10*time.Second)
	defer tick.Stop()
	for host.Sessions() > 0 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d sessions are kept of browsers that are gone", host.Sessions())
		}
	}
	try("bound 1", true)
	if n := fleet.Operating(); n != 0 {
		t.Errorf("%d calls that ended still use a browser: no release would come", n)
	}
}

func TestLeakCheck(t *testing.T) {
	for _, text := range []string{
		"ws://127.0.0.1:9222/devtools/browser/abc", "see /run/user/1000/abfleet/x/cdp.sock", "unit abfleet-abc.slice failed",
		"abfleet-abcdefghij-chromium-3.scope", "/home/u/.local/state/abfleet/identities/i/profiles/p7/Default", "--remote-debugging-pipe", "DevToolsActivePort",
	} {
		if len(toolstest.LeakCheck(text)) == 0 {
			t.Errorf("not seen: %s", text)
		}
	}
	if got := toolstest.LeakCheck("on abcdefghij at 4711", "abcdefghij", "4711", ""); len(got) != 2 {
		t.Error(got)
	}
	for _, text := range []string{"- Page URL: http://127.0.0.1:8080/profiles", "### Result\n- 0: (current) [T](http://localhost:3000/)", "/home/u/.local/state/abfleet/output/x/page-1.yml"} {
		if got := toolstest.LeakCheck(text); len(got) > 0 {
			t.Errorf("%s: %q", text, got)
		}
	}
}
