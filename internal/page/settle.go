package page

import (
	"context"
	"errors"
	"time"
)

// Bounds of settling. They are what is waited at most; evidence ends each
// earlier.
const (
	// framesWait bounds the wait for two animation frames: a page that
	// paints none is not waited for.
	framesWait = 200 * time.Millisecond
	// answerWait bounds the wait for a page that is too busy to say anything.
	answerWait = 500 * time.Millisecond
	// requestsWait bounds the wait for requests that an action started.
	requestsWait = 5 * time.Second
	// loadWait bounds the wait for the load event after DOMContentLoaded.
	loadWait = 5 * time.Second
	// popupWait bounds the wait for the documents of pages that an action opened.
	popupWait = 3 * time.Second
	// requestedWait bounds how long a navigation may take to begin that the
	// page has asked for. Some never do, such as those of mailto: links.
	requestedWait = 500 * time.Millisecond
	// wakeLinger is how long a background page stays awake after an action,
	// so that a series of actions wakes it once.
	wakeLinger = 3 * time.Second
)

// baseline is what a tab looked like before an action. Settling waits for what
// came after it.
type baseline struct {
	navigations, documents, lastRequest, tabs uint64
}

func (t *Tab) baseline() baseline {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return baseline{t.navigations, t.documents, t.lastRequest, t.b.lastTab}
}

// Settle waits until the page has settled: two animation frames, then the end
// of any navigation and requests under way. Actions that can change a page do
// so by themselves; this is for callers that have another reason to wait.
func (t *Tab) Settle(ctx context.Context) error {
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		return t.b.explain("wait for page", err)
	}
	defer end()
	base := t.baseline()
	base.lastRequest = 0
	t.b.mu.Lock()
	if t.navigating {
		base.navigations--
	}
	t.b.mu.Unlock()
	return t.b.explain("wait for page", t.settle(ctx, base))
}

// settle waits for the consequences of an action. It fails only when ctx ends;
// a page that is still busy at the cap is as settled as it gets. An open
// dialog, a crash and the end of the tab end it, without an error.
func (t *Tab) settle(parent context.Context, base baseline) error {
	limit := t.b.opts.SettleCap
	if limit < 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(parent, limit)
	defer cancel()
	for {
		t.paint(ctx)
		if t.b.sub.Flush(ctx) != nil {
			break
		}
		waited, err := t.consequences(ctx, &base)
		if err != nil || !waited {
			break
		}
	}
	if err := context.Cause(parent); err != nil && !ended(err) {
		return err
	}
	return nil
}

// ended reports whether a call ended because of what happened to the page.
func ended(err error) bool {
	return errors.Is(err, errDialog) || errors.Is(err, errCrashed) || errors.Is(err, errTabClosed)
}

// paint waits for two animation frames of the main frame, for a while.
func (t *Tab) paint(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	f, err := t.mainFrame(ctx)
	if err != nil {
		return
	}
	var r struct {
		Painted bool `json:"painted"`
	}
	// A failure means that the document was replaced: what follows sees it.
	_ = t.ask(ctx, f, &r, "frames", 2, framesWait.Milliseconds())
}

// consequences waits for what has begun since base, moves base forward and
// reports whether there was anything.
func (t *Tab) consequences(ctx context.Context, base *baseline) (bool, error) {
	waited := false
	t.b.mu.Lock()
	last, documents := t.lastRequest, t.documents
	navigating := t.navigations > base.navigations || documents > base.documents
	loading := t.inFlight(base.lastRequest)
	opened := t.opened(base.tabs)
	t.b.mu.Unlock()

	if navigating {
		waited = true
		if err := t.loaded(ctx, base); err != nil {
			return false, err
		}
	}
	if loading {
		waited = true
		err := t.until(ctx, requestsWait, func() bool { return !t.inFlight(base.lastRequest) })
		if err != nil {
			return false, err
		}
	}
	if len(opened) > 0 {
		err := t.until(ctx, popupWait, func() bool {
			for _, o := range opened {
				if !o.closed && (o.main == nil || !o.main.ready) {
					return false
				}
			}
			return true
		})
		if err != nil {
			return false, err
		}
	}
	t.b.mu.Lock()
	base.navigations, base.documents = t.navigations, t.documents
	base.lastRequest = max(last, base.lastRequest)
	t.b.mu.Unlock()
	return waited, nil
}

