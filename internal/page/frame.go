package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"abfleet/internal/cdp"
)

// frame is one frame of a page: its place in the tree, its document and the
// execution contexts of that. Guarded by b.mu but for the ids.
type frame struct {
	id       string
	parentID string  // "" for the main frame
	parent   *frame  // nil for the main frame, and where it is not known yet
	target   *target // whose session answers for it
	gone     bool

	seq    int  // k of the ref prefix f<k>; 0 is the first document of a page
	old    bool // the document was there before us and may have a prefix already
	url    string
	loader string
	ready  bool // DOMContentLoaded
	loaded bool // load
	page   int  // execution context of the page's own scripts, 0 unknown
	world  int  // execution context of the walker, 0 unknown

	// How the frame's owner element is known in the parent's walker, valid
	// while the parent's document is the one it was asked in.
	owner      owner
	ownerWorld int
}

// owner is an iframe element as the parent's walker describes it.
type owner struct {
	Handle  string `json:"handle"`
	Locator string `json:"locator"`
}

type frameInfo struct {
	ID             string `json:"id"`
	ParentID       string `json:"parentId"`
	LoaderID       string `json:"loaderId"`
	URL            string `json:"url"`
	URLFragment    string `json:"urlFragment"`
	UnreachableURL string `json:"unreachableUrl"`
}

// where is the URL that the frame shows. As in Chromium's own address bar, that
// of a page which could not be reached is the one asked for.
func (i frameInfo) where() string {
	if i.UnreachableURL != "" {
		return i.UnreachableURL + i.URLFragment
	}
	return i.URL + i.URLFragment
}

type frameTree struct {
	Frame       frameInfo   `json:"frame"`
	ChildFrames []frameTree `json:"childFrames"`
}

// add makes a frame; the one without a parent is the main frame. A frame in
// another process may be known before its parent is, which connects them. The
// caller holds b.mu.
func (t *Tab) add(id, parentID string, tg *target) *frame {
	if len(t.frames) >= maxFrames {
		return nil
	}
	f := &frame{id: id, parentID: parentID, parent: t.frames[parentID], target: tg}
	if parentID != "" {
		t.nextSeq++
		f.seq = t.nextSeq
	} else {
		t.main = f
	}
	t.frames[id] = f
	for _, c := range t.frames {
		if c.parentID == id {
			c.parent = f
		}
	}
	return f
}

// parentOf returns the frame around f, nil for the main frame.
func (t *Tab) parentOf(f *frame) (*frame, error) {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	if f.parent == nil && f.parentID != "" {
		return nil, errContextGone // not announced yet, or gone with its document
	}
	return f.parent, nil
}

// mergeTree takes over the frames of a session that its events have not told
// about already, which are newer.
func (t *Tab) mergeTree(tg *target, tree frameTree) {
	f := t.frames[tree.Frame.ID]
	if f == nil {
		known := t.frames[tree.Frame.ParentID] != nil
		first := tree.Frame.ParentID == "" && tg.parent == nil && t.main == nil
		if !known && !first {
			return
		}
		if f = t.add(tree.Frame.ID, tree.Frame.ParentID, tg); f == nil {
			return
		}
	}
	if f.loader == "" && f.target == tg {
		f.loader, f.url, f.old = tree.Frame.LoaderID, tree.Frame.where(), true
		if f == t.main { // a navigation may be waiting for just this
			t.commits++
			t.documents++
		}
	}
	for _, c := range tree.ChildFrames {
		t.mergeTree(tg, c)
	}
}

// adopt makes a new session the one that answers for a frame which has moved to
// another process. parentID is the frame around it.
func (t *Tab) adopt(tg *target, parentID string) {
	f := t.frames[tg.frame]
	if f == nil {
		// The parent's session does not tell about frames that were in
		// another process when it was attached to.
		if f = t.add(tg.frame, parentID, tg); f == nil {
			return
		}
	}
	t.dropChildren(f)
	t.leaveDocument(f)
	f.target, f.page, f.world, f.loader = tg, 0, 0, ""
	f.url, f.ready, f.loaded, f.old = "", false, false, false
}

// leaveDocument gives a frame that leaves a real document the next ref prefix,
// so that refs of the old one never resolve in the new one.
func (t *Tab) leaveDocument(f *frame) {
	if f.url != "" && f.url != "about:blank" {
		t.nextSeq++
		f.seq = t.nextSeq
	}
}

