package page

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// Tab is one page of the browser. Its methods are safe for concurrent use:
// actions of several clients take turns in the order they arrived, observers
// (Snapshot, Screenshot, State, the waits) need no turn.
type Tab struct {
	b      *Browser
	id     string // target id
	opener string // target id of the page that opened it
	seq    uint64 // number in order of appearance
	target *target
	ready  chan struct{} // closed when the frame tree is known, or never will be
	turn   chan struct{} // capacity 1: held by the action at work
	camera chan struct{} // capacity 1: held while a picture is made
	awake  waker

	readyOnce sync.Once

	// What follows is guarded by b.mu.
	firstURL string // before the frame tree is known
	frames   map[string]*frame
	main     *frame
	nextSeq  int
	closed   bool
	crashed  bool
	dialog   *Dialog
	calls    map[*interruptible]struct{}

	commits   uint64            // documents committed in the main frame, same-document moves included
	documents uint64            // the same without those
	status    string            // of the main document when not 2xx
	answers   map[string]string // statuses by loader id, of documents not committed yet
	errors    int
	warnings  int

	requested   time.Time // when the page last asked for a navigation that has not begun
	navigating  bool      // between the beginning of a navigation and its end
	navigations uint64    // begun or asked for
	requests    map[string]*request
	lastRequest uint64
}

// request is one request in flight that an action waits for.
type request struct {
	seq    uint64
	loader string
}

func newTab(b *Browser, info targetInfo, session *cdp.Session) *Tab {
	b.lastTab++
	t := &Tab{
		seq: b.lastTab, b: b, id: info.TargetID, opener: info.OpenerID, firstURL: info.URL,
		ready: make(chan struct{}), turn: make(chan struct{}, 1), camera: make(chan struct{}, 1),
		frames: make(map[string]*frame), calls: make(map[*interruptible]struct{}),
		answers: make(map[string]string), requests: make(map[string]*request),
	}
	t.target = &target{tab: t, session: session, frame: info.TargetID}
	t.awake.tab = t
	return t
}

// ID identifies the tab while the browser runs. It is not for answers.
func (t *Tab) ID() string { return t.id }

func (t *Tab) markReady() { t.readyOnce.Do(func() { close(t.ready) }) }

// url is where the tab is. The caller holds b.mu.
func (t *Tab) url() string {
	if t.main == nil {
		return t.firstURL
	}
	return t.main.url
}

// stateWait is how long State waits for a busy page to say its title.
const stateWait = 2 * time.Second

// State says what the page is and how it fares. It asks the page for its title
// only; a page that cannot answer has none.
func (t *Tab) State(ctx context.Context) (PageState, error) {
	if err := t.b.sub.Flush(ctx); err != nil {
		return PageState{}, t.b.explain("read page state", err)
	}
	title := t.title(ctx, stateWait)
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	if t.closed {
		return PageState{}, t.b.explain("read page state", errTabClosed)
	}
	st := PageState{
		URL: t.url(), Title: title, HTTPStatus: t.status,
		ConsoleErrors: t.errors, ConsoleWarnings: t.warnings, Crashed: t.crashed,
	}
	if t.dialog != nil {
		d := *t.dialog
		st.Dialog = &d
	}
	return st, nil
}

// title asks the document for its title, within a time.
func (t *Tab) title(ctx context.Context, within time.Duration) string {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		return ""
	}
	defer end()
	var p pageInfo
	err = t.onMain(ctx, func(ctx context.Context, f *frame) error { return t.ask(ctx, f, &p, "page") })
	if err != nil {
		return ""
	}
	return p.Title
}

// pageInfo is what the walker's page() answers, as far as it is used here.
type pageInfo struct {
	URL   string  `json:"url"`
	Title string  `json:"title"`
	DPR   float64 `json:"dpr"`
}

// interruptible is a call that a dialog, a crash or the end of the tab ends.
type interruptible struct{ cancel context.CancelCauseFunc }

// interrupt ends all calls at work. The caller holds b.mu.
func (t *Tab) interrupt(cause error) {
	for c := range t.calls {
		c.cancel(cause)
	}
}

// interruptible derives a context for talking to the page. It fails when the
// page cannot be talked to; a crashed one can, to be navigated.
func (t *Tab) interruptible(ctx context.Context, crashed bool) (context.Context, func(), error) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := &interruptible{cancel: cancel}
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	var err error
	switch {
	case t.b.err != nil:
		err = t.b.err
	case t.closed:
		err = errTabClosed
	case t.crashed && !crashed:
		err = errCrashed
	case t.dialog != nil:
		err = errDialog
	}
	if err != nil {
		cancel(err)
		return nil, nil, err
	}
	t.calls[c] = struct{}{}
	return ctx, func() {
		t.b.mu.Lock()
		delete(t.calls, c)
		t.b.mu.Unlock()
		cancel(nil)
	}, nil
}

