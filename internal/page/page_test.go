package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page/pagetest"
)

// shared is one Chromium with one engine that most tests use, each as a client
// of its own in a tab of its own.
var shared *Browser

// actionTimeout is shorter than by default, so that tests of giving up are quick.
const actionTimeout = 2 * time.Second

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	b, err := pagetest.Launch(pagetest.Options{Flags: []string{"--site-per-process"}})
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests with a real browser are skipped:", err)
		return m.Run()
	}
	defer b.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	shared, err = Attach(ctx, cdp.New(b.Pipe()), Options{KeepPage: true, ActionTimeout: actionTimeout})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer shared.Close()
	return m.Run()
}

// site serves pages by path and stops with the test.
type site map[string]string

func (s site) start(t testing.TB) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := s[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprint(w, strings.ReplaceAll(body, "HOST", r.Host))
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

// context that ends with the test, or when it hangs.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// openTab gives the test a client and a tab on the URL.
func openTab(t testing.TB, url string) (*Client, *Tab) {
	t.Helper()
	if shared == nil {
		t.Skip("no Chromium here")
	}
	c := shared.Client(t.Name())
	tab, err := c.NewTab(testContext(t), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		c.browser.conn.Root().Call(ctx, "Target.closeTarget", map[string]any{"targetId": tab.id}, nil)
		c.Forget()
	})
	return c, tab
}

// page opens a tab on one page with that body.
func openPage(t testing.TB, body string) *Tab {
	t.Helper()
	_, tab := openTab(t, site{"/": body}.start(t)+"/")
	return tab
}

func eval(t testing.TB, tab *Tab, js string) string {
	t.Helper()
	v, _, err := tab.Evaluate(testContext(t), js, "")
	if err != nil {
		t.Fatalf("evaluate %s: %v", js, err)
	}
	return v
}

// eventually waits for what has no event.
func eventually(t testing.TB, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen")
		}
	}
}

func wantCode(t testing.TB, err error, code fault.Code) {
	t.Helper()
	if !fault.Is(err, code) {
		t.Fatalf("error is %v (code %s), want code %s", err, fault.CodeOf(err), code)
	}
}

func TestNavigate(t *testing.T) {
	url := site{"/": "<title>Home</title>home", "/away": "<title>Away</title><script>location.replace('/')</script>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	st, err := tab.State(ctx)
	if err != nil || st.Title != "Home" || st.URL != url+"/" || st.HTTPStatus != "" {
		t.Fatalf("state = %+v, %v", st, err)
	}
	if err := tab.Navigate(ctx, url+"/none"); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); st.HTTPStatus != "404 Not Found" || st.ConsoleErrors == 0 {
		t.Fatalf("state of a missing page = %+v", st)
	}
	if err := tab.Navigate(ctx, url+"/away"); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); st.Title != "Home" {
		t.Fatalf("a page that sends the browser on was not followed: %+v", st)
	}
	err = tab.Navigate(ctx, "http://127.0.0.1:1/")
	wantCode(t, err, fault.NavigationFailed)
	if !strings.Contains(err.Error(), "net::ERR_UNSAFE_PORT at http://127.0.0.1:1/") {
		t.Fatal(err)
	}
	if err := tab.Back(ctx); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); !strings.HasPrefix(st.URL, url) {
		t.Fatalf("after back: %+v", st)
	}
}

func TestBackWithoutHistory(t *testing.T) {
	_, tab := openTab(t, "")
	wantCode(t, tab.Back(testContext(t)), fault.NavigationFailed)
}

func TestBackFromCache(t *testing.T) {
	url := site{"/a": "<title>A</title><script>window.mark=0</script>", "/b": "<title>B</title>"}.start(t)
	_, tab := openTab(t, url+"/a")
	ctx := testContext(t)
	eval(t, tab, "window.mark=7")
	if err := tab.Navigate(ctx, url+"/b"); err != nil {
		t.Fatal(err)
	}
	if err := tab.Back(ctx); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); st.Title != "A" {
		t.Fatalf("state = %+v", st)
	}
	if got := eval(t, tab, "window.mark"); got != "7" && got != "0" {
		t.Fatalf("mark = %s", got)
	} else {
		t.Logf("restored from the back/forward cache: %v", got == "7")
	}
}

func TestClickNavigates(t *testing.T) {
	url := site{"/": "<a href=/next>go</a>", "/next": "<title>Next</title>there<img src=/missing>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	loc, err := tab.Click(ctx, "a", ClickOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if loc.Code == "" {
		t.Error("the click has no locator")
	}
	if st, _ := tab.State(ctx); st.Title != "Next" {
		t.Fatalf("state after the click = %+v", st)
	}
}

