package page

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// deliveryWait bounds how long a page may take to work through one batch of
// input. A page that is busy for longer gets it nevertheless.
const deliveryWait = 5 * time.Second

// slack is what a wait in the page may take longer than it was told to.
const slack = 2 * time.Second

// action is one action at work: it has the tab's turn, the page is awake, and a
// context that ends with it.
type action struct {
	t    *Tab
	op   string
	ctx  context.Context
	base baseline
	ends []func()
	// linger keeps the turn after the action has returned, until it is closed.
	linger <-chan struct{}
}

// begin takes the turn for an action. op is its verb and object for errors.
func (t *Tab) begin(ctx context.Context, op string) (*action, error) {
	if err := t.take(ctx); err != nil {
		return nil, t.b.explain(op, err)
	}
	a := &action{t: t, op: op}
	a.ends = append(a.ends, t.release)
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		a.end()
		return nil, t.b.explain(op, err)
	}
	a.ctx = ctx
	a.ends = append(a.ends, end)
	wakeCtx, cancel := context.WithTimeout(ctx, t.b.opts.ActionTimeout)
	defer cancel()
	doze, err := t.awake.hold(wakeCtx)
	if err != nil {
		a.end()
		return nil, t.b.explain(op, err)
	}
	a.ends = append(a.ends, doze)
	a.base = t.baseline()
	return a, nil
}

func (a *action) end() {
	finish := func() {
		for i := len(a.ends) - 1; i >= 0; i-- {
			a.ends[i]()
		}
	}
	if a.linger == nil {
		finish()
		return
	}
	go func() {
		<-a.linger
		finish()
	}()
}

// seek finds a target through a walker function that waits in the page, for the
// action timeout.
func (a *action) seek(target string, out any, function string, args ...any) (place, error) {
	ctx, cancel := context.WithTimeout(a.ctx, a.t.b.opts.ActionTimeout+slack)
	defer cancel()
	p, err := a.t.find(ctx, target, out, function, args...)
	if err != nil {
		return p, a.t.explain(a.op, target, err)
	}
	return p, nil
}

// input is one command of the Input domain.
type input struct {
	method string
	params map[string]any
}

// deliver sends input without waiting between the commands, and waits until the
// page has worked through it. Input that opens a dialog, ends the tab or leaves
// the page has done its work.
func (a *action) deliver(batch []input) error {
	ctx, cancel := context.WithTimeout(a.ctx, deliveryWait)
	defer cancel()
	s := a.t.target.session
	sent := make([]*cdp.Pending, len(batch))
	for i, in := range batch {
		// Once begun, all of it is sent: half a click leaves a button down.
		sent[i] = s.Start(context.WithoutCancel(ctx), in.method, in.params)
	}
	for _, p := range sent {
		err := p.Wait(ctx, nil)
		var ce *cdp.CallError
		switch {
		case err == nil, ended(err), errors.Is(err, cdp.ErrSessionGone):
		case errors.As(err, &ce) && ce.Code == codeServerError:
			// The page that was to answer has been left.
		case errors.Is(err, cdp.ErrClosed):
			return fault.Wrap(err, fault.EffectUnknown, a.op, "take a snapshot to see whether it took effect")
		case errors.Is(err, context.DeadlineExceeded) && a.ctx.Err() == nil:
			return fault.New(fault.EffectUnknown, a.op, "take a snapshot to see whether it took effect",
				"the page did not answer the input within %v", deliveryWait)
		default:
			return a.t.b.explain(a.op, err)
		}
	}
	return nil
}

// settle waits for the consequences of the action.
func (a *action) settle() error {
	return a.t.b.explain(a.op, a.t.settle(a.ctx, a.base))
}

// point is where an element takes a press.
type point struct {
	element
	X float64 `json:"x"`
	Y float64 `json:"y"`
}

