package holder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// The broker shares one CDP connection between clients. Each client gets a
// browser session of its own (Target.attachToBrowserTarget), which it sees as
// its root: ids are replaced on the way, the session id of the root is added
// to what the client sends and taken from what it gets, and every further
// session belongs to the client in whose session it was announced.
type broker struct {
	root io.ReadWriteCloser
	// onClose is called when a client asks for the clean stop.
	onClose func(reason string)
	// page is closed when the browser has first told the holder of a page, or
	// has had the time to. Closing it needs mu.
	page chan struct{}
	trim trimmer
	// attended is told, under mu, whether there is a client.
	attended func(bool)

	writing sync.Mutex // one message at a time on root; taken after mu or alone

	mu      sync.Mutex // guards the fields that follow
	nextID  int32
	pending map[int32]call
	owner   map[string]*client // session id -> whose it is
	clients map[*client]struct{}
	closed  bool // root has ended
	unheard int  // how many of pending nobody waits for
	// closeAsked: some client sent Browser.close itself.
	closeAsked bool
	writers    sync.WaitGroup
}

// call is one message to the browser that has not been answered.
type call struct {
	client  *client // nil: the holder's own
	id      string  // the client's id token
	session string  // the session it was sent in, "" for the client's root
	attach  bool    // the answer announces a session
	answer  chan<- answer
	// unheard: the holder's own, and nobody waits any more. A session in its
	// answer is ended.
	unheard bool
}

// answer is what a call of the holder's own gets.
type answer struct {
	data    []byte
	session string // the session id in the result, if any
}

const (
	// maxCalls bounds the unanswered messages of one client.
	maxCalls = 16384
	// maxSessions bounds the sessions of one client.
	maxSessions = 65536
	// maxUnheard bounds the sessions that were asked of a browser that does
	// not answer, for clients that left. The pair holds about as many messages.
	maxUnheard = 256
	// maxOwnAnswer bounds the answers that the holder reads itself.
	maxOwnAnswer = 64 << 10
	// rootReadBuffer is how much is read from the browser at once.
	rootReadBuffer = 64 << 10
	// clientReadBuffer is how much is read from a client at once.
	clientReadBuffer = 8 << 10
)

// Codes of the broker's own error answers; those of JSON-RPC and of Chromium.
const (
	codeInvalid   = -32600
	codeNoMethod  = -32601
	codeServer    = -32000
	codeNoSession = -32001
)

const (
	methodClose  = "Holder.close"
	methodAttach = "Target.attachToBrowserTarget"
)

var (
	errRootClosed = errors.New("the browser's connection has ended")
	errUnheard    = errors.New("the browser has not answered too many clients")
)

func newBroker(root io.ReadWriteCloser) *broker {
	return &broker{
		root:    root,
		pending: map[int32]call{},
		owner:   map[string]*client{},
		clients: map[*client]struct{}{},
		page:    make(chan struct{}),
		trim:    newTrimmer(),

		attended: func(bool) {},
	}
}

// readRoot passes on what the browser says until the connection ends.
func (b *broker) readRoot() error {
	in := assembler{limit: maxFrame}
	in.scan.reset()
	buf := make([]byte, rootReadBuffer)
	var err error
	for err == nil {
		var n int
		n, err = b.root.Read(buf)
		for p := buf[:n]; len(p) > 0; {
			took, complete := in.feed(p)
			p = p[took:]
			if complete {
				f, m, tooLong := in.take()
				b.fromBrowser(f, m, tooLong)
			}
		}
	}
	b.mu.Lock()
	b.closed = true
	for id, c := range b.pending {
		if c.answer != nil {
			close(c.answer)
		}
		delete(b.pending, id)
	}
	clients := b.list()
	b.mu.Unlock()
	for _, c := range clients {
		c.finish()
	}
	return err
}

// list is for callers that hold mu.
func (b *broker) list() []*client {
	clients := make([]*client, 0, len(b.clients))
	for c := range b.clients {
		clients = append(clients, c)
	}
	return clients
}

