package holder

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fakeBrowser is the browser's end of a broker's connection. It shows exactly
// what reaches Chromium, which a real one cannot.
type fakeBrowser struct {
	*peer
	broker *broker
	t      *testing.T
	closed chan string
}

func socketPair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conns[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conns[i].Close() })
	}
	return conns[0], conns[1]
}

func newFakeBrowser(t *testing.T) *fakeBrowser {
	normal(t)
	ours, theirs := socketPair(t)
	f := &fakeBrowser{peer: newPeer(t, theirs), broker: newBroker(ours), t: t, closed: make(chan string, 1)}
	f.broker.onClose = func(reason string) { f.closed <- reason }
	go f.broker.trim.run()
	go f.broker.readRoot()
	return f
}

// client adds a client whose browser session has the name given.
func (f *fakeBrowser) client(session string) *peer {
	f.t.Helper()
	ours, theirs := socketPair(f.t)
	c, err := f.broker.add(ours, session)
	if err != nil {
		f.t.Fatal(err)
	}
	go func() {
		c.read()
		f.broker.remove(c)
	}()
	return newPeer(f.t, theirs)
}

// got returns the next message as Chromium would get it.
func (f *fakeBrowser) got() (id int, text string) {
	f.t.Helper()
	data, err := f.read()
	if err != nil {
		f.t.Fatal(err)
	}
	var m struct{ ID int }
	if err := json.Unmarshal(data, &m); err != nil {
		f.t.Fatalf("%v: %s", err, data)
	}
	return m.ID, string(data)
}

// want fails unless the next message is text.
func (p *peer) want(text string) {
	p.t.Helper()
	data, err := p.read()
	if err != nil {
		p.t.Fatal(err)
	}
	if string(data) != text {
		p.t.Fatalf("message is %s, want %s", data, text)
	}
}

func TestBrokerRewrites(t *testing.T) {
	f := newFakeBrowser(t)
	a, b := f.client("A"), f.client("B")
	seen := map[int]bool{}
	for _, c := range []struct {
		peer           *peer
		sends, reaches string
		answers, comes string
	}{
		{a, `{"id":5,"method":"Browser.getVersion"}`, `{"sessionId":"A","id":%d,"method":"Browser.getVersion"}`,
			`{"id":%d,"result":{"x":"sessionId"},"sessionId":"A"}`, `{"id":5,"result":{"x":"sessionId"}}`},
		{b, `{"id":5,"method":"Browser.getVersion"}`, `{"sessionId":"B","id":%d,"method":"Browser.getVersion"}`,
			`{"id":%d,"error":{"code":1},"sessionId":"B"}`, `{"id":5,"error":{"code":1}}`},
		{a, ` { "method":"X.y" , "id" : 6 }`, ` {"sessionId":"A", "method":"X.y" , "id" : %d }`,
			`{"sessionId":"A","id":%d,"result":{}}`, `{"id":6,"result":{}}`},
		{a, `{"id":-7,"sessionId":"A","method":"X.y"}`, `{"id":%d,"sessionId":"A","method":"X.y"}`,
			`{"id":%d,"sessionId":"A","result":{}}`, `{"id":-7,"result":{}}`},
	} {
		c.peer.raw(c.sends + "\x00")
		id, text := f.got()
		if want := fmt.Sprintf(c.reaches, id); text != want {
			t.Fatalf("the browser got %s, want %s", text, want)
		}
		if seen[id] {
			t.Errorf("id %d came twice", id)
		}
		seen[id] = true
		f.raw(fmt.Sprintf(c.answers, id) + "\x00")
		c.peer.want(c.comes)
	}
}

