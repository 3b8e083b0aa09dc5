package stack

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/xproto"

	"abfleet/internal/cdp"
	"abfleet/internal/config"
	"abfleet/internal/fleet"
	"abfleet/runtime/role"
)

// TestWindow protects the person's view: no window manager runs, so a window has
// to fill the screen from the start, cannot be minimised away, and fills the
// screen again whoever made it small. A page cannot do that to a window with
// tabs, but to a popup of its own; a person does it who tears off a tab. What
// is small on purpose, a page's picture-in-picture window, stays so. Dialogs do
// not hang over the edge.
func TestWindow(t *testing.T) {
	for _, display := range []string{config.DisplayXvnc, config.DisplayXvfb} {
		t.Run(display, func(t *testing.T) { window(t, display) })
	}
}

func window(t *testing.T, display string) {
	w := newWorld(t)
	w.cfg.Display = display
	ev := w.start("hhhhhhhhhh", w.cfg.TemplateDir("identity-1"))
	root := w.session(ev)
	call := func(s *cdp.Session, method string, params, result any) {
		t.Helper()
		if err := s.Call(t.Context(), method, params, result); err != nil {
			t.Fatalf("%s: %v", method, err)
		}
	}
	// page attaches to the next page that was not seen before.
	var known []string
	page := func() (*cdp.Session, string) {
		t.Helper()
		for {
			var targets struct {
				TargetInfos []struct{ TargetID, Type string }
			}
			call(root, "Target.getTargets", nil, &targets)
			for _, info := range targets.TargetInfos {
				if info.Type != "page" || slices.Contains(known, info.TargetID) {
					continue
				}
				known = append(known, info.TargetID)
				var attached struct{ SessionID string }
				call(root, "Target.attachToTarget", map[string]any{"targetId": info.TargetID, "flatten": true}, &attached)
				return root.Conn().Session(attached.SessionID), info.TargetID
			}
		}
	}
	evaluate := func(s *cdp.Session, expression string, result any) {
		t.Helper()
		var out struct {
			Result           struct{ Value json.RawMessage }
			ExceptionDetails json.RawMessage
		}
		call(s, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true, "userGesture": true}, &out)
		if out.ExceptionDetails != nil {
			t.Fatalf("%s: %s", expression, out.ExceptionDetails)
		}
		if result != nil {
			if err := json.Unmarshal(out.Result.Value, result); err != nil {
				t.Fatal(err)
			}
		}
	}

	type look struct {
		Outer      [2]int
		At         [2]int
		Visibility string
	}
	see := func(s *cdp.Session) (l look) {
		t.Helper()
		evaluate(s, `({Outer: [outerWidth, outerHeight], At: [screenX, screenY], Visibility: document.visibilityState})`, &l)
		return l
	}
	full := look{Outer: [2]int{w.cfg.ScreenWidth - 1, w.cfg.ScreenHeight - 1}, Visibility: "visible"}
	first, id := page()
	if got := see(first); got != full {
		t.Errorf("at start the window is %+v, want %+v", got, full)
	}
	evaluate(first, "resizeTo(300, 200); moveTo(50, 50)", nil)
	if got := see(first); got != full {
		t.Errorf("a page made the window %+v", got)
	}
	var window struct{ WindowID int }
	call(root, "Browser.getWindowForTarget", map[string]any{"targetId": id}, &window)
	bounds := func(b map[string]any) {
		t.Helper()
		call(root, "Browser.setWindowBounds", map[string]any{"windowId": window.WindowID, "bounds": b}, nil)
	}
	bounds(map[string]any{"windowState": "minimized"})
	if got := see(first); got != full {
		t.Errorf("after minimising the window is %+v", got)
	}

	// again makes a window small and waits until it fills the screen again.
	again := func(s *cdp.Session, who string, small func()) {
		t.Helper()
		small()
		became := false
		for deadline := time.Now().Add(15 * time.Second); ; {
			got := see(s)
			became = became || got != full
			if became && got == full {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: the window is %+v, was small: %v", who, got, became)
			}
		}
	}
	again(first, "moved like a torn-off tab", func() {
		bounds(map[string]any{"left": 300, "top": 200, "width": 500, "height": 400})
	})
	evaluate(first, `void open("about:blank", "popup", "width=400,height=300")`, nil)
	popup, _ := page()
	again(popup, "a popup's own script", func() { evaluate(popup, "resizeTo(300, 200); moveTo(120, 90)", nil) })
	call(popup, "Page.close", nil, nil)

	// Only a secure context has that interface.
	secure := "chrome://version/"
	call(first, "Page.navigate", map[string]any{"url": secure}, nil)
	for at := ""; at != secure; {
		evaluate(first, `document.readyState == "complete" ? location.href : ""`, &at)
	}
	var inner int
	evaluate(first, `documentPictureInPicture.requestWindow({width: 320, height: 240}).then(w => { window.pip = w; return w.innerWidth })`, &inner)
	before := inner
	again(first, "beside a picture-in-picture window", func() {
		bounds(map[string]any{"left": 300, "top": 200, "width": 500, "height": 400})
	})
	evaluate(first, "pip.innerWidth", &inner)
	if inner != before || inner >= w.cfg.ScreenWidth-1 {
		t.Errorf("the picture-in-picture window is %d wide, was %d", inner, before)
	}
	evaluate(first, "pip.close()", nil)

	evaluate(first, `const file = document.createElement("input"); file.type = "file"; file.showPicker()`, nil)
	w.dialogFits(ev)
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}

// dialogFits waits until a dialog shows and is on the screen as a whole.
func (w *world) dialogFits(ev fleet.Evidence) {
	w.t.Helper()
	e, err := decode(ev)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Setenv("XAUTHORITY", w.files(e.Instance).authority())
	conn, err := xgb.NewConnDisplay(role.XDisplay(e.Display.Display))
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	root := xproto.Setup(conn).DefaultScreen(conn).Root
	last := "there is none"
	for deadline := time.Now().Add(15 * time.Second); time.Now().Before(deadline); {
		tree, err := xproto.QueryTree(conn, root).Reply()
		if err != nil {
			w.t.Fatal(err)
		}
		for _, id := range tree.Children {
			owner, err := xproto.GetProperty(conn, false, id, xproto.AtomWmTransientFor, xproto.GetPropertyTypeAny, 0, 1).Reply()
			a, aerr := xproto.GetWindowAttributes(conn, id).Reply()
			g, gerr := xproto.GetGeometry(conn, xproto.Drawable(id)).Reply()
			if err != nil || aerr != nil || gerr != nil || owner.ValueLen == 0 || a.MapState == xproto.MapStateUnmapped {
				continue
			}
			last = fmt.Sprintf("it is %dx%d at %d,%d", g.Width, g.Height, g.X, g.Y)
			if g.X >= 0 && g.Y >= 0 && int(g.X)+int(g.Width) <= w.cfg.ScreenWidth && int(g.Y)+int(g.Height) <= w.cfg.ScreenHeight {
				w.t.Log("the dialog fits: " + last)
				return
			}
		}
	}
	w.t.Fatalf("no dialog is on the screen as a whole: %s", last)
}
