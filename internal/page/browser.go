// Package page is the page engine: it drives the pages of one running Chromium
// over CDP for several clients at once. It knows the tabs, frames and documents,
// takes snapshots, finds elements, acts on them with trusted input, and waits
// for the evidence that an action has settled.
//
// A Browser follows everything that happens, whoever caused it: a person using
// the same browser is another client that asks nobody. It never creates,
// focuses or closes a page except for NewTab, SelectTab, CloseTab and, where the
// browser has no page at all, Current. It answers no dialog by itself.
//
// Inside a document the work is done by walker.js, which lives in an isolated
// world of every frame; its header comment describes the calls.
package page

import (
	"context"
	_ "embed" // the walker
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// worldName names the isolated world the walker lives in.
const worldName = "abf"

//go:embed walker.js
var walkerSource string

// Bounds that are not options.
const (
	// attachWait bounds how long Attach waits for pages that exist to describe
	// themselves. A page that hangs is listed nevertheless.
	attachWait = 3 * time.Second
	// createWait bounds the creation and the closing of a page.
	createWait = 15 * time.Second
	// maxFrames bounds the frames followed per page; further ones are left out
	// of snapshots.
	maxFrames = 1000
	// maxTabs bounds the pages followed. Further ones run, but are not listed.
	maxTabs = 500
	// maxRequests bounds the requests in flight that are followed per page.
	maxRequests = 4096
)

// events are what the engine listens to. Those named lossy may be dropped when
// a page floods them: they only feed counters.
var (
	events = []string{
		"Target.attachedToTarget", "Target.detachedFromTarget",
		"Page.frameAttached", "Page.frameDetached", "Page.frameNavigated", "Page.navigatedWithinDocument",
		"Page.frameStartedLoading", "Page.frameStoppedLoading", "Page.frameRequestedNavigation",
		"Page.frameStartedNavigating", "Page.lifecycleEvent",
		"Page.javascriptDialogOpening", "Page.javascriptDialogClosed",
		"Runtime.executionContextCreated", "Runtime.executionContextDestroyed", "Runtime.executionContextsCleared",
		"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
		"Network.requestWillBeSent", "Network.responseReceived", "Network.loadingFinished", "Network.loadingFailed",
		"Inspector.targetCrashed", "Inspector.targetReloadedAfterCrash",
	}
	lossyEvents = []string{"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
)

// Browser is the engine on one connection. All methods are safe for concurrent
// use.
type Browser struct {
	conn *cdp.Conn
	sub  *cdp.Subscription
	opts Options
	log  *slog.Logger
	done chan struct{} // closed when the event loop has ended

	mu      sync.Mutex // guards what follows and all of Tab, target and frame that says so
	err     error
	targets map[string]*target // by session id
	tabs    []*Tab             // in order of appearance
	clients map[string]*Client
	lastTab uint64
	// todo is what handling an event leaves to be sent when b.mu is free: a
	// browser that does not read must not hold up those who only look.
	todo    []func()
	changed chan struct{} // closed at the next change; nil while nobody waits
}

// target is one attached session: a page, or a frame that runs in a process of
// its own.
type target struct {
	tab     *Tab
	session *cdp.Session
	parent  *target // nil for the page
	frame   string  // id of its topmost frame
}

func (o Options) withDefaults() Options {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&o.ActionTimeout, 5*time.Second)
	set(&o.NavigationTimeout, 60*time.Second)
	set(&o.EvaluateTimeout, 30*time.Second)
	set(&o.SettleCap, 10*time.Second)
	if o.MaxResult == 0 {
		o.MaxResult = 8 << 20
	}
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return o
}

// Attach starts the engine on a connection, which it then owns, and returns
// when the existing pages are known. ctx bounds the attaching only.
func Attach(ctx context.Context, conn *cdp.Conn, opts Options) (*Browser, error) {
	opts = opts.withDefaults()
	b := &Browser{
		conn:    conn,
		opts:    opts,
		log:     opts.Log,
		done:    make(chan struct{}),
		targets: make(map[string]*target),
		clients: make(map[string]*Client),
	}
	b.sub = conn.Subscribe(cdp.Filter{Methods: events, Lossy: lossyEvents})
	go b.loop()
	err := conn.Root().Call(ctx, "Target.setAutoAttach", autoAttach("page"), nil)
	if err == nil {
		err = b.sub.Flush(ctx)
	}
	if err != nil {
		b.Close()
		return nil, b.explain("attach to browser", err)
	}
	known, cancel := context.WithTimeout(ctx, attachWait)
	defer cancel()
	for _, t := range b.list() {
		select {
		case <-t.ready:
		case <-known.Done():
		case <-b.done:
		}
	}
	if err := context.Cause(ctx); err != nil {
		b.Close()
		return nil, b.explain("attach to browser", err)
	}
	return b, nil
}

// autoAttach asks for flat sessions on every target of one type, each held
// until it has been prepared.
func autoAttach(kind string) map[string]any {
	return map[string]any{
		"autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true,
		"filter": []map[string]any{{"type": kind}},
	}
}

// Close disconnects. Pages, tabs and the browser stay as they are.
func (b *Browser) Close() error {
	b.conn.Close()
	<-b.done
	return nil
}

// Done is closed when the engine has ended, by Close or because the connection
// was lost.
func (b *Browser) Done() <-chan struct{} { return b.done }

// Err says why the engine ended; it is nil while it runs.
func (b *Browser) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *Browser) list() []*Tab {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.tabs)
}

