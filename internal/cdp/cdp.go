// Package cdp is the client side of the Chrome DevTools Protocol: one
// connection to one browser, flat sessions on it, calls that end with their
// context, and event subscriptions that can never hold up the reader.
//
// A Conn carries either NUL-delimited messages (what the holder of a Session
// Browser serves) or one message per websocket frame (any other browser). Raw
// calls through [Session.Call] are the usual way; [Session.Client] offers the
// typed calls of github.com/mafredri/cdp on the same session.
//
// Order: everything the browser sends is handled in the order it arrives. When
// a call has returned, every event that the browser sent before the answer is
// already in the queue of each [Subscription]; [Subscription.Flush] waits until
// its consumer has worked through them.
package cdp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
)

// MaxMessage is the largest message accepted from a browser, in bytes. It is
// Chromium's own limit for what it accepts.
const MaxMessage = 100 << 20

// outQueue is how many messages may wait to be written before callers wait for
// the browser to read.
const outQueue = 256

// ErrClosed is in the chain of every error caused by a connection that ended.
var ErrClosed = errors.New("connection to the browser is closed")

// ErrSessionGone is in the chain of every error caused by a session whose
// target was closed, crashed away or was detached.
var ErrSessionGone = errors.New("session has ended")

// codeNoSession is what Chromium answers for a sessionId it does not know.
const codeNoSession = -32001

// CallError is the browser's refusal of one call.
type CallError struct {
	Method  string `json:"-"`
	Code    int    `json:"code"`
	Message string `json:"message"`
	Data    any    `json:"data"`
}

func (e *CallError) Error() string {
	if s, ok := e.Data.(string); ok && s != "" {
		return fmt.Sprintf("%s: %s (%s)", e.Method, e.Message, s)
	}
	return e.Method + ": " + e.Message
}

// Unwrap makes errors.Is(err, ErrSessionGone) true for an unknown session.
func (e *CallError) Unwrap() error {
	if e.Code == codeNoSession {
		return ErrSessionGone
	}
	return nil
}

// transport moves whole messages. Read is used by one goroutine, Write by
// another.
type transport interface {
	Read() ([]byte, error)      // a slice that the caller may keep
	Write(batch [][]byte) error // complete JSON texts
	Close() error
}

// reply is the answer to one call.
type reply struct {
	raw json.RawMessage
	err error
}

// pending is one call whose answer is awaited.
type pending struct {
	session string
	method  string
	deliver func(reply) // called once, by the reader or by the closing Conn
}

// Conn is one connection to a browser. All methods are safe for concurrent use.
type Conn struct {
	tr   transport
	out  chan []byte
	done chan struct{}
	subs atomic.Pointer[[]*Subscription]
	last atomic.Uint64 // id of the newest call

	mu       sync.Mutex // guards what follows
	err      error
	calls    map[uint64]pending
	sessions map[string]*Session
}

// New speaks CDP over conn, whose messages end with a NUL byte. It owns conn.
func New(conn net.Conn) *Conn { return newConn(newNulTransport(conn)) }

// DialWebSocket connects to the websocket debugger URL of a browser. No proxy
// is used, whatever the environment says.
func DialWebSocket(ctx context.Context, url string) (*Conn, error) {
	tr, err := dialWebSocket(ctx, url)
	if err != nil {
		return nil, err
	}
	return newConn(tr), nil
}

func newConn(tr transport) *Conn {
	c := &Conn{
		tr:       tr,
		out:      make(chan []byte, outQueue),
		done:     make(chan struct{}),
		calls:    make(map[uint64]pending),
		sessions: make(map[string]*Session),
	}
	c.subs.Store(new([]*Subscription))
	go c.read()
	go c.write()
	return c
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err says why the connection ended; it is nil while it lives.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection. The browser and its pages live on.
func (c *Conn) Close() error {
	c.fail(errors.New("closed by us"))
	return nil
}

// CloseWith is Close with a cause for those whose calls fail by it.
func (c *Conn) CloseWith(cause error) { c.fail(cause) }

// Root is the session of the connection itself, which is the whole browser.
func (c *Conn) Root() *Session { return c.Session("") }

// Session returns the flat session with that id, as given by
// Target.attachedToTarget. It does not ask the browser whether it exists.
func (c *Conn) Session(id string) *Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sessions[id]
	if s == nil {
		s = &Session{conn: c, id: id, done: make(chan struct{})}
		if c.err != nil {
			close(s.done)
			return s
		}
		c.sessions[id] = s
	}
	return s
}

// fail ends the connection once, with the first cause given.
func (c *Conn) fail(cause error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	// The error reaches people and models, whom the socket's path is nothing to.
	if op := (*net.OpError)(nil); errors.As(cause, &op) {
		cause = op.Err
	}
	c.err = fmt.Errorf("%w: %w", ErrClosed, cause)
	err, calls, sessions := c.err, c.calls, c.sessions
	c.calls, c.sessions = nil, nil
	close(c.done)
	c.mu.Unlock()

	c.tr.Close()
	for _, p := range calls {
		p.deliver(reply{err: fmt.Errorf("%s: %w", p.method, err)})
	}
	for _, s := range sessions {
		close(s.done)
	}
	for _, s := range *c.subs.Load() {
		s.close(err)
	}
}

