package page

import (
	"context"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page/pagetest"
)

// onScreen starts a browser that has a screen, and attaches to it.
func onScreen(t *testing.T) (context.Context, *Browser) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a second browser")
	}
	chromium := pagetest.Start(t, pagetest.Options{Headful: true, Env: []string{"DISPLAY=" + pagetest.Display(t)}})
	ctx := testContext(t)
	b, err := Attach(ctx, cdp.New(chromium.Pipe()), Options{KeepPage: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return ctx, b
}

// A browser with a screen shows one tab; the others are hidden: they paint
// nothing and Chromium holds mouse movements back there. An agent must be able
// to work in such a tab while a person looks at another.
func TestBackgroundTab(t *testing.T) {
	ctx, b := onScreen(t)
	url := site{
		"/work":   `<title>Work</title><button onclick="this.textContent='pressed'">x</button><input id=i><p style="margin-top:2000px">end</p>`,
		"/person": "<title>Person</title>",
	}.start(t)
	agent, person := b.Client("agent"), b.Client("person")
	tab, err := agent.NewTab(ctx, url+"/work")
	if err != nil {
		t.Fatal(err)
	}
	front, err := person.NewTab(ctx, url+"/person")
	if err != nil {
		t.Fatal(err)
	}
	visible := func(tab *Tab) string {
		t.Helper()
		var v string
		f, _ := tab.mainFrame(ctx)
		s, world, err := tab.walker(ctx, f)
		if err != nil {
			t.Fatal(err)
		}
		ev := evaluation{Result: remoteObject{Value: &v}}
		if err := tab.evaluate(ctx, f, s, world, map[string]any{"expression": "document.visibilityState", "contextId": world}, &ev); err != nil {
			t.Fatal(err)
		}
		return v
	}
	eventually(t, func() bool { return visible(tab) == "hidden" })
	try := func(name string, call func() error) {
		t.Helper()
		began := time.Now()
		if err := call(); err != nil {
			t.Errorf("%s in the background: %v", name, err)
		}
		if d := time.Since(began); d > 4*time.Second {
			t.Errorf("%s in the background took %v", name, d)
		}
	}
	// Observers first: they must not need the page to be awake.
	for range 3 { // every other one used to wait for the one after it
		try("screenshot", func() error { _, err := tab.Screenshot(ctx, ScreenshotOptions{}); return err })
		try("full page", func() error { _, err := tab.Screenshot(ctx, ScreenshotOptions{FullPage: true}); return err })
	}
	try("snapshot", func() error { _, err := tab.Snapshot(ctx, SnapshotOptions{}); return err })
	try("wait", func() error { return tab.WaitForText(ctx, "end") })
	eventually(t, func() bool { return visible(tab) == "hidden" })
	try("click", func() error { _, err := tab.Click(ctx, "button", ClickOptions{}); return err })
	try("fill", func() error { _, err := tab.Fill(ctx, "#i", "a"); return err })
	try("press", func() error { return tab.Press(ctx, "End") })
	try("type", func() error { _, err := tab.TypeSlowly(ctx, "#i", "bc"); return err })
	try("evaluate", func() error { _, _, err := tab.Evaluate(ctx, "document.title+=1", ""); return err })
	try("screenshot", func() error { _, err := tab.Screenshot(ctx, ScreenshotOptions{}); return err })
	v, _, err := tab.Evaluate(ctx, "[document.querySelector('button').textContent, document.querySelector('#i').value]", "")
	if err != nil || strings.Join(strings.Fields(v), "") != `["pressed","abc"]` {
		t.Fatalf("effects in the background: %s, %v", v, err)
	}
	// A tab that was opened in the background has never painted at all.
	if err := b.conn.Root().Call(ctx, "Target.createTarget", map[string]any{"url": url + "/work", "background": true}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return len(b.list()) == 4 })
	behind := b.list()[3]
	if _, err := behind.Click(ctx, "button", ClickOptions{}); err != nil {
		t.Error(err)
	}
	if v, _, err := behind.Evaluate(ctx, "document.querySelector('button').textContent", ""); err != nil || v != `"pressed"` {
		t.Errorf("a click into a tab that never painted: %s, %v", v, err)
	}
	if got := visible(front); got != "visible" {
		t.Errorf("the tab that the person looks at is %s", got)
	}
	eventually(t, func() bool { return visible(tab) == "hidden" })

	// The last tab closes into a blank one: without any, the browser ends.
	for range len(b.list()) {
		if err := agent.CloseTab(ctx, -1); err != nil {
			t.Fatal(err)
		}
	}
	tabs, err := agent.Tabs(ctx)
	if err != nil || len(tabs) != 1 || tabs[0].URL != "about:blank" || !tabs[0].Current {
		t.Fatalf("tabs after closing all: %+v, %v", tabs, err)
	}
}

// Pictures asked for at once, of a page that goes on loading others, do not get
// into each other's way.
func TestPicturesAtOnce(t *testing.T) {
	ctx, b := onScreen(t)
	url := site{"/long": `<p style="margin-top:2000px">end</p>`}.start(t) + "/long"
	tab, err := b.Client("").NewTab(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	for range 6 {
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				img, err := tab.Screenshot(ctx, ScreenshotOptions{FullPage: i%2 == 0})
				if err != nil || (img.Height > 2000) != (i%2 == 0) {
					t.Errorf("full page %t: %d px high, %v", i%2 == 0, img.Height, err)
				}
			})
		}
		wg.Go(func() {
			if err := tab.Navigate(ctx, url); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
	}
}