// take waits for the turn to act. The turn is handed back by release.
func (t *Tab) take(ctx context.Context) error {
	select {
	case t.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.b.done:
		return t.b.Err()
	}
}

func (t *Tab) release() { <-t.turn }

// HandleDialog answers the open dialog.
func (t *Tab) HandleDialog(ctx context.Context, accept bool, prompt string) error {
	const op = "answer dialog"
	t.b.mu.Lock()
	open := t.dialog
	t.b.mu.Unlock()
	if open == nil {
		return fault.New(fault.ModalState, op, "go on; there is nothing to answer", "no dialog is open")
	}
	ctx, cancel := context.WithTimeout(ctx, t.b.opts.ActionTimeout)
	defer cancel()
	err := t.target.session.Call(ctx, "Page.handleJavaScriptDialog", map[string]any{"accept": accept, "promptText": prompt}, nil)
	if err == nil {
		// The page may open the next one at once.
		err = t.b.await(ctx, func() bool { return t.dialog != open || t.closed })
	}
	return t.b.explain(op, err)
}

// handle brings the tab up to date with one event of one of its sessions. It
// runs with b.mu held.
func (t *Tab) handle(tg *target, ev cdp.Event) error {
	switch ev.Method {
	case "Inspector.targetCrashed":
		if tg.parent == nil {
			t.crashed = true
			t.navigating, t.requested = false, time.Time{}
			clear(t.requests)
			t.interrupt(errCrashed)
			t.b.notify()
		}
		return nil
	case "Inspector.targetReloadedAfterCrash":
		if tg.parent == nil {
			t.crashed = false
			t.b.notify()
		}
		return nil
	case "Page.javascriptDialogOpening":
		var p struct {
			URL, Message, Type, DefaultPrompt string
		}
		if err := json.Unmarshal(ev.Params, &p); err != nil {
			return err
		}
		t.dialog = &Dialog{Type: p.Type, Message: p.Message, DefaultPrompt: p.DefaultPrompt, URL: p.URL}
		t.interrupt(errDialog)
		t.b.notify()
		return nil
	case "Page.javascriptDialogClosed":
		t.dialog = nil
		t.b.notify()
		return nil
	case "Runtime.consoleAPICalled":
		var p struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal(ev.Params, &p); err != nil {
			return err
		}
		switch p.Type {
		case "error", "assert":
			t.errors++
		case "warning":
			t.warnings++
		}
		return nil
	case "Runtime.exceptionThrown":
		t.errors++
		return nil
	case "Log.entryAdded":
		var p struct {
			Entry struct{ Level, Source string } `json:"entry"`
		}
		if err := json.Unmarshal(ev.Params, &p); err != nil {
			return err
		}
		switch {
		case p.Entry.Source == "worker":
		case p.Entry.Level == "error":
			t.errors++
		case p.Entry.Level == "warning":
			t.warnings++
		}
		return nil
	}
	if strings.HasPrefix(ev.Method, "Network.") {
		return t.network(ev)
	}
	return t.frameEvent(tg, ev)
}

// network follows what an action may have to wait for, and the answer to the
// main document's request.
func (t *Tab) network(ev cdp.Event) error {
	var p struct {
		RequestID string `json:"requestId"`
		LoaderID  string `json:"loaderId"`
		FrameID   string `json:"frameId"`
		Type      string `json:"type"`
		Response  struct {
			Status     int    `json:"status"`
			StatusText string `json:"statusText"`
		} `json:"response"`
	}
	if err := json.Unmarshal(ev.Params, &p); err != nil {
		return err
	}
	switch ev.Method {
	case "Network.requestWillBeSent":
		switch p.Type {
		case "Document", "XHR", "Fetch", "Script":
		default:
			return nil
		}
		if t.requests[p.RequestID] != nil { // redirected
			return nil
		}
		t.lastRequest++
		if len(t.requests) < maxRequests {
			t.requests[p.RequestID] = &request{seq: t.lastRequest, loader: p.LoaderID}
		}
	case "Network.responseReceived":
		if p.Type != "Document" || p.RequestID != p.LoaderID || t.main == nil || p.FrameID != t.main.id {
			return nil
		}
		status := ""
		if p.Response.Status < 200 || p.Response.Status > 299 {
			text := p.Response.StatusText
			if text == "" { // HTTP/2 and later send none
				text = http.StatusText(p.Response.Status)
			}
			status = strings.TrimSpace(strconv.Itoa(p.Response.Status) + " " + text)
		}
		if p.LoaderID == t.main.loader {
			t.status = status
			return nil
		}
		if len(t.answers) > 64 { // answers that never became documents
			clear(t.answers)
		}
		t.answers[p.LoaderID] = status
	default: // loadingFinished, loadingFailed
		if t.requests[p.RequestID] == nil {
			return nil
		}
		delete(t.requests, p.RequestID)
		t.b.notify()
	}
	return nil
}
