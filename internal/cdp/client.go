package cdp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	typed "github.com/mafredri/cdp"
	"github.com/mafredri/cdp/rpcc"
)

// typedClient is the lazily made typed client of a Session.
type typedClient struct {
	once   sync.Once
	client *typed.Client
	err    error
}

// Client returns the typed calls of github.com/mafredri/cdp on this session.
// Its calls and event streams end with the session. Event streams buffer
// without bound inside that library, so a stream must be read or closed.
func (s *Session) Client() (*typed.Client, error) {
	s.client.once.Do(func() {
		codec := &sessionCodec{
			session: s,
			sub:     s.conn.Subscribe(Filter{Session: s}),
		}
		codec.ctx, codec.cancel = context.WithCancelCause(context.Background())
		stop := context.AfterFunc(codec.ctx, codec.sub.Close)
		rc, err := rpcc.DialContext(codec.ctx, "session",
			rpcc.WithDialer(func(context.Context, string) (io.ReadWriteCloser, error) { return codec, nil }),
			rpcc.WithCodec(func(io.ReadWriter) rpcc.Codec { return codec }))
		if err != nil {
			stop()
			codec.sub.Close()
			s.client.err = fmt.Errorf("open typed client: %w", err)
			return
		}
		go func() {
			<-s.done
			codec.cancel(fmt.Errorf("%w", ErrSessionGone))
			rc.Close()
		}()
		s.client.client = typed.NewClient(rc)
	})
	return s.client.client, s.client.err
}

// sessionCodec lets an rpcc.Conn speak through one flat session. It is also
// the connection that rpcc closes; nothing is ever read or written on it.
type sessionCodec struct {
	session *Session
	sub     *Subscription
	ctx     context.Context
	cancel  context.CancelCauseFunc
}

var errCodecIO = errors.New("a typed client has no byte stream")

func (c *sessionCodec) Read([]byte) (int, error)  { return 0, errCodecIO }
func (c *sessionCodec) Write([]byte) (int, error) { return 0, errCodecIO }
func (c *sessionCodec) Close() error {
	c.cancel(ErrClosed)
	return nil
}

// WriteRequest implements rpcc.Codec. Answers join the events, so that rpcc sees
// both in the order of their arrival.
func (c *sessionCodec) WriteRequest(r *rpcc.Request) error {
	return c.sub.Start(c.ctx, c.session, r.Method, r.Args, r.ID)
}

// ReadResponse implements rpcc.Codec.
func (c *sessionCodec) ReadResponse(r *rpcc.Response) error {
	ev, err := c.sub.Next(c.ctx)
	if err != nil {
		return err
	}
	id, ok := ev.Tag.(uint64)
	if !ok {
		r.Method, r.Args = ev.Method, ev.Params
		return nil
	}
	r.ID = id
	if ev.Err == nil {
		r.Result = ev.Params
		return nil
	}
	r.Error = &rpcc.ResponseError{Code: codeNoSession, Message: ev.Err.Error()}
	var ce *CallError
	if errors.As(ev.Err, &ce) {
		r.Error.Code, r.Error.Message = int64(ce.Code), ce.Message
		r.Error.Data, _ = ce.Data.(string)
	}
	return nil
}

var _ rpcc.Codec = (*sessionCodec)(nil)