func TestBrokerOwnsSessions(t *testing.T) {
	f := newFakeBrowser(t)
	a, b := f.client("A"), f.client("B")
	const refused = `{"id":1,"error":{"code":-32001,"message":"Session with given id not found."}}`

	// Announced by an event in a's session.
	event := `{"method":"Target.attachedToTarget","params":{"sessionId":"P","targetInfo":{}},"sessionId":"A"}`
	f.raw(event + "\x00")
	a.want(`{"method":"Target.attachedToTarget","params":{"sessionId":"P","targetInfo":{}}}`)
	b.raw(`{"id":1,"method":"Runtime.evaluate","sessionId":"P"}` + "\x00")
	b.want(refused)
	b.raw(`{"id":1,"method":"Runtime.evaluate","sessionId":"A"}` + "\x00")
	b.want(refused)
	a.raw(`{"id":1,"method":"Runtime.evaluate","sessionId":"P"}` + "\x00")
	id, text := f.got()
	if want := fmt.Sprintf(`{"id":%d,"method":"Runtime.evaluate","sessionId":"P"}`, id); text != want {
		t.Errorf("the browser got %s, want %s", text, want)
	}
	f.raw(fmt.Sprintf(`{"id":%d,"result":{},"sessionId":"P"}`, id) + "\x00")
	a.want(`{"id":1,"result":{},"sessionId":"P"}`)

	// Announced by an event in a page session, as auto-attach does; the other
	// client's events do not move it.
	f.raw(`{"method":"Target.attachedToTarget","params":{"sessionId":"Q"},"sessionId":"P"}` + "\x00")
	a.want(`{"method":"Target.attachedToTarget","params":{"sessionId":"Q"},"sessionId":"P"}`)
	f.raw(`{"method":"Target.attachedToTarget","params":{"sessionId":"Q"},"sessionId":"B"}` + "\x00")
	b.want(`{"method":"Target.attachedToTarget","params":{"sessionId":"Q"}}`)
	f.raw(`{"method":"Page.event","params":{},"sessionId":"Q"}` + "\x00")
	a.want(`{"method":"Page.event","params":{},"sessionId":"Q"}`)

	// Announced by an answer.
	b.raw(`{"id":2,"method":"Target.attachToTarget","params":{}}` + "\x00")
	id, _ = f.got()
	f.raw(fmt.Sprintf(`{"id":%d,"result":{"sessionId":"R"},"sessionId":"B"}`, id) + "\x00")
	b.want(`{"id":2,"result":{"sessionId":"R"}}`)
	f.raw(`{"method":"Page.event","params":{},"sessionId":"R"}` + "\x00")
	b.want(`{"method":"Page.event","params":{},"sessionId":"R"}`)
	// An answer to something else announces nothing.
	b.raw(`{"id":3,"method":"Other.method","params":{}}` + "\x00")
	id, _ = f.got()
	f.raw(fmt.Sprintf(`{"id":%d,"result":{"sessionId":"Z"},"sessionId":"B"}`, id) + "\x00")
	b.want(`{"id":3,"result":{"sessionId":"Z"}}`)
	b.raw(`{"id":1,"method":"Runtime.evaluate","sessionId":"Z"}` + "\x00")
	b.want(refused)

	// Ended.
	f.raw(`{"method":"Target.detachedFromTarget","params":{"sessionId":"P"},"sessionId":"A"}` + "\x00")
	a.want(`{"method":"Target.detachedFromTarget","params":{"sessionId":"P"}}`)
	a.raw(`{"id":1,"method":"Runtime.evaluate","sessionId":"P"}` + "\x00")
	a.want(refused)
	// The holder's own events and those of nobody go nowhere.
	f.raw(`{"method":"Target.attachedToTarget","params":{"sessionId":"N"}}` + "\x00" + `{"method":"x","sessionId":"N"}` + "\x00" +
		`garbage` + "\x00\x00" + `{"id":99999,"result":{}}` + "\x00" + `{"method":"last","sessionId":"R"}` + "\x00")
	b.want(`{"method":"last","sessionId":"R"}`)

	// Gone: its browser session is detached, and nothing of it comes any more.
	b.conn.Close()
	id, text = f.got()
	if want := fmt.Sprintf(`{"id":%d,"method":"Target.detachFromTarget","params":{"sessionId":"B"}}`, id); text != want {
		t.Errorf("the browser got %s, want %s", text, want)
	}
	f.raw(fmt.Sprintf(`{"id":%d,"result":{}}`, id) + "\x00" + `{"method":"late","sessionId":"R"}` + "\x00" + `{"method":"mine","sessionId":"Q"}` + "\x00")
	a.want(`{"method":"mine","sessionId":"Q"}`)
	// The browser ends a client's own session.
	f.raw(`{"method":"Target.detachedFromTarget","params":{"sessionId":"A"}}` + "\x00")
	a.gone()
}

