package cdp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// peer is the browser's side of a connection.
type peer struct {
	t    testing.TB
	conn net.Conn
	in   *bufio.Reader
}

func pair(t testing.TB) (*Conn, *peer) {
	t.Helper()
	ours, theirs := net.Pipe()
	c := New(ours)
	t.Cleanup(func() { c.Close(); theirs.Close() })
	return c, &peer{t, theirs, bufio.NewReader(theirs)}
}

type command struct {
	ID        uint64          `json:"id"`
	Method    string          `json:"method"`
	SessionID string          `json:"sessionId"`
	Params    json.RawMessage `json:"params"`
}

func (p *peer) read() command {
	b, err := p.in.ReadBytes(0)
	if err != nil {
		p.t.Error(err)
		return command{}
	}
	var c command
	if err := json.Unmarshal(b[:len(b)-1], &c); err != nil {
		p.t.Errorf("%s: %v", b, err)
	}
	return c
}

func (p *peer) write(format string, args ...any) {
	if _, err := fmt.Fprintf(p.conn, format+"\x00", args...); err != nil {
		p.t.Error(err)
	}
}

func TestCall(t *testing.T) {
	c, p := pair(t)
	go func() {
		cmd := p.read()
		if cmd.Method != "A.b" || cmd.SessionID != "S" || string(cmd.Params) != `{"x":1}` {
			t.Errorf("command = %+v", cmd)
		}
		p.write(`{"method":"A.other","params":{"result":{"id":7}},"sessionId":"S"}`)
		p.write(`{"id":%d,"result":{"v":"a\"}{[\\"},"sessionId":"S"}`, cmd.ID)
		cmd = p.read()
		p.write(`{"id":%d,"error":{"code":-32000,"message":"no"},"sessionId":"S"}`, cmd.ID)
		cmd = p.read()
		p.write(`{"id":%d,"error":{"code":-32001,"message":"Session with given id not found."}}`, cmd.ID)
	}()
	ctx := t.Context()
	var r struct{ V string }
	if err := c.Session("S").Call(ctx, "A.b", map[string]int{"x": 1}, &r); err != nil || r.V != `a"}{[\` {
		t.Fatalf("%+v %v", r, err)
	}
	var ce *CallError
	if err := c.Session("S").Call(ctx, "A.b", nil, nil); !errors.As(err, &ce) || ce.Code != -32000 || err.Error() != "A.b: no" {
		t.Fatal(err)
	}
	if err := c.Session("S").Call(ctx, "A.b", nil, nil); !errors.Is(err, ErrSessionGone) {
		t.Fatal(err)
	}
}

func TestCancelReturnsAtOnce(t *testing.T) {
	c, p := pair(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	go func() {
		cmd := p.read()
		cancel(cause)
		p.write(`{"id":%d,"result":{}}`, cmd.ID) // too late or not, it harms nobody
		cmd = p.read()
		p.write(`{"id":%d,"result":{}}`, cmd.ID)
	}()
	if err := c.Root().Call(ctx, "A.b", nil, nil); err != nil && !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if err := c.Root().Call(ctx, "A.b", nil, nil); !errors.Is(err, cause) {
		t.Fatalf("a call with a context that has ended: %v", err)
	}
	if err := c.Root().Call(t.Context(), "A.b", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// A browser that reads nothing must not hold up a caller whose context ends.
func TestCancelWhileWriting(t *testing.T) {
	c, _ := pair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	done := make(chan error, outQueue*2)
	for range outQueue * 2 {
		go func() { done <- c.Root().Call(ctx, "A.b", nil, nil) }()
	}
	for range outQueue * 2 {
		select {
		case err := <-done:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a caller hangs")
		}
	}
}

// A frozen browser is given up, so that nobody waits for it without end.
func TestFrozenBrowser(t *testing.T) {
	defer func(d time.Duration) { writeWait = d }(writeWait)
	writeWait = 50 * time.Millisecond
	c, _ := pair(t)
	if err := c.Root().Call(t.Context(), "A.b", nil, nil); !errors.Is(err, ErrClosed) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestSessionEnds(t *testing.T) {
	c, p := pair(t)
	s := c.Session("S")
	other := c.Session("T").Start(t.Context(), "A.b", nil)
	mine := s.Start(t.Context(), "A.b", nil)
	cmd := p.read()
	p.read()
	p.write(`{"method":"Target.detachedFromTarget","params":{"sessionId":"S","targetId":"x"}}`)
	if err := mine.Wait(t.Context(), nil); !errors.Is(err, ErrSessionGone) {
		t.Fatal(err)
	}
	<-s.Done()
	p.write(`{"id":%d,"result":{}}`, cmd.ID)
	if err := other.Wait(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

func TestConnectionLost(t *testing.T) {
	c, p := pair(t)
	s := c.Session("S")
	sub := c.Subscribe(Filter{})
	call := s.Start(t.Context(), "A.b", nil)
	p.read()
	p.write(`{"method":"A.c","params":{}}`)
	p.conn.Close()
	if err := call.Wait(t.Context(), nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	<-s.Done()
	<-c.Done()
	if ev, err := sub.Next(t.Context()); err != nil || ev.Method != "A.c" {
		t.Fatalf("what came before the end is lost: %+v %v", ev, err)
	}
	if _, err := sub.Next(t.Context()); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := c.Root().Call(t.Context(), "A.b", nil, nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := c.Subscribe(Filter{}).Next(t.Context()); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	<-c.Session("later").Done()
}

// What a lost connection says is shown to models, who learn no path from it. A
// peer that goes with input unread resets the connection.
func TestConnectionLostNamesNoPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := New(ours)
	defer c.Close()
	call := c.Root().Start(t.Context(), "Browser.getVersion", nil)
	if _, err := theirs.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	if err := call.Wait(t.Context(), nil); !errors.Is(err, ErrClosed) || !errors.Is(err, syscall.ECONNRESET) || strings.Contains(err.Error(), path) {
		t.Error(err)
	}
}

func TestSubscriptionOrderAndFlush(t *testing.T) {
	c, p := pair(t)
	sub := c.Subscribe(Filter{Session: c.Session("S"), Methods: []string{"A.x", "A.y"}})
	go func() {
		for i := range 100 {
			p.write(`{"method":"A.%c","params":{"n":%d},"sessionId":"S"}`, "xy"[i%2], i)
			p.write(`{"method":"A.z","params":{},"sessionId":"S"}`)
			p.write(`{"method":"A.x","params":{},"sessionId":"T"}`)
		}
		cmd := p.read()
		p.write(`{"id":%d,"result":{}}`, cmd.ID)
	}()
	if err := c.Session("S").Call(t.Context(), "A.b", nil, nil); err != nil {
		t.Fatal(err)
	}
	handled := make(chan int, 200)
	go func() {
		for i := 0; ; i++ {
			ev, err := sub.Next(context.Background())
			if err != nil {
				return
			}
			var n struct{ N int }
			if json.Unmarshal(ev.Params, &n); n.N != i {
				t.Errorf("event %d came at place %d", n.N, i)
			}
			handled <- i
		}
	}()
	if err := sub.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(handled) != 100 {
		t.Fatalf("%d events handled when Flush returned, want 100", len(handled))
	}
}

// A subscriber that never reads costs a bounded queue and itself, never the
// connection.
func TestOverflow(t *testing.T) {
	c, p := pair(t)
	lossy := c.Subscribe(Filter{Methods: []string{"A.x"}, Lossy: []string{"A.x"}})
	strict := c.Subscribe(Filter{})
	go func() {
		line := []byte(`{"method":"A.x","params":{}}` + "\x00")
		batch := []byte(strings.Repeat(string(line), 256))
		for range (queueEvents + 1024) / 256 {
			if _, err := p.conn.Write(batch); err != nil {
				t.Error(err)
			}
		}
		cmd := p.read()
		p.write(`{"id":%d,"result":{}}`, cmd.ID)
	}()
	if err := c.Root().Call(t.Context(), "A.b", nil, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := strict.Next(t.Context()); !errors.Is(err, ErrOverflow) {
		t.Fatal(err)
	}
	if _, err := lossy.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if lossy.Dropped() == 0 {
		t.Error("nothing was dropped")
	}
}

func TestMalformedMessageEndsConnection(t *testing.T) {
	for _, m := range []string{"junk", `{"id":1`, `{"id":"x"}`, `{"a":}`, `{"method":5}`, `["id"]`} {
		c, p := pair(t)
		p.write("%s", m)
		<-c.Done()
		if !errors.Is(c.Err(), ErrClosed) {
			t.Errorf("%s: %v", m, c.Err())
		}
	}
}

func TestTypedClient(t *testing.T) {
	c, p := pair(t)
	go func() {
		cmd := p.read()
		if cmd.Method != "Browser.getVersion" || cmd.SessionID != "S" {
			t.Errorf("command = %+v", cmd)
		}
		p.write(`{"id":%d,"result":{"product":"Chrome/1"},"sessionId":"S"}`, cmd.ID)
		cmd = p.read()
		p.write(`{"method":"Page.loadEventFired","params":{"timestamp":4},"sessionId":"S"}`)
		p.write(`{"id":%d,"error":{"code":-32000,"message":"refused"},"sessionId":"S"}`, cmd.ID)
	}()
	client, err := c.Session("S").Client()
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	v, err := client.Browser.GetVersion(ctx)
	if err != nil || v.Product != "Chrome/1" {
		t.Fatalf("%+v %v", v, err)
	}
	loads, err := client.Page.LoadEventFired(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer loads.Close()
	if err := client.Page.Enable(ctx); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Fatal(err)
	}
	if ev, err := loads.Recv(); err != nil || ev.Timestamp != 4 {
		t.Fatalf("%+v %v", ev, err)
	}
	p.write(`{"method":"Target.detachedFromTarget","params":{"sessionId":"S"}}`)
	if _, err := loads.Recv(); err == nil {
		t.Fatal("the stream outlived its session")
	}
}

func TestLargeMessage(t *testing.T) {
	c, p := pair(t)
	text := strings.Repeat("x", 3<<20)
	go func() {
		cmd := p.read()
		p.write(`{"id":%d,"result":{"v":"%s"}}`, cmd.ID, text)
	}()
	var r struct{ V string }
	if err := c.Root().Call(t.Context(), "A.b", nil, &r); err != nil || r.V != text {
		t.Fatalf("%d bytes, %v", len(r.V), err)
	}
}

func FuzzParseEnvelope(f *testing.F) {
	for _, s := range []string{
		`{"id":1,"result":{"a":[1,"]"]},"sessionId":"S"}`, `{"method":"A.b","params":{}}`, `{}`, ` { "id" : 3 } `,
		`{"error":{"code":-32000,"message":"\\\""}}`, `{"id":1,"result":`, `{"a":"\`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		env, err := parseEnvelope(b)
		var want struct {
			ID        *uint64         `json:"id"`
			Method    *string         `json:"method"`
			SessionID *string         `json:"sessionId"`
			Result    json.RawMessage `json:"result"`
		}
		dec := json.NewDecoder(strings.NewReader(string(b)))
		if dec.Decode(&want) != nil || want.ID == nil {
			return // what encoding/json refuses may be read or refused
		}
		if strings.Count(string(b), `"`) != strings.Count(strings.ToLower(string(b)), `"`) || err != nil || !env.hasID {
			return // names that differ in case or are escaped
		}
		if want.Result != nil && env.result != nil && !json.Valid(env.result) {
			t.Errorf("result %q of %q", env.result, b)
		}
	})
}
