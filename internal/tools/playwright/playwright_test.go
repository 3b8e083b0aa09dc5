package playwright

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/tools"
	"abfleet/internal/tools/agent"
	"abfleet/internal/tools/toolstest"
)

// rig is a fleet with one Chromium, a site, and a client bound to it.
type rig struct {
	*testing.T
	fleet *toolstest.Fleet
	host  *tools.Host
	site  *httptest.Server
	out   string
	*toolstest.Client
	caller tools.Caller
}

func newRig(t *testing.T, o tools.Options) *rig {
	r := &rig{T: t, fleet: toolstest.NewFleet(t), out: filepath.Join(t.TempDir(), "output"), caller: tools.Caller{Session: "s1", Client: "c1"}}
	o.Fleet = r.fleet
	o.OutputDir = func(session string) string { return filepath.Join(r.out, session) }
	o.Caller = func(context.Context, *mcp.CallToolRequest) (tools.Caller, error) { return r.caller, nil }
	r.host = tools.NewHost(o)
	t.Cleanup(r.host.Close)
	r.Client = toolstest.Connect(t, r.host, append(agent.Tools(), Tools()...)...)
	pages := map[string]string{
		"/":     `<title>T</title><button>Hi</button>`,
		"/form": `<title>F</title><label>Name <input id=n></label><p id=p></p><script>n.onkeydown=e=>{if(e.key==='Enter')p.textContent='sent '+n.value}</script>`,
		"/two":  `<title>Two</title><button>One</button><button>Two</button>`,
		"/late": `<title>L</title><p id=a>going</p><script>setTimeout(()=>a.textContent='arrived',300)</script>`,
		"/dlg":  `<title>D</title><button onclick="alert('boo\nhoo')">Alert</button>`,
		"/con":  `<title>C</title><script>console.error('e');console.warn('w')</script>`,
		"/slow": `<title>S</title><button onclick="fetch('/hang')">Hang</button>`,
	}
	release := make(chan struct{})
	r.site = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch body, ok := pages[req.URL.Path]; {
		case req.URL.Path == "/favicon.ico": // else it counts as a console error
			w.WriteHeader(http.StatusNoContent)
		case req.URL.Path == "/hang":
			select {
			case <-release:
			case <-req.Context().Done():
			}
		case !ok:
			http.NotFound(w, req)
		default:
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fmt.Fprint(w, "<!doctype html>"+body)
		}
	}))
	t.Cleanup(func() { close(release); r.site.Close() })
	return r
}

type args map[string]any

