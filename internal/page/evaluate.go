package page

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// Bounds of stopping a function that was given up.
const (
	// probeWait is how long a page may take to answer before the script that
	// holds it is terminated.
	probeWait = 150 * time.Millisecond
	// stopWait bounds the whole of it.
	stopWait = 3 * time.Second
)

// measure counts what a result would take to send, up to a limit, so that a
// result of any size costs no more than that. It uses nothing that the page
// could have replaced but where it says so.
const measure = `const size=(v,d)=>{if(d>deepest)deepest=d;
if(typeof v==='string'){n+=v.length}else if(typeof v==='object'&&v!==null&&d<200){
if(typeof v.nodeType==='number'||v===v.window)return;
path[d]=v;if(d>DEEP)for(let i=0;i<d;i++)if(path[i]===v){ring=true;return}
for(const k in v){n+=k.length+16;if(n>LIMIT)return;size(v[k],d+1)}}
n+=8};const path=[];let n=0,deepest=0,ring=false;try{size(r,0)}catch{n=deepest=0}
const limit=n=>{if(n>LIMIT)throw new RangeError('the result is larger than '+LIMIT+' bytes')};limit(n);
if(deepest>DEEP&&!ring){const text=JSON.stringify(r,null,deepest<200?2:0);limit(text.length);return{TEXT:text}}`

// maxNesting is how deep a result may nest to be sent as a value: a message of
// CDP nests at most 300 levels, and a level of a value takes three of them. A
// deeper one is sent as text, which is all that the page's own JSON is used for.
const maxNesting = 60

// wrap makes the expression that is evaluated in the page. source is a function,
// called with args, or an expression, taken as it is; it sees none of our names.
func wrap(source, args string, limit int, key string) string {
	return "(async(f,...a)=>{const r=typeof f==='function'?await f(...a):await f;" +
		strings.NewReplacer("LIMIT", strconv.Itoa(limit), "DEEP", strconv.Itoa(maxNesting), "TEXT", key).Replace(measure) + "return r})((" + source + "\n)" + args + ")"
}

// Evaluate runs a function in the page's own world, or in that of the target's
// frame with the element as argument, and returns its result as indented JSON,
// or "undefined". An expression or statements do as well. The result is "" when
// the function opened a dialog: it goes on when that is answered. The page is
// settled only if the function changed it or began something.
func (t *Tab) Evaluate(ctx context.Context, function, target string) (string, Located, error) {
	const op = "evaluate function"
	caller := ctx
	a, err := t.begin(ctx, op)
	if err != nil {
		return "", Located{}, err
	}
	defer a.end()
	limited, cancel := context.WithTimeout(a.ctx, t.b.opts.EvaluateTimeout)
	defer cancel()

	var (
		loc     Located
		p       place
		session *cdp.Session
		object  string
		world   int
	)
	if target == "" {
		if p.frame, err = t.mainFrame(limited); err == nil {
			session, world, err = t.pageWorld(limited, p.frame)
		}
	} else {
		var e element
		if p, err = t.find(limited, target, &e, "resolve"); err == nil {
			loc = p.located(e)
			session, world, object, err = t.pageObject(limited, p.frame, e.Handle)
		}
	}
	if err != nil {
		return "", loc, t.explain(op, target, err)
	}

	// The walker watches the document meanwhile. All of it is sent in one go
	// and worked through in order.
	watch := t.watch(limited, p.frame)
	key := "text" + rand.Text() // no page can name it
	ev, err := t.run(limited, session, world, object, function, key)
	if err != nil {
		switch {
		case errors.Is(err, errDialog):
			return "", loc, nil
		case ended(err), errors.Is(err, cdp.ErrClosed):
			return "", loc, t.b.explain(op, err)
		case tooDeep(err):
			return "", loc, fault.New(fault.EvaluationFailed, op, "return less, or a simpler value", "the result is nested too deeply")
		case contextGone(err):
			// What ended the document shows a little later.
			why := t.until(a.ctx, answerWait, func() bool { return t.documents > a.base.documents })
			if why == nil {
				why = a.settle()
			}
			if why == nil {
				why = context.Cause(a.ctx)
			}
			if why != nil {
				return "", loc, t.b.explain(op, why)
			}
			return "", loc, fault.New(fault.EvaluationFailed, op, "take a snapshot to see the page it led to",
				"the page navigated while the function ran, so that its result is lost")
		}
		a.linger = t.stop(session, world)
		if caller.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
			return "", loc, fault.New(fault.Timeout, op, "let the function do less, or not wait for so long",
				"it did not end within %v", t.b.opts.EvaluateTimeout)
		}
		return "", loc, t.b.explain(op, err)
	}
	text, err := t.format(limited, session, ev, key)
	if watch(limited) {
		err = errors.Join(err, a.settle())
	} else if ferr := t.b.sub.Flush(limited); ferr == nil && t.begun(a.base) {
		err = errors.Join(err, a.settle())
	}
	if err != nil {
		return "", loc, t.b.explain(op, err)
	}
	return text, loc, nil
}