// until is await for a while: running out of that is no failure.
func (t *Tab) until(ctx context.Context, d time.Duration, cond func() bool) error {
	wait, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := t.b.await(wait, cond)
	if err != nil && ctx.Err() == nil && wait.Err() != nil {
		return nil
	}
	return err
}

// inFlight reports whether a request that began after seq is not finished. The
// caller holds b.mu.
func (t *Tab) inFlight(seq uint64) bool {
	for _, r := range t.requests {
		if r.seq > seq {
			return true
		}
	}
	return false
}

// opened lists the pages that this one opened after the tab with number seq, and
// whose document is not there yet. The caller holds b.mu.
func (t *Tab) opened(seq uint64) []*Tab {
	var list []*Tab
	for _, o := range t.b.tabs {
		if o.opener == t.id && o.seq > seq && !o.crashed && o.dialog == nil && (o.main == nil || !o.main.ready) {
			list = append(list, o)
		}
	}
	return list
}

// loaded waits until a navigation has ended: with a document that is ready and,
// for a while, loaded; or without one, as downloads do.
func (t *Tab) loaded(ctx context.Context, base *baseline) error {
	for {
		err := t.until(ctx, requestedWait, func() bool { return t.requested.IsZero() || t.closed })
		if err != nil {
			return err
		}
		t.b.mu.Lock()
		t.requested = time.Time{}
		seen := t.navigations
		t.b.mu.Unlock()
		err = t.b.await(ctx, func() bool {
			committed := t.documents > base.documents && t.main != nil && t.main.ready
			return committed || !t.navigating || t.closed
		})
		if err != nil {
			return err
		}
		err = t.until(ctx, loadWait, func() bool {
			return t.closed || !t.navigating || t.main != nil && t.main.loaded || t.navigations > seen
		})
		if err != nil {
			return err
		}
		t.b.mu.Lock()
		again := t.navigations > seen && !t.closed
		if again {
			base.documents = t.documents
		}
		t.b.mu.Unlock()
		if !again {
			return nil
		}
	}
}

// waker keeps a page in the background awake while actions need it. A hidden
// page paints no frame, and Chromium holds mouse movements until it does, so
// that nothing could be clicked there. Focus emulation makes it behave as a
// visible page without showing it to the person who watches another tab.
type waker struct {
	tab *Tab
	// What follows is guarded by tab.b.mu.
	holds int
	on    bool
	timer *time.Timer
}

// hold wakes the page if it is hidden. The returned function lets it doze off.
func (w *waker) hold(ctx context.Context) (func(), error) {
	t := w.tab
	t.b.mu.Lock()
	w.holds++
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	on := w.on
	t.b.mu.Unlock()
	done := func() {
		t.b.mu.Lock()
		defer t.b.mu.Unlock()
		w.holds--
		if w.holds == 0 && w.on {
			w.timer = time.AfterFunc(wakeLinger, w.sleep)
		}
	}
	if on {
		return done, nil
	}
	hidden, err := t.hidden(ctx)
	if err == nil && hidden {
		err = t.target.session.Call(ctx, "Emulation.setFocusEmulationEnabled", map[string]any{"enabled": true}, nil)
		if err == nil {
			t.b.mu.Lock()
			w.on = true
			t.b.mu.Unlock()
		}
	}
	if err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// hidden reports whether the page is in the background, and not kept awake.
func (t *Tab) hidden(ctx context.Context) (bool, error) {
	var visibility string
	err := t.onMain(ctx, func(ctx context.Context, f *frame) error {
		s, world, err := t.walker(ctx, f)
		if err != nil {
			return err
		}
		ev := evaluation{Result: remoteObject{Value: &visibility}}
		return t.evaluate(ctx, f, s, world, map[string]any{
			"expression": "document.visibilityState", "contextId": world, "returnByValue": true,
		}, &ev)
	})
	return visibility == "hidden", err
}

// sleep gives the page back its true visibility.
func (w *waker) sleep() {
	t := w.tab
	t.b.mu.Lock()
	if w.holds > 0 || !w.on || t.closed {
		t.b.mu.Unlock()
		return
	}
	w.on, w.timer = false, nil
	t.b.mu.Unlock()
	t.target.session.Start(context.Background(), "Emulation.setFocusEmulationEnabled", map[string]any{"enabled": false})
}