// The browser dies while a call is at work.
func TestLostConnection(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a second browser")
	}
	chromium := pagetest.Start(t, pagetest.Options{Port: true})
	ctx := testContext(t)
	conn, err := cdp.DialWebSocket(ctx, chromium.WebSocketURL(t))
	if err != nil {
		t.Fatal(err)
	}
	b, err := Attach(ctx, conn, Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := b.Client("")
	tab, err := c.Current(ctx)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := syscall.Kill(chromium.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-errs, "browser_not_controllable")
	<-b.Done()
	if b.Err() == nil {
		t.Error("the engine ended without a reason")
	}
	_, err = c.Tabs(ctx)
	wantCode(t, err, "browser_not_controllable")
	_, err = tab.Snapshot(ctx, SnapshotOptions{})
	wantCode(t, err, "browser_not_controllable")
}

// The service restarts while a dialog is open. Chromium tells a new connection
// nothing of it, and lets it not be answered there; the page just does not
// answer. That must be said soon, and the tab must be usable by navigating it.
func TestAttachWithOpenDialog(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a second browser")
	}
	chromium := pagetest.Start(t, pagetest.Options{Headful: true, Port: true, Env: []string{"DISPLAY=" + pagetest.Display(t)}})
	ctx := testContext(t)
	var engines []*Browser
	for range 2 {
		conn, err := cdp.DialWebSocket(ctx, chromium.WebSocketURL(t))
		if err != nil {
			t.Fatal(err)
		}
		b, err := Attach(ctx, conn, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		engines = append(engines, b)
		tab, err := b.Client("").Current(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(engines) == 1 {
			url := site{"/": `<title>D</title><button onclick="this.textContent=confirm('sure?')">x</button>`, "/b": "<title>B</title>"}.start(t)
			if err := tab.Navigate(ctx, url+"/"); err != nil {
				t.Fatal(err)
			}
			if _, err := tab.Click(ctx, "button", ClickOptions{}); err != nil {
				t.Fatal(err)
			}
			b.Close()
			continue
		}
		began := time.Now()
		_, err = tab.Snapshot(ctx, SnapshotOptions{})
		wantCode(t, err, fault.Timeout)
		if d := time.Since(began); !strings.Contains(err.Error(), "dialog") || d > 8*time.Second {
			t.Errorf("%v after %v", err, d)
		}
		if err := tab.Navigate(ctx, strings.TrimSuffix(tab.firstURL, "/")+"/b"); err != nil {
			t.Fatal(err)
		}
		if st, err := tab.State(ctx); err != nil || st.Title != "B" {
			t.Fatalf("%+v %v", st, err)
		}
	}
}

// The service restarts: the next engine finds the pages and frames that exist,
// with the marks that only the running documents have.
func TestAttachToExistingPages(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a second browser")
	}
	chromium := pagetest.Start(t, pagetest.Options{Port: true, Flags: []string{"--site-per-process"}})
	ctx := testContext(t)
	first, err := Attach(ctx, cdp.New(chromium.Pipe()), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	tab, err := first.Client("").Current(ctx)
	if err != nil {
		t.Fatal(err)
	}
	url := frames.startWithPort(t)
	for range 2 { // so that the refs of the page have a prefix
		if err := tab.Navigate(ctx, url+"/"); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := tab.Evaluate(ctx, "() => { window.mark = 1; console.error('x') }", ""); err != nil {
		t.Fatal(err)
	}
	before, err := tab.Snapshot(ctx, SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := cdp.DialWebSocket(ctx, chromium.WebSocketURL(t))
	if err != nil {
		t.Fatal(err)
	}
	second, err := Attach(ctx, conn, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	again, err := second.Client("").Current(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(before, "[ref=f") {
		t.Fatalf("no ref has a prefix: the test shows nothing\n%s", before)
	}
	// Frames in other processes attach a little later than their page.
	var after string
	eventually(t, func() bool {
		after, err = again.Snapshot(ctx, SnapshotOptions{})
		return err != nil || strings.Count(after, "\n") == strings.Count(before, "\n")
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := again.Evaluate(ctx, "mark", ""); err != nil || got != "1" {
		t.Fatalf("mark is %s, %v", got, err)
	}
	if st, err := again.State(ctx); err != nil || st.Title != "Top" || st.ConsoleErrors == 0 {
		t.Fatalf("%+v %v", st, err)
	}
	if after != before {
		t.Errorf("snapshots differ: before\n%s\nafter\n%s", before, after)
	}
	// Refs the first engine gave are good while the documents live, and say
	// which frame they are in.
	for line := range strings.Lines(before) {
		if _, ref, ok := strings.Cut(line, "- button "); ok {
			_, ref, _ = strings.Cut(ref, "[ref=")
			ref, _, _ = strings.Cut(ref, "]")
			loc, err := again.Click(ctx, ref, ClickOptions{})
			if err != nil || !strings.Contains(loc.Code, ".contentFrame().") {
				t.Errorf("%s: %+v, %v", ref, loc, err)
			}
		}
	}
}
