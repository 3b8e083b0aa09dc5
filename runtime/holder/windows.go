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
	types struct{ window, normal, dialog, state, above xproto.Atom }
	// width and height are what a window has at least when it fills the
	// screen. Chromium's own is one pixel short of the screen.
	width, height uint16
	wake          chan struct{} // capacity 1: there is something in moved

	mu    sync.Mutex               // guards the field that follows
	moved map[xproto.Window]change // windows that may not be where they belong
}

// change is when a window was first and last seen to change.
type change struct{ first, last time.Time }

const (
	// windowsAfter is how long after its first page a browser is left alone:
	// it is not controllable yet, and somebody waits for that.
	windowsAfter = time.Second
	// windowQuiet is how long a window must have stayed as it is before it is
	// made large again, so that a drag is not fought over.
	windowQuiet = 250 * time.Millisecond
	// windowLongest is how long one that is never still may be left alone.
	windowLongest = 10 * time.Second
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
		"_NET_WM_WINDOW_TYPE_DIALOG": &w.types.dialog,
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
			if !ev.OverrideRedirect {
				w.note(ev.Window)
			}
		case xproto.MapNotifyEvent:
			if !ev.OverrideRedirect {
				w.note(ev.Window)
			}
		}
	}
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

// fit gives their place to those windows that have been still for long enough.
// ok is false when there is nothing to wait for.
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
		w.place(id)
	}
	return wait, ok
}

// place gives a window that is shown its place: a browser's the whole screen, a
// dialog's what of the screen it can have, since GTK makes its file chooser
// higher than a small screen and puts the buttons at the bottom. Menus and
// bubbles, and a video in a window of its own, stay what they are.
func (w *windows) place(id xproto.Window) {
	a, err := xproto.GetWindowAttributes(w.conn, id).Reply()
	if err != nil || a.OverrideRedirect || a.MapState == xproto.MapStateUnmapped || a.Class != xproto.WindowClassInputOutput {
		return
	}
	g, err := xproto.GetGeometry(w.conn, xproto.Drawable(id)).Reply()
	if err != nil {
		return
	}
	x, y, width, height := 0, 0, int(w.width), int(w.height)
	kinds := w.property(id, w.types.window)
	switch {
	case len(kinds) == 0 || slices.Contains(w.property(id, w.types.state), uint32(w.types.above)):
		return
	case kinds[0] == uint32(w.types.dialog), len(w.property(id, xproto.AtomWmTransientFor)) > 0:
		width, height = min(width, int(g.Width)), min(height, int(g.Height))
		x, y = max(0, min(int(g.X), int(w.width)-width)), max(0, min(int(g.Y), int(w.height)-height))
	case kinds[0] != uint32(w.types.normal), w.full(g):
		return
	}
	const all = xproto.ConfigWindowX | xproto.ConfigWindowY | xproto.ConfigWindowWidth | xproto.ConfigWindowHeight
	xproto.ConfigureWindow(w.conn, id, all, []uint32{uint32(x), uint32(y), uint32(width), uint32(height)})
}

// full reports whether a window leaves nothing of the screen free; one that a
// page has made full-screen is larger than the others.
func (w *windows) full(g *xproto.GetGeometryReply) bool {
	return g.X <= 0 && g.Y <= 0 && int(g.X)+int(g.Width) >= int(w.width) && int(g.Y)+int(g.Height) >= int(w.height)
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