// aim waits until the target takes a press and returns where that is in the
// page's viewport.
func (a *action) aim(target string, force bool) (point, Located, error) {
	t := a.t
	deadline := time.Now().Add(t.b.opts.ActionTimeout)
	for {
		var pt point
		opts := map[string]any{"timeout": milliseconds(max(time.Until(deadline), time.Millisecond)), "force": force}
		p, err := a.seek(target, &pt, "point", opts)
		if err != nil {
			return pt, Located{}, err
		}
		x, y, err := t.toPage(a.ctx, p.frame, pt.X, pt.Y)
		if err == nil && t.remote(p.frame) {
			// Another process scrolls the pages around its frame later, and
			// input finds the frame where it was last painted.
			for again := true; again && err == nil; {
				t.paint(a.ctx)
				var nx, ny float64
				nx, ny, err = t.toPage(a.ctx, p.frame, pt.X, pt.Y)
				again = (nx != x || ny != y) && time.Now().Before(deadline)
				x, y = nx, ny
			}
		}
		if err == nil {
			pt.X, pt.Y = x, y
			return pt, p.located(pt.element), nil
		}
		// Something may cover or move the frame for the moment only.
		var we *walkerError
		retry := errors.Is(err, errContextGone) || errors.As(err, &we)
		if !retry || time.Now().After(deadline) {
			return pt, Located{}, t.explain(a.op, target, err)
		}
		t.paint(a.ctx)
		if err := context.Cause(a.ctx); err != nil {
			return pt, Located{}, t.b.explain(a.op, err)
		}
	}
}

// remote reports whether a frame or one around it runs in another process than
// the page.
func (t *Tab) remote(f *frame) bool {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return f.target != t.target
}

// toPage turns a point of a frame's viewport into one of the page's, checking
// on the way that each frame receives the press there.
func (t *Tab) toPage(ctx context.Context, f *frame, x, y float64) (float64, float64, error) {
	for {
		parent, err := t.parentOf(f)
		if err != nil || parent == nil {
			return x, y, err
		}
		o, err := t.owner(ctx, f, parent)
		if err != nil {
			return 0, 0, err
		}
		var r struct{ X, Y float64 }
		if err := t.ask(ctx, parent, &r, "frameOffset", o.Handle, map[string]any{"x": x, "y": y}); err != nil {
			return 0, 0, err
		}
		x, y, f = r.X, r.Y, parent
	}
}

var buttons = map[string]int{"left": 1, "right": 2, "middle": 4}

// Click presses and releases a mouse button on the target once it is visible,
// stable, enabled and receives the press, and settles. When the click opens a
// dialog, the result is nil and State has the dialog.
func (t *Tab) Click(ctx context.Context, target string, o ClickOptions) (Located, error) {
	op := "click " + quote(target)
	button := o.Button
	if button == "" {
		button = "left"
	}
	bit, ok := buttons[button]
	if !ok {
		return Located{}, fault.New(fault.InvalidArgument, op, "use left, right or middle", "unknown button %s", quote(button))
	}
	keys, mask, err := modifierKeys(o.Modifiers)
	if err != nil {
		return Located{}, fault.New(fault.InvalidArgument, op, "use Alt, Control, ControlOrMeta, Meta or Shift", "%w", err)
	}
	a, err := t.begin(ctx, op)
	if err != nil {
		return Located{}, err
	}
	defer a.end()
	pt, loc, err := a.aim(target, o.Force)
	if err != nil {
		return loc, err
	}
	mouse := func(kind string, buttons, count int) input {
		p := map[string]any{"type": kind, "x": pt.X, "y": pt.Y, "modifiers": mask, "buttons": buttons, "clickCount": count}
		if count > 0 {
			p["button"] = button
		}
		return input{"Input.dispatchMouseEvent", p}
	}
	var batch []input
	held := 0
	for _, k := range keys {
		held |= k.modifier()
		batch = append(batch, k.event("rawKeyDown", held))
	}
	batch = append(batch, mouse("mouseMoved", 0, 0))
	clicks := 1
	if o.Double {
		clicks = 2
	}
	for n := 1; n <= clicks; n++ {
		batch = append(batch, mouse("mousePressed", bit, n), mouse("mouseReleased", 0, n))
	}
	for i := len(keys) - 1; i >= 0; i-- {
		held &^= keys[i].modifier()
		batch = append(batch, keys[i].event("keyUp", held))
	}
	if err := a.deliver(batch); err != nil {
		return loc, err
	}
	return loc, a.settle()
}