func (b *broker) fromBrowser(f frame, m message, tooLong bool) {
	if m.bad != "" {
		return
	}
	b.mu.Lock()
	if m.id == "" {
		b.event(f, m, tooLong)
		return
	}
	id, err := strconv.ParseInt(m.id, 10, 32)
	c, ok := b.pending[int32(id)]
	if err != nil || !ok {
		b.mu.Unlock()
		return
	}
	delete(b.pending, int32(id))
	if c.client == nil {
		if c.unheard {
			b.unheard--
		}
		b.mu.Unlock()
		if c.unheard && m.inner != "" {
			go b.detach(m.inner)
		}
		if c.answer != nil {
			c.answer <- answer{data: f.bytes(maxOwnAnswer), session: m.inner}
		}
		return
	}
	c.client.calls--
	if c.attach && m.inner != "" {
		b.adopt(m.inner, c.client)
	}
	b.mu.Unlock()
	if tooLong {
		c.client.deliver(errorAnswer(c.id, c.session, codeServer, "The answer has more than "+strconv.Itoa(maxFrame)+" bytes."))
		return
	}
	edits := []edit{{m.idStart, m.idEnd, c.id}}
	if m.session != "" && m.session == c.client.session {
		edits = append(edits, edit{m.sessionStart, m.sessionEnd, ""})
		if edits[0].start > edits[1].start {
			edits[0], edits[1] = edits[1], edits[0]
		}
	}
	c.client.deliver(f.splice(edits...))
}

// event passes on an event. It is called with mu held and releases it.
func (b *broker) event(f frame, m message, tooLong bool) {
	var c *client
	var gone *client
	if m.session != "" {
		c = b.owner[m.session]
	}
	switch m.method {
	case "Target.attachedToTarget":
		if c != nil && m.inner != "" {
			b.adopt(m.inner, c)
		}
	case "Target.targetCreated", "Target.targetInfoChanged":
		// Only the holder's own discovery has no session.
		if m.session == "" && bytes.Contains(f.bytes(maxOwnAnswer), []byte(`"type":"page"`)) {
			b.lookNoFurther()
		}
	case "Target.detachedFromTarget":
		if m.inner == "" {
			break
		}
		// Only the session that announced it may end it; the root announces
		// the clients' browser sessions.
		if o := b.owner[m.inner]; o != nil && (o == c || m.session == "") {
			if m.inner == o.session {
				gone = o
			} else {
				o.sessions--
			}
			delete(b.owner, m.inner)
		}
	}
	b.mu.Unlock()
	if gone != nil {
		gone.finish()
	}
	if c == nil || tooLong {
		return
	}
	if m.session == c.session {
		c.deliver(f.splice(edit{m.sessionStart, m.sessionEnd, ""}))
	} else {
		c.deliver(f.splice())
	}
}

// lookNoFurther ends the wait for the first page. The caller holds mu.
func (b *broker) lookNoFurther() {
	select {
	case <-b.page:
	default:
		close(b.page)
	}
}

// adopt notes a session as c's. The caller holds mu.
func (b *broker) adopt(session string, c *client) {
	if b.owner[session] != nil || c.sessions >= maxSessions {
		return
	}
	if _, ok := b.clients[c]; !ok {
		return
	}
	b.owner[session] = c
	c.sessions++
}

// enter notes a call and returns the id to send it with.
func (b *broker) enter(c call) (int32, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return 0, errRootClosed
	}
	if c.client != nil {
		if c.client.calls >= maxCalls {
			return 0, errors.New("too many calls are unanswered")
		}
		c.client.calls++
	}
	for {
		b.nextID++
		if b.nextID <= 0 {
			b.nextID = 1
		}
		if _, used := b.pending[b.nextID]; !used {
			break
		}
	}
	b.pending[b.nextID] = c
	return b.nextID, nil
}

// toBrowser writes one message.
func (b *broker) toBrowser(out outgoing) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	for _, p := range out.parts {
		if _, err := b.root.Write(p); err != nil {
			// Half a message would swallow the next one.
			b.root.Close()
			return err
		}
	}
	return nil
}