func TestClickSettlesOnRequests(t *testing.T) {
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		switch r.URL.Path {
		case "/data":
			<-release
			fmt.Fprint(w, "first")
		case "/more":
			fmt.Fprint(w, "second")
		default:
			fmt.Fprint(w, `<button>load</button><p></p><script>document.querySelector('button').onclick=async()=>{
				const a=await (await fetch('/data')).text();const b=await (await fetch('/more')).text();document.querySelector('p').textContent=a+b}</script>`)
		}
	}))
	defer srv.Close()
	_, tab := openTab(t, srv.URL)
	time.AfterFunc(300*time.Millisecond, func() { close(release) })
	began := time.Now()
	if _, err := tab.Click(testContext(t), "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d > 4*time.Second {
		t.Errorf("the click settled %v after it", d)
	}
	if got := eval(t, tab, "document.querySelector('p').textContent"); got != `"firstsecond"` {
		t.Fatalf("the click settled too early: %s", got)
	}
}

func TestClickTargets(t *testing.T) {
	tab := openPage(t, `<style>@keyframes m{from{margin-left:0}to{margin-left:400px}} #moving{animation:m .6s linear}</style>
		<button id=ok onclick="this.textContent='done'">x</button>
		<button id=off disabled>x</button>
		<div style="position:relative"><button id=covered>x</button><div id=cover style="position:absolute;inset:0;background:red"></div></div>
		<button id=moving onclick="window.moved=this.getBoundingClientRect().x">m</button>
		<button id=later disabled onclick="window.later=1">l</button>
		<div style="height:3000px"></div><button id=far onclick="window.far=1">far</button>
		<script>setTimeout(()=>later.disabled=false,400)</script>`)
	ctx := testContext(t)
	for _, id := range []string{"ok", "moving", "later", "far"} {
		if _, err := tab.Click(ctx, "#"+id, ClickOptions{}); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
	if got := eval(t, tab, "[ok.textContent, window.later, window.far, window.moved>=0]"); strings.Join(strings.Fields(got), "") != `["done",1,1,true]` {
		t.Fatalf("clicks had the effect %s", got)
	}
	for id, want := range map[string]string{"off": "disabled", "covered": ""} {
		began := time.Now()
		_, err := tab.Click(ctx, "#"+id, ClickOptions{})
		wantCode(t, err, fault.TargetNotActionable)
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", id, err)
		}
		if d := time.Since(began); d < actionTimeout/2 || d > actionTimeout+2*time.Second {
			t.Errorf("%s was given up after %v", id, d)
		}
	}
	_, err := tab.Click(ctx, "#none", ClickOptions{})
	wantCode(t, err, fault.TargetNotFound)
	if want := `"#none" does not match any elements.`; errors.Unwrap(err).Error() != want {
		t.Errorf("cause = %v", errors.Unwrap(err))
	}
	_, err = tab.Click(ctx, "e999", ClickOptions{})
	wantCode(t, err, fault.TargetNotFound)
	if want := `Ref e999 not found in the current page snapshot. Try capturing new snapshot.`; errors.Unwrap(err).Error() != want {
		t.Errorf("cause = %v", errors.Unwrap(err))
	}
	_, err = tab.Click(ctx, "button", ClickOptions{})
	wantCode(t, err, fault.TargetAmbiguous)
}

func TestClickKinds(t *testing.T) {
	tab := openPage(t, `<button style="width:100px;height:50px">b</button><script>window.log=[];
		const b=document.querySelector('button');
		for(const k of ['mousedown','mouseup','click','dblclick','contextmenu','auxclick'])
		b.addEventListener(k,e=>{log.push(k+e.button+(e.ctrlKey?'c':'')+(e.shiftKey?'s':''));if(k=='contextmenu')e.preventDefault()});</script>`)
	ctx := testContext(t)
	for _, c := range []struct {
		o    ClickOptions
		want string
	}{
		{ClickOptions{Double: true}, "mousedown0 mouseup0 click0 mousedown0 mouseup0 click0 dblclick0"},
		{ClickOptions{Button: "right"}, "mousedown2 contextmenu2 mouseup2 auxclick2"},
		{ClickOptions{Modifiers: []string{"ControlOrMeta", "Shift"}}, "mousedown0cs mouseup0cs click0cs"},
	} {
		eval(t, tab, "log.length=0")
		if _, err := tab.Click(ctx, "button", c.o); err != nil {
			t.Fatal(err)
		}
		if got := eval(t, tab, "log.join(' ')"); got != `"`+c.want+`"` {
			t.Errorf("%+v made %s, want %s", c.o, got, c.want)
		}
	}
	_, err := tab.Click(ctx, "button", ClickOptions{Button: "side"})
	wantCode(t, err, fault.InvalidArgument)
}

// frames are the pages of the frame tests: a frame of the same site, and one of
// another site that runs in a process of its own, with one inside it.
var frames = site{
	"/": `<title>Top</title><body style="margin:0"><div style="height:40px">top</div>
		<iframe id=near src="/inner" style="border:3px solid;margin-left:30px"></iframe>
		<div style="height:1500px"></div><iframe id=far src="http://localhost:PORT/outer" width=500 height=300></iframe>`,
	"/inner": `<button id=b onclick="this.dataset.done='pressed'">in</button><input id=i>`,
	"/outer": `<p>outer</p><div style="height:600px"></div><button id=b onclick="this.dataset.done='pressed'">out</button><input id=i>
		<iframe src="/inner"></iframe>`,
}