// endSession fails the calls of a session that the browser has ended.
func (c *Conn) endSession(id string) {
	if id == "" {
		return
	}
	var failed []pending
	c.mu.Lock()
	s := c.sessions[id]
	delete(c.sessions, id)
	for n, p := range c.calls {
		if p.session == id {
			failed = append(failed, p)
			delete(c.calls, n)
		}
	}
	c.mu.Unlock()
	if s != nil {
		close(s.done)
	}
	for _, p := range failed {
		p.deliver(reply{err: fmt.Errorf("%s: %w", p.method, ErrSessionGone)})
	}
}

// start registers and queues one call. The answer reaches deliver, also when
// the connection ends. A non-nil error means that deliver will not be called.
func (c *Conn) start(ctx context.Context, session, method string, params any, deliver func(reply)) (uint64, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	id := c.last.Add(1)
	frame, err := encode(id, session, method, params)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", method, err)
	}
	c.mu.Lock()
	if c.err != nil {
		err := c.err
		c.mu.Unlock()
		return 0, fmt.Errorf("%s: %w", method, err)
	}
	c.calls[id] = pending{session: session, method: method, deliver: deliver}
	c.mu.Unlock()
	select {
	case c.out <- frame:
		return id, nil
	case <-c.done:
		return id, nil // fail delivers
	case <-ctx.Done():
		if c.forget(id) {
			return 0, context.Cause(ctx)
		}
		return id, nil
	}
}

// forget drops a call nobody waits for and reports whether it was pending.
func (c *Conn) forget(id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.calls[id]
	delete(c.calls, id)
	return ok
}

func (c *Conn) write() {
	batch := make([][]byte, 0, outQueue)
	for {
		batch = batch[:0]
		select {
		case m := <-c.out:
			batch = append(batch, m)
		case <-c.done:
			return
		}
	more:
		for len(batch) < cap(batch) {
			select {
			case m := <-c.out:
				batch = append(batch, m)
			default:
				break more
			}
		}
		if err := c.tr.Write(batch); err != nil {
			c.fail(err)
			return
		}
		clear(batch)
	}
}

func (c *Conn) read() {
	for {
		msg, err := c.tr.Read()
		if err != nil {
			c.fail(err)
			return
		}
		env, err := parseEnvelope(msg)
		if err != nil {
			c.fail(fmt.Errorf("message from the browser is not CDP: %w", err))
			return
		}
		if env.method != nil {
			c.event(env)
		} else if env.hasID {
			c.answer(env)
		}
	}
}

func (c *Conn) answer(env envelope) {
	c.mu.Lock()
	p, ok := c.calls[env.id]
	delete(c.calls, env.id)
	c.mu.Unlock()
	if !ok {
		return // its caller has gone
	}
	if env.error != nil {
		e := &CallError{Method: p.method}
		if err := json.Unmarshal(env.error, e); err != nil {
			e.Message = "unreadable error"
		}
		p.deliver(reply{err: e})
		return
	}
	p.deliver(reply{raw: env.result})
}

func (c *Conn) event(env envelope) {
	for _, s := range *c.subs.Load() {
		s.offer(env)
	}
	if string(env.method) == "Target.detachedFromTarget" {
		var p struct {
			SessionID string `json:"sessionId"`
		}
		if json.Unmarshal(env.params, &p) == nil {
			c.endSession(p.SessionID)
		}
	}
}

// Session is one flat session. Calls on a session that ended fail with
// ErrSessionGone.
type Session struct {
	conn *Conn
	id   string
	done chan struct{}

	client typedClient
}

// ID is the session id, "" for the root session.
func (s *Session) ID() string { return s.id }

// Conn is the connection that the session lives on.
func (s *Session) Conn() *Conn { return s.conn }

// Done is closed when the browser ended the session or the connection did.
func (s *Session) Done() <-chan struct{} { return s.done }

// Call sends one command and decodes its result into result, which may be nil.
// It returns as soon as ctx ends, with the cause of that; the command may then
// still take effect. params nil sends none.
func (s *Session) Call(ctx context.Context, method string, params, result any) error {
	return s.Start(ctx, method, params).Wait(ctx, result)
}

// Start sends one command without waiting for the answer, so that several can
// be on their way at once; the browser handles those of one session in order.
func (s *Session) Start(ctx context.Context, method string, params any) *Pending {
	p := &Pending{session: s, method: method, ch: make(chan reply, 1)}
	p.id, p.err = s.conn.start(ctx, s.id, method, params, func(r reply) { p.ch <- r })
	return p
}

// Pending is a command on its way.
type Pending struct {
	session *Session
	method  string
	id      uint64
	ch      chan reply
	err     error
}

// Wait waits for the answer and decodes it into result unless that is nil. It
// must be called at most once.
func (p *Pending) Wait(ctx context.Context, result any) error {
	if p.err != nil {
		return p.err
	}
	var r reply
	select {
	case r = <-p.ch:
	case <-ctx.Done():
		p.session.conn.forget(p.id)
		return context.Cause(ctx)
	}
	if r.err != nil || result == nil {
		return r.err
	}
	if raw, ok := result.(*json.RawMessage); ok {
		*raw = r.raw
		return nil
	}
	if err := json.Unmarshal(r.raw, result); err != nil {
		return fmt.Errorf("%s: decode result: %w", p.method, err)
	}
	return nil
}
