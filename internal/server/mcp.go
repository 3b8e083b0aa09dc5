package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/auth"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/tools"
)

var (
	// callTimeout bounds one tool call, whatever its own waits are.
	callTimeout = 10 * time.Minute
	// cancelGrace is how long a canceled handler has to answer for itself.
	// After it, the call is answered without it.
	cancelGrace = time.Second
)

// maxClient caps what the client's header names, in characters.
const maxClient = 200

// batchKey is the _meta key that marks the members of a batch, so that each
// finds its own entry in the registry.
const batchKey = "abfleet/batch-member"

// endpoint serves MCP.
type endpoint struct {
	log   *slog.Logger
	calls *calls
	sdk   http.Handler
	// readOnly holds the tools that change nothing, so that an interrupted
	// call of theirs can be called without effect.
	readOnly map[string]bool
}

// requestsKey finds the registry entries of a POST in its context.
type requestsKey struct{}

// requests are the registry entries of a POST, by batch member; a POST of one
// message has its entry at "".
type requests map[string]*call

// newEndpoint returns the endpoint for a server whose tools are registered.
func newEndpoint(ctx context.Context, server *mcp.Server, log *slog.Logger) (*endpoint, error) {
	e := &endpoint{log: log, calls: newCalls(), readOnly: make(map[string]bool)}
	if err := e.learnTools(ctx, server); err != nil {
		return nil, err
	}
	server.AddReceivingMiddleware(e.middleware)
	e.sdk = mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, &mcp.StreamableHTTPOptions{
		Stateless:           true,
		Logger:              log,
		MaxRequestBodyBytes: api.MaxMCPBody,
		// The socket is a unix socket: there is no name to rebind.
		DisableLocalhostProtection: true,
	})
	return e, nil
}

// learnTools asks the server for its tools, as a client would.
func (e *endpoint) learnTools(ctx context.Context, server *mcp.Server) error {
	here, there := mcp.NewInMemoryTransports()
	serving, err := server.Connect(ctx, there, nil)
	if err != nil {
		return err
	}
	defer serving.Close()
	session, err := mcp.NewClient(&mcp.Implementation{Name: "abfleetd", Version: api.Version}, nil).Connect(ctx, here, nil)
	if err != nil {
		return err
	}
	defer session.Close()
	for tool, err := range session.Tools(ctx, nil) {
		if err != nil {
			return err
		}
		if tool.Annotations != nil && tool.Annotations.ReadOnlyHint {
			e.readOnly[tool.Name] = true
		}
	}
	return nil
}

// ServeHTTP registers the requests of a POST and passes it to the SDK.
func (e *endpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	caller, err := callerOf(r)
	if err != nil {
		refuse(w, http.StatusBadRequest, nil, err)
		return
	}
	if r.Method != http.MethodPost {
		e.sdk.ServeHTTP(w, r)
		return
	}
	// The body is read to its end here. Only then does net/http watch the
	// connection and end the request's context when the client goes away.
	body, err := readAll(w, r, api.MaxMCPBody)
	if err != nil {
		refuse(w, statusOf(fault.CodeOf(err)), nil, err)
		return
	}
	messages, batch := parseMessages(body)
	key := func(id string) callKey {
		return callKey{session: caller.Session, client: caller.Client, pid: clientPID(caller), id: id}
	}
	ctx := tools.WithCaller(r.Context(), caller)
	ctx = auth.WithActor(ctx, audit.Actor{Kind: audit.KindAgent, Name: caller.Client, How: "mcp", PID: caller.PID})
	entries := make(requests)
	for i, m := range messages {
		if id := m.canceledID(); id != "" && !e.calls.cancel(key(id)) {
			e.log.Debug("nothing to cancel", "session", caller.Session, "request", id)
		}
		if !m.isCall() {
			continue
		}
		k := key(requestID(m.ID))
		entry, err := e.calls.add(ctx, k, m.toolName())
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, m.ID, err)
			return
		}
		defer e.calls.remove(ctx, k, entry)
		member := ""
		if batch {
			member = strconv.Itoa(i)
		}
		entries[member] = entry
	}
	if batch {
		body = markMembers(body)
	}
	r = r.WithContext(context.WithValue(ctx, requestsKey{}, entries))
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.ContentLength = int64(len(body))
	e.sdk.ServeHTTP(w, r)
}

// clientPID tells clients apart that send no Abfleet-Client header. One that
// does may cancel from another process than it called from.
func clientPID(caller tools.Caller) int {
	if caller.Client != "" {
		return 0
	}
	return caller.PID
}

// callerOf reads who calls from the authenticated channel.
func callerOf(r *http.Request) (tools.Caller, error) {
	const op = "tell the session"
	caller := tools.Caller{Session: r.Header.Get(api.HeaderSession), Client: r.Header.Get(api.HeaderClient)}
	if caller.Session == "" {
		return caller, fault.New(fault.InvalidSession, op, "Send the header "+api.HeaderSession+", or use `abfleet mcp --session NAME`", "the request has no %s header", api.HeaderSession)
	}
	if err := fleet.CheckSession(op, caller.Session); err != nil {
		return caller, err
	}
	if !printable(caller.Client, maxClient) {
		return caller, fault.New(fault.InvalidArgument, op, "Use up to 200 characters without control characters", "the %s header is malformed", api.HeaderClient)
	}
	if peer, ok := auth.PeerFrom(r.Context()); ok {
		caller.PID = peer.PID
	}
	return caller, nil
}

