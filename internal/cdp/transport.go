package cdp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/coder/websocket"
)

var errTooLarge = fmt.Errorf("message from the browser exceeds %d MB", MaxMessage>>20)

// nulTransport frames messages by a NUL byte after each.
type nulTransport struct {
	conn net.Conn
	in   *bufio.Reader
	buf  []byte
}

// writeWait is how long a browser may take to read what is sent to it. One that
// has stopped reading for longer, such as a frozen one, is given up.
var writeWait = 30 * time.Second

// keepWriteBuffer is the most write buffer kept between messages.
const keepWriteBuffer = 64 << 10

func newNulTransport(conn net.Conn) *nulTransport {
	return &nulTransport{conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}
}

func (t *nulTransport) Read() ([]byte, error) {
	var msg []byte
	for {
		part, err := t.in.ReadSlice(0)
		if len(msg)+len(part) > MaxMessage+1 {
			return nil, errTooLarge
		}
		if err == nil {
			part = part[:len(part)-1]
			if msg == nil {
				if len(part) == 0 {
					continue
				}
				return bytes.Clone(part), nil
			}
			return append(msg, part...), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		msg = append(msg, part...)
	}
}

func (t *nulTransport) Write(batch [][]byte) error {
	for _, m := range batch {
		t.buf = append(t.buf, m...)
		t.buf = append(t.buf, 0)
	}
	err := t.conn.SetWriteDeadline(time.Now().Add(writeWait))
	if err == nil {
		_, err = t.conn.Write(t.buf)
	}
	if cap(t.buf) > keepWriteBuffer {
		t.buf = nil
	}
	t.buf = t.buf[:0]
	return err
}

func (t *nulTransport) Close() error { return t.conn.Close() }

// wsTransport carries one message per websocket message.
type wsTransport struct {
	ws     *websocket.Conn
	ctx    context.Context
	cancel context.CancelFunc
}

func dialWebSocket(ctx context.Context, url string) (*wsTransport, error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ws, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{
		HTTPClient:      client,
		CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", url, err)
	}
	ws.SetReadLimit(MaxMessage)
	t := &wsTransport{ws: ws}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t, nil
}

func (t *wsTransport) Read() ([]byte, error) {
	_, b, err := t.ws.Read(t.ctx)
	return b, err
}

func (t *wsTransport) Write(batch [][]byte) error {
	for _, m := range batch {
		ctx, cancel := context.WithTimeout(t.ctx, writeWait)
		err := t.ws.Write(ctx, websocket.MessageText, m)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *wsTransport) Close() error {
	t.cancel()
	return t.ws.CloseNow()
}
