package vnc

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"abfleet/internal/fault"
)

// patience bounds what should happen at once in these tests.
const patience = 20 * time.Second

var password = []byte("secret78")

// display is a fake Xvnc on a unix socket: it exists to misbehave. play gets
// each connection.
func display(t *testing.T, play func(net.Conn)) func() (net.Conn, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "rfb")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var players sync.WaitGroup
	players.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			players.Go(func() {
				defer conn.Close()
				play(conn)
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		players.Wait()
	})
	return func() (net.Conn, error) { return net.Dial("unix", path) }
}

// accept plays the display's half of a good handshake.
func accept(conn net.Conn) error {
	hello := make([]byte, len(banner)+1+challengeSize)
	if _, err := io.WriteString(conn, banner+"\x01\x02"+challenge); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, hello); err != nil {
		return err
	}
	want, _ := answerChallenge(password, [challengeSize]byte([]byte(challenge)))
	if !bytes.Equal(hello[len(banner)+1:], want[:]) {
		_, _ = io.WriteString(conn, be32(1)+be32(0))
		return errors.New("wrong answer")
	}
	_, err := io.WriteString(conn, success)
	return err
}

// rig is a gateway in front of a display, and what its relays ended with.
type rig struct {
	*Gateway
	server *httptest.Server
}

func serve(t testing.TB, dial func() (net.Conn, error), opts Options) *rig {
	t.Helper()
	gateway := &Gateway{
		Resolve: func(context.Context, *http.Request) (Target, error) {
			conn, err := dial()
			return Target{Conn: conn, Password: password}, err
		},
		Deny: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, string(fault.CodeOf(err)), http.StatusBadRequest)
		},
		Options: opts,
	}
	server := httptest.NewServer(gateway)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := gateway.Close(ctx); err != nil {
			t.Errorf("viewers left: %v", err)
		}
		server.Close()
	})
	return &rig{gateway, server}
}

func (r *rig) url() string { return "ws" + strings.TrimPrefix(r.server.URL, "http") + "/?session=s" }

func (r *rig) open(t *testing.T, opts *websocket.DialOptions) *websocket.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, r.url(), opts)
	if err != nil {
		t.Fatal(err)
	}
	ws.SetReadLimit(-1)
	t.Cleanup(func() { _ = ws.CloseNow() })
	return ws
}

// join opens a viewer and completes its handshake.
func (r *rig) join(t *testing.T) net.Conn {
	t.Helper()
	conn := stream(t, r.open(t, nil))
	if err := viewerHandshake(conn); err != nil {
		t.Fatal(err)
	}
	return conn
}

func stream(t *testing.T, ws *websocket.Conn) net.Conn {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	t.Cleanup(cancel)
	return websocket.NetConn(ctx, ws, websocket.MessageBinary)
}

func viewerHandshake(conn io.ReadWriter) error {
	if _, err := io.WriteString(conn, banner+"\x01"); err != nil {
		return err
	}
	got := make([]byte, len(banner)+2+4)
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if want := banner + "\x01\x01" + success; string(got) != want {
		return fmt.Errorf("viewer was told %q, want %q", got, want)
	}
	return nil
}

// closing reads until the websocket ends and returns how.
func closing(t *testing.T, ws *websocket.Conn) websocket.CloseError {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		if _, _, err := ws.Read(ctx); err != nil {
			var end websocket.CloseError
			if !errors.As(err, &end) {
				t.Errorf("no close frame: %v", err)
			}
			return end
		}
	}
}

func TestRelayPassesBytesBothWays(t *testing.T) {
	heard := make(chan []byte, 1)
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) != nil {
			return
		}
		_, _ = io.WriteString(conn, "server init")
		got := make([]byte, len("client init and a key"))
		_, _ = io.ReadFull(conn, got)
		heard <- got
		_, _ = io.WriteString(conn, "an update")
		_, _ = io.Copy(io.Discard, conn)
	}), Options{})

	// Everything a viewer can send ahead, in one message.
	ws := r.open(t, nil)
	conn := stream(t, ws)
	if _, err := io.WriteString(conn, banner+"\x01client init and a key"); err != nil {
		t.Fatal(err)
	}
	want := banner + "\x01\x01" + success + "server initan update"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("viewer got %q, want %q", got, want)
	}
	if got := <-heard; string(got) != "client init and a key" {
		t.Errorf("display got %q", got)
	}
	if bytes.Contains(got, password) {
		t.Error("the password reached the viewer")
	}
}

