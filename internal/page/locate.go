package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// refPattern is what refs look like in snapshots of the main document and of
// later documents and child frames.
var refPattern = regexp.MustCompile(`^(?:f([0-9]{1,9}))?e[0-9]{1,9}$`)

// element is what the walker says about an element it found.
type element struct {
	Handle  string `json:"handle"`
	Ref     string `json:"ref"`
	Role    string `json:"role"`
	Name    string `json:"name"`
	Locator string `json:"locator"`
}

// place is where a target is looked for: a frame, the target as that frame's
// walker understands it, and the code that leads into the frame.
type place struct {
	frame  *frame
	target string
	prefix string
}

func (p place) located(e element) Located {
	return Located{Code: p.prefix + e.Locator, Role: e.Role, Name: e.Name, Ref: e.Ref}
}

// place finds the frame of a target.
func (t *Tab) place(ctx context.Context, target string) (place, error) {
	if m := refPattern.FindStringSubmatch(target); m != nil {
		k := 0
		if m[1] != "" {
			k, _ = strconv.Atoi(m[1]) // nine digits fit
		}
		if err := t.b.sub.Flush(ctx); err != nil {
			return place{}, err
		}
		if err := t.learnPrefixes(ctx); err != nil {
			return place{}, err
		}
		t.b.mu.Lock()
		var f *frame
		for _, o := range t.frames {
			if o.seq == k {
				f = o
				break
			}
		}
		t.b.mu.Unlock()
		if f == nil {
			return place{}, &walkerError{Code: "stale_ref"}
		}
		prefix, err := t.framePrefix(ctx, f)
		return place{frame: f, target: target, prefix: prefix}, err
	}
	f, err := t.mainFrame(ctx)
	if err != nil {
		return place{}, err
	}
	p := place{frame: f, target: target}
	for strings.Contains(p.target, "contentFrame(") || strings.Contains(p.target, "frameLocator(") || strings.Contains(p.target, "enter-frame") {
		var r struct {
			Frame *struct {
				Handle, Locator, Rest string
			} `json:"frame"`
		}
		if err := t.ask(ctx, p.frame, &r, "resolve", p.target); err != nil {
			return p, err
		}
		if r.Frame == nil {
			return p, nil
		}
		child, err := t.contentFrame(ctx, p.frame, r.Frame.Handle)
		if err != nil {
			return p, err
		}
		if child == nil {
			return p, &walkerError{Code: "not_found"}
		}
		p = place{frame: child, target: r.Frame.Rest, prefix: p.prefix + r.Frame.Locator + ".contentFrame()."}
	}
	return p, nil
}

// prefixWait is how long the documents that were there before us may take to
// say what prefix their refs have.
const prefixWait = 500 * time.Millisecond

// seqVariable keeps k of a document's ref prefix in the walker's world, for
// those who come to the document later: a service that was restarted must know
// the refs that agents have, and give no prefix to two documents.
const seqVariable = "globalThis.abfSeq"

