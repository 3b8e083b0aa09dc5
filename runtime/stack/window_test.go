package stack

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"abfleet/internal/cdp"
)

// TestWindow protects the person's view: no window manager runs, so a window has
// to fill the screen from the start, cannot be minimised away, and fills the
// screen again whoever made it small. A page cannot do that to a window with
// tabs, but to a popup of its own; a person does it who tears off a tab. What
// is small on purpose, a page's picture-in-picture window, stays so.
func TestWindow(t *testing.T) {
	w := newWorld(t)
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
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}