func TestRelayTakesBytesOneByOne(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(conn, conn)
		}
	}), Options{})
	ws := r.open(t, nil)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// One message in frames of one byte, then single-byte messages.
	w, err := ws.Writer(ctx, websocket.MessageBinary)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []byte(banner) {
		if _, err := w.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, b := range []byte("\x01echo") {
		if err := ws.Write(ctx, websocket.MessageBinary, []byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	conn := stream(t, ws)
	want := banner + "\x01\x01" + success + "echo"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// Bytes that arrive in one packet with the upgrade request belong to the
// stream (F-19).
func TestFramePipelinedWithUpgrade(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(conn, conn)
		}
	}), Options{})
	conn, reader := rawUpgrade(t, r, frame(0x82, uint64(len(banner)+3), []byte(banner+"\x01hi")))
	defer conn.Close()
	want := banner + "\x01\x01" + success + "hi"
	var got []byte
	for len(got) < len(want) {
		head := make([]byte, 2)
		if _, err := io.ReadFull(reader, head); err != nil {
			t.Fatalf("after %q: %v", got, err)
		}
		body := make([]byte, head[1])
		if _, err := io.ReadFull(reader, body); err != nil {
			t.Fatal(err)
		}
		got = append(got, body...)
	}
	if string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// frame makes a masked frame with any claimed length, under a mask of zeros.
func frame(first byte, claimed uint64, payload []byte) []byte {
	b := []byte{first, 0x80 | 127}
	b = binary.BigEndian.AppendUint64(b, claimed)
	b = append(b, 0, 0, 0, 0)
	return append(b, payload...)
}

func rawUpgrade(t *testing.T, r *rig, after []byte) (net.Conn, *bufio.Reader) {
	t.Helper()
	host := strings.TrimPrefix(r.server.URL, "http://")
	conn, err := net.Dial("tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	request := "GET /?session=s HTTP/1.1\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
	if _, err := conn.Write(append([]byte(request), after...)); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(conn)
	answer, err := http.ReadResponse(reader, nil)
	if err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %v, %v", answer, err)
	}
	return conn, reader
}

// A length in a frame is a claim: nothing may be allocated for it (F-21).
func TestForgedFrames(t *testing.T) {
	for name, bad := range map[string][]byte{
		"length of 2^62":     frame(0x82, 1<<62, nil),
		"negative length":    frame(0x82, 1<<63|4, nil),
		"unmasked":           append([]byte{0x82, byte(len(banner))}, banner...),
		"reserved bits":      frame(0xf2, 4, []byte("RFB ")),
		"unknown opcode":     frame(0x83, 4, []byte("RFB ")),
		"long ping":          frame(0x89, 4096, make([]byte, 4096)),
		"stray continuation": frame(0x80, 4, []byte("RFB ")),
	} {
		t.Run(name, func(t *testing.T) {
			// The short deadline ends the one that is not an error yet.
			r := serve(t, display(t, func(conn net.Conn) {
				if accept(conn) == nil {
					_, _ = io.Copy(io.Discard, conn)
				}
			}), Options{HandshakeTimeout: 300 * time.Millisecond})
			before := allocated()
			conn, reader := rawUpgrade(t, r, bad)
			defer conn.Close()
			readUntilClose(reader)
			if grown := allocated() - before; grown > 4<<20 {
				t.Errorf("%d bytes were allocated for it", grown)
			}
		})
	}
}