func (s site) startWithPort(t testing.TB) string {
	url := ""
	s2 := site{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprint(w, s2[r.URL.Path])
	}))
	t.Cleanup(srv.Close)
	url = srv.URL
	_, port, _ := strings.Cut(strings.TrimPrefix(url, "http://"), ":")
	for k, v := range s {
		s2[k] = strings.ReplaceAll(v, "PORT", port)
	}
	return url
}

func TestFrames(t *testing.T) {
	_, tab := openTab(t, frames.startWithPort(t)+"/")
	ctx := testContext(t)
	text, err := tab.Snapshot(ctx, SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(text)
	oop := 0
	tab.b.mu.Lock()
	for _, tg := range tab.b.targets {
		if tg.tab == tab && tg.parent != nil {
			oop++
		}
	}
	tab.b.mu.Unlock()
	if oop == 0 {
		t.Fatal("no frame runs in a process of its own: the test shows nothing")
	}
	var refs []string // of the buttons
	for line := range strings.Lines(text) {
		if strings.Contains(line, "- button") {
			_, r, _ := strings.Cut(line, "[ref=")
			r, _, _ = strings.Cut(r, "]")
			refs = append(refs, r)
		}
	}
	if len(refs) != 3 {
		t.Fatalf("refs of buttons: %v", refs)
	}
	for _, r := range refs {
		loc, err := tab.Click(ctx, r, ClickOptions{})
		if err != nil {
			t.Fatalf("%s: %v", r, err)
		}
		if !strings.Contains(loc.Code, ".contentFrame().") {
			t.Errorf("locator of %s does not lead into its frame: %s", r, loc.Code)
		}
		got, _, err := tab.Evaluate(ctx, "(e) => e.dataset.done", r)
		if err != nil || got != `"pressed"` {
			t.Errorf("%s says %s, %v", r, got, err)
		}
	}
	for _, target := range []string{
		"locator('#near').contentFrame().locator('#i')", "locator('#far').contentFrame().locator('#i')",
	} {
		if _, err := tab.Fill(ctx, target, "héllo"); err != nil {
			t.Fatalf("fill %s: %v", target, err)
		}
		if _, err := tab.TypeSlowly(ctx, target, "!é"); err != nil {
			t.Fatalf("type %s: %v", target, err)
		}
		got, loc, err := tab.Evaluate(ctx, "e => e.value", target)
		if err != nil || !strings.HasPrefix(got, `"h`) || !strings.Contains(got, "!é") {
			t.Errorf("%s has %s, %v", target, got, err)
		}
		if loc.Code == "" {
			t.Error("no code")
		}
		img, err := tab.Screenshot(ctx, ScreenshotOptions{Target: target})
		if err != nil || img.Width < 50 || img.Height < 10 {
			t.Errorf("screenshot of %s: %dx%d, %v", target, img.Width, img.Height, err)
		}
	}
}

func TestFillAndPress(t *testing.T) {
	tab := openPage(t, `<form action=javascript:void(0) onsubmit="log.push('submit')"><input id=i value=old><textarea id=a></textarea></form>
		<div id=c contenteditable>old text</div><input id=off disabled><input id=ro readonly>
		<script>window.log=[];i.oninput=e=>log.push(e.inputType+e.isTrusted);i.onkeydown=e=>log.push(e.key+'/'+e.code)</script>`)
	ctx := testContext(t)
	fill := func(target, text string) {
		t.Helper()
		if _, err := tab.Fill(ctx, target, text); err != nil {
			t.Fatal(err)
		}
	}
	press := func(key string) {
		t.Helper()
		if err := tab.Press(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	fill("#i", "new")
	if got := eval(t, tab, "i.value+log"); got != `"newinsertTexttrue"` {
		t.Fatal(got)
	}
	press("x")
	press("Shift+y")
	press("ArrowLeft")
	press("Backspace")
	if got := eval(t, tab, "i.value"); got != `"newY"` {
		t.Fatal(got)
	}
	press("ControlOrMeta+a")
	press("Z")
	if got := eval(t, tab, "i.value"); got != `"Z"` {
		t.Fatalf("select all and type gave %s", got)
	}
	press("Enter")
	if got := eval(t, tab, "log.includes('submit')"); got != "true" {
		t.Fatal("Enter did not submit")
	}
	fill("#i", "")
	fill("#a", "two\nlines")
	fill("#c", "fresh")
	if got := eval(t, tab, "[i.value,a.value,c.textContent]"); strings.Join(strings.Fields(got), "") != `["","two\nlines","fresh"]` {
		t.Fatal(got)
	}
	press("Tab")
	if _, err := tab.TypeSlowly(ctx, "#a", "%ü\n~"); err != nil {
		t.Fatal(err)
	}
	if got := eval(t, tab, "a.value"); !strings.Contains(got, `%ü\n~`) {
		t.Fatal(got)
	}
	_, err := tab.Fill(ctx, "#ro", "x")
	wantCode(t, err, fault.TargetNotActionable)
	wantCode(t, tab.Press(ctx, "Nonsense"), fault.InvalidArgument)
	wantCode(t, tab.Press(ctx, "a+b"), fault.InvalidArgument)
	wantCode(t, tab.Press(ctx, ""), fault.InvalidArgument)
}

func TestEvaluate(t *testing.T) {
	tab := openPage(t, `<title>T</title><p id=p>x</p><script>
		JSON.stringify=()=>'lie';Array.prototype.map=()=>'lie';Object.keys=()=>['lie'];Array.prototype.toJSON=()=>'lie'</script>`)
	for js, want := range map[string]string{
		"1+1":                                   "2",
		"() => ({a:1})":                         "{\n  \"a\": 1\n}",
		"document.title":                        `"T"`,
		"() => { }":                             "undefined",
		"async () => [1,[],{}]":                 "[\n  1,\n  [],\n  {}\n]",
		"function f() { return null }":          "null",
		"() => ({b:1, a:undefined, c:()=>1})":   "{\n  \"b\": 1\n}",
		"[undefined, NaN, -0, 1e21, 0.1]":       "[\n  null,\n  null,\n  0,\n  1e+21,\n  0.1\n]",
		"document.querySelector('#p')":          `"ref: <Node>"`,
		"window":                                `"ref: <Window>"`,
		"new Date(0)":                           `"1970-01-01T00:00:00.000Z"`,
		"new URL('http://a/b')":                 `"http://a/b"`,
		"() => { const o={x:1}; return [o,o] }": "[\n  {\n    \"x\": 1\n  },\n  {\n    \"x\": 1\n  }\n]",
		"({r: new DOMRect(1,2,3,4)})":           "{\n  \"r\": {\n    \"x\": 1,\n    \"y\": 2,\n    \"width\": 3,\n    \"height\": 4,\n    \"top\": 2,\n    \"right\": 4,\n    \"bottom\": 6,\n    \"left\": 1\n  }\n}",
		"const q = 5; q + 1":                    "6",
		"const q = 6; await 1; q + 1":           "7",
		"'<\"\\u2028\\n'":                       "\"<\\\"\\u2028\\n\"",
		"new Map([[1,2]])":                      "{}",
		"// comment\n() => 3 // more":           "3",
	} {
		if got := eval(t, tab, js); got != want {
			t.Errorf("%s = %s, want %s", js, got, want)
		}
	}
	ctx := testContext(t)
	for js, want := range map[string]string{
		`() => { throw new Error("x") }`:        "Error: x\n    at ",
		`() => Promise.reject(5)`:               "Error: 5",
		`() => { throw "text" }`:                "Error: text",
		`nope.x`:                                "ReferenceError: nope is not defined",
		`() => {`:                               "SyntaxError",
		`() => { const a={}; a.a=a; return a }`: "circular",
		`() => 'x'.repeat(1e8)`:                 "larger than",
		`() => { let a; for (let i = 0; i < 99; i++) a = {a}; return a }`: "makes no JSON",
		`() => Array.from({length:3e6},(_, i)=>i)`:                        "larger than",
		`JSON.parse('{')`: "SyntaxError",
		`Object.defineProperty({},'a',{enumerable:1,get(){throw new Error('g')}}).a`: "Error: g",
	} {
		_, _, err := tab.Evaluate(ctx, js, "")
		if !fault.Is(err, fault.EvaluationFailed) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", js, err, want)
		}
	}
	if got := eval(t, tab, "1"); got != "1" {
		t.Fatal("the tab is not usable any more")
	}
}

// A value may nest deeper than a message of CDP may.
func TestEvaluateDeep(t *testing.T) {
	tab := openPage(t, "")
	nested := func(n int) string {
		return fmt.Sprintf("() => { let a = 1; for (let i = 0; i < %d; i++) a = {a}; return a }", n)
	}
	for _, n := range []int{59, 61, 150, 1000} {
		var v any
		if err := json.Unmarshal([]byte(eval(t, tab, nested(n))), &v); err != nil {
			t.Fatal(err)
		}
		depth := 0
		for m, ok := v.(map[string]any); ok; m, ok = v.(map[string]any) {
			v = m["a"]
			depth++
		}
		if depth != n || v != 1.0 {
			t.Errorf("nested %d levels: %d around %v", n, depth, v)
		}
	}
	ctx := testContext(t)
	for _, js := range []string{nested(1_000_000), "let b = 1; for (let i = 0; i < 500; i++) b = {b}; b"} {
		if _, _, err := tab.Evaluate(ctx, js, ""); !fault.Is(err, fault.EvaluationFailed) || strings.Contains(err.Error(), "navigated") {
			t.Errorf("%s: %v", js, err)
		}
	}
}

// An open dialog goes with its tab, and only that tab is closed.
func TestCloseTabWithDialog(t *testing.T) {
	c, first := openTab(t, site{"/": "<button onclick='alert(1)'>x</button>"}.start(t)+"/")
	ctx := testContext(t)
	tab, err := c.NewTab(ctx, first.url())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Click(ctx, "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	before, err := c.Tabs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.CloseTab(ctx, -1); err != nil {
		t.Error(err)
	}
	if after, err := c.Tabs(ctx); err != nil || len(after) != len(before)-1 {
		t.Errorf("%d tabs of %d, %v", len(after), len(before), err)
	}
}

func TestEvaluateNavigates(t *testing.T) {
	url := site{"/": "a", "/b": "<title>B</title>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	eval(t, tab, "() => { location.href='/b' }")
	if st, _ := tab.State(ctx); st.Title != "B" {
		t.Fatalf("state = %+v", st)
	}
	_, _, err := tab.Evaluate(ctx, "() => { location.href='/'; return new Promise(()=>{}) }", "")
	wantCode(t, err, fault.EvaluationFailed)
	if got := eval(t, tab, "location.pathname"); got != `"/"` {
		t.Fatal(got)
	}
}

func TestCancelBusyLoop(t *testing.T) {
	tab := openPage(t, "<button onclick=\"this.textContent='pressed'\">x</button>")
	ctx, cancel := context.WithCancel(testContext(t))
	errs := make(chan error, 1)
	go func() {
		_, _, err := tab.Evaluate(ctx, "() => { window.started=1; for(;;); }", "")
		errs <- err
	}()
	time.AfterFunc(300*time.Millisecond, cancel)
	<-ctx.Done()
	began := time.Now()
	wantCode(t, <-errs, fault.Canceled)
	if d := time.Since(began); d > 200*time.Millisecond {
		t.Fatalf("cancel took %v", d)
	}
	began = time.Now()
	if got := eval(t, tab, "window.started"); got != "1" {
		t.Fatal(got)
	}
	t.Logf("usable again after %v", time.Since(began))
	if _, err := tab.Click(testContext(t), "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestCancelLeavesIdlePageAlone(t *testing.T) {
	tab := openPage(t, "<script>window.n=0;setInterval(()=>n++,10)</script>")
	ctx, cancel := context.WithTimeout(testContext(t), 300*time.Millisecond)
	defer cancel()
	_, _, err := tab.Evaluate(ctx, "() => new Promise(()=>{})", "")
	wantCode(t, err, fault.Timeout)
	got := eval(t, tab, "async () => { const a=n; await new Promise(r=>setTimeout(r,200)); return n>a }")
	if got != "true" {
		t.Fatal("the page's own timer died")
	}
}

func TestCancelWhileWaiting(t *testing.T) {
	tab := openPage(t, "<button disabled>x</button>")
	for name, call := range map[string]func(context.Context) error{
		"click":    func(ctx context.Context) error { _, err := tab.Click(ctx, "button", ClickOptions{}); return err },
		"wait":     func(ctx context.Context) error { return tab.WaitForText(ctx, "never") },
		"time":     func(ctx context.Context) error { return tab.WaitTime(ctx, time.Minute) },
		"navigate": func(ctx context.Context) error { return tab.Navigate(ctx, hanging(t)) },
	} {
		ctx, cancel := context.WithCancel(testContext(t))
		time.AfterFunc(200*time.Millisecond, cancel)
		began := time.Now()
		wantCode(t, call(ctx), fault.Canceled)
		if d := time.Since(began); d > 400*time.Millisecond {
			t.Errorf("%s ended %v after its cancel", name, d-200*time.Millisecond)
		}
	}
	if got := eval(t, tab, "1"); got != "1" {
		t.Fatal(got)
	}
}

// hanging is a URL that never answers while the test runs.
func hanging(t testing.TB) string {
	done := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-done:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(func() { close(done); srv.Close() })
	return srv.URL
}

func TestDialog(t *testing.T) {
	tab := openPage(t, `<button id=a onclick="alert('boo')">a</button><button id=c onclick="this.textContent=confirm('sure?')">c</button>`)
	ctx := testContext(t)
	if _, err := tab.Click(ctx, "#a", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	st, err := tab.State(ctx)
	if err != nil || st.Dialog == nil || st.Dialog.Type != "alert" || st.Dialog.Message != "boo" {
		t.Fatalf("state = %+v, %v", st, err)
	}
	for name, call := range map[string]func() error{
		"click":    func() error { _, err := tab.Click(ctx, "#c", ClickOptions{}); return err },
		"snapshot": func() error { _, err := tab.Snapshot(ctx, SnapshotOptions{}); return err },
		"evaluate": func() error { _, _, err := tab.Evaluate(ctx, "1", ""); return err },
		"press":    func() error { return tab.Press(ctx, "a") },
		"navigate": func() error { return tab.Navigate(ctx, "about:blank") },
		"picture":  func() error { _, err := tab.Screenshot(ctx, ScreenshotOptions{}); return err },
	} {
		began := time.Now()
		if err := call(); !fault.Is(err, fault.ModalState) {
			t.Errorf("%s: %v", name, err)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("%s took %v", name, d)
		}
	}
	if err := tab.HandleDialog(ctx, true, ""); err != nil {
		t.Fatal(err)
	}
	wantCode(t, tab.HandleDialog(ctx, true, ""), fault.ModalState)
	v, _, err := tab.Evaluate(ctx, "() => confirm('really?')", "")
	if err != nil || v != "" {
		t.Fatalf("evaluate that opens a dialog = %q, %v", v, err)
	}
	if st, _ := tab.State(ctx); st.Dialog == nil || st.Dialog.Message != "really?" {
		t.Fatalf("%+v", st)
	}
	// A person answers it, in the live view.
	if err := tab.target.session.Call(ctx, "Page.handleJavaScriptDialog", map[string]any{"accept": false}, nil); err != nil {
		t.Fatal(err)
	}
	if err := tab.b.await(ctx, func() bool { return tab.dialog == nil }); err != nil {
		t.Fatal(err)
	}
	if got := eval(t, tab, "2"); got != "2" {
		t.Fatal(got)
	}
}

func TestPopupAndTabs(t *testing.T) {
	url := site{"/": `<title>Main</title><button onclick="window.open('/pop')">o</button>`, "/pop": "<title>Pop</title>"}.start(t)
	c, tab := openTab(t, url+"/")
	ctx := testContext(t)
	if _, err := tab.Click(ctx, "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	tabs, err := c.Tabs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	pop := tabs[len(tabs)-1]
	if pop.Title != "Pop" || pop.Current || pop.URL != url+"/pop" {
		t.Fatalf("tabs = %+v", tabs)
	}
	if cur, _ := c.Current(ctx); cur != tab {
		t.Fatal("the popup became the current tab")
	}
	other := shared.Client(t.Name() + "/other")
	defer other.Forget()
	if _, err := other.SelectTab(ctx, pop.Index); err != nil {
		t.Fatal(err)
	}
	if cur, _ := c.Current(ctx); cur != tab {
		t.Fatal("one client changed the tab of another")
	}
	if _, err := c.SelectTab(ctx, pop.Index); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseTab(ctx, -1); err != nil {
		t.Fatal(err)
	}
	tabs, err = c.Tabs(ctx)
	if err != nil || len(tabs) != pop.Index {
		t.Fatalf("tabs = %+v, %v", tabs, err)
	}
	if !tabs[len(tabs)-1].Current {
		t.Fatalf("closing the last tab left no current one: %+v", tabs)
	}
	_, err = c.SelectTab(ctx, 99)
	wantCode(t, err, fault.TargetNotFound)
}

// A person closes the tab that an agent works in.
func TestTabClosedByPerson(t *testing.T) {
	url := site{"/": "x"}.start(t)
	c, tab := openTab(t, url+"/")
	ctx := testContext(t)
	errs := make(chan error, 1)
	go func() {
		_, _, err := tab.Evaluate(ctx, "() => new Promise(()=>{})", "")
		errs <- err
	}()
	eventually(t, func() bool {
		tab.b.mu.Lock()
		defer tab.b.mu.Unlock()
		return len(tab.calls) > 0
	})
	if err := shared.conn.Root().Call(ctx, "Target.closeTarget", map[string]any{"targetId": tab.id}, nil); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-errs, fault.TargetNotFound)
	if cur, err := c.Current(ctx); err != nil || cur == tab {
		t.Fatalf("the closed tab is still the current one: %v", err)
	}
	_, err := tab.State(ctx)
	wantCode(t, err, fault.TargetNotFound)
}

func TestBeforeUnload(t *testing.T) {
	url := site{"/": `<input id=i><script>onbeforeunload=e=>e.preventDefault()</script>`, "/b": "<title>B</title>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	if _, err := tab.TypeSlowly(ctx, "#i", "x"); err != nil {
		t.Fatal(err)
	}
	wantCode(t, tab.Navigate(ctx, url+"/b"), fault.ModalState)
	if st, _ := tab.State(ctx); st.Dialog == nil || st.Dialog.Type != "beforeunload" {
		t.Fatalf("state = %+v", st)
	}
	if err := tab.HandleDialog(ctx, true, ""); err != nil {
		t.Fatal(err)
	}
	if err := tab.Settle(ctx); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); st.Title != "B" {
		t.Fatalf("state = %+v", st)
	}
}

func TestEndlessAlerts(t *testing.T) {
	tab := openPage(t, `<button onclick="for(window.n=0;n<5;n++)alert(n)">x</button>`)
	ctx := testContext(t)
	if _, err := tab.Click(ctx, "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		st, err := tab.State(ctx)
		if err != nil || st.Dialog == nil || st.Dialog.Message != fmt.Sprint(i) {
			t.Fatalf("state = %+v, %v", st, err)
		}
		if err := tab.HandleDialog(ctx, true, ""); err != nil {
			t.Fatal(err)
		}
		if i < 4 {
			if err := tab.b.await(ctx, func() bool { return tab.dialog != nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := eval(t, tab, "n"); got != "5" {
		t.Fatal(got)
	}
}

// A page whose own script never ends can be left.
func TestLeaveBusyPage(t *testing.T) {
	url := site{"/": `<title>A</title><button onclick="for(;;);">x</button>`, "/b": "<title>B</title>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	began := time.Now()
	_, err := tab.Click(ctx, "button", ClickOptions{})
	wantCode(t, err, fault.EffectUnknown)
	t.Logf("click on a busy page gave up after %v", time.Since(began))
	began = time.Now()
	if err := tab.Navigate(ctx, url+"/b"); err != nil {
		t.Fatal(err)
	}
	t.Logf("left it after %v", time.Since(began))
	if st, _ := tab.State(ctx); st.Title != "B" {
		t.Fatalf("state = %+v", st)
	}
}

func TestConsoleFlood(t *testing.T) {
	tab := openPage(t, `<script>for(let i=0;i<50000;i++)console.error('x'.repeat(100),i)</script><title>F</title>`)
	ctx := testContext(t)
	if st, err := tab.State(ctx); err != nil || st.Title != "F" || st.ConsoleErrors == 0 {
		t.Fatalf("%+v %v", st, err)
	} else {
		t.Logf("%d errors counted", st.ConsoleErrors)
	}
}

func TestCrash(t *testing.T) {
	url := site{"/": "<title>Up</title>"}.start(t)
	c, tab := openTab(t, url+"/")
	ctx := testContext(t)
	errs := make(chan error, 1)
	go func() {
		_, _, err := tab.Evaluate(ctx, "() => new Promise(()=>{})", "")
		errs <- err
	}()
	eventually(t, func() bool {
		tab.b.mu.Lock()
		defer tab.b.mu.Unlock()
		return len(tab.calls) > 0
	})
	tab.target.session.Start(ctx, "Page.crash", nil)
	wantCode(t, <-errs, fault.PageCrashed)
	if st, err := tab.State(ctx); err != nil || !st.Crashed {
		t.Fatalf("state = %+v, %v", st, err)
	}
	_, err := tab.Snapshot(ctx, SnapshotOptions{})
	wantCode(t, err, fault.PageCrashed)
	tabs, _ := c.Tabs(ctx)
	if !tabs[len(tabs)-1].Crashed {
		t.Fatalf("tabs = %+v", tabs)
	}
	if err := tab.Navigate(ctx, url+"/"); err != nil {
		t.Fatal(err)
	}
	if st, _ := tab.State(ctx); st.Crashed || st.Title != "Up" {
		t.Fatalf("state after recovery = %+v", st)
	}
}

func TestScreenshot(t *testing.T) {
	tab := openPage(t, `<body style="margin:0;background:#fff"><div style="height:2000px"></div><div id=d style="width:120px;height:60px;background:#f00"></div>`)
	ctx := testContext(t)
	view, err := tab.Screenshot(ctx, ScreenshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	full, err := tab.Screenshot(ctx, ScreenshotOptions{FullPage: true, Type: "jpeg"})
	if err != nil {
		t.Fatal(err)
	}
	el, err := tab.Screenshot(ctx, ScreenshotOptions{Target: "#d"})
	if err != nil {
		t.Fatal(err)
	}
	if view.Width < 800 || view.Height < 400 || full.Width != view.Width && full.Width != view.Width-15 || full.Height != 2060 || el.Width != 120 || el.Height != 60 {
		t.Fatalf("sizes: view %dx%d, full %dx%d, element %dx%d", view.Width, view.Height, full.Width, full.Height, el.Width, el.Height)
	}
	fit, err := FitImage(full)
	if err != nil || max(fit.Width, fit.Height) > fitSide || fit.Width*fit.Height > fitPixels || fit.MIME != "image/jpeg" {
		t.Fatalf("fitted %dx%d %s, %v", fit.Width, fit.Height, fit.MIME, err)
	}
	if webp, err := tab.Screenshot(ctx, ScreenshotOptions{Type: "webp"}); err != nil || webp.Width != view.Width {
		t.Fatalf("webp %dx%d, %v", webp.Width, webp.Height, err)
	}
	_, err = tab.Screenshot(ctx, ScreenshotOptions{Type: "gif"})
	wantCode(t, err, fault.InvalidArgument)
}

func TestWaitForText(t *testing.T) {
	tab := openPage(t, `<p id=p>soon</p><script>setTimeout(()=>p.textContent='here',300)</script>`)
	ctx := testContext(t)
	if err := tab.WaitForText(ctx, "here"); err != nil {
		t.Fatal(err)
	}
	if err := tab.WaitForTextGone(ctx, "soon"); err != nil {
		t.Fatal(err)
	}
	eval(t, tab, "setTimeout(()=>{const f=document.createElement('iframe');f.srcdoc='in a frame';document.body.append(f);p.remove()},300)")
	if err := tab.WaitForText(ctx, "in a frame"); err != nil {
		t.Fatal(err)
	}
	if err := tab.WaitForTextGone(ctx, "here"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	wantCode(t, tab.WaitForText(ctx, "never"), fault.Timeout)
	if d := time.Since(began); d < actionTimeout/2 || d > actionTimeout+2*time.Second {
		t.Errorf("gave up after %v", d)
	}
}

func TestSnapshotDuringNavigation(t *testing.T) {
	url := site{"/": "<title>A</title><p>page</p>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond):
				tab.target.session.Call(ctx, "Page.reload", nil, nil)
				// A document that is replaced before it is there is rightly
				// refused; on a slow machine that would be every one.
				tab.target.session.Call(ctx, "Runtime.evaluate", map[string]any{"awaitPromise": true,
					"expression": `new Promise(r => document.readyState === "complete" ? setTimeout(r, 60) : addEventListener("load", () => setTimeout(r, 60)))`}, nil)
			}
		}
	})
	for range 30 {
		text, err := tab.Snapshot(ctx, SnapshotOptions{})
		if err != nil {
			t.Error(err)
			break
		}
		if text != "" && !strings.Contains(text, "page") {
			t.Errorf("snapshot between documents: %q", text)
		}
	}
	close(stop)
	wg.Wait()
}

func TestStaleRefAfterNavigation(t *testing.T) {
	url := site{"/": "<button>a</button><button>b</button>", "/2": "<button>c</button><button>d</button>"}.start(t)
	_, tab := openTab(t, url+"/")
	ctx := testContext(t)
	if _, err := tab.Snapshot(ctx, SnapshotOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := tab.Navigate(ctx, url+"/2"); err != nil {
		t.Fatal(err)
	}
	text, err := tab.Snapshot(ctx, SnapshotOptions{})
	if err != nil || !strings.Contains(text, "[ref=f1e") {
		t.Fatalf("%s %v", text, err)
	}
	_, err = tab.Click(ctx, "e2", ClickOptions{})
	wantCode(t, err, fault.TargetNotFound)
}

func TestConcurrentClients(t *testing.T) {
	if shared == nil {
		t.Skip("no Chromium here")
	}
	tab := openPage(t, `<button onclick="n++">x</button><script>window.n=0</script>`)
	ctx := testContext(t)
	var wg sync.WaitGroup
	const clients, clicks = 6, 4
	for range clients {
		wg.Go(func() {
			for range clicks {
				if _, err := tab.Click(ctx, "button", ClickOptions{}); err != nil {
					t.Error(err)
				}
				if _, err := tab.State(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := eval(t, tab, "n"); got != fmt.Sprint(clients*clicks) {
		t.Fatalf("%s clicks arrived, want %d", got, clients*clicks)
	}
}

func TestDownloadIsNoError(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/file":
			w.Header().Set("Content-Disposition", "attachment; filename=x.bin")
			fmt.Fprint(w, "data")
		case "/none":
			w.WriteHeader(http.StatusNoContent)
		default:
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, "<title>D</title><a href=/file>get</a>")
		}
	}))
	defer srv.Close()
	_, tab := openTab(t, srv.URL)
	ctx := testContext(t)
	if err := tab.Navigate(ctx, srv.URL+"/file"); err != nil {
		t.Fatal(err)
	}
	wantCode(t, tab.Navigate(ctx, srv.URL+"/none"), fault.NavigationFailed)
	began := time.Now()
	if _, err := tab.Click(ctx, "a", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("a click that starts a download took %v", d)
	}
	if st, _ := tab.State(ctx); st.Title != "D" {
		t.Fatalf("%+v", st)
	}
}

func TestPageThatNeverPaints(t *testing.T) {
	tab := openPage(t, `<script>window.requestAnimationFrame=()=>0</script><button onclick="window.ok=1">x</button>`)
	if _, err := tab.Click(testContext(t), "button", ClickOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := eval(t, tab, "ok"); got != "1" {
		t.Fatal(got)
	}
}

func TestNormalizeURL(t *testing.T) {
	for in, want := range map[string]string{
		"example.com":            "https://example.com",
		"example.com:8443/a":     "https://example.com:8443/a",
		"localhost":              "http://localhost",
		"localhost:3000/x":       "http://localhost:3000/x",
		"localhost.evil.example": "https://localhost.evil.example",
		"http://a/":              "http://a/",
		" https://b/ ":           "https://b/",
		"about:blank":            "about:blank",
		"data:text/html,hi":      "data:text/html,hi",
		"127.0.0.1:80":           "https://127.0.0.1:80",
	} {
		if got, err := NormalizeURL(in); err != nil || got != want {
			t.Errorf("%q = %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		"file:///etc/hosts", "FILE:///x", "chrome://settings", "devtools://x", "view-source:http://a", "javascript:alert(1)",
		"java\nscript:alert(1)", "chrome-extension://x/y", "filesystem:http://a/", "ws://x/", "about:settings", "about://version",
	} {
		if got, err := NormalizeURL(in); !fault.Is(err, fault.BlockedURL) {
			t.Errorf("%q = %q, %v", in, got, err)
		}
	}
	if _, err := NormalizeURL("file:///etc/hosts"); errors.Unwrap(err).Error() != `Access to "file:" protocol is blocked. Attempted URL: "file:///etc/hosts"` {
		t.Error(err)
	}
	for _, in := range []string{"", "http://", "https:///x"} {
		if _, err := NormalizeURL(in); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", in, err)
		}
	}
}
