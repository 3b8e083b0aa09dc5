package holder

import (
	"encoding/json"
	"net"
	"strconv"
	"sync"
)

// client is one connection that passed the handshake.
type client struct {
	broker  *broker
	conn    net.Conn
	session string // its browser session, "" for a control connection

	// Guarded by the broker's mu.
	calls    int
	sessions int

	wake chan struct{} // capacity 1: the queue has changed

	mu     sync.Mutex // guards the fields that follow; never held together with the broker's
	queue  []outgoing
	small  int // bytes waiting in messages that are not large
	large  int // bytes waiting in large ones
	ending bool
}

const (
	// maxWaiting bounds the ordinary messages that wait for a client, in bytes.
	maxWaiting = 16 << 20
	// maxWaitingLarge bounds the large ones. One is always accepted.
	maxWaitingLarge = maxFrame
	// keepQueue is the queue length whose memory is kept when it empties.
	keepQueue = 64
)

// deliver queues a message, and cuts the client off if it does not keep up.
// It never waits.
func (c *client) deliver(out outgoing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ending {
		return
	}
	if out.size >= largeFrame {
		if c.large > 0 && c.large+out.size > maxWaitingLarge {
			c.cut()
			return
		}
		c.large += out.size
	} else {
		if c.small+out.size > maxWaiting {
			c.cut()
			return
		}
		c.small += out.size
	}
	c.queue = append(c.queue, out)
	c.signal()
}

func (c *client) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// cut ends the client at once. The caller holds c.mu.
func (c *client) cut() {
	c.ending, c.queue, c.small, c.large = true, nil, 0, 0
	c.conn.Close()
	c.signal()
}

// finish ends the client after what is queued.
func (c *client) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
	c.signal()
}

// next waits for the next message to write; ok is false at the end.
func (c *client) next() (out outgoing, ok bool) {
	for {
		c.mu.Lock()
		if len(c.queue) > 0 {
			out = c.queue[0]
			c.queue[0] = outgoing{}
			c.queue = c.queue[1:]
			if out.size >= largeFrame {
				c.large -= out.size
			} else {
				c.small -= out.size
			}
			if len(c.queue) == 0 && cap(c.queue) > keepQueue {
				c.queue = nil
			}
			c.mu.Unlock()
			return out, true
		}
		ending := c.ending
		c.mu.Unlock()
		if ending {
			return outgoing{}, false
		}
		<-c.wake
	}
}

// write is the client's writer. Closing the connection also ends the reader.
func (c *client) write() {
	defer c.broker.writers.Done()
	defer c.conn.Close()
	for {
		out, ok := c.next()
		if !ok {
			return
		}
		parts := net.Buffers(out.parts)
		if _, err := parts.WriteTo(c.conn); err != nil {
			c.mu.Lock()
			c.cut()
			c.mu.Unlock()
			return
		}
		if out.size >= largeFrame {
			out, parts = outgoing{}, nil
			c.broker.trim.ask()
		}
	}
}

// read passes on what the client says until its connection ends. A message
// that the client did not finish never reaches the browser.
func (c *client) read() {
	in := assembler{limit: maxFrame}
	in.scan.reset()
	buf := make([]byte, clientReadBuffer)
	var err error
	for err == nil {
		var n int
		n, err = c.conn.Read(buf)
		for p := buf[:n]; len(p) > 0 && err == nil; {
			took, complete := in.feed(p)
			p = p[took:]
			if in.tooLong {
				// Whatever the rest is, reading it is not worth it.
				c.mu.Lock()
				c.cut()
				c.mu.Unlock()
				return
			}
			if complete {
				f, m, _ := in.take()
				err = c.fromClient(f, m)
			}
		}
	}
	c.finish()
}

// fromClient passes on one message. An error ends the connection.
func (c *client) fromClient(f frame, m message) error {
	b := c.broker
	switch {
	case m.bad != "":
		c.deliver(errorAnswer("", "", codeInvalid, "Message refused: "+m.bad+"."))
		return nil
	case m.id == "":
		c.deliver(errorAnswer("", "", codeInvalid, "Message must have integer 'id' property."))
		return nil
	case m.method == "":
		c.deliver(errorAnswer(m.id, "", codeInvalid, "Message must have string 'method' property."))
		return nil
	}
	if m.session == "" {
		if m.method == methodClose {
			c.deliver(resultAnswer(m.id, "{}"))
			b.onClose(closeReason(f))
			return nil
		}
	}
	if c.session == "" {
		c.deliver(errorAnswer(m.id, "", codeNoMethod, "This connection reaches the holder only."))
		return nil
	}
	session := c.session
	if m.session != "" {
		b.mu.Lock()
		mine := b.owner[m.session] == c
		b.mu.Unlock()
		if !mine {
			c.deliver(errorAnswer(m.id, "", codeNoSession, "Session with given id not found."))
			return nil
		}
		session = m.session
	}
	id, err := b.enter(call{
		client:  c,
		id:      m.id,
		session: m.session,
		attach:  m.method == "Target.attachToTarget" || m.method == methodAttach,
	})
	if err == errRootClosed {
		return err
	}
	if err != nil {
		c.deliver(errorAnswer(m.id, m.session, codeServer, "Message refused: "+err.Error()+"."))
		return nil
	}
	if m.method == "Browser.close" {
		b.mu.Lock()
		b.closeAsked = true
		b.mu.Unlock()
	}
	edits := make([]edit, 0, 2)
	if m.session == "" {
		edits = append(edits, edit{m.open, m.open, `"sessionId":"` + session + `",`})
	}
	edits = append(edits, edit{m.idStart, m.idEnd, strconv.Itoa(int(id))})
	err = b.toBrowser(f.splice(edits...))
	if f.size >= largeFrame {
		b.trim.ask()
	}
	return err
}

// maxReason bounds the reason for a close that is recorded.
const maxReason = 200

func closeReason(f frame) string {
	var m struct{ Params struct{ Reason string } }
	// Without a readable reason the close is still what was asked for.
	_ = json.Unmarshal(f.bytes(maxHandshake), &m)
	reason := m.Params.Reason
	if reason == "" {
		reason = "no reason given"
	}
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	return reason
}

func resultAnswer(id, result string) outgoing {
	data := append([]byte(`{"id":`+id+`,"result":`+result+`}`), 0)
	return outgoing{parts: [][]byte{data}, size: len(data)}
}