func TestBrokerRefusesBadMessages(t *testing.T) {
	f := newFakeBrowser(t)
	a := f.client("A")
	for _, c := range []struct{ sends, comes string }{
		{`not json`, `{"error":{"code":-32600,"message":"Message refused: not a JSON object."}}`},
		{``, `{"error":{"code":-32600,"message":"Message refused: it is incomplete."}}`},
		{`{"id":1,"method":"x","sessionId":"A","sessionId":"B"}`, `{"error":{"code":-32600,"message":"Message refused: a member appears twice."}}`},
		{`{"method":"x"}`, `{"error":{"code":-32600,"message":"Message must have integer 'id' property."}}`},
		{`{"id":4}`, `{"id":4,"error":{"code":-32600,"message":"Message must have string 'method' property."}}`},
	} {
		a.raw(c.sends + "\x00")
		a.want(c.comes)
	}
	control := f.client("")
	control.raw(`{"id":1,"method":"Browser.getVersion"}` + "\x00")
	control.want(`{"id":1,"error":{"code":-32601,"message":"This connection reaches the holder only."}}`)
	control.raw(`{"id":2,"method":"Holder.close","params":{"reason":"over"}}` + "\x00")
	control.want(`{"id":2,"result":{}}`)
	if reason := <-f.closed; reason != "over" {
		t.Errorf("reason is %q", reason)
	}
	// Nothing of all this has reached the browser.
	a.raw(`{"id":9,"method":"x"}` + "\x00")
	if _, text := f.got(); !strings.HasSuffix(text, `"method":"x"}`) {
		t.Errorf("the browser got %s", text)
	}
}

// TestBrokerCutsWhoDoesNotRead: the client that does not read is cut off, the
// other goes on, and the browser's reader never waits.
func TestBrokerCutsWhoDoesNotRead(t *testing.T) {
	f := newFakeBrowser(t)
	slow, quick := f.client("A"), f.client("B")
	event := `{"method":"x","params":"` + strings.Repeat("y", 100<<10) + `","sessionId":"A"}` + "\x00"
	ping := `{"method":"ping","sessionId":"B"}` + "\x00"
	for sent := 0; sent < 2*maxWaiting; sent += len(event) {
		f.raw(event + ping)
		quick.want(`{"method":"ping"}`)
	}
	slow.gone()
	id, text := f.got()
	if !strings.Contains(text, `"Target.detachFromTarget","params":{"sessionId":"A"}`) {
		t.Errorf("the browser got %d %s", id, text)
	}
	f.raw(ping)
	quick.want(`{"method":"ping"}`)
}

// TestBrokerDeliversLargeMessages: one large message passes whatever the queue
// holds, small ones may follow it, and a second that does not fit cuts off.
func TestBrokerDeliversLargeMessages(t *testing.T) {
	f := newFakeBrowser(t)
	a, b := f.client("A"), f.client("B")
	small := `{"method":"small","params":"` + strings.Repeat("y", 64<<10) + `","sessionId":"A"}` + "\x00"
	large := `{"method":"large","params":"` + strings.Repeat("z", 60<<20) + `","sessionId":"A"}` + "\x00"
	ping := `{"method":"ping","sessionId":"B"}` + "\x00"
	strip := func(s string) string { return strings.TrimSuffix(s, `,"sessionId":"A"}`+"\x00") + "}" }
	for range 20 {
		f.raw(small)
	}
	f.raw(large)
	for range 20 {
		f.raw(small)
	}
	f.raw(ping)
	b.want(`{"method":"ping"}`)
	for _, m := range []string{small, large, small} {
		n := 20
		if m == large {
			n = 1
		}
		for range n {
			data, err := a.read()
			if err != nil {
				t.Fatal(err)
			}
			if string(data) != strip(m) {
				t.Fatalf("%d bytes are not the %d sent", len(data), len(strip(m)))
			}
		}
	}
	for range 3 { // one in flight, one waiting, one too many
		f.raw(large)
	}
	f.raw(ping)
	b.want(`{"method":"ping"}`)
	a.gone()
}

