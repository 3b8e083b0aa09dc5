package vnc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// Close codes a viewer can be told, beside the standard ones. The page knows
// them too (server/web/src/viewer.ts).
const (
	// CloseNotAllowed: this viewer may not see this browser.
	CloseNotAllowed websocket.StatusCode = 4001
	// CloseBrowserStopped: there is no running browser to show.
	CloseBrowserStopped websocket.StatusCode = 4002
	// CloseDisplayGone: the display went away while the browser still counted
	// as running.
	CloseDisplayGone websocket.StatusCode = 4003
	// CloseDisplayRefused: the display did not accept the service.
	CloseDisplayRefused websocket.StatusCode = 4004
	// CloseDisplaySilent: the display accepted the connection and then did
	// not do its part in time.
	CloseDisplaySilent websocket.StatusCode = 4005
	// CloseViewerSlow: the viewer took nothing for too long, or stopped
	// answering pings.
	CloseViewerSlow websocket.StatusCode = 4006
	// CloseViewerProtocol: the viewer does not speak RFB as offered.
	CloseViewerProtocol websocket.StatusCode = 4007
	// CloseNotFound: no such session or Identity.
	CloseNotFound websocket.StatusCode = 4008
	// CloseUnavailable: the browser exists and cannot be shown at present.
	CloseUnavailable websocket.StatusCode = 4009
	// CloseNoDisplay: browsers have no display here, and will not get one while
	// the viewer waits.
	CloseNoDisplay websocket.StatusCode = 4010
)

// MaxMessage caps one websocket message of a viewer, in bytes. Messages are
// streamed, never held whole; a clipboard is the largest thing RFB clients
// send.
const MaxMessage = 16 << 20

const (
	// smallBuffer is what an idle direction holds.
	smallBuffer = 4 << 10
	// bigBuffer is what a busy downward direction borrows. It bounds what a
	// relay keeps in memory for a slow viewer.
	bigBuffer = 64 << 10
)

// Defaults of Options.
const (
	// DefaultHandshakeTimeout bounds both RFB handshakes together: an Xvnc
	// answers in milliseconds, a tunnelled browser in a few round trips.
	DefaultHandshakeTimeout = 10 * time.Second
	// DefaultPingInterval stays below the 30 to 60 seconds after which
	// proxies cut a silent connection.
	DefaultPingInterval = 20 * time.Second
	// DefaultStallTimeout is how long either side may take nothing at all
	// while there is something for it.
	DefaultStallTimeout = 30 * time.Second
)

// Options tunes a relay. The zero value is the default.
type Options struct {
	HandshakeTimeout time.Duration
	// PingInterval is how long nothing may be sent to the viewer before it
	// gets a ping, and how long it may take to answer.
	PingInterval time.Duration
	StallTimeout time.Duration
}

func (o Options) withDefaults() Options {
	if o.HandshakeTimeout <= 0 {
		o.HandshakeTimeout = DefaultHandshakeTimeout
	}
	if o.PingInterval <= 0 {
		o.PingInterval = DefaultPingInterval
	}
	if o.StallTimeout <= 0 {
		o.StallTimeout = DefaultStallTimeout
	}
	return o
}

// End says why a relay ended, in the viewer's words and in the log's.
type End struct {
	// Code and Reason are what the viewer is told.
	Code   websocket.StatusCode
	Reason string
	// Err is the cause, for the log only.
	Err error
}

func (e *End) Error() string {
	if e.Err == nil {
		return "viewer ended: " + e.Reason
	}
	return "viewer ended: " + e.Reason + ": " + e.Err.Error()
}

func (e *End) Unwrap() error { return e.Err }

func end(code websocket.StatusCode, reason string, err error) *End {
	return &End{Code: code, Reason: reason, Err: err}
}

// Relay authenticates to the display behind upstream, greets the viewer behind
// ws, and passes bytes until either side ends, ctx is done or something stalls.
// It owns both and has closed them when it returns. It returns nil when the
// viewer left by itself, else an *End.
//
// A ctx that is cancelled with an *End as its cause ends the relay with that.
func Relay(ctx context.Context, ws *websocket.Conn, upstream net.Conn, password []byte, opts Options) error {
	return relayWith(ctx, ws, upstream, password, opts, nil)
}