// readUntilClose reads the relay's short frames until one says goodbye, or the
// connection ends.
func readUntilClose(reader io.Reader) {
	const opClose = 0x88
	head := make([]byte, 2)
	for {
		if _, err := io.ReadFull(reader, head); err != nil || head[0] == opClose {
			return
		}
		if _, err := io.CopyN(io.Discard, reader, int64(head[1])); err != nil {
			return
		}
	}
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

func TestMessageLimit(t *testing.T) {
	got := make(chan int64, 1)
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) != nil {
			return
		}
		n, _ := io.Copy(io.Discard, conn)
		got <- n
	}), Options{})
	ws := r.open(t, nil)
	if err := viewerHandshake(stream(t, ws)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	before := allocated()
	writeErr := make(chan error, 1)
	go func() { writeErr <- ws.Write(ctx, websocket.MessageBinary, make([]byte, MaxMessage+1<<20)) }()
	if end := closing(t, ws); end.Code != websocket.StatusMessageTooBig {
		t.Errorf("closed with %v", end)
	}
	<-writeErr
	if n := <-got; n > MaxMessage+1 {
		t.Errorf("the display was given %d bytes of it", n)
	}
	// The message itself was made by this test.
	if grown := allocated() - before; grown > MaxMessage+8<<20 {
		t.Errorf("%d bytes were allocated while it passed", grown)
	}
}

func TestHandshakeEnds(t *testing.T) {
	silent := func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }
	good := func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	}
	say := func(text string) func(net.Conn) {
		return func(conn net.Conn) {
			_, _ = io.WriteString(conn, text)
			_, _ = io.Copy(io.Discard, conn)
		}
	}
	for name, c := range map[string]struct {
		play   func(net.Conn)
		viewer string
		code   websocket.StatusCode
		reason string
	}{
		"display never speaks":        {silent, banner + "\x01", CloseDisplaySilent, "the display does not answer"},
		"display stops half way":      {say(banner + "\x01\x02"), banner + "\x01", CloseDisplaySilent, "the display does not answer"},
		"display offers None only":    {say(banner + "\x01\x01"), banner + "\x01", CloseDisplayRefused, "the display refused the service"},
		"display is something else":   {say("220 mail.example.org ESMTP\r\n"), banner + "\x01", CloseDisplayRefused, "the display refused the service"},
		"display refuses":             {say(banner + "\x00" + be32(1<<32-1) + strings.Repeat("n", 1<<16)), banner + "\x01", CloseDisplayRefused, "the display refused the service"},
		"display hangs up":            {func(net.Conn) {}, banner + "\x01", CloseDisplayGone, "the display went away"},
		"display hangs up on success": {func(c net.Conn) { _ = accept(c) }, banner + "\x01", CloseDisplayGone, "the display went away"},
		"viewer never speaks":         {good, "", CloseViewerProtocol, "this viewer did not complete the handshake"},
		"viewer stops half way":       {good, banner, CloseViewerProtocol, "this viewer did not complete the handshake"},
		"viewer is something else":    {good, "GET / HTTP/1.1\r\n", CloseViewerProtocol, "this viewer does not speak RFB"},
		"viewer wants a password":     {good, banner + "\x02", CloseViewerProtocol, "this viewer does not speak RFB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := serve(t, display(t, c.play), Options{HandshakeTimeout: 500 * time.Millisecond})
			ws := r.open(t, nil)
			if c.viewer != "" {
				// The display's failure may come first.
				_ = ws.Write(context.Background(), websocket.MessageBinary, []byte(c.viewer))
			}
			if end := closing(t, ws); end.Code != c.code || end.Reason != c.reason {
				t.Errorf("closed with %d %q, want %d %q", end.Code, end.Reason, c.code, c.reason)
			}
		})
	}
}

func TestTextMessageIsRefused(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) { _ = accept(conn); _, _ = io.Copy(io.Discard, conn) }), Options{})
	ws := r.open(t, nil)
	if err := ws.Write(context.Background(), websocket.MessageText, []byte(banner)); err != nil {
		t.Fatal(err)
	}
	if end := closing(t, ws); end.Code != websocket.StatusUnsupportedData {
		t.Errorf("closed with %v", end)
	}
}

