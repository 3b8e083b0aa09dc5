package holder

import (
	"io"
	"log"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/xproto"
)

// windows keeps the browser's windows as large as the screen. No window manager
// runs: what a page's script or a tab that a person tears off has moved or made
// small would stay so, and nobody could move it back.
//
// It only listens to what has happened and configures windows like any other X
// client; it redirects nothing, so it is no window manager, and a browser
// without it misses nothing else.
type windows struct {
	conn  *xgb.Conn
	root  xproto.Window
	types struct{ window, normal, state, above xproto.Atom }
	// width and height are what a window has at least when it fills the
	// screen. Chromium's own is one pixel short of the screen.
	width, height uint16
	wake          chan struct{} // capacity 1: there is something in moved

	mu    sync.Mutex               // guards the field that follows
	moved map[xproto.Window]change // windows that may not fill the screen
}

// change is when a window was first and last seen to change.
type change struct{ first, last time.Time }

const (
	// windowQuiet is how long a window must have stayed as it is before it is
	// made large again, so that a drag is not fought over.
	windowQuiet = 250 * time.Millisecond
	// windowLongest is how long one that never stays may keep its size.
	windowLongest = 2 * time.Second
)

// keepWindows makes the windows on a display fill it until the display ends.
// authority is the path of the Xauthority file.
func keepWindows(display, authority string) error {
	// The library says on stderr what it also returns, and takes the file's
	// path from the environment, which no child of the holder inherits.
	xgb.Logger = log.New(io.Discard, "", 0)
	if err := os.Setenv("XAUTHORITY", authority); err != nil {
		return err
	}
	conn, err := xgb.NewConnDisplay(display)
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &windows{conn: conn, wake: make(chan struct{}, 1), moved: map[xproto.Window]change{}}
	if err := w.begin(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.listen()
	}()
	timer := time.NewTimer(0)
	for {
		select {
		case <-w.wake:
		case <-timer.C:
		case <-ended:
			return nil
		}
		if wait, ok := w.fit(time.Now()); ok {
			timer.Reset(wait)
		}
	}
}

// begin asks to hear of all windows and notes those that are there.
func (w *windows) begin() error {
	screen := xproto.Setup(w.conn).DefaultScreen(w.conn)
	w.root, w.width, w.height = screen.Root, screen.WidthInPixels-1, screen.HeightInPixels-1
	for name, atom := range map[string]*xproto.Atom{
		"_NET_WM_WINDOW_TYPE":        &w.types.window,
		"_NET_WM_WINDOW_TYPE_NORMAL": &w.types.normal,
		"_NET_WM_STATE":              &w.types.state,
		"_NET_WM_STATE_ABOVE":        &w.types.above,
	} {
		r, err := xproto.InternAtom(w.conn, false, uint16(len(name)), name).Reply()
		if err != nil {
			return err
		}
		*atom = r.Atom
	}
	err := xproto.ChangeWindowAttributesChecked(w.conn, w.root, xproto.CwEventMask, []uint32{xproto.EventMaskSubstructureNotify}).Check()
	if err != nil {
		return err
	}
	tree, err := xproto.QueryTree(w.conn, w.root).Reply()
	if err != nil {
		return err
	}
	for _, id := range tree.Children {
		w.note(id)
	}
	return nil
}

// listen notes the windows that change until the display ends. It asks for
// nothing: an answer would wait behind events that nobody takes.
func (w *windows) listen() {
	for {
		ev, xerr := w.conn.WaitForEvent()
		if ev == nil && xerr == nil {
			return
		}
		// Errors are about windows that were closed meanwhile.
		switch ev := ev.(type) {
		case xproto.ConfigureNotifyEvent:
			if !ev.OverrideRedirect && !w.full(ev.X, ev.Y, ev.Width, ev.Height) {
				w.note(ev.Window)
			}
		case xproto.MapNotifyEvent:
			if !ev.OverrideRedirect {
				w.note(ev.Window)
			}
		}
	}
}

func (w *windows) full(x, y int16, width, height uint16) bool {
	return x <= 0 && y <= 0 && int(x)+int(width) >= int(w.width) && int(y)+int(height) >= int(w.height)
}

func (w *windows) note(id xproto.Window) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	c, known := w.moved[id]
	if !known {
		c.first = now
	}
	c.last = now
	w.moved[id] = c
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// fit makes those windows large that have been still for long enough. ok is
// false when there is nothing to wait for.
func (w *windows) fit(now time.Time) (wait time.Duration, ok bool) {
	var still []xproto.Window
	w.mu.Lock()
	for id, c := range w.moved {
		left := min(windowQuiet-now.Sub(c.last), windowLongest-now.Sub(c.first))
		switch {
		case left <= 0:
			still = append(still, id)
			delete(w.moved, id)
		case !ok || left < wait:
			wait, ok = left, true
		}
	}
	w.mu.Unlock()
	for _, id := range still {
		g, err := xproto.GetGeometry(w.conn, xproto.Drawable(id)).Reply()
		if err != nil || w.full(g.X, g.Y, g.Width, g.Height) || !w.browser(id) {
			continue
		}
		const place = xproto.ConfigWindowX | xproto.ConfigWindowY | xproto.ConfigWindowWidth | xproto.ConfigWindowHeight
		xproto.ConfigureWindow(w.conn, id, place, []uint32{0, 0, uint32(w.width), uint32(w.height)})
	}
	return wait, ok
}

// browser reports whether a window is an ordinary one that is shown. Menus and
// bubbles, dialogs and a video in a window of its own keep their size.
func (w *windows) browser(id xproto.Window) bool {
	a, err := xproto.GetWindowAttributes(w.conn, id).Reply()
	if err != nil || a.OverrideRedirect || a.MapState == xproto.MapStateUnmapped || a.Class != xproto.WindowClassInputOutput {
		return false
	}
	if len(w.property(id, xproto.AtomWmTransientFor)) > 0 {
		return false
	}
	kinds := w.property(id, w.types.window)
	return len(kinds) > 0 && kinds[0] == uint32(w.types.normal) && !slices.Contains(w.property(id, w.types.state), uint32(w.types.above))
}

// property returns a property of 32-bit items, nil when it is not there.
func (w *windows) property(id xproto.Window, name xproto.Atom) []uint32 {
	const items = 32
	p, err := xproto.GetProperty(w.conn, false, id, name, xproto.GetPropertyTypeAny, 0, items).Reply()
	if err != nil || p.Format != 32 {
		return nil
	}
	out := make([]uint32, 0, p.ValueLen)
	for b := p.Value; len(b) >= 4; b = b[4:] {
		out = append(out, xgb.Get32(b))
	}
	return out
}