// relayWith is Relay with a last word: explain may replace an End before the
// viewer is told.
func relayWith(ctx context.Context, ws *websocket.Conn, upstream net.Conn, password []byte, opts Options, explain func(*End) *End) error {
	r := &relay{
		ws:       ws,
		upstream: upstream,
		opts:     opts.withDefaults(),
		accepted: make(chan struct{}),
		greeted:  make(chan struct{}),
		// One place for each sender, so that none waits for a reader.
		ends: make(chan *End, 4),
		quit: make(chan struct{}),
	}
	ws.SetReadLimit(MaxMessage)
	r.stall = time.AfterFunc(r.opts.StallTimeout, func() {
		r.finish(end(CloseViewerSlow, "this viewer is too slow", errors.New("it took nothing in time")))
	})
	r.stall.Stop()

	var parts sync.WaitGroup
	parts.Go(func() { r.finish(r.down(password)) })
	parts.Go(func() { r.finish(r.up()) })
	parts.Go(func() { r.finish(r.pings()) })
	ended := r.wait(ctx)

	// The display's side goes first: it frees whoever is blocked on it, and
	// the close handshake below then has the websocket's reader for itself.
	close(r.quit)
	_ = upstream.Close()
	if ended != nil && explain != nil {
		ended = explain(ended)
	}
	switch {
	case ended == nil:
		_ = ws.Close(websocket.StatusNormalClosure, "")
	case ended.Code == CloseViewerSlow:
		// Nobody is taking bytes, so nobody would read the reason.
		_ = ws.CloseNow()
	default:
		_ = ws.Close(ended.Code, ended.Reason)
	}
	parts.Wait()
	r.stall.Stop()
	if ended == nil {
		return nil
	}
	return ended
}

type relay struct {
	ws       *websocket.Conn
	upstream net.Conn
	opts     Options

	accepted chan struct{} // closed when the display accepted the service
	greeted  chan struct{} // closed when the viewer's handshake is complete
	ends     chan *End
	quit     chan struct{} // closed when the relay is over

	stall *time.Timer  // armed while a write to the viewer is under way
	sent  atomic.Int64 // writes to the viewer begun or done, so far
	heard atomic.Int64 // reads from the viewer, so far
	// feeding is set while the display is given a viewer's bytes.
	feeding atomic.Bool
}

// finish reports how one part ended; the first report decides.
func (r *relay) finish(e *End) {
	select {
	case r.ends <- e:
	default:
	}
}

// wait returns how the relay ended: nil when the viewer left.
func (r *relay) wait(ctx context.Context) *End {
	deadline := time.NewTimer(r.opts.HandshakeTimeout)
	defer deadline.Stop()
	greeted := r.greeted
	for {
		select {
		case e := <-r.ends:
			return e
		case <-greeted:
			deadline.Stop()
			greeted = nil
		case <-deadline.C:
			select {
			case <-r.accepted:
				return end(CloseViewerProtocol, "this viewer did not complete the handshake", context.DeadlineExceeded)
			default:
				return end(CloseDisplaySilent, "the display does not answer", context.DeadlineExceeded)
			}
		case <-ctx.Done():
			var e *End
			if errors.As(context.Cause(ctx), &e) {
				return e
			}
			return end(websocket.StatusGoingAway, "the service is stopping", context.Cause(ctx))
		}
	}
}

// down authenticates to the display and then passes its bytes to the viewer.
func (r *relay) down(password []byte) *End {
	if err := authenticateDisplay(r.upstream, password); err != nil {
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
			return end(CloseDisplayGone, "the display went away", err)
		}
		return end(CloseDisplayRefused, "the display refused the service", err)
	}
	close(r.accepted)
	select {
	case <-r.greeted:
	case <-r.quit:
		return nil
	}
	var small [smallBuffer]byte
	var big *[bigBuffer]byte
	defer func() { giveBack(big) }()
	for {
		buf := small[:]
		if big != nil {
			buf = big[:]
		}
		n, err := r.upstream.Read(buf)
		if n > 0 {
			if e := r.write(buf[:n]); e != nil {
				return e
			}
		}
		if err != nil {
			return end(CloseDisplayGone, "the display went away", err)
		}
		// A full read means more is waiting; a part of one that the display
		// has nothing to say for now, and an idle viewer keeps no big buffer.
		switch {
		case big == nil && n == len(buf):
			big = bigBuffers.Get().(*[bigBuffer]byte)
		case big != nil && n < smallBuffer:
			giveBack(big)
			big = nil
		}
	}
}

var bigBuffers = sync.Pool{New: func() any { return new([bigBuffer]byte) }}