var (
	stamp = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-\d{3}Z`)
	ref   = regexp.MustCompile(`\[ref=([^\]]+)\]`)
)

// ok calls a tool that must succeed and returns the answer with the site, the
// output directory and times replaced.
func (r *rig) ok(name string, a args) string {
	r.Helper()
	text, isError, _ := r.Call(r.Context(), name, a)
	if isError {
		r.Fatalf("%s %v: %s", name, a, text)
	}
	return r.plain(text)
}

func (r *rig) plain(text string) string {
	text = strings.ReplaceAll(text, r.site.URL, "http://HOST")
	text = strings.ReplaceAll(text, filepath.Join(r.out, r.caller.Session), "OUT")
	return stamp.ReplaceAllString(text, "TIME")
}

// fail calls a tool that must answer an error.
func (r *rig) fail(name string, a args) string {
	r.Helper()
	text, isError, _ := r.Call(r.Context(), name, a)
	if !isError {
		r.Fatalf("%s %v succeeded: %s", name, a, text)
	}
	return r.plain(text)
}

func (r *rig) want(name string, a args, want string) {
	r.Helper()
	if got := r.ok(name, a); got != want {
		r.Errorf("%s %v:\n%s\n--- want\n%s", name, a, got, want)
	}
}

func (r *rig) contains(text string, parts ...string) {
	r.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			r.Errorf("%q is missing in:\n%s", p, text)
		}
	}
}

// What is offered is the catalog, as it is: clients and models know it.
func TestCatalog(t *testing.T) {
	r := newRig(t, tools.Options{})
	type offered struct {
		Name        string         `json:"name"`
		InputSchema any            `json:"inputSchema"`
		Annotations map[string]any `json:"annotations"`
	}
	var catalog struct{ Tools []offered }
	if err := json.Unmarshal(catalogJSON, &catalog); err != nil {
		t.Fatal(err)
	}
	want := map[string]offered{}
	for _, o := range catalog.Tools {
		want[o.Name] = o
	}
	var names []string
	for _, tool := range r.Tools() {
		names = append(names, tool.Name)
		if strings.HasPrefix(tool.Name, "agent_") {
			continue
		}
		data, err := json.Marshal(tool)
		if err != nil {
			t.Fatal(err)
		}
		var got offered
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if got.Annotations["idempotentHint"] == false {
			delete(got.Annotations, "idempotentHint") // the SDK spells the default out
		}
		if !reflect.DeepEqual(got.InputSchema, want[tool.Name].InputSchema) || !maps.Equal(got.Annotations, want[tool.Name].Annotations) {
			t.Errorf("%s: %+v\nthe catalog has\n%+v", tool.Name, got, want[tool.Name])
		}
	}
	slices.Sort(names)
	all := "agent_browser_identities agent_browser_use_identity browser_click browser_close browser_evaluate browser_navigate browser_navigate_back browser_press_key browser_snapshot browser_tabs browser_take_screenshot browser_type browser_wait_for"
	if got := strings.Join(names, " "); got != all {
		t.Errorf("offered are %s", got)
	}
}

// Before an Identity is chosen every browser_* call says which tool to call.
func TestBeforeBinding(t *testing.T) {
	r := newRig(t, tools.Options{})
	for name := range implemented {
		a := args{"url": "http://x/", "target": "e1", "text": "x", "key": "a", "function": "1", "action": "list", "time": 0}
		r.contains(r.fail(name, a), "Code: identity_not_selected", "agent_browser_use_identity")
	}
	r.want("agent_browser_identities", nil, "### Result\n{\n  \"current_identity_id\": \"\",\n  \"session_browser_running\": false,\n  \"identities\": [\n    {\n      \"id\": \"id-1\",\n      \"name\": \"Shop\",\n      \"template_state\": \"READY\"\n    }\n  ]\n}")
	r.contains(r.fail("agent_browser_use_identity", args{"identity_id": "nope"}), "Code: identity_not_found")
	r.contains(r.fail("agent_browser_use_identity", nil), "Invalid arguments for tool \"agent_browser_use_identity\":\n✖ Invalid input: expected string, received undefined\n  → at identity_id")
	r.want("agent_browser_use_identity", args{"identity_id": "Shop"}, "### Result\n{\n  \"identity_id\": \"id-1\",\n  \"session_browser_ready\": true,\n  \"shared_control\": true\n}")
	r.contains(r.ok("agent_browser_identities", nil), `"current_identity_id": "id-1"`, `"session_browser_running": true`)
}

// The answers that models have learned from @playwright/mcp.
func TestSamples(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	const link = "### Snapshot\n- [Snapshot](OUT/page-TIME.yml)"
	const header = "### Page\n- Page URL: http://HOST/\n- Page Title: T\n"
	r.want("browser_tabs", args{"action": "list"}, "### Result\n- 0: (current) [](about:blank)")
	r.want("browser_navigate", args{"url": r.site.URL + "/"}, "### Ran Playwright code\n```js\nawait page.goto('http://HOST/');\n```\n"+header+link)
	snapshot := r.ok("browser_snapshot", nil)
	if want := header + "### Snapshot\n```yaml\n- button \"Hi\" [ref="; !strings.HasPrefix(snapshot, want) || !strings.HasSuffix(snapshot, "]\n```") {
		t.Errorf("%s", snapshot)
	}
	e := ref.FindStringSubmatch(snapshot)[1]
	click := "### Ran Playwright code\n```js\nawait page.getByRole('button', { name: 'Hi' }).click();\n```\n" + header + link
	r.want("browser_click", args{"element": "Hi", "target": e}, click)
	r.contains(r.fail("browser_click", args{"target": "e999"}), "### Error\nError: ", "Ref e999 not found in the current page snapshot. Try capturing new snapshot.", "Code: target_not_found", "Hint: ")
	r.contains(r.fail("browser_click", args{"target": "#nope"}), `"#nope" does not match any elements.`)
	if got := r.fail("browser_click", args{}); got != "### Error\nInvalid arguments for tool \"browser_click\":\n✖ Invalid input: expected string, received undefined\n  → at target" {
		t.Errorf("%s", got)
	}
	r.want("browser_click", args{"target": "text=Hi"}, strings.Replace(click, "getByRole('button', { name: 'Hi' })", "locator('text=Hi')", 1))
	r.want("browser_click", args{"target": e, "button": "right", "modifiers": []string{"Shift", "Alt"}, "doubleClick": true},
		strings.Replace(click, ".click()", ".dblclick({ button: 'right', modifiers: ['Shift', 'Alt'] })", 1))
	r.want("browser_press_key", args{"key": "a"}, "### Ran Playwright code\n```js\n// Press a\nawait page.keyboard.press('a');\n```")
	r.want("browser_press_key", args{"key": "Enter"}, "### Ran Playwright code\n```js\n// Press Enter\nawait page.keyboard.press('Enter');\n```\n"+header+link)
	r.want("browser_evaluate", args{"function": "() => ({a:1})"}, "### Result\n{\n  \"a\": 1\n}\n### Ran Playwright code\n```js\nawait page.evaluate('() => ({a:1})');\n```")
	r.want("browser_evaluate", args{"function": "document.title"}, "### Result\n\"T\"\n### Ran Playwright code\n```js\nawait page.evaluate('() => (document.title)');\n```")
	r.contains(r.fail("browser_evaluate", args{"function": `() => { throw new Error("x") }`}), "### Error\nError: ", "Error: x\n", "Code: evaluation_failed")
	r.want("browser_evaluate", args{"function": "(e) => e.textContent", "element": "b", "target": e},
		"### Result\n\"Hi\"\n### Ran Playwright code\n```js\nawait page.getByRole('button', { name: 'Hi' }).evaluate('(e) => e.textContent');\n```")
	r.contains(r.ok("browser_navigate", args{"url": r.site.URL + "/con"}), "- Page Title: C\n- Console: 1 errors, 1 warnings\n")
	r.contains(r.ok("browser_navigate", args{"url": r.site.URL + "/404x"}), "- HTTP status: 404 Not Found\n")
	r.contains(r.fail("browser_navigate", args{"url": "file:///etc/hosts"}), `Access to "file:" protocol is blocked. Attempted URL: "file:///etc/hosts"`, "Code: blocked_url")
	r.contains(r.fail("browser_navigate", args{"url": "http://127.0.0.1:1/"}), "ERR_UNSAFE_PORT", "Code: navigation_failed")
	r.ok("browser_navigate", args{"url": r.site.URL + "/"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/form"})
	r.want("browser_navigate_back", nil, "### Ran Playwright code\n```js\nawait page.goBack();\n```\n"+header+link)
}

func TestForms(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/form"})
	const code = "await page.getByRole('textbox', { name: 'Name' })"
	e := ref.FindStringSubmatch(strings.SplitAfter(r.ok("browser_snapshot", nil), "- textbox")[1])[1]
	r.want("browser_type", args{"target": e, "text": "it's\n"}, "### Ran Playwright code\n```js\n"+code+".fill('it\\'s\\n');\n```")
	const page = "\n### Page\n- Page URL: http://HOST/form\n- Page Title: F\n### Snapshot\n- [Snapshot](OUT/page-TIME.yml)"
	r.want("browser_type", args{"target": e, "text": "abc", "slowly": true}, "### Ran Playwright code\n```js\n"+code+".pressSequentially('abc');\n```"+page)
	r.want("browser_type", args{"target": e, "text": "abc", "submit": true}, "### Ran Playwright code\n```js\n"+code+".fill('abc');\n"+code+".press('Enter');\n```"+page)
	r.contains(r.ok("browser_evaluate", args{"function": "p.textContent"}), `"sent abc"`)
	r.contains(r.fail("browser_type", args{"target": "p", "text": "x"}), "Code: target_not_actionable")
}

// With inline snapshots, a client that cannot read files sees the page too.
func TestInlineSnapshots(t *testing.T) {
	r := newRig(t, tools.Options{Snapshot: tools.SnapshotInline})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	text := r.ok("browser_navigate", args{"url": r.site.URL + "/two"})
	r.contains(text, "### Snapshot\n```yaml\n- generic", "button \"One\"", "button \"Two\"")
	if entries, err := os.ReadDir(r.out); err == nil && len(entries) > 0 {
		t.Errorf("files were written: %v", entries)
	}
}

func TestSnapshotArguments(t *testing.T) {
	r := newRig(t, tools.Options{SnapshotBytes: 600})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/two"})
	r.contains(r.ok("browser_snapshot", args{"target": "text=Two"}), "```yaml\n- button \"Two\" [ref=")
	if text := r.ok("browser_snapshot", args{"depth": 0}); strings.Contains(text, "button") {
		t.Error(text)
	}
	r.contains(r.ok("browser_snapshot", args{"boxes": true}), "[box=")
	r.contains(r.fail("browser_snapshot", args{"depth": -1}), "Code: invalid_argument")
	r.contains(r.fail("browser_snapshot", args{"target": "button"}), "matches 2 elements", "getByRole('button', { name: 'One' })", "Code: target_ambiguous")
	r.contains(r.ok("browser_snapshot", args{"filename": "s.yml"}), "### Snapshot\n- [Snapshot](OUT/s.yml)")
	data, err := os.ReadFile(filepath.Join(r.out, "s1", "s.yml"))
	if err != nil || !strings.Contains(string(data), "button \"Two\"") {
		t.Errorf("%s %v", data, err)
	}
	r.contains(r.fail("browser_snapshot", args{"filename": "../s.yml"}), "File access denied", "Code: file_access_denied")
	r.ok("browser_evaluate", args{"function": "document.body.append(...Array.from({length: 500}, (_, i) => Object.assign(document.createElement('p'), {textContent: 'paragraph ' + i})))"})
	text := r.ok("browser_snapshot", nil)
	r.contains(text, "# cut: ")
	if len(text) > 900 {
		t.Errorf("%d bytes", len(text))
	}
}

func TestScreenshots(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/"})
	shot := func(a args) (string, []*mcp.ImageContent) {
		t.Helper()
		text, isError, images := r.Call(t.Context(), "browser_take_screenshot", a)
		if isError {
			t.Fatal(text)
		}
		return r.plain(text), images
	}
	check := func(images []*mcp.ImageContent, format string) {
		t.Helper()
		if len(images) != 1 || images[0].MIMEType != "image/"+format {
			t.Fatalf("%d images", len(images))
		}
		cfg, kind, err := image.DecodeConfig(bytes.NewReader(images[0].Data))
		if err != nil || kind != format || cfg.Width > 1568 || cfg.Height > 1568 || cfg.Width < 10 {
			t.Errorf("%v %s %v", cfg, kind, err)
		}
	}
	text, images := shot(nil)
	if want := "### Result\n- [Screenshot of viewport](OUT/page-TIME.png)\n### Ran Playwright code\n```js\n// Screenshot viewport and save it as OUT/page-TIME.png\nawait page.screenshot({\n  path: 'OUT/page-TIME.png',\n  scale: 'css',\n  type: 'png'\n});\n```"; text != want {
		t.Errorf("%s", text)
	}
	check(images, "png")
	text, images = shot(args{"target": "text=Hi", "element": "Hi btn", "type": "jpeg"})
	if want := "### Result\n- [Screenshot of Hi btn](OUT/element-TIME.jpeg)\n### Ran Playwright code\n```js\n// Screenshot Hi btn and save it as OUT/element-TIME.jpeg\nawait page.locator('text=Hi').screenshot({\n  path: 'OUT/element-TIME.jpeg',\n  quality: 90,\n  scale: 'css',\n  type: 'jpeg'\n});\n```"; text != want {
		t.Errorf("%s", text)
	}
	check(images, "jpeg")
	text, images = shot(args{"filename": "a.png", "fullPage": true})
	r.contains(text, "- [Screenshot of full page](OUT/a.png)", "  fullPage: true,\n  path: 'OUT/a.png',")
	if len(images) > 0 {
		t.Error("a picture follows although a file was named")
	}
	if data, err := os.ReadFile(filepath.Join(r.out, "s1", "a.png")); err != nil || !bytes.HasPrefix(data, []byte("\x89PNG")) {
		t.Error(err)
	}
	r.contains(r.fail("browser_take_screenshot", args{"fullPage": true, "target": "text=Hi"}), "fullPage cannot be used")
}

// Each client has a tab of its own choice, and what it was shown is remembered
// for each.
func TestTabs(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/"})
	text := r.ok("browser_tabs", args{"action": "new", "url": r.site.URL + "/two"})
	r.contains(text, "### Result\n- 0: [T](http://HOST/)\n- 1: (current) [Two](http://HOST/two)\n", "### Open tabs\n", "### Snapshot\n")
	r.caller.Client = "c2"
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "- 0: (current) [T](http://HOST/)\n- 1: [Two](http://HOST/two)")
	r.contains(r.ok("browser_evaluate", args{"function": "document.title"}), `"T"`)
	r.caller.Client = "c1"
	r.want("browser_press_key", args{"key": "b"}, "### Ran Playwright code\n```js\n// Press b\nawait page.keyboard.press('b');\n```")
	r.contains(r.ok("browser_tabs", args{"action": "select", "index": 0}), "- 0: (current) [T]", "### Page\n- Page URL: http://HOST/\n")
	r.contains(r.fail("browser_tabs", args{"action": "select", "index": 7}), "Code: target_not_found")
	r.contains(r.fail("browser_tabs", args{"action": "select"}), "Code: invalid_argument")
	r.contains(r.fail("browser_tabs", args{"action": "close", "index": 0.5}), "Code: invalid_argument")
	r.contains(r.fail("browser_tabs", args{"action": "jump"}), `✖ Invalid option: expected one of "list"|"new"|"close"|"select"`)
	r.contains(r.ok("browser_tabs", args{"action": "close"}), "### Result\n- 0: (current) [Two](http://HOST/two)")

	// browser_close ends the caller's tool state only.
	opened := r.fleet.Opened
	r.ok("browser_close", nil)
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "- 0: (current) [Two](http://HOST/two)")
	if r.fleet.Opened != opened {
		t.Error("browser_close ended the connection that other clients use")
	}
}