func TestViewerLeaving(t *testing.T) {
	for name, leave := range map[string]func(*websocket.Conn){
		"with a close frame": func(ws *websocket.Conn) { _ = ws.Close(websocket.StatusNormalClosure, "") },
		"without one":        func(ws *websocket.Conn) { _ = ws.CloseNow() },
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan struct{})
			r := serve(t, display(t, func(conn net.Conn) {
				if accept(conn) == nil {
					_, _ = io.Copy(io.Discard, conn)
				}
				close(ended)
			}), Options{})
			ws := r.open(t, nil)
			if err := viewerHandshake(stream(t, ws)); err != nil {
				t.Fatal(err)
			}
			leave(ws)
			select {
			case <-ended:
			case <-time.After(patience):
				t.Fatal("the display's connection stays open")
			}
		})
	}
}

func TestRelayReturn(t *testing.T) {
	run := func(t *testing.T, ctx context.Context, play func(net.Conn), viewer func(*websocket.Conn)) error {
		dial := display(t, play)
		result := make(chan error, 1)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ws, err := websocket.Accept(w, r, nil)
			if err != nil {
				result <- err
				return
			}
			upstream, err := dial()
			if err != nil {
				result <- err
				return
			}
			result <- Relay(ctx, ws, upstream, password, Options{})
		}))
		t.Cleanup(server.Close)
		ws, _, err := websocket.Dial(context.Background(), server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer ws.CloseNow()
		viewer(ws)
		select {
		case err := <-result:
			return err
		case <-time.After(patience):
			t.Fatal("the relay does not end")
			return nil
		}
	}
	idle := func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	}
	t.Run("nil when the viewer left", func(t *testing.T) {
		err := run(t, context.Background(), idle, func(ws *websocket.Conn) {
			if err := viewerHandshake(stream(t, ws)); err != nil {
				t.Error(err)
			}
			_ = ws.Close(websocket.StatusGoingAway, "")
		})
		if err != nil {
			t.Errorf("got %v", err)
		}
	})
	t.Run("an End when the display left", func(t *testing.T) {
		err := run(t, context.Background(), func(conn net.Conn) { _ = accept(conn) }, func(ws *websocket.Conn) {
			_ = viewerHandshake(stream(t, ws))
			_, _, _ = ws.Read(context.Background())
		})
		var end *End
		if !errors.As(err, &end) || end.Code != CloseDisplayGone || !errors.Is(err, io.EOF) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the context's cause", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		err := run(t, ctx, idle, func(ws *websocket.Conn) {
			conn := stream(t, ws)
			if err := viewerHandshake(conn); err != nil {
				t.Error(err)
			}
			cancel(&End{Code: CloseNotAllowed, Reason: "not allowed any more"})
			if got := closing(t, ws); got.Code != CloseNotAllowed || got.Reason != "not allowed any more" {
				t.Errorf("viewer was told %v", got)
			}
		})
		var end *End
		if !errors.As(err, &end) || end.Code != CloseNotAllowed {
			t.Errorf("got %v", err)
		}
	})
}

// A viewer that takes nothing costs bounded memory, does not disturb another
// one, and is cut in the end.
func TestSlowViewer(t *testing.T) {
	const flood = 256 << 20
	pushed := make(chan int64, 1)
	dial := display(t, func(conn net.Conn) {
		if accept(conn) != nil {
			return
		}
		first := make([]byte, 1)
		if _, err := io.ReadFull(conn, first); err != nil {
			return
		}
		if first[0] == 'e' {
			_, _ = io.Copy(conn, conn)
			return
		}
		n, _ := io.Copy(conn, io.LimitReader(zeros{}, flood))
		pushed <- n
	})
	r := serve(t, dial, Options{StallTimeout: time.Second})

	slow := r.join(t)
	if _, err := io.WriteString(slow, "f"); err != nil {
		t.Fatal(err)
	}
	other := r.join(t)
	if _, err := io.WriteString(other, "e"); err != nil {
		t.Fatal(err)
	}
	// The other viewer works for as long as the slow one lives.
	var n int64
	for echo := make([]byte, 1000); ; {
		if _, err := other.Write(echo); err != nil {
			t.Fatalf("the other viewer: %v", err)
		}
		if _, err := io.ReadFull(other, echo); err != nil {
			t.Fatalf("the other viewer: %v", err)
		}
		select {
		case n = <-pushed:
		default:
			continue
		}
		break
	}
	// What the display could get rid of sits in kernel buffers, but for
	// bigBuffer.
	if n > flood/4 {
		t.Errorf("the display could push %d bytes to a viewer that takes none", n)
	}
	if r.Viewers() > 2 {
		t.Errorf("%d viewers", r.Viewers())
	}
}