// fillKind is what prepareFill answers.
type fillKind struct {
	element
	Kind string `json:"kind"`
}

// Fill makes text the content of a text field or contenteditable element, firing
// the events that typing would. It does not settle.
func (t *Tab) Fill(ctx context.Context, target, text string) (Located, error) {
	a, err := t.begin(ctx, "type into "+quote(target))
	if err != nil {
		return Located{}, err
	}
	defer a.end()
	var k fillKind
	p, err := a.seek(target, &k, "prepareFill", text, map[string]any{"timeout": milliseconds(t.b.opts.ActionTimeout)})
	if err != nil {
		return Located{}, err
	}
	loc := p.located(k.element)
	switch {
	case k.Kind == "done":
		return loc, nil
	case text == "":
		return loc, a.deliver(stroke(keyTable["Delete"], 0))
	default:
		return loc, a.deliver([]input{{"Input.insertText", map[string]any{"text": text}}})
	}
}

// strokesAtOnce is how many key strokes are on their way at the same time.
const strokesAtOnce = 16

// TypeSlowly focuses the target and presses one key per character, and settles.
// Characters that no key of a US keyboard makes are inserted.
func (t *Tab) TypeSlowly(ctx context.Context, target, text string) (Located, error) {
	a, err := t.begin(ctx, "type into "+quote(target))
	if err != nil {
		return Located{}, err
	}
	defer a.end()
	var k fillKind
	p, err := a.seek(target, &k, "prepareType", map[string]any{"timeout": milliseconds(t.b.opts.ActionTimeout)})
	if err != nil {
		return Located{}, err
	}
	loc := p.located(k.element)
	var batch []input
	n := 0
	for _, r := range text {
		if key, ok := keyForRune(r); ok {
			batch = append(batch, stroke(key, 0)...)
		} else {
			batch = append(batch, input{"Input.insertText", map[string]any{"text": string(r)}})
		}
		if n++; n%strokesAtOnce == 0 {
			if err := a.deliver(batch); err != nil {
				return loc, err
			}
			if err := context.Cause(a.ctx); err != nil {
				break // a dialog opened: the rest would go nowhere
			}
			batch = batch[:0]
		}
	}
	if err := a.deliver(batch); err != nil {
		return loc, err
	}
	return loc, a.settle()
}

// Press presses a key, or a chord such as Control+A, on whatever has the focus.
// It settles after Enter, which may submit something.
func (t *Tab) Press(ctx context.Context, key string) error {
	op := "press " + quote(key)
	keys, err := parseChord(key)
	if err != nil {
		return fault.New(fault.InvalidArgument, op, "use a key name such as Enter or ArrowLeft, or a character, after modifiers joined by +", "%w", err)
	}
	a, err := t.begin(ctx, op)
	if err != nil {
		return err
	}
	defer a.end()
	if err := a.deliver(chord(keys)); err != nil {
		return err
	}
	if last := keys[len(keys)-1]; last.key != "Enter" {
		return nil
	}
	return a.settle()
}

// WaitTime waits, at most MaxWait.
func (t *Tab) WaitTime(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(min(d, MaxWait))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return t.b.explain("wait", context.Cause(ctx))
	case <-t.b.done:
		return t.b.explain("wait", t.b.Err())
	}
}

// MaxWait is the longest WaitTime.
const MaxWait = 30 * time.Second

