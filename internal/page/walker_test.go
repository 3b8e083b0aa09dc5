package page

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// golden is a file of pages and what @playwright/mcp prints for them.
type golden struct{ Cases []goldenCase }

type goldenCase struct {
	Name, HTML, Snapshot string
	Options              struct {
		Depth *int
		Boxes bool
	}
}

// Snapshots are equal, line for line, to those that models know from
// @playwright/mcp.
func TestSnapshotGolden(t *testing.T) {
	for _, name := range []string{"snapshot-golden.json", "snapshot-more.json"} {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile("testdata/" + name)
			if err != nil {
				t.Fatal(err)
			}
			var g golden
			if err := json.Unmarshal(data, &g); err != nil {
				t.Fatal(err)
			}
			if len(g.Cases) < 90 {
				t.Fatalf("only %d cases", len(g.Cases))
			}
			// Several tabs at a time: most of the time is Chromium's.
			const workers = 4
			for n := range workers {
				t.Run(strconv.Itoa(n), func(t *testing.T) {
					t.Parallel()
					tab := goldenTab(t)
					for i := n; i < len(g.Cases); i += workers {
						g.Cases[i].check(t, tab)
					}
				})
			}
		})
	}
}

// goldenTab is a tab in the conditions that the goldens were made under.
func goldenTab(t *testing.T) *Tab {
	_, tab := openTab(t, "")
	ctx := testContext(t)
	s := tab.target.session
	if err := s.Call(ctx, "Emulation.setFocusEmulationEnabled", map[string]any{"enabled": true}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "Emulation.setDeviceMetricsOverride",
		map[string]any{"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": false}, nil); err != nil {
		t.Fatal(err)
	}
	return tab
}