// begun reports whether a navigation, a request or a page has begun since base.
func (t *Tab) begun(base baseline) bool {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return t.navigations > base.navigations || t.documents > base.documents || t.lastRequest > base.lastRequest ||
		len(t.opened(base.tabs)) > 0
}

// watch has the walker look out for changes of a frame's document. The returned
// function reports whether there were any; when in doubt, there were.
func (t *Tab) watch(ctx context.Context, f *frame) func(context.Context) bool {
	s, world, err := t.walker(ctx, f)
	if err != nil {
		return func(context.Context) bool { return true }
	}
	ask := func(ctx context.Context, expr string) *cdp.Pending {
		return s.Start(ctx, "Runtime.evaluate", map[string]any{"expression": expr, "contextId": world, "returnByValue": true})
	}
	first := ask(ctx, "globalThis.abfWatch=abf.watch()")
	return func(ctx context.Context) bool {
		ctx, cancel := context.WithTimeout(ctx, answerWait)
		defer cancel()
		second := ask(ctx, "abf.changed(globalThis.abfWatch)")
		var changed any
		ev := evaluation{Result: remoteObject{Value: &changed}}
		if first.Wait(ctx, nil) != nil || second.Wait(ctx, &ev) != nil || ev.Exception != nil {
			return true
		}
		quiet, ok := changed.(bool)
		return !ok || quiet
	}
}

// pageWorld returns the context of the page's own scripts in a frame.
func (t *Tab) pageWorld(ctx context.Context, f *frame) (*cdp.Session, int, error) {
	err := t.b.await(ctx, func() bool { return f.gone || f.page != 0 })
	if err != nil {
		return nil, 0, err
	}
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	if f.gone {
		return nil, 0, errContextGone
	}
	return f.target.session, f.page, nil
}

// pageObject makes an element known to the walker an object of the page's world.
func (t *Tab) pageObject(ctx context.Context, f *frame, handle string) (*cdp.Session, int, string, error) {
	id, s, err := t.object(ctx, f, handle)
	if err != nil {
		return nil, 0, "", err
	}
	defer s.Start(context.WithoutCancel(ctx), "Runtime.releaseObject", map[string]any{"objectId": id})
	_, world, err := t.pageWorld(ctx, f)
	if err != nil {
		return nil, 0, "", err
	}
	var d struct {
		Node struct {
			BackendNodeID int `json:"backendNodeId"`
		} `json:"node"`
	}
	if err := s.Call(ctx, "DOM.describeNode", map[string]any{"objectId": id, "depth": 0}, &d); err != nil {
		return nil, 0, "", err
	}
	var r struct {
		Object remoteObject `json:"object"`
	}
	err = s.Call(ctx, "DOM.resolveNode", map[string]any{
		"backendNodeId": d.Node.BackendNodeID, "executionContextId": world, "objectGroup": evaluateGroup,
	}, &r)
	return s, world, r.Object.ObjectID, err
}