// WaitForText waits until text is visible in the page or one of its frames, for
// the action timeout.
func (t *Tab) WaitForText(ctx context.Context, text string) error {
	return t.waitText(ctx, text, false, "appear")
}

// WaitForTextGone waits until text is visible nowhere in the page.
func (t *Tab) WaitForTextGone(ctx context.Context, text string) error {
	return t.waitText(ctx, text, true, "disappear")
}

func (t *Tab) waitText(ctx context.Context, text string, gone bool, verb string) error {
	op := fmt.Sprintf("wait for %s to %s", quote(text), verb)
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		return t.b.explain(op, err)
	}
	defer end()
	limit := t.b.opts.ActionTimeout
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if gone {
		err = t.textGone(wait, text)
	} else {
		err = t.textAppears(wait, text)
	}
	if err != nil && ctx.Err() == nil && wait.Err() != nil {
		return fault.New(fault.Timeout, op, "take a snapshot to see what the page shows", "it did not within %v", limit)
	}
	return t.b.explain(op, err)
}

// textMet asks one frame to wait for a text, until ctx ends at the latest.
func (t *Tab) textMet(ctx context.Context, f *frame, text string, gone bool) (bool, error) {
	var r struct {
		Met bool `json:"met"`
	}
	left := t.b.opts.ActionTimeout
	if d, ok := ctx.Deadline(); ok {
		left = time.Until(d)
	}
	err := t.ask(ctx, f, &r, "waitForText", text, map[string]any{"gone": gone, "timeout": milliseconds(max(left, time.Millisecond))})
	return r.Met, err
}

// textAppears has every frame look for the text, frames that come later too.
func (t *Tab) textAppears(ctx context.Context, text string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type key struct {
		f     *frame
		world int
	}
	asked := make(map[key]bool)
	met := make(chan struct{}, 1)
	found := false
	next := func() []*frame { // frames whose document was not asked yet
		var list []*frame
		for _, f := range t.frames {
			if k := (key{f, f.world}); f.world != 0 && !asked[k] && len(asked) < maxFrames {
				asked[k] = true
				list = append(list, f)
			}
		}
		return list
	}
	// A page whose walker was never made, such as one attached to while it
	// was busy, gets it now.
	if f, err := t.mainFrame(ctx); err != nil {
		return err
	} else if _, _, err := t.walker(ctx, f); err != nil && !errors.Is(err, errContextGone) {
		return err
	}
	for {
		var list []*frame
		err := t.b.await(ctx, func() bool {
			select {
			case <-met:
				found = true
			default:
			}
			list = next()
			return found || len(list) > 0
		})
		if err != nil || found {
			return err
		}
		for _, f := range list {
			go func() {
				ok, err := t.textMet(ctx, f, text, false)
				if err != nil || !ok {
					return // replaced, or out of time: its successor is asked
				}
				select {
				case met <- struct{}{}:
				default:
				}
				t.b.mu.Lock()
				t.b.notify()
				t.b.mu.Unlock()
			}()
		}
	}
}

// textGone asks the frames one after the other until none shows the text. A
// frame that had to be waited for makes it ask the others again.
func (t *Tab) textGone(ctx context.Context, text string) error {
	for {
		t.b.mu.Lock()
		frames := slices.Collect(maps.Values(t.frames))
		documents := t.documents
		t.b.mu.Unlock()
		clean := true
		for _, f := range frames {
			began := time.Now()
			met, err := t.textMet(ctx, f, text, true)
			switch {
			case errors.Is(err, errContextGone):
				clean = false
			case err != nil:
				return err
			case !met:
				return context.DeadlineExceeded
			case len(frames) > 1 && time.Since(began) > framesWait:
				clean = false
			}
		}
		t.b.mu.Lock()
		clean = clean && documents == t.documents
		t.b.mu.Unlock()
		if clean {
			return nil
		}
		t.paint(ctx)
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
}