// printable reports whether text is UTF-8 of at most limit characters without
// control characters.
func printable(text string, limit int) bool {
	if !utf8.ValidString(text) || utf8.RuneCountInString(text) > limit {
		return false
	}
	for _, r := range text {
		if unicode.IsControl(r) {
			return false
		}
	}
	return true
}

// refuse answers a POST that does not reach the SDK, in JSON-RPC so that a
// client shows the reason.
func refuse(w http.ResponseWriter, status int, id json.RawMessage, err error) {
	if len(id) == 0 {
		id = json.RawMessage("null")
	}
	e := api.ErrorOf(err)
	text := e.Message
	if e.Hint != "" {
		text += ". " + e.Hint
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"jsonrpc": "2.0",
		"id":      id,
		"error":   map[string]any{"code": rpcRefused, "message": text, "data": e},
	})
}

// rpcRefused is the JSON-RPC error code of refusals: the first that the
// specification leaves to implementations.
const rpcRefused = -32000

// markMembers puts each request's place in its batch into its _meta.
func markMembers(body []byte) []byte {
	var members []map[string]json.RawMessage
	if json.Unmarshal(body, &members) != nil {
		return body
	}
	for i, member := range members {
		if _, isRequest := member["method"]; !isRequest {
			continue
		}
		params, ok := object(member["params"])
		if !ok {
			continue
		}
		meta, ok := object(params["_meta"])
		if !ok {
			continue
		}
		meta[batchKey], _ = json.Marshal(strconv.Itoa(i))
		params["_meta"], _ = json.Marshal(meta)
		member["params"], _ = json.Marshal(params)
	}
	marked, err := json.Marshal(members)
	if err != nil {
		return body
	}
	return marked
}

// object decodes a JSON object; nothing at all and null are empty ones.
func object(raw json.RawMessage) (map[string]json.RawMessage, bool) {
	var members map[string]json.RawMessage
	if len(raw) > 0 && json.Unmarshal(raw, &members) != nil {
		return nil, false
	}
	if members == nil {
		members = make(map[string]json.RawMessage)
	}
	return members, true
}

// middleware gives a tool call the context of its registry entry, and answers
// it when it is ended before it is done.
func (e *endpoint) middleware(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		entries, _ := ctx.Value(requestsKey{}).(requests)
		if len(entries) == 0 {
			return next(ctx, method, req)
		}
		// Only members of a batch are marked. Other requests may well have no
		// params at all, which the SDK passes on as a nil of their type.
		entry := entries[""]
		if entry == nil {
			entry = entries[memberOf(req)]
		}
		if entry == nil {
			return next(ctx, method, req)
		}
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		defer context.AfterFunc(entry.ctx, func() { cancel(context.Cause(entry.ctx)) })()
		if method != "tools/call" {
			return next(ctx, method, req)
		}
		ctx, expire := context.WithTimeoutCause(ctx, callTimeout, context.DeadlineExceeded)
		defer expire()
		return e.finish(ctx, entry, func() (mcp.Result, error) { return next(ctx, method, req) })
	}
}

// memberOf returns the batch mark of a request, "" for none, and removes it.
func memberOf(req mcp.Request) string {
	params := req.GetParams()
	if v := reflect.ValueOf(params); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return ""
	}
	meta := params.GetMeta()
	member, _ := meta[batchKey].(string)
	delete(meta, batchKey)
	return member
}

// finish runs a tool call. When its context ends first, the handler has
// cancelGrace to return; what it then says matters only if it says that the
// call is done. Otherwise the caller is told whether it may have had an effect.
func (e *endpoint) finish(ctx context.Context, entry *call, run func() (mcp.Result, error)) (mcp.Result, error) {
	type outcome struct {
		result mcp.Result
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		result, err := run()
		done <- outcome{result, err}
	}()
	select {
	case o := <-done:
		if ctx.Err() == nil || succeeded(o.result, o.err) {
			return o.result, o.err
		}
	case <-ctx.Done():
		grace := time.NewTimer(cancelGrace)
		defer grace.Stop()
		select {
		case o := <-done:
			if succeeded(o.result, o.err) {
				return o.result, o.err
			}
		case <-grace.C:
			e.log.Warn("a tool call did not end when it was told to", "tool", entry.tool)
		}
	}
	return interrupted(entry.tool, e.readOnly[entry.tool], context.Cause(ctx)), nil
}

func succeeded(result mcp.Result, err error) bool {
	if err != nil {
		return false
	}
	called, ok := result.(*mcp.CallToolResult)
	return !ok || !called.IsError
}

// interrupted is the answer of a call that was ended from outside, in the form
// of package tools.
func interrupted(tool string, readOnly bool, cause error) *mcp.CallToolResult {
	err := api.Interrupted(tool, readOnly, cause)
	text := "### Error\nError: " + err.Error() + "\nCode: " + string(fault.CodeOf(err)) + "\nHint: " + fault.HintOf(err)
	return &mcp.CallToolResult{
		IsError: true,
		Content: []mcp.Content{&mcp.TextContent{Text: text}},
		Meta:    mcp.Meta{"abfleet/error": api.ErrorOf(err)},
	}
}