// evaluateGroup holds the remote objects of one evaluation.
const evaluateGroup = "abf-evaluate"

// run evaluates source. A result that is too deep is text under key. What cannot
// be compiled as a function or expression has not run at all, and is tried as
// statements.
func (t *Tab) run(ctx context.Context, s *cdp.Session, world int, object, source, key string) (evaluation, error) {
	common := func(more map[string]any) map[string]any {
		more["awaitPromise"], more["userGesture"], more["objectGroup"] = true, true, evaluateGroup
		more["serializationOptions"] = map[string]any{
			"serialization": "deep", "additionalParameters": map[string]any{"maxNodeDepth": 0, "includeShadowTree": "none"},
		}
		return more
	}
	var ev evaluation
	if object != "" {
		err := s.Call(ctx, "Runtime.callFunctionOn", common(map[string]any{
			"functionDeclaration": "function(){return " + wrap(source, ",this", t.b.opts.MaxResult, key) + "}",
			"objectId":            object, "arguments": []map[string]any{{"objectId": object}},
		}), &ev)
		return ev, err
	}
	err := s.Call(ctx, "Runtime.evaluate", common(map[string]any{
		"expression": wrap(source, "", t.b.opts.MaxResult, key), "contextId": world,
	}), &ev)
	if err != nil || !ev.uncompiled() {
		return ev, err
	}
	var second evaluation
	err = s.Call(ctx, "Runtime.evaluate", common(map[string]any{
		"expression": source, "contextId": world, "replMode": true,
	}), &second)
	if err != nil || !second.uncompiled() {
		return second, err
	}
	return ev, nil
}

// uncompiled reports whether the source was refused before any of it ran.
func (e evaluation) uncompiled() bool {
	return e.Exception != nil && e.Exception.Exception.ClassName == "SyntaxError" && e.Exception.StackTrace == nil
}

// tooDeep reports whether a result nests deeper than a message of CDP may.
func tooDeep(err error) bool {
	var ce *cdp.CallError
	return errors.As(err, &ce) && strings.Contains(ce.Message, "stack limit exceeded")
}

// stop ends a function that was given up, so that the page can be used again.
// The returned channel closes when done.
func (t *Tab) stop(s *cdp.Session, world int) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), stopWait)
		defer cancel()
		defer s.Start(ctx, "Runtime.releaseObjectGroup", map[string]any{"objectGroup": evaluateGroup})
		t.unblock(ctx, s, world, probeWait)
	}()
	return done
}

// unblock terminates the script that holds a page which does not answer within
// a time. A page that does answer is left alone: with no script at work, it
// would lose the next one instead.
func (t *Tab) unblock(ctx context.Context, s *cdp.Session, world int, within time.Duration) {
	probe := s.Start(ctx, "Runtime.evaluate", map[string]any{"expression": "0", "contextId": world, "returnByValue": true})
	answered, stop := context.WithTimeout(ctx, within)
	defer stop()
	err := probe.Wait(answered, nil)
	if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		return
	}
	if err := s.Call(ctx, "Runtime.terminateExecution", nil, nil); err != nil && ctx.Err() == nil {
		t.b.log.Warn("cannot terminate script", "error", err)
	}
}