func TestWaitFor(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/late"})
	r.contains(r.ok("browser_wait_for", args{"text": "arrived"}), "### Result\nWaited for arrived\n", "getByText('arrived').first().waitFor({ state: 'visible' })", "### Snapshot\n")
	r.contains(r.ok("browser_wait_for", args{"textGone": "going"}), "Waited for going", "state: 'hidden'")
	began := time.Now()
	r.contains(r.ok("browser_wait_for", args{"time": 0.2}), "Waited for 0.2", "setTimeout(f, 0.2 * 1000)")
	if d := time.Since(began); d < 200*time.Millisecond {
		t.Errorf("waited %v", d)
	}
	r.contains(r.fail("browser_wait_for", nil), "Code: invalid_argument")
	r.contains(r.fail("browser_wait_for", args{"time": -1}), "Code: invalid_argument")
}

// A dialog is said, and what cannot be done while it is open is refused.
func TestModalState(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/dlg"})
	const modal = "### Modal state\n- [\"alert\" dialog with message \"boo hoo\"]: can be handled by the person in the live view"
	text := r.ok("browser_click", args{"target": "text=Alert"})
	r.contains(text, "await page.locator('text=Alert').click();", modal)
	if strings.Contains(text, "### Snapshot") {
		t.Errorf("a page that cannot be read has a snapshot: %s", text)
	}
	text = r.fail("browser_snapshot", nil)
	r.contains(text, "Code: modal_state", modal)
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "(current)", modal)
}