// orphan forgets the frames that an ended session answered for. A frame that
// came back to the parent's process is announced there.
func (t *Tab) orphan(tg *target) {
	for _, f := range t.frames {
		if f.target == tg {
			f.page, f.world = 0, 0
			if f.id == tg.frame {
				f.target = tg.parent
				continue
			}
			t.remove(f)
		}
	}
}

func (t *Tab) remove(f *frame) {
	t.dropChildren(f)
	f.gone = true
	delete(t.frames, f.id)
}

func (t *Tab) dropChildren(f *frame) {
	for _, c := range t.frames {
		if c.parentID == f.id {
			t.remove(c)
		}
	}
}

// frameEvent handles events about frames, documents and contexts.
func (t *Tab) frameEvent(tg *target, ev cdp.Event) error {
	var p struct {
		Frame         frameInfo `json:"frame"`
		Type          string    `json:"type"`
		FrameID       string    `json:"frameId"`
		ParentFrameID string    `json:"parentFrameId"`
		LoaderID      string    `json:"loaderId"`
		URL           string    `json:"url"`
		Reason        string    `json:"reason"`
		Name          string    `json:"name"`
		Disposition   string    `json:"disposition"`
		// NavigationType is set by frameStartedNavigating only.
		NavigationType string `json:"navigationType"`
		ContextID      int    `json:"executionContextId"`
		Context        struct {
			ID      int    `json:"id"`
			Name    string `json:"name"`
			AuxData struct {
				FrameID   string `json:"frameId"`
				IsDefault bool   `json:"isDefault"`
			} `json:"auxData"`
		} `json:"context"`
	}
	if err := json.Unmarshal(ev.Params, &p); err != nil {
		return err
	}
	f := t.frames[p.FrameID]
	isMain := f != nil && f == t.main
	switch ev.Method {
	case "Page.frameAttached":
		if f == nil {
			if t.frames[p.ParentFrameID] != nil {
				t.add(p.FrameID, p.ParentFrameID, tg)
			}
		} else if f.target != tg && f.target != nil && f.target.parent == tg {
			f.target, f.page, f.world = tg, 0, 0 // back from its own process
		}
	case "Page.frameDetached":
		// A session whose own topmost frame goes away ends; its parent's
		// says whether the frame is gone.
		if f != nil && p.Reason != "swap" && (tg.frame != f.id || tg.parent == nil) {
			t.remove(f)
		}
	case "Page.frameNavigated":
		t.navigated(tg, p.Frame, p.Type)
	case "Page.navigatedWithinDocument":
		if f != nil {
			f.url = p.URL
		}
		if isMain {
			t.commits++
			t.requested = time.Time{}
		}
	case "Page.frameRequestedNavigation":
		if isMain && p.Disposition == "currentTab" {
			t.requested = time.Now()
			t.navigations++
		}
	case "Page.frameStartedNavigating", "Page.frameStartedLoading":
		if !isMain || p.NavigationType == "sameDocument" || p.NavigationType == "historySameDocument" {
			return nil
		}
		if !t.navigating || p.NavigationType != "" {
			t.navigations++
		}
		t.navigating, t.requested = true, time.Time{}
	case "Page.frameStoppedLoading":
		if isMain {
			t.navigating, t.requested = false, time.Time{}
		}
	case "Page.lifecycleEvent":
		if f == nil || f.target != tg {
			return nil
		}
		switch p.Name {
		case "DOMContentLoaded":
			if f.loader == p.LoaderID {
				f.ready = true
			}
		case "load":
			if f.loader == p.LoaderID {
				f.ready, f.loaded = true, true
			}
		default:
			return nil
		}
	case "Runtime.executionContextCreated":
		if f = t.frames[p.Context.AuxData.FrameID]; f == nil || f.target != tg {
			return nil
		}
		switch {
		case p.Context.AuxData.IsDefault:
			f.page = p.Context.ID
		case p.Context.Name == worldName:
			f.world = p.Context.ID
		}
	case "Runtime.executionContextDestroyed":
		for _, f := range t.frames {
			if f.target != tg {
				continue
			}
			if f.page == p.ContextID {
				f.page = 0
			}
			if f.world == p.ContextID {
				f.world = 0
			}
		}
	case "Runtime.executionContextsCleared":
		for _, f := range t.frames {
			if f.target == tg {
				f.page, f.world = 0, 0
			}
		}
	default:
		return nil
	}
	t.b.notify()
	return nil
}