// format turns what was evaluated into JSON text.
func (t *Tab) format(ctx context.Context, s *cdp.Session, ev evaluation, key string) (string, error) {
	const op = "evaluate function"
	defer s.Start(context.WithoutCancel(ctx), "Runtime.releaseObjectGroup", map[string]any{"objectGroup": evaluateGroup})
	if ev.Exception != nil {
		return "", fault.New(fault.EvaluationFailed, op, "correct the function", "%s", ev.Exception.text())
	}
	v, err := parseDeep(ev.Result)
	if err != nil {
		return "", err
	}
	if v.hasPlatformObject() && ev.Result.ObjectID != "" {
		// DOMRect, URL and their like say what they are by toJSON only.
		var plain evaluation
		err := s.Call(ctx, "Runtime.callFunctionOn", map[string]any{
			"functionDeclaration": plainer, "objectId": ev.Result.ObjectID, "objectGroup": evaluateGroup,
			"serializationOptions": map[string]any{"serialization": "deep", "additionalParameters": map[string]any{"maxNodeDepth": 0}},
		}, &plain)
		if err != nil {
			return "", err
		}
		if plain.Exception == nil {
			if v, err = parseDeep(plain.Result); err != nil {
				return "", err
			}
		}
	}
	if m := v.members(); v.kind() == "object" && len(m) == 1 && m[0].key == key {
		text, _ := m[0].value["value"].(string)
		if !json.Valid([]byte(text)) {
			return "", fault.New(fault.EvaluationFailed, op, "return less, or a simpler value", "the page's JSON.stringify makes no JSON")
		}
		return text, nil
	}
	text, err := v.json(t.b.opts.MaxResult)
	if err != nil {
		return "", fault.Wrap(err, fault.EvaluationFailed, op, "return less, or a simpler value")
	}
	return text, nil
}

// text is what a page exception says: an error's own text with its stack, any
// other thrown value after "Error: ".
func (e *exception) text() string {
	x := e.Exception
	if x.Subtype == "error" {
		return x.Text
	}
	if s, ok := x.Value.(string); ok {
		return "Error: " + s
	}
	if x.Text != "" {
		return "Error: " + x.Text
	}
	if x.Value != nil {
		return fmt.Sprintf("Error: %v", x.Value)
	}
	return e.Text
}

// plainer rebuilds a value with what its objects' toJSON says, as JSON.stringify
// would see it.
const plainer = `function(){
const seen=[];
const plain=(v,d)=>{
if(typeof v!=='object'||v===null||d>200)return v;
if(typeof v.nodeType==='number'||v===v.window)return v;
if(typeof v.toJSON==='function'&&typeof v.getTime!=='function'){const j=v.toJSON();if(typeof j!=='object'||j===null)return j;v=j}
for(let i=0;i<seen.length;i++)if(seen[i]===v)return v;
seen[seen.length]=v;
let out;
if(typeof v.length==='number'&&typeof v.splice==='function'){out=[];for(let i=0;i<v.length;i++)out[i]=plain(v[i],d+1)}
else if(typeof v.getTime==='function')out=v;
else{out={};for(const k in v){const x=v[k];if(typeof x!=='function')out[k]=plain(x,d+1)}}
seen.length--;
return out};
return plain(this,0)}`

// deep is one value of CDP's deep serialization: an object with type, value and,
// where the same object occurs more than once, weakLocalObjectReference.
type deep map[string]any

// errCircular is the refusal that JSON.stringify gives.
var errCircular = errors.New("TypeError: Converting circular structure to JSON")

func parseDeep(o remoteObject) (deep, error) {
	if len(o.Deep) == 0 {
		return deep{"type": "undefined"}, nil
	}
	d := make(deep)
	dec := json.NewDecoder(bytes.NewReader(o.Deep))
	dec.UseNumber() // numbers stay as JavaScript printed them
	if err := dec.Decode(&d); err != nil {
		return d, fmt.Errorf("decode result: %w", err)
	}
	return d, nil
}

func (d deep) kind() string {
	s, _ := d["type"].(string)
	return s
}

// local is the number of an object that occurs more than once.
func (d deep) local() (string, bool) {
	n, ok := d["weakLocalObjectReference"].(json.Number)
	return string(n), ok
}

// unprintable reports whether JSON has no words for the value.
func (d deep) unprintable() bool {
	switch d.kind() {
	case "undefined", "function", "symbol":
		return true
	}
	return false
}

// member is one property of an object or, with an empty key, element of an array.
type member struct {
	key   string
	value deep
}