func (c goldenCase) check(t *testing.T, tab *Tab) {
	ctx := testContext(t)
	if err := tab.Navigate(ctx, "data:text/html;charset=utf-8,"+url.PathEscape("<!doctype html><body>"+c.HTML)); err != nil {
		t.Fatalf("%s: %v", c.Name, err)
	}
	f, err := tab.mainFrame(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// Without the prefix that the engine gives refs of later documents.
	opts := map[string]any{"boxes": c.Options.Boxes}
	if c.Options.Depth != nil {
		opts["depth"] = *c.Options.Depth
	}
	var r snapshotAnswer
	if err := tab.ask(ctx, f, &r, "snapshot", opts); err != nil {
		t.Fatalf("%s: %v", c.Name, err)
	}
	if r.Text != c.Snapshot {
		t.Errorf("%s: %s\n--- want\n%s\n--- got\n%s", c.Name, c.HTML, c.Snapshot, r.Text)
	}
}

// walk opens a page and calls the walker in its main frame.
func walk(t *testing.T, tab *Tab, function string, args ...any) json.RawMessage {
	t.Helper()
	ctx := testContext(t)
	f, err := tab.mainFrame(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var raw json.RawMessage
	if err := tab.ask(ctx, f, &raw, function, args...); err != nil {
		var we *walkerError
		if !asWalkerError(err, &we) {
			t.Fatal(err)
		}
		raw, err = json.Marshal(map[string]any{"error": we.Code + ": " + we.Message})
		if err != nil {
			t.Fatal(err)
		}
	}
	return raw
}

func asWalkerError(err error, we **walkerError) bool {
	e, ok := err.(*walkerError)
	*we = e
	return ok
}

// answer is the union of what the tests read.
type answer struct {
	element
	Error      string
	Text       string
	Kind       string
	X, Y       float64
	Scrolled   bool
	Lines      int
	Candidates []element
	Cut        *struct {
		Lines, Bytes int
		Within       string
	}
}

func ask(t *testing.T, tab *Tab, function string, args ...any) answer {
	t.Helper()
	var a answer
	if err := json.Unmarshal(walk(t, tab, function, args...), &a); err != nil {
		t.Fatal(err)
	}
	return a
}

// N-40: a number is never given to a second element, and stays with its element
// while role and name stay.
func TestRefsAreNeverReused(t *testing.T) {
	tab := openPage(t, `<main><button id=a>A</button><button id=b>B</button></main>`)
	first := ask(t, tab, "snapshot").Text
	again := ask(t, tab, "snapshot").Text
	if first != again {
		t.Errorf("refs moved without a change:\n%s\n%s", first, again)
	}
	ref := refOfLine(t, first, `button "A"`)
	eval(t, tab, `a.textContent = 'A2'`)
	if e := ask(t, tab, "resolve", ref); e.Error != "" {
		t.Errorf("a changed name alone takes the ref away: %s", e.Error)
	}
	second := ask(t, tab, "snapshot").Text
	if refOfLine(t, second, `button "A2"`) == ref {
		t.Error("the ref names another button now")
	}
	if e := ask(t, tab, "resolve", ref); !strings.HasPrefix(e.Error, "stale_ref") {
		t.Errorf("the old ref still answers: %+v", e)
	}
	if refOfLine(t, second, `button "B"`) != refOfLine(t, first, `button "B"`) {
		t.Error("an unchanged element has another ref")
	}
	eval(t, tab, `b.remove(); document.querySelector('main').append(Object.assign(document.createElement('button'), {textContent: 'B'}))`)
	third := ask(t, tab, "snapshot").Text
	if refOfLine(t, third, `button "B"`) == refOfLine(t, first, `button "B"`) {
		t.Error("a new element got the ref of a removed one")
	}
	if e := ask(t, tab, "resolve", refOfLine(t, first, `button "B"`)); !strings.HasPrefix(e.Error, "stale_ref") {
		t.Errorf("the ref of a removed element answers: %+v", e)
	}
}

func refOfLine(t *testing.T, text, start string) string {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.Contains(line, "- "+start) {
			_, r, _ := strings.Cut(line, "[ref=")
			r, _, _ = strings.Cut(r, "]")
			return r
		}
	}
	t.Fatalf("no line %s in\n%s", start, text)
	return ""
}

// The code that answers show finds the element and nothing else.
func TestLocators(t *testing.T) {
	tab := openPage(t, `
		<label>Name <input id=name></label><label>Kind <select id=kind><option>x</select></label>
		<input id=mail placeholder=Mail><button id=hi>Hi</button><button id=ok>OK</button><button id=ok2>OK then</button>
		<ul><li>Milk <button id=del1>Remove</button></li><li>Bread <button id=del2>Remove</button></li></ul>
		<img id=logo alt=Logo src=data:, width=9 height=9><span id=note>just a note</span><div data-testid=tt id=tt>t</div>
		<button class=z id=ember1234>Same</button><button id=ember1235>Same</button>
		<div id=host></div><a id=link href=/x>It's "quoted"</a><p id=long>`+strings.Repeat("word ", 60)+`</p>
		<div><div><i id=i1234></i></div></div><script>host.attachShadow({mode:'open'}).innerHTML='<button>deep</button>'</script>`)
	for target, want := range map[string]string{
		"#hi":        "getByRole('button', { name: 'Hi' })",
		"#name":      "getByRole('textbox', { name: 'Name' })",
		"#kind":      "getByLabel('Kind x')",
		"#mail":      "getByRole('textbox', { name: 'Mail' })",
		"#ok":        "getByRole('button', { name: 'OK', exact: true })",
		"#ok2":       "getByRole('button', { name: 'OK then' })",
		"#del2":      "getByRole('listitem').filter({ hasText: 'Bread Remove' }).getByRole('button')",
		"#logo":      "getByRole('img', { name: 'Logo' })",
		"#note":      "getByText('just a note')",
		"#tt":        "getByTestId('tt')",
		"#link":      `getByRole('link', { name: 'It\'s "quoted"' })`,
		"#ember1235": "getByRole('button', { name: 'Same' }).nth(1)",
		"text=deep":  "getByRole('button', { name: 'deep' })",
	} {
		d := ask(t, tab, "describe", target)
		if target != "#ember1235" && d.Locator != want {
			t.Errorf("%s: %s, want %s (%s)", target, d.Locator, want, d.Error)
		}
		back := ask(t, tab, "describe", d.Locator)
		if back.Handle != d.Handle {
			t.Errorf("%s: %s finds %+v", target, d.Locator, back)
		}
	}
	// Whatever the code is, it must lead back.
	for _, target := range []string{"#long", "#i1234", "#host", "body", "html", "li >> nth=0", "ul", "#del1", "#ember1234"} {
		d := ask(t, tab, "describe", target)
		back := ask(t, tab, "describe", d.Locator)
		if d.Handle == "" || back.Handle != d.Handle {
			t.Errorf("%s: %s finds %+v, want %s", target, d.Locator, back, d.Handle)
		}
	}
}

// What callers may write as a target.
func TestTargets(t *testing.T) {
	tab := openPage(t, `<form id=f><label>Name <input id=name placeholder="Full name" title=T></label><label><input type=checkbox id=c checked> Check</label></form>
		<table><tr id=r1><td>one</td><td><button id=b1>Go</button></td></tr><tr id=r2><td>two</td><td><button id=b2 disabled>Go</button></td></tr></table>
		<p id=p>Hello <b id=b>big</b> world</p><div id=w>Hello   there</div><img id=im alt=Pic><span data-testid=x id=sp></span>
		<input type=submit id=sub value=Send><button id=off style="display:none">Off</button><h2 id=h>Head</h2>
		<div id=host></div><script>host.attachShadow({mode:'open'}).innerHTML='<section><button id=in>Inside</button></section>'</script>`)
	for target, want := range map[string]string{
		"#name": "name", "css=#name": "name", "form input[type=checkbox]": "c", "//p/b": "b", "xpath=//b": "b", "id=p": "p", "data-testid=x": "sp",
		"text=big": "b", "text=Hello there": "w", "text='big'": "b", `text="big"`: "b", "text=/^hello\\s+there$/i": "w", "text=Send": "sub",
		"role=button[name='Send']": "sub", "role=heading": "h", "role=checkbox[checked]": "c", `role=button[name="go"i][disabled]`: "b2",
		"tr >> nth=1 >> button": "b2", "button:has-text('send'), #b1": "b1", "button:visible >> nth=0": "b1", "td:text-is('two')": "",
		"getByRole('button', { name: 'Send' })":                           "sub",
		`page.getByRole("button", {name: "Send", exact: true})`:           "sub",
		"await page.getByRole('heading').click":                           "bad_selector",
		"getByRole('heading', { level: 2 })":                              "h",
		"getByRole('checkbox', { checked: true })":                        "c",
		"getByRole('button', { name: /^go$/i, disabled: true })":          "b2",
		"getByText('big')":                                                "b",
		"getByText('BIG', { exact: true })":                               "not_found",
		"getByLabel('Name')":                                              "name",
		"getByPlaceholder('full')":                                        "name",
		"getByTitle('T')":                                                 "name",
		"getByAltText('pic')":                                             "im",
		"getByTestId('x')":                                                "sp",
		"locator('tr').filter({ hasText: 'two' }).getByRole('button')":    "b2",
		"locator('tr', { has: page.getByText('one') }).locator('button')": "b1",
		"getByRole('button', { name: 'Go' }).first()":                     "b1",
		"getByRole('button', { name: 'Go' }).last()":                      "b2",
		"getByRole('button', { name: 'Go' }).nth(1)":                      "b2",
		"getByRole('button').and(page.locator('#b1'))":                    "b1",
		"locator('#nope').or(locator('#p'))":                              "p",
		"getByRole('button', { name: 'Inside' })":                         "in",
		"section #in":                          "in",
		"getByRole('button', { name: 'Off' })": "not_found",
		"getByRole('button', { name: 'Off', includeHidden: true })": "off",
		"getByRole('button', { name: 'Go' })":                       "ambiguous",
		"button":                                                    "ambiguous",
		"#nope":                                                     "not_found",
		"a[":                                                        "bad_selector",
		"foo=bar":                                                   "bad_selector",
		"getByRole('button'":                                        "bad_selector",
		"getByRole(42)":                                             "bad_selector",
		"getByNothing('x')":                                         "bad_selector",
		"text=/(/":                                                  "bad_selector",
		"":                                                          "bad_selector",
		"e999":                                                      "stale_ref",
		"f7e1":                                                      "stale_ref",
		"h999":                                                      "detached",
		"locator('tr').filter({ has: locator('p').contentFrame().locator('b') })": "bad_selector",
	} {
		if want == "" {
			continue
		}
		got := ask(t, tab, "resolve", target)
		if got.Error != "" {
			if code, _, _ := strings.Cut(got.Error, ":"); code != want {
				t.Errorf("%s: %s, want %s", target, got.Error, want)
			}
			continue
		}
		if id := eval1(t, tab, got.Handle); id != want {
			t.Errorf("%s finds %q, want %s", target, id, want)
		}
	}
	d := ask(t, tab, "resolve", "text=big")
	if d.Locator != "locator('text=big')" {
		t.Errorf("a caller's selector is shown as %s", d.Locator)
	}
	if d := ask(t, tab, "resolve", " page.getByText('big') "); d.Locator != "getByText('big')" {
		t.Errorf("a caller's locator is shown as %s", d.Locator)
	}
}

// eval1 is the id of the element of a handle.
func eval1(t *testing.T, tab *Tab, handle string) string {
	t.Helper()
	v, _, err := tab.Evaluate(testContext(t), "e => e.id", handle)
	if err != nil {
		t.Fatal(err)
	}
	id, err := strconv.Unquote(v)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestFrameTargets(t *testing.T) {
	tab := openPage(t, `<iframe id=a name=fa srcdoc="<p>x</p>"></iframe><iframe id=b srcdoc="<p>y</p>"></iframe>`)
	for target, want := range map[string]string{
		"locator('#a').contentFrame().locator('p')":               "locator('#a') | locator('p')",
		"page.frameLocator('#b').getByText('y').first()":          "locator('#b') | getByText('y').first()",
		"frameLocator('iframe').nth(1).getByText('y')":            "locator('iframe').nth(1) | getByText('y')",
		"#a >> internal:control=enter-frame >> p":                 "locator('#a') | p",
		"frameLocator('#a').frameLocator('#q').locator('x')":      "locator('#a') | frameLocator('#q').locator('x')",
		"locator('p').contentFrame().locator('x')":                "not_found",
		"frameLocator('iframe').getByText('y')":                   "ambiguous",
		"locator('#a').contentFrame()":                            "bad_selector",
		"locator('#a').contentFrame().locator('p').contentFrame(": "locator('#a') | locator('p').contentFrame(",
	} {
		var r struct {
			Error string
			Frame *struct{ Handle, Locator, Rest string }
		}
		if err := json.Unmarshal(walk(t, tab, "resolve", target), &r); err != nil {
			t.Fatal(err)
		}
		got, _, _ := strings.Cut(r.Error, ":")
		if r.Frame != nil {
			got = r.Frame.Locator + " | " + r.Frame.Rest
		}
		if got != want {
			t.Errorf("%s: %s, want %s (%s)", target, got, want, r.Error)
		}
	}
	if d := ask(t, tab, "describe", "#a"); d.Locator != `locator('iframe[name="fa"]')` {
		t.Errorf("frame is shown as %s", d.Locator)
	}
}

// What keeps a press from doing what was asked is said, and nothing is pressed.
func TestPoint(t *testing.T) {
	for _, c := range []struct{ name, html, target, want string }{
		{"plain", `<button id=x>X</button>`, "#x", ""},
		{"N-01 scrolled", `<div style=height:3000px></div><button id=x>X</button><div style=height:3000px></div>`, "#x", ""},
		{"N-03 covered", `<button id=x>X</button><div role=dialog aria-label=Menu style="position:fixed;inset:0">over</div>`, "#x",
			`obstructed: <div> dialog "Menu" would receive the press instead of <button> button "X"`},
		{"N-04 outside", `<button id=x style="position:fixed;left:-500px">X</button>`, "#x", "outside_viewport: "},
		{"N-07 disabled", `<button id=x disabled>X</button>`, "#x", `disabled: <button> button "X" is disabled`},
		{"N-07 fieldset", `<fieldset disabled><button id=x>X</button></fieldset>`, "#x", "disabled: "},
		{"N-07 legend", `<fieldset disabled><legend><button id=x>X</button></legend></fieldset>`, "#x", ""},
		{"N-07 aria ancestor", `<div aria-disabled=true><button id=x>X</button></div>`, "#x", "disabled: "},
		{"N-08 icon", `<button id=x style="position:absolute;left:0;top:0">X</button><svg style="position:absolute;left:0;top:0" width=100 height=100></svg>`, "#x",
			"obstructed: <svg> img would receive"},
		{"N-09 option", `<select><option id=x>one</select>`, "#x", "not_visible: "},
		{"N-11 shadow", `<div id=h></div><script>h.attachShadow({mode:'open'}).innerHTML='<div><button>X</button></div>'</script>`, "text=X", ""},
		{"closed shadow part", `<div id=h></div><script>h.attachShadow({mode:'closed'}).innerHTML='<slot></slot>';h.innerHTML='<button id=x>X</button>'</script>`, "#x", ""},
		{"hidden", `<button id=x style="visibility:hidden">X</button>`, "#x", "not_visible: "},
		{"display none", `<button id=x hidden>X</button>`, "#x", "not_visible: "},
		{"no size", `<div id=x></div>`, "#x", `not_visible: <div> generic has no size`},
		{"moving", `<button id=x>X</button><script>let n=0;const f=()=>{x.style.translate=(n=(n+7)%301)+"px";requestAnimationFrame(f)};f()</script>`, "#x", "not_stable: "},
		{"child receives", `<button id=x><span>X</span></button>`, "#x", ""},
		{"label receives", `<label><input type=checkbox id=x style="opacity:0;position:absolute;width:40px;height:20px"><span style="position:relative">Label</span></label>`, "#x", ""},
		{"pointer-events", `<div><button id=x style="pointer-events:none">X</button></div>`, "#x", "obstructed: "},
		{"display contents", `<div id=x style="display:contents"><b>text</b></div>`, "#x", ""},
		{"two lines", `<div style="width:60px"><a id=x href=#>aaaa bbbb cccc dddd</a></div>`, "#x", ""},
		{"image map", `<img width=50 height=50 usemap=#m src=data:,><map name=m><area id=x href=# shape=rect coords=0,0,50,50 alt=Area></map>`, "#x", "not_visible: "},
		{"smooth scrolling", `<style>html{scroll-behavior:smooth}</style><div style=height:4000px></div><button id=x>X</button>`, "#x", ""},
		{"sticky header", `<div style="position:sticky;top:0;height:300px;background:red">head</div><div style=height:250px></div><button id=x>X</button><div style=height:3000px></div><script>scrollTo(0,260)</script>`, "#x", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			tab := openPage(t, "<!doctype html><body>"+c.html)
			opts := map[string]any{"timeout": 50}
			if strings.Contains(c.name, "sticky") || strings.Contains(c.name, "scroll") {
				opts["timeout"] = 3000
			}
			got := ask(t, tab, "point", c.target, opts)
			if c.want == "" && (got.Error != "" || got.X <= 0 || got.Y <= 0) {
				t.Fatalf("refused: %+v", got)
			}
			if !strings.HasPrefix(got.Error, c.want) {
				t.Fatalf("got %q, want %q", got.Error, c.want)
			}
			if c.want == "" {
				hit := ask(t, tab, "hit", c.target, got.X, got.Y)
				if hit.Error != "" {
					t.Errorf("the point it answered does not hit: %s", hit.Error)
				}
			}
		})
	}
	t.Run("force skips the obstruction but not disabled", func(t *testing.T) {
		tab := openPage(t, `<button id=x>X</button><button id=y disabled>Y</button><div style="position:fixed;inset:0"></div>`)
		if got := ask(t, tab, "point", "#x", map[string]any{"timeout": 50, "force": true}); got.Error != "" {
			t.Error(got.Error)
		}
		if got := ask(t, tab, "point", "#y", map[string]any{"timeout": 50, "force": true}); !strings.HasPrefix(got.Error, "disabled") {
			t.Errorf("%+v", got)
		}
	})
	t.Run("waits until it is enabled", func(t *testing.T) {
		tab := openPage(t, `<button id=x disabled>X</button><script>setTimeout(()=>x.disabled=false,200)</script>`)
		if got := ask(t, tab, "point", "#x", map[string]any{"timeout": 5000}); got.Error != "" {
			t.Error(got.Error)
		}
	})
	t.Run("an element that goes meanwhile", func(t *testing.T) {
		tab := openPage(t, `<button id=x disabled>X</button><script>setTimeout(()=>x.remove(),100)</script>`)
		if got := ask(t, tab, "point", "#x", map[string]any{"timeout": 5000}); !strings.HasPrefix(got.Error, "detached") {
			t.Errorf("%+v", got)
		}
	})
}

func TestFields(t *testing.T) {
	tab := openPage(t, `<input id=i value=old><textarea id=a>old</textarea><input id=ro readonly><input id=off disabled>
		<input type=date id=d><input type=color id=c><input type=range id=r max=10 step=2><input type=number id=n value=3><input type=email id=e value=x>
		<input type=checkbox id=k><input type=file id=f><select id=s><option value=1>One<option value=2>Two<option value=3 disabled>Three</select>
		<div id=ce contenteditable><p id=p>old</p></div><div id=plain>x</div><label id=l>For <input id=li></label><input id=lost onfocus=this.blur()>
		<select id=m multiple><option>a<option>b<option>c</select>
		<script>window.log=[];for(const e of document.querySelectorAll('input,select'))for(const k of ['input','change'])e.addEventListener(k,()=>log.push(e.id+'.'+k))</script>`)
	soon := map[string]any{"timeout": 50}
	for _, c := range []struct{ target, text, want string }{
		{"#i", "new", "insert"}, {"#a", "new", "insert"}, {"#ce", "new", "insert"}, {"#p", "new", "insert"}, {"#n", "-4.5", "insert"}, {"#e", "a@b", "insert"}, {"#l", "x", "insert"},
		{"#d", "2026-11-30", "done"}, {"#c", "#FF0000", "done"}, {"#r", "4", "done"},
		{"#d", "30.11.2026", "bad_value"}, {"#r", "99", "bad_value"}, {"#n", "many", "bad_value"},
		{"#ro", "x", "readonly"}, {"#off", "x", "disabled"}, {"#k", "x", "not_editable"}, {"#f", "x", "not_editable"}, {"#s", "x", "not_editable"}, {"#plain", "x", "not_editable"}, {"#lost", "x", "not_editable"},
	} {
		got := ask(t, tab, "prepareFill", c.target, c.text, soon)
		code, _, _ := strings.Cut(got.Error, ":")
		if got.Kind != c.want && code != c.want {
			t.Errorf("fill %s with %s: %+v, want %s", c.target, c.text, got, c.want)
		}
	}
	if got := eval(t, tab, "[d.value,c.value,r.value].join()"); got != `"2026-11-30,#ff0000,4"` {
		t.Error(got)
	}
	if got := eval(t, tab, "log.join()"); got != `"d.input,d.change,c.input,c.change,r.input,r.change"` {
		t.Error(got)
	}
	ask(t, tab, "prepareFill", "#a", "x", soon)
	if got := eval(t, tab, "[document.activeElement.id,a.selectionStart,a.selectionEnd].join()"); got != `"a,0,3"` {
		t.Error(got)
	}
	ask(t, tab, "prepareType", "#i", soon)
	if got := eval(t, tab, "[document.activeElement.id,i.selectionStart,i.selectionEnd].join()"); got != `"i,3,3"` {
		t.Error(got)
	}
	var sel struct {
		Selected []string
		Error    string
	}
	for _, c := range []struct {
		target string
		values []string
		want   string
	}{
		{"#s", []string{"2"}, "2"}, {"#s", []string{"One"}, "1"}, {"#s", []string{"Nine"}, "bad_value"}, {"#s", []string{"Three"}, "disabled"}, {"#m", []string{"a", "c"}, "a,c"}, {"#i", nil, "not_editable"},
	} {
		sel.Selected, sel.Error = nil, ""
		if err := json.Unmarshal(walk(t, tab, "selectOption", c.target, c.values, soon), &sel); err != nil {
			t.Fatal(err)
		}
		code, _, _ := strings.Cut(sel.Error, ":")
		if strings.Join(sel.Selected, ",") != c.want && code != c.want {
			t.Errorf("select %v in %s: %+v, want %s", c.values, c.target, sel, c.want)
		}
	}
	if got := eval(t, tab, "s.value+[...m.selectedOptions].map(o=>o.value)"); got != `"1a,c"` {
		t.Error(got)
	}
	act := ask(t, tab, "active")
	if act.Role != "listbox" {
		t.Errorf("%+v", act)
	}
}

// The cap is kept, and what was left out is said.
func TestSnapshotCap(t *testing.T) {
	body := "<nav><a href=/>Home</a></nav><main aria-label=Main><ul>"
	for i := range 20000 {
		body += fmt.Sprintf("<li><a href=/%d>Entry %d é</a></li>", i, i)
	}
	tab := openPage(t, body+"</ul></main><footer>end</footer>")
	const limit = 10_000
	began := time.Now()
	a := ask(t, tab, "snapshot", map[string]any{"maxBytes": limit})
	t.Logf("capped snapshot of 40,000 elements: %v", time.Since(began))
	if len(a.Text) > limit {
		t.Errorf("%d bytes", len(a.Text))
	}
	if len(a.Text) < limit*8/10 {
		t.Errorf("only %d bytes of %d are used", len(a.Text), limit)
	}
	lines := strings.Split(a.Text, "\n")
	last := lines[len(lines)-1]
	if a.Cut == nil || !strings.HasPrefix(last, "# cut: ") || !strings.Contains(last, "list [ref=e") || len(lines) != a.Lines {
		t.Errorf("cut is not said: %+v\n%s", a.Cut, last)
	}
	if !strings.Contains(lines[len(lines)-2], "- ") {
		t.Errorf("cut inside a line: %s", lines[len(lines)-2])
	}
	whole := ask(t, tab, "snapshot")
	if whole.Cut != nil || !strings.Contains(whole.Text, "Entry 19999 é") {
		t.Error("without a cap something is missing")
	}

	t.Run("one endless text", func(t *testing.T) {
		tab := openPage(t, "<p id=p></p><script>p.textContent='x'.repeat(40e6)</script><button>after</button>")
		began := time.Now()
		a := ask(t, tab, "snapshot", map[string]any{"maxBytes": limit})
		t.Logf("40 MB of text: %v", time.Since(began))
		if len(a.Text) > limit || !strings.Contains(a.Text, "# cut: ") || !strings.Contains(a.Text, "xxxxx") {
			t.Errorf("%d bytes: %.100s", len(a.Text), a.Text)
		}
	})
}

// Pages that fight back get a truthful snapshot in bounded time.
func TestHostilePages(t *testing.T) {
	for _, c := range []struct{ name, html, want string }{
		{"overridden prototypes", `<script>Array.prototype.map=Array.prototype.push=JSON.stringify=Node.prototype.contains=()=>{throw 1};
			Element.prototype.getAttribute=()=>'lie';Object.defineProperty(Node.prototype,'textContent',{get(){return 'lie'}});
			window.getComputedStyle=()=>({});globalThis.abf={version:1}</script><button>True</button>`, `- button "True" [ref=e2]`},
		{"element named abf", `<div id=abf></div><button>True</button>`, `- button "True" [ref=e2]`},
		{"clobbered form", `<form><input name=parentNode><input name=nodeType><input name=getAttribute><input name=children><input name=tagName><input name=firstChild></form>`,
			"textbox [ref=e"},
		{"clobbered document", `<img name=body><img name=activeElement><form name=documentElement></form><button>True</button>`, `button "True"`},
		{"lies in names", `<button aria-label='x" [ref=e5]
- button "y'>b</button>`, `button "x\" [ref=e5] - button \"y" [ref=e2]`},
		{"foreign elements", `<div id=d></div><script>for (const n of ['input','textarea','select','button','option','label','slot','table','details'])
			for (const ns of ['http://www.w3.org/1999/xhtml','http://www.w3.org/2000/svg','x:y']) for (const q of [n, n.toUpperCase()])
			d.append(Object.assign(document.createElementNS(ns,q),{textContent:n}))</script>`, "textarea"},
		{"deep", `<script>let e=document.body;for(let i=0;i<2000;i++){const d=document.createElement('div');e.append(d);e=d}e.append('bottom')</script><button>True</button>`, "- button \"True\" [ref=e1002]\n# cut: about 1000 more elements did not fit"},
		{"lone surrogates", `<p id=p></p><script>p.textContent='a\ud800b'</script>`, "a\ufffdb"},
		{"only shadow roots", `<div id=h></div><script>let e=h;for(let i=0;i<50;i++){const r=e.attachShadow({mode:'open'});r.innerHTML='<div></div>';e=r.firstChild}e.textContent='bottom'</script>`, "bottom"},
		{"owns itself", `<div id=x aria-owns="x y">a</div><div id=y aria-owns="x">b</div><button id=z aria-labelledby="z z" >t</button><label for=q id=w><input id=q aria-labelledby=w>l</label>`, "button"},
		{"no body", `<script>document.body.remove()</script>`, ""},
		{"document of pieces", `<script>document.documentElement.remove()</script>`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			tab := openPage(t, "<!doctype html><body>"+c.html)
			began := time.Now()
			a := ask(t, tab, "snapshot", map[string]any{"maxBytes": 45000})
			if d := time.Since(began); d > 5*time.Second {
				t.Errorf("it took %v", d)
			}
			if a.Error != "" || !strings.Contains(a.Text, c.want) {
				t.Errorf("%s\n%s", a.Error, a.Text)
			}
			ask(t, tab, "resolve", "getByRole('button')")
			ask(t, tab, "resolve", "text=nothing")
			ask(t, tab, "page")
		})
	}
}

func TestWatch(t *testing.T) {
	tab := openPage(t, "<p id=p>x</p>")
	id := walk(t, tab, "watch")
	if got := walk(t, tab, "changed", id); string(got) != "false" {
		t.Errorf("changed: %s", got)
	}
	eval(t, tab, "p.textContent='y'")
	if got := walk(t, tab, "changed", id); string(got) != "true" {
		t.Errorf("changed: %s", got)
	}
}