func TestBrokerBoundsFrames(t *testing.T) {
	f := newFakeBrowser(t)
	a, b := f.client("A"), f.client("B")
	a.raw(`{"id":3,"method":"x"}` + "\x00")
	id, _ := f.got()
	pad := strings.Repeat("z", 1<<20)
	fill := func(p *peer, head, tail string, n int) {
		t.Helper()
		p.raw(head)
		for n > len(pad) {
			p.raw(pad)
			n -= len(pad)
		}
		p.raw(pad[:n] + tail)
	}
	// The id may come before or after what is too long.
	fill(f.peer, `{"result":"`, fmt.Sprintf(`","id":%d,"sessionId":"A"}`, id)+"\x00", maxFrame)
	a.want(`{"id":3,"error":{"code":-32000,"message":"The answer has more than 100000000 bytes."}}`)
	fill(f.peer, `{"method":"x","params":"`, `","sessionId":"A"}`+"\x00", maxFrame)
	f.raw(`{"method":"next","sessionId":"A"}` + "\x00")
	a.want(`{"method":"next"}`)
	// As large as it may be.
	const frameSize = len(`{"method":"x","params":"","sessionId":"A"}`)
	fill(f.peer, `{"method":"x","params":"`, `","sessionId":"A"}`+"\x00", maxFrame-frameSize)
	if data, err := a.read(); err != nil || len(data) != maxFrame-len(`,"sessionId":"A"`) {
		t.Errorf("%d bytes, %v", len(data), err)
	}
	// A client that sends too much is cut off, and none of it gets through.
	go func() {
		// The write fails when the client is cut off.
		a.conn.SetDeadline(time.Now().Add(testTimeout))
		a.conn.Write([]byte(`{"id":1,"method":"x","params":"`))
		for range maxFrame/len(pad) + 2 {
			if _, err := a.conn.Write([]byte(pad)); err != nil {
				return
			}
		}
	}()
	a.gone()
	if _, text := f.got(); !strings.Contains(text, "detachFromTarget") {
		t.Errorf("the browser got %.100s", text)
	}
	b.raw(`{"id":1,"method":"x"}` + "\x00")
	if _, text := f.got(); !strings.Contains(text, `"method":"x"`) {
		t.Errorf("the browser got %.100s", text)
	}
}

func TestBrokerForgetsHalfMessages(t *testing.T) {
	f := newFakeBrowser(t)
	a, b := f.client("A"), f.client("B")
	a.raw(`{"id":1,"method":"half","params":{"x":"`)
	b.raw(`{"id":1,"method":"whole"}` + "\x00")
	if _, text := f.got(); !strings.HasSuffix(text, `"method":"whole"}`) {
		t.Errorf("the browser got %s", text)
	}
	a.conn.Close()
	if _, text := f.got(); !strings.Contains(text, "detachFromTarget") {
		t.Errorf("the browser got %s", text)
	}
}

func TestBrokerEndsWithTheBrowser(t *testing.T) {
	f := newFakeBrowser(t)
	a := f.client("A")
	a.raw(`{"id":1,"method":"Browser.close"}` + "\x00")
	id, _ := f.got()
	f.raw(fmt.Sprintf(`{"id":%d,"result":{},"sessionId":"A"}`, id) + "\x00")
	f.conn.Close()
	a.want(`{"id":1,"result":{}}`)
	a.gone()
	if !f.broker.closeAsked {
		t.Error("the client's Browser.close was not noted")
	}
	if _, err := f.broker.add(nil, "X"); err != errRootClosed {
		t.Errorf("a client after the end: %v", err)
	}
	if _, err := f.broker.call(t.Context(), "x", ""); err != errRootClosed {
		t.Errorf("a call after the end: %v", err)
	}
}