// members lists what is in an array or object, nil for other values.
func (d deep) members() []member {
	list, _ := d["value"].([]any)
	var out []member
	switch d.kind() {
	case "array":
		for _, e := range list {
			if v, ok := e.(map[string]any); ok {
				out = append(out, member{value: v})
			}
		}
	case "object":
		for _, e := range list {
			pair, _ := e.([]any)
			if len(pair) != 2 {
				continue
			}
			key, isString := pair[0].(string)
			if v, ok := pair[1].(map[string]any); ok && isString {
				out = append(out, member{key, v})
			}
		}
	}
	return out
}

// hasPlatformObject reports whether the value holds an object of the browser
// whose contents were not serialized.
func (d deep) hasPlatformObject() bool {
	switch d.kind() {
	case "platformobject", "typedarray":
		return true
	}
	for _, m := range d.members() {
		if m.value.hasPlatformObject() {
			return true
		}
	}
	return false
}

// json prints the value as JSON.stringify(value, null, 2) would, or "undefined".
func (d deep) json(limit int) (string, error) {
	if d.unprintable() {
		return "undefined", nil
	}
	p := &printer{limit: limit, objects: make(map[string]deep), open: make(map[string]bool)}
	p.learn(d)
	if err := p.print(d, 0); err != nil {
		return "", err
	}
	return p.sb.String(), nil
}

// printer prints deep values.
type printer struct {
	sb      strings.Builder
	limit   int
	objects map[string]deep // objects that occur more than once
	open    map[string]bool // those that are being printed
}

// learn remembers the objects that others refer to.
func (p *printer) learn(d deep) {
	if id, ok := d.local(); ok && d["value"] != nil {
		p.objects[id] = d
	}
	for _, m := range d.members() {
		p.learn(m.value)
	}
}

func (p *printer) print(d deep, depth int) error {
	if p.sb.Len() > p.limit {
		return fmt.Errorf("the result is larger than %d bytes", p.limit)
	}
	if id, ok := d.local(); ok {
		if p.open[id] {
			return errCircular
		}
		if o, ok := p.objects[id]; ok {
			d = o
		}
		p.open[id] = true
		defer delete(p.open, id)
	}
	switch d.kind() {
	case "null":
		p.sb.WriteString("null")
	case "boolean":
		fmt.Fprint(&p.sb, d["value"])
	case "number":
		switch n := d["value"].(type) {
		case json.Number:
			p.sb.WriteString(string(n))
		default: // NaN, Infinity and -0 come as strings
			if n == "-0" {
				p.sb.WriteString("0")
			} else {
				p.sb.WriteString("null")
			}
		}
	case "string", "date":
		s, _ := d["value"].(string)
		p.sb.WriteString(quote(s))
	case "bigint":
		s, _ := d["value"].(string)
		p.sb.WriteString(s)
	case "array":
		return p.list(d.members(), depth, "[", "]")
	case "object":
		return p.list(d.members(), depth, "{", "}")
	case "node":
		n, _ := d["value"].(map[string]any)
		if n["nodeType"] == json.Number("9") {
			p.sb.WriteString(`"ref: <Document>"`)
		} else {
			p.sb.WriteString(`"ref: <Node>"`)
		}
	case "window":
		p.sb.WriteString(`"ref: <Window>"`)
	default: // map, set, error, promise, regexp ...: objects without properties of their own
		p.sb.WriteString("{}")
	}
	return nil
}

// list prints the members between brackets, each on a line of its own.
func (p *printer) list(members []member, depth int, begin, end string) error {
	p.sb.WriteString(begin)
	empty := true
	for _, m := range members {
		if begin == "{" && m.value.unprintable() {
			continue
		}
		if !empty {
			p.sb.WriteByte(',')
		}
		empty = false
		p.line(depth + 1)
		if begin == "{" {
			p.sb.WriteString(quote(m.key) + ": ")
		} else if m.value.unprintable() {
			p.sb.WriteString("null")
			continue
		}
		if err := p.print(m.value, depth+1); err != nil {
			return err
		}
	}
	if !empty {
		p.line(depth)
	}
	p.sb.WriteString(end)
	return nil
}

func (p *printer) line(depth int) {
	p.sb.WriteByte('\n')
	for range depth {
		p.sb.WriteString("  ")
	}
}
