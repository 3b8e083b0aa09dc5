package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// connectTimeout bounds connecting. A socket that systemd holds answers at
// once, also while the service starts: the connection waits in its queue.
const connectTimeout = 10 * time.Second

// maxAnswer caps an answer of the control API, in bytes.
const maxAnswer = 16 << 20

// HTTPClient returns a client whose every request goes to the unix socket,
// each over a connection of its own: whether a request reached the service
// then never depends on what happened to an earlier one.
func HTTPClient(socket string) *http.Client {
	dialer := &net.Dialer{Timeout: connectTimeout}
	return &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives:  true,
			DisableCompression: true,
			Proxy:              nil,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, "unix", socket)
			},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Base is the scheme and authority of requests over the unix socket.
const Base = "http://abfleet"

// Client calls the control API.
type Client struct {
	// Socket is the path of the control socket.
	Socket string
	http   *http.Client
}

// NewClient returns a Client for the socket.
func NewClient(socket string) *Client {
	return &Client{Socket: socket, http: HTTPClient(socket)}
}

// Get asks for path with a query.
func (c *Client) Get(ctx context.Context, path string, query url.Values) (*Answer, error) {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return c.do(ctx, http.MethodGet, path, nil)
}

// Post sends body to path.
func (c *Client) Post(ctx context.Context, path string, body any) (*Answer, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "encode request", "")
	}
	return c.do(ctx, http.MethodPost, path, data)
}

func (c *Client) do(ctx context.Context, method, path string, body []byte) (*Answer, error) {
	request, err := http.NewRequestWithContext(ctx, method, Base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "make request", "")
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, Unreachable(err, c.Socket)
	}
	defer response.Body.Close()
	const op = "read the answer of the service"
	if kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type")); kind != "application/json" {
		return nil, fault.New(fault.ServiceUnavailable, op, "Check that the socket is the fleet's, and that service and CLI are of one release", "%s, %q", response.Status, kind)
	}
	var answer Answer
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&answer); err != nil {
		if ctx.Err() != nil {
			return nil, fault.New(fault.Canceled, op, "", "%w", ctx.Err())
		}
		return nil, fault.New(fault.ServiceUnavailable, op, "Ask again: the service was stopped while it answered", "%w", err)
	}
	if answer.Error != nil {
		return nil, answer.Error.Fault()
	}
	if !answer.OK {
		return nil, fault.New(fault.ServiceUnavailable, op, "Check that service and CLI are of one release", "%s without an error", response.Status)
	}
	return &answer, nil
}

// Unsent reports whether a request failed before a byte of it was sent, so that
// it had no effect and may be repeated.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// Unreachable explains why a request over the socket failed.
func Unreachable(err error, socket string) error {
	const op = "reach the service"
	switch {
	case errors.Is(err, context.Canceled):
		return fault.New(fault.Canceled, op, "", "%w", context.Canceled)
	case errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.Timeout, op, "Check the service: systemctl --user status abfleetd", "no answer on %s in time", socket)
	case errors.Is(err, unix.ENOENT):
		return fault.New(fault.ServiceUnavailable, op, "Run `abfleet setup --now`, or name the socket with --socket", "there is no socket %s", socket)
	case errors.Is(err, unix.ECONNREFUSED):
		return fault.New(fault.ServiceUnavailable, op, "Run `abfleet setup --now`, which starts sockets and service again, also after failed starts", "nothing listens on %s", socket)
	case errors.Is(err, unix.EACCES):
		return fault.New(fault.Unauthorized, op, "Run the command as the user whose fleet this is", "the socket %s belongs to somebody else", socket)
	case Unsent(err):
		return fault.New(fault.ServiceUnavailable, op, "Check the service: systemctl --user status abfleetd", "%w", err)
	}
	return fault.New(fault.EffectUnknown, op, "Ask for the state before repeating the command", "the service went away before it answered: %w", err)
}
