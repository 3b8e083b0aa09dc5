package page

import (
	"log/slog"
	"time"
)

// Options configure a Browser. The zero value is what the fleet uses.
type Options struct {
	// ActionTimeout bounds how long an action waits for its element to become
	// actionable, and WaitForText and WaitForTextGone wait. Default 5 s.
	ActionTimeout time.Duration
	// NavigationTimeout bounds Navigate and Back. Default 60 s.
	NavigationTimeout time.Duration
	// EvaluateTimeout bounds Evaluate, including promises it awaits. Default 30 s.
	EvaluateTimeout time.Duration
	// SettleCap bounds what Settle waits for after an action. Default 10 s;
	// negative turns settling off.
	SettleCap time.Duration
	// KeepPage makes CloseTab leave a blank page where it would close the
	// last one, since a browser with a screen ends with its last window.
	KeepPage bool
	// MaxResult caps the bytes of one Evaluate result. Default 8 MiB.
	MaxResult int
	// Log receives what is worth knowing about a browser that misbehaves.
	// Nil discards it.
	Log *slog.Logger
}

// TabInfo is one line of a Client's tab list.
type TabInfo struct {
	Index   int
	Title   string
	URL     string
	Current bool
	Crashed bool
}

// Located says which element an action found.
type Located struct {
	// Code is the Playwright locator expression without the leading "page.",
	// such as getByRole('button', { name: 'Hi' }).
	Code string
	Role string
	Name string
	// Ref is the element's snapshot ref, "" when it has none.
	Ref string
}

// Dialog is an open alert, confirm, prompt or beforeunload.
type Dialog struct {
	Type          string
	Message       string
	DefaultPrompt string
	URL           string
}

// PageState is what an answer says about the page itself.
type PageState struct {
	URL   string
	Title string
	// HTTPStatus is "404 Not Found" and the like when the main document's
	// answer was not 2xx, else "".
	HTTPStatus      string
	ConsoleErrors   int
	ConsoleWarnings int
	Crashed         bool
	// Dialog is the open dialog, nil when there is none.
	Dialog *Dialog
}

// SnapshotOptions choose what Tab.Snapshot prints.
type SnapshotOptions struct {
	// Target limits the snapshot to one element; "" is the whole page.
	Target string
	// Depth is the deepest level printed, nil for all.
	Depth *int
	// Boxes adds [box=x,y,w,h].
	Boxes bool
	// MaxBytes caps the text, 0 for no cap.
	MaxBytes int
}

// ClickOptions vary a click. The zero value is one left click.
type ClickOptions struct {
	Button    string // "left", "right", "middle"; "" is left
	Double    bool
	Modifiers []string // Alt, Control, ControlOrMeta, Meta, Shift
	Force     bool     // skip the stability and obstruction checks
}

// ScreenshotOptions choose what Tab.Screenshot captures.
type ScreenshotOptions struct {
	Target   string // "" is the viewport
	FullPage bool
	Type     string // "png", "jpeg", "webp"; "" is png
	// DeviceScale keeps device pixels; otherwise one image pixel is one CSS pixel.
	DeviceScale bool
}

// Image is one captured picture.
type Image struct {
	Data          []byte
	MIME          string
	Width, Height int
	// Cut says that the page is longer than what was captured.
	Cut bool
	// Located is the captured element, zero for page pictures.
	Located Located
}
