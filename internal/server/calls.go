package server

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"

	"abfleet/internal/fault"
)

// Why a call's context ends before its handler does.
var (
	errCanceledByClient = errors.New("the client canceled the call")
	errClientGone       = errors.New("the client closed the connection")
	errStopping         = errors.New("the service is stopping")
)

// callKey finds the calls that a cancel notification means. Request ids are
// counted by every client for itself, so the client is part of the key: its
// Abfleet-Client header, or else the process it is.
type callKey struct {
	session, client string
	pid             int
	id              string // canonical JSON: 1 and "1" differ
}

// call is one request in flight.
type call struct {
	cancel context.CancelCauseFunc
	ctx    context.Context
	// tool is the tool's name for tools/call, else "".
	tool string
}

// calls is the registry of MCP requests in flight.
type calls struct {
	mu       sync.Mutex // guards the fields that follow
	inFlight map[callKey][]*call
	count    int
	stopping bool
	drained  chan struct{} // closed when stopping and count is 0
}

func newCalls() *calls {
	return &calls{inFlight: make(map[callKey][]*call), drained: make(chan struct{})}
}

// add registers a request, which ends when ctx does. It fails when the service
// is stopping: the request then had no effect.
func (c *calls) add(ctx context.Context, key callKey, tool string) (*call, error) {
	entry := &call{tool: tool}
	entry.ctx, entry.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { entry.cancel(errClientGone) })
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopping {
		entry.cancel(errStopping)
		return nil, fault.New(fault.ServiceUnavailable, "start the call", "Repeat it: it had no effect", "%w", errStopping)
	}
	c.inFlight[key] = append(c.inFlight[key], entry)
	c.count++
	return entry, nil
}

// remove ends a request whose ctx was that of add.
func (c *calls) remove(ctx context.Context, key callKey, entry *call) {
	if ctx.Err() != nil {
		entry.cancel(errClientGone)
	}
	entry.cancel(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := c.inFlight[key]
	for i, other := range entries {
		if other == entry {
			c.inFlight[key] = append(entries[:i:i], entries[i+1:]...)
			c.count--
			break
		}
	}
	if len(c.inFlight[key]) == 0 {
		delete(c.inFlight, key)
	}
	if c.stopping && c.count == 0 {
		c.finish()
	}
}

// finish needs c.mu held.
func (c *calls) finish() {
	select {
	case <-c.drained:
	default:
		close(c.drained)
	}
}

// cancel ends the call that the client means and reports whether there was one.
// Where two clients that cannot be told apart use the same id, neither call is
// ended: the wrong one would be worse than none.
func (c *calls) cancel(key callKey) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var meant *call
	for _, entry := range c.inFlight[key] {
		if entry.ctx.Err() != nil {
			continue
		}
		if meant != nil {
			return false
		}
		meant = entry
	}
	if meant == nil {
		return false
	}
	meant.cancel(errCanceledByClient)
	return true
}

// stop refuses new calls. The channel is closed when the last one has ended.
func (c *calls) stop() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopping = true
	if c.count == 0 {
		c.finish()
	}
	return c.drained
}

// cancelAll ends every call because the service stops.
func (c *calls) cancelAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, entries := range c.inFlight {
		for _, entry := range entries {
			entry.cancel(errStopping)
		}
	}
}

// message is the part of a JSON-RPC message that the registry needs.
type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
}

// parseMessages takes a POST body apart: one message, or a batch of them as
// protocols before 2025-06-18 allow. What is not JSON-RPC yields nothing, and
// the SDK answers it.
func parseMessages(body []byte) (messages []message, batch bool) {
	if json.Unmarshal(body, &messages) == nil {
		return messages, true
	}
	var one message
	if json.Unmarshal(body, &one) != nil {
		return nil, false
	}
	return []message{one}, false
}

// isCall reports whether the message wants an answer.
func (m message) isCall() bool { return m.Method != "" && requestID(m.ID) != "" }

// requestID returns the canonical form of a request id, "" for none. Ids are
// strings or whole numbers, and "1" is not 1.
func requestID(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil && len(raw) > 0 && raw[0] == '"' {
		return strconv.Quote(text)
	}
	var number json.Number
	if json.Unmarshal(raw, &number) == nil && number != "" {
		return number.String()
	}
	return ""
}

// toolName returns the tool that a tools/call names.
func (m message) toolName() string {
	if m.Method != "tools/call" {
		return ""
	}
	var params struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(m.Params, &params)
	return params.Name
}

// canceledID returns the id that a cancel notification names.
func (m message) canceledID() string {
	if m.Method != "notifications/cancelled" {
		return ""
	}
	var params struct {
		RequestID json.RawMessage `json:"requestId"`
	}
	_ = json.Unmarshal(m.Params, &params)
	return requestID(params.RequestID)
}