// learnPrefixes asks the documents that were there before us for the prefix of
// their refs. It comes before any ref is given out or looked for.
func (t *Tab) learnPrefixes(ctx context.Context) error {
	t.b.mu.Lock()
	var asked []*frame
	for _, f := range t.frames {
		if f.old {
			asked = append(asked, f)
		}
	}
	t.b.mu.Unlock()
	if len(asked) == 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, prefixWait)
	defer cancel()
	var wg sync.WaitGroup
	found := make([]*int, len(asked))
	for i, f := range asked {
		wg.Go(func() {
			// A document that does not say has given out no refs, or hangs.
			_ = t.script(wait, f, &found[i], seqVariable)
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	taken := make(map[int]bool)
	for i, f := range asked {
		if k := found[i]; k != nil && f.old && !taken[*k] {
			f.seq = *k
			taken[f.seq] = true
			t.nextSeq = max(t.nextSeq, f.seq)
		}
	}
	learned := make(map[*frame]bool)
	for i, f := range asked {
		learned[f] = found[i] != nil
		f.old = false
	}
	for _, f := range t.frames { // whose number turned out to be taken
		if !learned[f] && taken[f.seq] {
			t.nextSeq++
			f.seq = t.nextSeq
		}
	}
	return nil
}

// framePrefix is the locator code that leads from the page into a frame.
func (t *Tab) framePrefix(ctx context.Context, f *frame) (string, error) {
	prefix := ""
	for {
		parent, err := t.parentOf(f)
		if err != nil || parent == nil {
			return prefix, err
		}
		o, err := t.owner(ctx, f, parent)
		if err != nil {
			return "", err
		}
		prefix = o.Locator + ".contentFrame()." + prefix
		f = parent
	}
}

// contentFrame finds the frame inside an iframe element; nil when it is not
// followed.
func (t *Tab) contentFrame(ctx context.Context, f *frame, handle string) (*frame, error) {
	id, session, err := t.object(ctx, f, handle)
	if err != nil {
		return nil, err
	}
	defer session.Start(ctx, "Runtime.releaseObject", map[string]any{"objectId": id})
	var d struct {
		Node struct {
			FrameID string `json:"frameId"`
		} `json:"node"`
	}
	err = session.Call(ctx, "DOM.describeNode", map[string]any{"objectId": id, "depth": 0}, &d)
	if err != nil {
		if contextGone(err) {
			err = errContextGone
		}
		return nil, err
	}
	if err := t.b.sub.Flush(ctx); err != nil {
		return nil, err
	}
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return t.frames[d.Node.FrameID], nil
}

// object gets the remote object of an element in the walker's world.
func (t *Tab) object(ctx context.Context, f *frame, target string) (string, *cdp.Session, error) {
	s, world, err := t.walker(ctx, f)
	if err != nil {
		return "", nil, err
	}
	expr, err := callExpression("element", []any{target})
	if err != nil {
		return "", nil, err
	}
	var ev evaluation
	if err := t.evaluate(ctx, f, s, world, map[string]any{"expression": expr, "contextId": world}, &ev); err != nil {
		return "", nil, err
	}
	if ev.Exception != nil {
		return "", nil, fmt.Errorf("walker: element: %w", ev.Exception)
	}
	if ev.Result.ObjectID == "" {
		return "", nil, &walkerError{Code: "detached", Message: "the element has left the document"}
	}
	return ev.Result.ObjectID, s, nil
}

// owner finds the iframe element of a child frame in its parent's walker.
func (t *Tab) owner(ctx context.Context, f, parent *frame) (owner, error) {
	s, world, err := t.walker(ctx, parent)
	if err != nil {
		return owner{}, err
	}
	t.b.mu.Lock()
	o, known := f.owner, f.ownerWorld == world
	t.b.mu.Unlock()
	if known {
		return o, nil
	}
	id, err := t.ownerObject(ctx, f, s, world)
	if err != nil {
		return owner{}, err
	}
	defer s.Start(ctx, "Runtime.releaseObject", map[string]any{"objectId": id})
	ev := evaluation{Result: remoteObject{Value: &o}}
	err = s.Call(ctx, "Runtime.callFunctionOn", map[string]any{
		"functionDeclaration": "function(){return abf.describeElement(this)}", "objectId": id, "returnByValue": true,
	}, &ev)
	if err == nil && ev.Exception != nil {
		err = fmt.Errorf("walker: describeElement: %w", ev.Exception)
	}
	if err != nil {
		if contextGone(err) {
			err = errContextGone
		}
		return owner{}, err
	}
	t.b.mu.Lock()
	f.owner, f.ownerWorld = o, world
	t.b.mu.Unlock()
	return o, nil
}

// ownerObject gets the iframe element of a child frame as a remote object of a
// world of the parent.
func (t *Tab) ownerObject(ctx context.Context, f *frame, parent *cdp.Session, world int) (string, error) {
	var own struct {
		BackendNodeID int `json:"backendNodeId"`
	}
	err := parent.Call(ctx, "DOM.getFrameOwner", map[string]any{"frameId": f.id}, &own)
	if err == nil {
		var r struct {
			Object remoteObject `json:"object"`
		}
		err = parent.Call(ctx, "DOM.resolveNode", map[string]any{"backendNodeId": own.BackendNodeID, "executionContextId": world}, &r)
		if err == nil {
			return r.Object.ObjectID, nil
		}
	}
	if contextGone(err) {
		err = errContextGone
	}
	return "", err
}

// find calls a walker function that looks for a target and answers an element,
// in the right frame, again when a document is replaced meanwhile. A target that
// is only looked at is looked for anew on the next document; a ref of the old
// one is then unknown.
func (t *Tab) find(ctx context.Context, target string, out any, function string, args ...any) (place, error) {
	var p place
	err := t.onMain(ctx, func(ctx context.Context, _ *frame) error {
		var err error
		if p, err = t.place(ctx, target); err != nil {
			return err
		}
		return t.ask(ctx, p.frame, out, function, append([]any{p.target}, args...)...)
	})
	return p, err
}

// explain is Browser.explain for what went wrong with a target.
func (t *Tab) explain(op, target string, err error) error {
	var we *walkerError
	if !errors.As(err, &we) {
		if errors.Is(err, errContextGone) {
			return fault.New(fault.TargetNotFound, op, "take a new snapshot once the page has settled", "the page keeps replacing its document")
		}
		return t.b.explain(op, err)
	}
	switch we.Code {
	case "stale_ref":
		return fault.New(fault.TargetNotFound, op, "take a new snapshot and use its refs",
			"Ref %s not found in the current page snapshot. Try capturing new snapshot.", target)
	case "not_found":
		return fault.New(fault.TargetNotFound, op, "take a snapshot and use a ref from it",
			"%s does not match any elements.", quote(target))
	case "ambiguous":
		var sb strings.Builder
		sb.WriteString(we.Message)
		for _, c := range we.Candidates {
			sb.WriteString("\n- " + c.Role)
			if c.Name != "" {
				sb.WriteString(" " + quote(c.Name))
			}
			if c.Ref != "" {
				sb.WriteString(" [ref=" + c.Ref + "]")
			}
			if c.Locator != "" {
				sb.WriteString(" " + c.Locator)
			}
		}
		return fault.New(fault.TargetAmbiguous, op, "use one of the listed refs or locators", "%s", sb.String())
	case "bad_selector":
		return fault.New(fault.InvalidArgument, op, "use a ref from a snapshot, a CSS selector or a Playwright locator", "%s", we.Message)
	case "bad_value":
		return fault.New(fault.InvalidArgument, op, "use a value that the field accepts", "%s", we.Message)
	default:
		return fault.New(fault.TargetNotActionable, op, "take a snapshot to see the state of the page", "%s", we.Message)
	}
}

// quote is a JSON string without HTML escapes.
func quote(s string) string {
	var sb strings.Builder
	enc := json.NewEncoder(&sb)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return strconv.Quote(s)
	}
	return strings.TrimSuffix(sb.String(), "\n")
}

// milliseconds is a duration as the walker takes it.
func milliseconds(d time.Duration) int64 { return d.Milliseconds() }

// refPrefix is the prefix of the refs of a frame's document.
func refPrefix(seq int) string {
	if seq == 0 {
		return ""
	}
	return "f" + strconv.Itoa(seq)
}