// A viewer that is slow but does take bytes gets every one of them.
func TestSlowViewerIsNotCutWhileItReads(t *testing.T) {
	data := make([]byte, 24<<20)
	_, _ = rand.Read(data)
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = conn.Write(data)
			_, _ = io.Copy(io.Discard, conn)
		}
	}), Options{StallTimeout: 2 * time.Second})
	conn := r.join(t)
	sum := sha256.New()
	buf := make([]byte, 64<<10)
	for left := len(data); left > 0; {
		n, err := io.ReadFull(conn, buf[:min(left, len(buf))])
		if err != nil {
			t.Fatalf("%d bytes before the end: %v", left, err)
		}
		sum.Write(buf[:n])
		left -= n
		runtime.Gosched()
	}
	if [sha256.Size]byte(sum.Sum(nil)) != sha256.Sum256(data) {
		t.Error("the bytes differ")
	}
}

// A display that takes no input must not hold the viewer for ever.
func TestDisplayThatTakesNoInput(t *testing.T) {
	hold := make(chan struct{})
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			<-hold
		}
	}), Options{StallTimeout: 300 * time.Millisecond})
	t.Cleanup(func() { close(hold) })
	ws := r.open(t, nil)
	if err := viewerHandshake(stream(t, ws)); err != nil {
		t.Fatal(err)
	}
	go func() {
		for ws.Write(context.Background(), websocket.MessageBinary, make([]byte, 1<<20)) == nil {
		}
	}()
	if end := closing(t, ws); end.Code != CloseDisplaySilent {
		t.Errorf("closed with %v", end)
	}
}

func TestPings(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	}), Options{PingInterval: 50 * time.Millisecond})

	t.Run("an idle viewer that answers stays", func(t *testing.T) {
		pings := make(chan struct{}, 100)
		ws := r.open(t, &websocket.DialOptions{OnPingReceived: func(context.Context, []byte) bool {
			pings <- struct{}{}
			return true
		}})
		if err := viewerHandshake(stream(t, ws)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() { _, _, _ = ws.Read(ctx) }()
		for range 5 {
			select {
			case <-pings:
			case <-time.After(patience):
				t.Fatal("no ping")
			}
		}
	})
	t.Run("one that does not answer is cut", func(t *testing.T) {
		ws := r.open(t, &websocket.DialOptions{OnPingReceived: func(context.Context, []byte) bool { return false }})
		if err := viewerHandshake(stream(t, ws)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
			t.Errorf("it stays: %v", err)
		}
	})
}

// BenchmarkRelayDown measures a busy display's way to a viewer.
func BenchmarkRelayDown(b *testing.B) {
	data := make([]byte, 1<<20)
	path := filepath.Join(b.TempDir(), "rfb")
	listener, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil || accept(conn) != nil {
			return
		}
		for {
			if _, err := conn.Write(data); err != nil {
				return
			}
		}
	}()
	r := serve(b, func() (net.Conn, error) { return net.Dial("unix", path) }, Options{})
	ws, _, err := websocket.Dial(context.Background(), r.url(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer ws.CloseNow()
	conn := websocket.NetConn(context.Background(), ws, websocket.MessageBinary)
	if err := viewerHandshake(conn); err != nil {
		b.Fatal(err)
	}
	got := make([]byte, len(data))
	b.SetBytes(int64(len(got)))
	for b.Loop() {
		if _, err := io.ReadFull(conn, got); err != nil {
			b.Fatal(err)
		}
	}
}