// call sends a message of the holder's own, outside of every client's session.
// params is JSON or "".
func (b *broker) call(ctx context.Context, method, params string) (answer, error) {
	got := make(chan answer, 1)
	b.mu.Lock()
	full := method == methodAttach && b.unheard >= maxUnheard
	b.mu.Unlock()
	if full {
		return answer{}, errUnheard
	}
	id, err := b.enter(call{answer: got})
	if err != nil {
		return answer{}, err
	}
	text := `{"id":` + strconv.Itoa(int(id)) + `,"method":"` + method + `"`
	if params != "" {
		text += `,"params":` + params
	}
	data := append([]byte(text), '}', 0)
	sent := make(chan error, 1)
	// A browser that does not read must not hold up the caller's deadline.
	go func() { sent <- b.toBrowser(outgoing{parts: [][]byte{data}, size: len(data)}) }()
	for {
		select {
		case a, ok := <-got:
			if !ok {
				return answer{}, errRootClosed
			}
			return a, answerError(a.data)
		case err := <-sent:
			if err != nil {
				return answer{}, err
			}
			sent = nil
		case <-ctx.Done():
			b.mu.Lock()
			_, waiting := b.pending[id]
			switch {
			case waiting && method == methodAttach:
				b.pending[id] = call{unheard: true}
				b.unheard++
			case waiting:
				delete(b.pending, id)
			}
			b.mu.Unlock()
			if waiting || method != methodAttach {
				return answer{}, ctx.Err()
			}
			// The answer is on its way, and may have a session to end.
			ctx = context.WithoutCancel(ctx)
		}
	}
}

func answerError(data []byte) error {
	var a struct{ Error *struct{ Message string } }
	if err := json.Unmarshal(data, &a); err != nil {
		return fmt.Errorf("the browser's answer is damaged: %w", err)
	}
	if a.Error != nil {
		return errors.New(a.Error.Message)
	}
	return nil
}

// add makes a client of an accepted connection. session is its browser
// session, "" for a control connection, which reaches the holder only.
func (b *broker) add(conn net.Conn, session string) (*client, error) {
	c := &client{broker: b, conn: conn, session: session, wake: make(chan struct{}, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errRootClosed
	}
	b.clients[c] = struct{}{}
	b.attended(true)
	if session != "" {
		b.owner[session] = c
	}
	b.writers.Add(1)
	go c.write()
	return c, nil
}

// remove forgets a client and ends its sessions in the browser.
func (b *broker) remove(c *client) {
	b.mu.Lock()
	delete(b.clients, c)
	b.attended(len(b.clients) > 0)
	for s, o := range b.owner {
		if o == c {
			delete(b.owner, s)
		}
	}
	for id, p := range b.pending {
		if p.client == c {
			delete(b.pending, id)
		}
	}
	b.mu.Unlock()
	if c.session != "" {
		b.detach(c.session)
	}
	b.trim.ask()
}

// detachTimeout bounds the wait for the end of a browser session whose client
// is gone. Nothing depends on the answer.
const detachTimeout = 10 * time.Second

func (b *broker) detach(session string) {
	ctx, cancel := context.WithTimeout(context.Background(), detachTimeout)
	defer cancel()
	// An error means that the session or the browser has ended already.
	_, _ = b.call(ctx, "Target.detachFromTarget", `{"sessionId":"`+session+`"}`)
}

// flush lets the clients' writers finish, for the time given at most.
func (b *broker) flush(timeout time.Duration) {
	b.mu.Lock()
	clients := b.list()
	b.mu.Unlock()
	for _, c := range clients {
		c.finish()
	}
	done := make(chan struct{})
	go func() { b.writers.Wait(); close(done) }()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
	for _, c := range clients {
		c.conn.Close()
	}
}

// errorAnswer is an answer that the broker gives in the browser's place.
func errorAnswer(id, session string, code int, text string) outgoing {
	message, err := json.Marshal(text)
	if err != nil {
		message = []byte(`"unknown"`)
	}
	s := "{"
	if id != "" {
		s += `"id":` + id + `,`
	}
	s += `"error":{"code":` + strconv.Itoa(code) + `,"message":` + string(message) + `}`
	if session != "" {
		s += `,"sessionId":"` + session + `"`
	}
	data := append([]byte(s), '}', 0)
	return outgoing{parts: [][]byte{data}, size: len(data)}
}

// trimmer gives memory back to the system after large messages. Requests that
// come while it works are served by one more round.
type trimmer chan struct{}

func newTrimmer() trimmer { return make(trimmer, 1) }

func (t trimmer) ask() {
	select {
	case t <- struct{}{}:
	default:
	}
}

func (t trimmer) run() {
	for range t {
		debug.FreeOSMemory()
	}
}