// TestFirstPageIsAwaited: the first client waits for a page, or for as long as
// a start may take; whoever comes later does not wait again.
func TestFirstPageIsAwaited(t *testing.T) {
	for _, page := range []bool{true, false} {
		f := newFakeBrowser(t)
		s := &server{spec: &Spec{}, broker: f.broker, relay: newRelay(&Spec{})}
		timeout := testTimeout
		if !page {
			timeout = time.Millisecond
		}
		first := make(chan error, 1)
		go func() { first <- s.awaitPage(t.Context(), timeout) }()
		id, text := f.got()
		if !strings.Contains(text, `"Target.setDiscoverTargets","params":{"discover":true}`) {
			t.Fatalf("the browser got %s", text)
		}
		f.raw(`{"method":"Target.targetCreated","params":{"targetInfo":{"targetId":"X","type":"tab"}}}` + "\x00")
		f.raw(fmt.Sprintf(`{"id":%d,"result":{}}`, id) + "\x00")
		if page {
			// Another client's view of a page is none of the holder's.
			f.raw(`{"method":"Target.targetCreated","params":{"targetInfo":{"type":"page"}},"sessionId":"A"}` + "\x00")
			select {
			case err := <-first:
				t.Fatalf("it did not wait: %v", err)
			default:
			}
			f.raw(`{"method":"Target.targetCreated","params":{"targetInfo":{"targetId":"Y","type":"page"}}}` + "\x00")
		}
		if err := <-first; err != nil {
			t.Fatal(err)
		}
		if id, text = f.got(); !strings.Contains(text, `"discover":false`) {
			t.Errorf("the browser got %s", text)
		}
		f.raw(fmt.Sprintf(`{"id":%d,"result":{}}`, id) + "\x00")
		start := time.Now()
		if err := s.awaitPage(t.Context(), testTimeout); err != nil || time.Since(start) > testTimeout/2 {
			t.Errorf("the second waited %v, %v", time.Since(start), err)
		}
	}
}

// TestUnheardSessionIsEnded: a client that gives up before the browser answers
// leaves nothing in it.
func TestUnheardSessionIsEnded(t *testing.T) {
	f := newFakeBrowser(t)
	s := &server{spec: &Spec{}, broker: f.broker, relay: newRelay(&Spec{}), product: "x", pageAsked: true}
	ctx, giveUp := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() {
		_, _, err := s.attach(ctx)
		over <- err
	}()
	id, text := f.got()
	if !strings.Contains(text, `"method":"Target.attachToBrowserTarget"`) {
		t.Fatalf("the browser got %s", text)
	}
	giveUp()
	if err := <-over; !errors.Is(err, context.Canceled) {
		t.Errorf("a client that gave up: %v", err)
	}
	f.raw(fmt.Sprintf(`{"id":%d,"result":{"sessionId":"LATE"}}`, id) + "\x00")
	id, text = f.got()
	if !strings.Contains(text, `"Target.detachFromTarget","params":{"sessionId":"LATE"}`) {
		t.Errorf("the browser got %s", text)
	}
	f.raw(fmt.Sprintf(`{"id":%d,"result":{}}`, id) + "\x00")

	// A browser that answers nobody is not asked for ever more.
	f.broker.mu.Lock()
	f.broker.unheard = maxUnheard
	f.broker.mu.Unlock()
	if _, _, err := s.attach(t.Context()); !errors.Is(err, errUnheard) {
		t.Errorf("one too many: %v", err)
	}
}