// navigated takes over a committed document.
func (t *Tab) navigated(tg *target, info frameInfo, kind string) {
	f := t.frames[info.ID]
	if f == nil {
		switch {
		case info.ParentID != "" && t.frames[info.ParentID] != nil:
			f = t.add(info.ID, info.ParentID, tg)
		case info.ParentID == "" && tg.parent == nil:
			if t.main != nil { // another frame took the main one's place
				seq := t.main.seq
				t.remove(t.main)
				f = t.add(info.ID, "", tg)
				f.seq = seq
			} else {
				f = t.add(info.ID, "", tg)
			}
		}
		if f == nil {
			return
		}
	}
	t.dropChildren(f)
	t.leaveDocument(f)
	f.target, f.url, f.loader, f.old = tg, info.where(), info.LoaderID, false
	restored := kind == "BackForwardCacheRestore" // it will not say so again
	f.ready, f.loaded = restored, restored
	if f != t.main {
		return
	}
	t.commits++
	t.documents++
	t.errors, t.warnings = 0, 0
	t.crashed = false
	t.status = t.answers[info.LoaderID]
	clear(t.answers)
	for id, r := range t.requests {
		if r.loader != info.LoaderID {
			delete(t.requests, id)
		}
	}
}

// errContextGone says that the document asked has been replaced.
var errContextGone = errors.New("the document was replaced")

// codeServerError is CDP's one code for most refusals. From Runtime.evaluate and
// its like with a known-good command it means that the context is no more.
const codeServerError = -32000

// contextGone reports whether a Runtime call failed for want of its context.
func contextGone(err error) bool {
	var ce *cdp.CallError
	return errors.Is(err, errContextGone) || errors.Is(err, cdp.ErrSessionGone) ||
		errors.As(err, &ce) && ce.Code == codeServerError
}

// walker returns the session and context in which to talk to a frame's walker.
func (t *Tab) walker(ctx context.Context, f *frame) (*cdp.Session, int, error) {
	t.b.mu.Lock()
	s, world, gone := f.target.session, f.world, f.gone
	t.b.mu.Unlock()
	if gone {
		return nil, 0, errContextGone
	}
	if world != 0 {
		return s, world, nil
	}
	var r struct {
		ContextID int `json:"executionContextId"`
	}
	err := s.Call(ctx, "Page.createIsolatedWorld", map[string]any{"frameId": f.id, "worldName": worldName}, &r)
	if err != nil {
		if contextGone(err) {
			err = errContextGone
		}
		return nil, 0, err
	}
	t.b.mu.Lock()
	if f.target.session == s && f.world == 0 {
		f.world = r.ContextID
	}
	t.b.mu.Unlock()
	return s, r.ContextID, nil
}

// remoteObject is what Runtime calls answer with. Value is decoded in place
// into what the caller put there.
type remoteObject struct {
	Type      string          `json:"type"`
	Subtype   string          `json:"subtype"`
	ClassName string          `json:"className"`
	Text      string          `json:"description"`
	ObjectID  string          `json:"objectId"`
	Raw       string          `json:"unserializableValue"`
	Value     any             `json:"value"`
	Deep      json.RawMessage `json:"deepSerializedValue"`
}

type evaluation struct {
	Result    remoteObject `json:"result"`
	Exception *exception   `json:"exceptionDetails"`
}

type exception struct {
	Text       string       `json:"text"`
	Exception  remoteObject `json:"exception"`
	StackTrace *struct{}    `json:"stackTrace"`
}

func (e *exception) Error() string {
	if e.Exception.Text != "" {
		return e.Exception.Text
	}
	return e.Text
}

// ask calls a function of the walker in a frame and decodes its answer into
// out. It fails with errContextGone when the document is no more, and with a
// *walkerError when the walker answers one.
func (t *Tab) ask(ctx context.Context, f *frame, out any, function string, args ...any) error {
	expr, err := callExpression(function, args)
	if err != nil {
		return err
	}
	return t.script(ctx, f, out, expr)
}