func giveBack(buf *[bigBuffer]byte) {
	if buf != nil {
		bigBuffers.Put(buf)
	}
}

// write sends p to the viewer as one message, under the stall timer.
func (r *relay) write(p []byte) *End {
	r.sent.Add(1)
	r.stall.Reset(r.opts.StallTimeout)
	// No context: cancelling one would cut the connection without a reason.
	// The relay's end closes the websocket and with it this write.
	err := r.ws.Write(context.Background(), websocket.MessageBinary, p)
	r.stall.Stop()
	r.sent.Add(1)
	if err != nil {
		return viewerEnd(err)
	}
	return nil
}

// up greets the viewer and then passes its bytes to the display.
func (r *relay) up() *End {
	viewer := &viewerStream{relay: r}
	if err := greetViewer(viewer); err != nil {
		return viewerEnd(err)
	}
	select {
	case <-r.accepted:
	case <-r.quit:
		return nil
	}
	if err := acceptViewer(viewer); err != nil {
		return viewerEnd(err)
	}
	close(r.greeted)
	var buf [smallBuffer]byte
	for {
		n, err := viewer.Read(buf[:])
		if n > 0 {
			if e := r.writeDisplay(buf[:n]); e != nil {
				return e
			}
		}
		if err != nil {
			return viewerEnd(err)
		}
	}
}

// writeDisplay passes a viewer's bytes on, under a deadline.
func (r *relay) writeDisplay(p []byte) *End {
	r.feeding.Store(true)
	defer r.feeding.Store(false)
	err := r.upstream.SetWriteDeadline(time.Now().Add(r.opts.StallTimeout))
	if err == nil {
		_, err = r.upstream.Write(p)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return end(CloseDisplaySilent, "the display takes no input", err)
	default:
		return end(CloseDisplayGone, "the display went away", err)
	}
}

// pings asks a viewer for a sign of life whenever nothing was sent to it for
// an interval. A viewer with traffic needs none: the stall timer watches it,
// and a ping behind a full send buffer would only wait for the same thing.
func (r *relay) pings() *End {
	tick := time.NewTicker(r.opts.PingInterval)
	defer tick.Stop()
	sent := r.sent.Load()
	for {
		select {
		case <-tick.C:
		case <-r.quit:
			return nil
		}
		if now := r.sent.Load(); now != sent || now%2 != 0 {
			sent = now
			continue
		}
		heard := r.heard.Load()
		ctx, cancel := context.WithTimeout(context.Background(), r.opts.PingInterval)
		err := r.ws.Ping(ctx)
		cancel()
		// A pong is only read between a viewer's messages, so one that the
		// display is slow to take excuses it.
		if err == nil || r.heard.Load() != heard || r.sent.Load() != sent || r.feeding.Load() {
			continue
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return end(CloseViewerSlow, "this viewer does not answer", err)
		}
		return viewerEnd(err)
	}
}

// viewerStream reads the viewer's messages as one stream of bytes: message
// boundaries mean nothing in RFB.
type viewerStream struct {
	relay   *relay
	message io.Reader
}

var errTextMessage = errors.New("text message")

func (v *viewerStream) Read(p []byte) (int, error) {
	for {
		if v.message == nil {
			kind, message, err := v.relay.ws.Reader(context.Background())
			if err != nil {
				return 0, err
			}
			if kind != websocket.MessageBinary {
				return 0, errTextMessage
			}
			v.message = message
		}
		n, err := v.message.Read(p)
		v.relay.heard.Add(1)
		if errors.Is(err, io.EOF) {
			v.message, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (v *viewerStream) Write(p []byte) (int, error) {
	if e := v.relay.write(p); e != nil {
		return 0, e
	}
	return len(p), nil
}

// viewerEnd tells the ends a viewer brings about apart: it left, which is no
// error, or it broke the protocol.
func viewerEnd(err error) *End {
	var e *End
	switch {
	case errors.As(err, &e):
		return e
	case websocket.CloseStatus(err) != -1, errors.Is(err, net.ErrClosed),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil
	case errors.Is(err, websocket.ErrMessageTooBig):
		return end(websocket.StatusMessageTooBig, fmt.Sprintf("a message may have at most %d bytes", MaxMessage), err)
	case errors.Is(err, errTextMessage):
		return end(websocket.StatusUnsupportedData, "RFB needs binary messages", err)
	}
	var sys *net.OpError
	if errors.As(err, &sys) {
		return nil
	}
	return end(CloseViewerProtocol, "this viewer does not speak RFB", err)
}