func TestLargeResult(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	text := r.ok("browser_evaluate", args{"function": "() => 'é'.repeat(200000)"})
	if len(text) > 10_000 {
		t.Errorf("%d bytes", len(text))
	}
	r.contains(text, "- [The whole evaluation result, 400002 bytes](OUT/result-TIME.json)")
	r.contains(r.ok("browser_evaluate", args{"function": "() => 1", "filename": "r.json"}), "- [Evaluation result](OUT/r.json)")
}

// A lost browser is connected to again, and a call that lost it says whether it
// may have taken effect.
func TestLostConnection(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_navigate", args{"url": r.site.URL + "/slow"})
	during := func(name string, a args) string {
		done := make(chan string)
		go func() {
			text, isError, _ := r.Call(t.Context(), name, a)
			if !isError {
				text = "no error: " + text
			}
			done <- text
		}()
		timer := time.NewTimer(700 * time.Millisecond) // it is waiting by then
		defer timer.Stop()
		select {
		case text := <-done:
			return "too early: " + text
		case <-timer.C:
		}
		r.fleet.Disconnect()
		return <-done
	}
	opened := r.fleet.Opened
	r.contains(during("browser_wait_for", args{"text": "never"}), "Code: browser_not_controllable", "it had no effect", "Hint: call it again")
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "[S](http://HOST/slow)")
	if r.fleet.Opened != opened+1 {
		t.Errorf("%d connections were opened, want 1", r.fleet.Opened-opened)
	}
	r.contains(during("browser_evaluate", args{"function": "() => new Promise(() => {})"}), "Code: effect_unknown", "it may have taken effect", "Hint: look with browser_snapshot")
	r.contains(during("browser_click", args{"target": "text=Hang"}), "Code: effect_unknown")
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "[S](http://HOST/slow)")
}