// handshake runs one greeting against a server in this process.
func handshake(t *testing.T, h *HolderSpec, greeting string) string {
	t.Helper()
	ours, theirs := socketPair(t)
	root, _ := socketPair(t)
	s := &server{spec: &Spec{Holder: h}, broker: newBroker(root), relay: newRelay(&Spec{}), hello: welcome{BrowserPID: 4711, Generation: 7}}
	done := make(chan struct{})
	go func() {
		s.serve(ours.(*net.UnixConn))
		ours.Close()
		close(done)
	}()
	if _, err := theirs.Write([]byte(greeting)); err != nil {
		t.Fatal(err)
	}
	theirs.SetReadDeadline(time.Now().Add(testTimeout))
	text, err := bufio.NewReader(theirs).ReadString(0)
	if err != nil {
		text = "error"
	}
	theirs.Close()
	<-done
	return strings.TrimSuffix(text, "\x00")
}

func TestHandshake(t *testing.T) {
	normal(t)
	mine, err := cgroupOf(os.Getpid())
	if err != nil {
		t.Skip("no unified cgroup hierarchy here: ", err)
	}
	const refused = `{"abfleet-cdp":0,"error":"refused"}`
	good := `{"abfleet-cdp":1,"browserPid":4711,"generation":7}`
	key := `"key":"` + testKey + `","control":true`
	for _, c := range []struct{ greeting, cgroup, want string }{
		{`{"abfleet-cdp":{"min":1,"max":1},` + key + `}`, "", good},
		{`{"abfleet-cdp":{"min":1,"max":1},` + key + `}`, mine, good},
		{`{"abfleet-cdp":{"min":0,"max":9},` + key + `}`, "", good},
		{`{"abfleet-cdp":{"min":1,"max":1},` + key + `}`, mine + "/x", refused},
		{`{"abfleet-cdp":{"min":2,"max":9},` + key + `}`, "", `{"abfleet-cdp":0,"error":"version","min":1,"max":1}`},
		{`{"abfleet-cdp":{"min":0,"max":0},` + key + `}`, "", `{"abfleet-cdp":0,"error":"version","min":1,"max":1}`},
		{`{"abfleet-cdp":{"min":2,"max":9},"key":"wrong"}`, "", refused},
		{`{"abfleet-cdp":{"min":1,"max":1},"key":"` + testKey[1:] + `"}`, "", refused},
		{`{"abfleet-cdp":{"min":1,"max":1},"key":""}`, "", refused},
		{`{"abfleet-cdp":{"min":1,"max":1}}`, "", refused},
		{`{` + key + `}`, "", refused},
		{`{"abfleet-cdp":1,` + key + `}`, "", refused},
		{`{"id":1,"method":"Browser.getVersion"}`, "", refused},
		{``, "", refused},
		{strings.Repeat("x", maxHandshake), "", "error"},
	} {
		if got := handshake(t, &HolderSpec{Key: testKey, PeerCgroup: c.cgroup}, c.greeting+"\x00"); got != c.want {
			t.Errorf("%.100s is answered %s, want %s", c.greeting, got, c.want)
		}
	}
}

func FuzzHandshake(f *testing.F) {
	for _, s := range []string{
		`{"abfleet-cdp":{"min":1,"max":1},"key":"` + testKey + `"}`,
		`{"abfleet-cdp":{"min":-1,"max":99},"key":""}`, `{"abfleet-cdp":null}`, `[]`, ``,
	} {
		f.Add([]byte(s))
	}
	s := &server{spec: &Spec{Holder: &HolderSpec{Key: testKey}}}
	f.Fuzz(func(t *testing.T, data []byte) {
		g, version, err := s.judge(data)
		if err == nil && (g.Key != testKey || version != 1) {
			t.Fatalf("%q was accepted as version %d", data, version)
		}
		if err != nil && version != 0 {
			t.Fatalf("%q was refused as version %d", data, version)
		}
		if err == nil && !bytes.Contains(data, []byte("abfleet-cdp")) && !bytes.ContainsAny(data, `\ABCDEFLTP`) {
			t.Fatalf("%q was accepted", data)
		}
	})
}
