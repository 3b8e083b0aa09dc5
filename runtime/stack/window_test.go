package stack

import (
	"encoding/json"
	"testing"

	"abfleet/internal/cdp"
)

// TestWindow protects the person's view: no window manager runs, so the window
// has to fill the screen from the start, cannot be minimised away, and is not
// resized by a page.
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
	var targets struct {
		TargetInfos []struct{ TargetID, Type string }
	}
	call(root, "Target.getTargets", nil, &targets)
	id := ""
	for _, info := range targets.TargetInfos {
		if info.Type == "page" {
			id = info.TargetID
		}
	}
	var attached struct{ SessionID string }
	call(root, "Target.attachToTarget", map[string]any{"targetId": id, "flatten": true}, &attached)
	page := root.Conn().Session(attached.SessionID)

	type look struct {
		Outer      [2]int
		At         [2]int
		Visibility string
	}
	see := func() look {
		t.Helper()
		var out struct {
			Result struct{ Value json.RawMessage }
		}
		call(page, "Runtime.evaluate", map[string]any{"returnByValue": true, "expression": `({Outer: [outerWidth, outerHeight], At: [screenX, screenY], Visibility: document.visibilityState})`}, &out)
		var l look
		if err := json.Unmarshal(out.Result.Value, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	full := look{Outer: [2]int{w.cfg.ScreenWidth - 1, w.cfg.ScreenHeight - 1}, Visibility: "visible"}
	if got := see(); got != full {
		t.Errorf("at start the window is %+v, want %+v", got, full)
	}
	call(page, "Runtime.evaluate", map[string]any{"expression": "resizeTo(300, 200); moveTo(50, 50)", "userGesture": true}, nil)
	if got := see(); got != full {
		t.Errorf("a page made the window %+v", got)
	}
	var window struct{ WindowID int }
	call(root, "Browser.getWindowForTarget", map[string]any{"targetId": id}, &window)
	call(root, "Browser.setWindowBounds", map[string]any{"windowId": window.WindowID, "bounds": map[string]any{"windowState": "minimized"}}, nil)
	if got := see(); got != full {
		t.Errorf("after minimising the window is %+v", got)
	}
	if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
		t.Fatal(err)
	}
}