// script evaluates an expression in the walker's world of a frame, as ask does.
func (t *Tab) script(ctx context.Context, f *frame, out any, expr string) error {
	for attempt := 0; ; attempt++ {
		s, world, err := t.walker(ctx, f)
		if err != nil {
			return err
		}
		var answer json.RawMessage
		ev := evaluation{Result: remoteObject{Value: &answer}}
		err = t.evaluate(ctx, f, s, world, map[string]any{
			"expression": expr, "contextId": world, "returnByValue": true, "awaitPromise": true,
		}, &ev)
		if err != nil {
			return err
		}
		if ev.Exception == nil {
			return decodeAnswer(answer, out)
		}
		if ev.Exception.Exception.ClassName != "ReferenceError" || attempt > 0 {
			return fmt.Errorf("walker: %w", ev.Exception)
		}
		var installed evaluation
		err = t.evaluate(ctx, f, s, world, map[string]any{"expression": "void " + walkerSource, "contextId": world}, &installed)
		if err != nil {
			return err
		}
		if installed.Exception != nil {
			return fmt.Errorf("walker: install: %w", installed.Exception)
		}
	}
}

// evaluate is one Runtime.evaluate; a context that is no more is forgotten.
func (t *Tab) evaluate(ctx context.Context, f *frame, s *cdp.Session, world int, params map[string]any, ev *evaluation) error {
	err := s.Call(ctx, "Runtime.evaluate", params, ev)
	if err == nil || !contextGone(err) {
		return err
	}
	if ferr := t.b.sub.Flush(ctx); ferr != nil {
		return ferr
	}
	t.b.mu.Lock()
	if f.world == world {
		f.world = 0
	}
	t.b.mu.Unlock()
	return errContextGone
}

func callExpression(function string, args []any) (string, error) {
	var sb strings.Builder
	sb.WriteString("abf." + function + "(")
	for i, a := range args {
		if i > 0 {
			sb.WriteByte(',')
		}
		j, err := json.Marshal(a)
		if err != nil {
			return "", fmt.Errorf("encode argument of %s: %w", function, err)
		}
		sb.Write(j)
	}
	sb.WriteByte(')')
	return sb.String(), nil
}

// walkerError is a failure that the walker answered.
type walkerError struct {
	Code       string `json:"code"`
	Message    string `json:"message"`
	Candidates []struct {
		Ref     string `json:"ref"`
		Role    string `json:"role"`
		Name    string `json:"name"`
		Locator string `json:"locator"`
	} `json:"candidates"`
}

func (e *walkerError) Error() string { return e.Message }

// errorPrefix starts every answer that is an error and nothing else: the
// walker's functions put no other member before it.
var errorPrefix = []byte(`{"error":`)

func decodeAnswer(answer json.RawMessage, out any) error {
	if len(answer) >= len(errorPrefix) && string(answer[:len(errorPrefix)]) == string(errorPrefix) {
		var e struct {
			Error walkerError `json:"error"`
		}
		if err := json.Unmarshal(answer, &e); err != nil {
			return fmt.Errorf("decode walker error: %w", err)
		}
		return &e.Error
	}
	if out == nil || len(answer) == 0 {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("decode walker answer: %w", err)
	}
	return nil
}

// onMain runs fn for the main frame and again for the next document when the
// one it talked to was replaced, for the action timeout.
func (t *Tab) onMain(ctx context.Context, fn func(context.Context, *frame) error) error {
	deadline := time.Now().Add(t.b.opts.ActionTimeout)
	for {
		f, err := t.mainFrame(ctx)
		if err != nil {
			return err
		}
		t.b.mu.Lock()
		documents := t.documents
		t.b.mu.Unlock()
		if err = fn(ctx, f); !errors.Is(err, errContextGone) || time.Now().After(deadline) {
			return err
		}
		// Talk to the next document when it is there. If it does not say so,
		// the next attempt finds out.
		err = t.until(ctx, replaceWait, func() bool {
			return t.closed || t.documents > documents && t.main.world != 0
		})
		if err != nil {
			return err
		}
	}
}

// replaceWait is how long a document that is being replaced may leave the tab
// without another before it is asked again.
const replaceWait = 250 * time.Millisecond

// mainFrame returns the main frame, waiting for a page that was only just
// attached.
func (t *Tab) mainFrame(ctx context.Context) (*frame, error) {
	wait, cancel := context.WithTimeout(ctx, t.b.opts.ActionTimeout)
	defer cancel()
	var f *frame
	err := t.b.await(wait, func() bool { f = t.main; return f != nil || t.closed })
	switch {
	case err == nil && f == nil:
		return nil, errTabClosed
	case err != nil && ctx.Err() == nil && wait.Err() != nil:
		return nil, errSilent
	}
	return f, err
}