// loop handles all events in order.
func (b *Browser) loop() {
	defer close(b.done)
	for {
		ev, err := b.sub.Next(context.Background())
		if err != nil {
			b.conn.CloseWith(err)
			b.mu.Lock()
			b.err = err
			for _, t := range b.tabs {
				t.interrupt(err)
			}
			b.notify()
			b.mu.Unlock()
			return
		}
		b.mu.Lock()
		b.handle(ev)
		todo := b.todo
		b.todo = nil
		b.mu.Unlock()
		for _, f := range todo {
			f()
		}
	}
}

// notify wakes whoever waits for a change of the model. The caller holds b.mu.
func (b *Browser) notify() {
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

// await waits until cond, which is called with b.mu held, is true.
func (b *Browser) await(ctx context.Context, cond func() bool) error {
	for {
		b.mu.Lock()
		if cond() {
			b.mu.Unlock()
			return nil
		}
		if b.err != nil {
			defer b.mu.Unlock()
			return b.err
		}
		if b.changed == nil {
			b.changed = make(chan struct{})
		}
		ch := b.changed
		b.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// handle brings the model up to date. It runs with b.mu held and must not wait.
func (b *Browser) handle(ev cdp.Event) {
	if ev.Tag != nil {
		if tr, ok := ev.Tag.(*target); ok {
			b.treeArrived(tr, ev)
		}
		return
	}
	switch ev.Method {
	case "Target.attachedToTarget":
		b.attached(ev)
		return
	case "Target.detachedFromTarget":
		b.detached(ev)
		return
	}
	tg := b.targets[ev.Session]
	if tg == nil {
		return
	}
	if err := tg.tab.handle(tg, ev); err != nil {
		b.log.Warn("event not understood", "method", ev.Method, "error", err)
	}
}

type targetInfo struct {
	TargetID string `json:"targetId"`
	Type     string `json:"type"`
	Title    string `json:"title"`
	URL      string `json:"url"`
	OpenerID string `json:"openerId"`
	Subtype  string `json:"subtype"`
	// ParentFrameID is set for frames in processes of their own.
	ParentFrameID string `json:"parentFrameId"`
}

// attached takes over a new session, or lets it go when it is none of ours.
func (b *Browser) attached(ev cdp.Event) {
	var p struct {
		SessionID  string     `json:"sessionId"`
		TargetInfo targetInfo `json:"targetInfo"`
	}
	if json.Unmarshal(ev.Params, &p) != nil {
		return
	}
	info := p.TargetInfo
	session := b.conn.Session(p.SessionID)
	parent := b.targets[ev.Session]
	var tg *target
	switch {
	case info.Type == "page" && ev.Session == "" && info.Subtype == "" && !isDevTools(info.URL) && len(b.tabs) < maxTabs:
		t := newTab(b, info, session)
		tg = t.target
		b.tabs = append(b.tabs, t)
	case info.Type == "iframe" && parent != nil && len(parent.tab.frames) < maxFrames:
		tg = &target{tab: parent.tab, session: session, parent: parent, frame: info.TargetID}
		around := info.ParentFrameID
		if around == "" {
			around = parent.frame
		}
		parent.tab.adopt(tg, around)
	default:
		b.todo = append(b.todo, func() { b.release(session, ev.Session) })
		return
	}
	b.targets[p.SessionID] = tg
	b.todo = append(b.todo, func() { b.prepare(tg) })
	b.notify()
}

// release resumes a target that is not followed and leaves it.
func (b *Browser) release(session *cdp.Session, parent string) {
	ctx := context.Background()
	session.Start(ctx, "Runtime.runIfWaitingForDebugger", nil)
	b.conn.Session(parent).Start(ctx, "Target.detachFromTarget", map[string]any{"sessionId": session.ID()})
}

// prepare sends everything a new session needs in one go. The order matters:
// the frame tree is asked for after its events are on, and the target runs on
// last. The answers are of no interest but for the frame tree, which is
// handled among the events so that it is never older than they are.
func (b *Browser) prepare(tg *target) {
	ctx := context.Background()
	s := tg.session
	start := func(method string, params any) { s.Start(ctx, method, params) }
	start("Page.enable", nil)
	if err := b.sub.Start(ctx, s, "Page.getFrameTree", nil, tg); err != nil {
		b.log.Warn("cannot ask for frames", "error", err)
	}
	start("Page.setLifecycleEventsEnabled", map[string]any{"enabled": true})
	start("Page.addScriptToEvaluateOnNewDocument", map[string]any{
		"source": walkerSource, "worldName": worldName, "runImmediately": true,
	})
	start("Runtime.enable", nil)
	start("Log.enable", nil)
	start("Network.enable", map[string]any{"maxTotalBufferSize": 10 << 20, "maxResourceBufferSize": 5 << 20})
	start("Target.setAutoAttach", autoAttach("iframe"))
	start("Runtime.runIfWaitingForDebugger", nil)
}

// treeArrived merges the answer of Page.getFrameTree.
func (b *Browser) treeArrived(tg *target, ev cdp.Event) {
	if b.targets[ev.Session] != tg {
		return
	}
	if ev.Err == nil {
		var p struct {
			FrameTree frameTree `json:"frameTree"`
		}
		if err := json.Unmarshal(ev.Params, &p); err != nil {
			b.log.Warn("frame tree not understood", "error", err)
		} else {
			tg.tab.mergeTree(tg, p.FrameTree)
		}
	}
	if tg.parent == nil {
		tg.tab.markReady()
	}
	b.notify()
}

// detached forgets a session and, with a page's own, the page.
func (b *Browser) detached(ev cdp.Event) {
	var p struct {
		SessionID string `json:"sessionId"`
	}
	if json.Unmarshal(ev.Params, &p) != nil {
		return
	}
	tg := b.targets[p.SessionID]
	if tg == nil {
		return
	}
	delete(b.targets, p.SessionID)
	t := tg.tab
	if tg.parent != nil {
		t.orphan(tg)
		b.notify()
		return
	}
	for id, other := range b.targets {
		if other.tab == t {
			delete(b.targets, id)
		}
	}
	i := slices.Index(b.tabs, t)
	if i >= 0 {
		b.tabs = slices.Delete(b.tabs, i, i+1)
	}
	t.closed = true
	t.markReady()
	t.interrupt(errTabClosed)
	for _, c := range b.clients {
		if c.current == t {
			c.current = nil
			if len(b.tabs) > 0 {
				c.current = b.tabs[min(max(i, 0), len(b.tabs)-1)]
			}
		}
	}
	b.notify()
}

// Conditions that end a call from outside it.
var (
	errTabClosed = errors.New("the tab was closed")
	errCrashed   = errors.New("the page crashed")
	errDialog    = errors.New("a dialog is open")
	// errSilent is a page that has not said a word since it was attached to.
	// Chromium tells nothing of dialogs that were open before.
	errSilent = errors.New("the page does not answer; it is busy, or shows a dialog that was opened before the browser was connected to")
)

// explain turns what went wrong below into an error for users, with op as its
// verb and object. Errors that are explained already stay.
func (b *Browser) explain(op string, err error) error {
	var fe *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &fe):
		return err
	case errors.Is(err, errDialog):
		return fault.Wrap(err, fault.ModalState, op, "the dialog has to be answered first")
	case errors.Is(err, errCrashed):
		return fault.Wrap(err, fault.PageCrashed, op, "navigate the tab again, or close it")
	case errors.Is(err, errSilent):
		return fault.Wrap(err, fault.Timeout, op, "answer the dialog in the live view, or navigate the tab, which closes it")
	case errors.Is(err, errTabClosed), errors.Is(err, cdp.ErrSessionGone):
		return fault.New(fault.TargetNotFound, op, "list the tabs and go on in another one", "%w", errTabClosed)
	case errors.Is(err, cdp.ErrClosed), errors.Is(err, cdp.ErrOverflow):
		return fault.Wrap(err, fault.BrowserNotControllable, op, "try again; the connection to the browser is made anew")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.Timeout, op, "take a snapshot to see what the page is doing", "the page did not answer in time: %w", err)
	case errors.Is(err, context.Canceled):
		return fault.New(fault.Canceled, op, "", "%w", err)
	default:
		return fault.Wrap(err, fault.Internal, op, "take a snapshot to see the page as it is now, then try again")
	}
}

// Ping returns when the browser answers, whatever its pages do.
func (b *Browser) Ping(ctx context.Context) error {
	return b.conn.Root().Call(ctx, "Browser.getVersion", nil, nil)
}

// createPage opens a blank page and returns its tab when it is ready.
func (b *Browser) createPage(ctx context.Context) (*Tab, error) {
	ctx, cancel := context.WithTimeout(ctx, createWait)
	defer cancel()
	var r struct {
		TargetID string `json:"targetId"`
	}
	if err := b.conn.Root().Call(ctx, "Target.createTarget", map[string]any{"url": "about:blank"}, &r); err != nil {
		return nil, fmt.Errorf("create page: %w", err)
	}
	var t *Tab
	err := b.await(ctx, func() bool {
		for _, o := range b.tabs {
			if o.id == r.TargetID {
				t = o
				return true
			}
		}
		return false
	})
	if err != nil {
		return nil, fmt.Errorf("wait for new page: %w", err)
	}
	select {
	case <-t.ready:
		return t, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