// A session that is bound anew never drives the browser it had before.
func TestRebinding(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	r.ok("browser_tabs", args{"action": "list"})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	opened := r.fleet.Opened
	r.ok("browser_tabs", args{"action": "list"})
	if r.fleet.Opened != opened+1 {
		t.Error("the engine of the old generation is still in use")
	}
	r.ok("browser_tabs", args{"action": "list"})
	if r.fleet.Opened != opened+1 {
		t.Error("each call connects anew")
	}
}

// A cancelled call ends at once and takes nobody else's.
func TestCancel(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := r.CallError(ctx, "browser_wait_for", args{"time": 20}); err == nil {
		t.Error("no error")
	}
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("it ended after %v", d)
	}
	r.contains(r.ok("browser_tabs", args{"action": "list"}), "(current)")
}

// Clients come and go; those long gone are forgotten.
func TestManyClients(t *testing.T) {
	r := newRig(t, tools.Options{})
	r.ok("agent_browser_use_identity", args{"identity_id": "id-1"})
	for i := range 300 {
		r.caller.Client = fmt.Sprintf("client-%d", i)
		r.ok("browser_tabs", args{"action": "list"})
	}
	r.caller.Client = "client-299"
	r.want("browser_tabs", args{"action": "list"}, "### Result\n- 0: (current) [](about:blank)")
}
