package cli

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"abfleet/internal/api"
	"abfleet/internal/fault"
)

var (
	// reconnectTimeout is how long a message waits for a service that does
	// not answer: a restart takes a second or two.
	reconnectTimeout = 30 * time.Second
	// retryPause is the time between two tries.
	retryPause = 200 * time.Millisecond
	// eofGrace is how long calls in flight may finish after the client has
	// closed its end, and unsentGrace how long what never reached the service
	// is tried again then.
	eofGrace    = 10 * time.Second
	unsentGrace = time.Second
)

const (
	// maxInFlight caps the requests of one client that are answered at the
	// same time.
	maxInFlight = 64
	// lookAfter is the number of tries after which systemd is asked whether
	// the service can come back at all.
	lookAfter = 5
	// maxMessage caps one message from the service, in bytes.
	maxMessage = 128 << 20
	// rpcFailed is the JSON-RPC error code of what the bridge answers itself.
	rpcFailed = -32000
	// headerVersions is the first protocol version that wants method and tool
	// repeated in headers.
	headerVersions = "2026-07-28"
	metaVersion    = "io.modelcontextprotocol/protocolVersion"
)

func (a *app) mcpCommand() *cobra.Command {
	var session string
	cmd := &cobra.Command{
		Use: "mcp --session NAME", Short: "Serve MCP on standard input and output for one session", Args: cobra.NoArgs,
		Long: "mcp connects an MCP client that starts its servers (stdio) to the service. It survives\n" +
			"a restart of the service: only calls in flight at that moment fail, and say whether they\n" +
			"may have taken effect.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if session == "" {
				return usageError{errors.New("mcp needs --session")}
			}
			if session != strings.TrimSpace(session) || strings.ContainsFunc(session, unicode.IsControl) {
				return usageError{fmt.Errorf("--session %q: no space around it and no control characters", session)}
			}
			socket, err := a.controlSocket()
			if err != nil {
				return err
			}
			b := newBridge(socket, session, a.out)
			b.explain = a.explain
			b.detail = a.errOut
			return b.run(cmd.Context(), a.in)
		},
	}
	cmd.Flags().StringVar(&session, "session", "", "session to act for (required)")
	return cmd
}

// bridge passes JSON-RPC messages between a stdio client and the service,
// untouched. It knows of MCP only what HTTP wants repeated in headers, what a
// cancel means, and which tools change nothing.
type bridge struct {
	socket  string
	session string
	client  string // tells our request ids from those of other clients
	http    *http.Client
	// explain adds to an error what systemd knows.
	explain func(error) error
	// detail takes what a person should know of an error and an agent should
	// not.
	detail io.Writer

	outMu sync.Mutex
	out   io.Writer

	// eof is closed when the client has closed its end.
	eof chan struct{}

	mu       sync.Mutex // guards the fields that follow
	version  string     // negotiated, or last used
	flights  map[string]*flight
	readOnly map[string]bool
	failure  error // of writing; ends the bridge
	fail     context.CancelFunc
}

// flight is one request that is not answered yet.
type flight struct {
	id       json.RawMessage
	tool     string // for tools/call
	cancel   context.CancelFunc
	canceled bool // by the client, which then wants no answer
}

func newBridge(socket, session string, out io.Writer) *bridge {
	return &bridge{
		socket: socket, session: session, client: "bridge-" + rand.Text(), http: api.HTTPClient(socket), out: out,
		explain: func(err error) error { return err }, detail: io.Discard,
		eof: make(chan struct{}), flights: make(map[string]*flight), readOnly: make(map[string]bool),
	}
}

// envelope is what the bridge reads of a message.
type envelope struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  json.RawMessage `json:"error"`
}

// key returns the request id as a map key, "" where there is none. Clients
// repeat an id byte for byte, but may put space around it.
func key(id json.RawMessage) string {
	text := string(bytes.TrimSpace(id))
	if text == "null" {
		return ""
	}
	return text
}

// run passes messages until in ends, ctx ends or out fails.
func (b *bridge) run(ctx context.Context, in io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b.fail = cancel

	var calls sync.WaitGroup
	lines, readErr := make(chan input), make(chan error, 1)
	go func() { readErr <- readLines(ctx, in, lines) }()
	slots := make(chan struct{}, maxInFlight)
	for {
		select {
		case <-ctx.Done():
			calls.Wait()
			return b.ended()
		case in := <-lines:
			if in.tooLong {
				b.answerError(in.id, rpcFailed, fault.New(fault.BodyTooLarge, "read a message", "Send less in one message", "it has more than %d bytes", api.MaxMCPBody))
				continue
			}
			b.take(ctx, in.line, &calls, slots)
		case err := <-readErr:
			close(b.eof)
			done := make(chan struct{})
			go func() { calls.Wait(); close(done) }()
			grace := time.NewTimer(eofGrace)
			defer grace.Stop()
			select {
			case <-done:
			case <-ctx.Done():
			case <-grace.C:
			}
			cancel()
			<-done
			return errors.Join(err, b.ended())
		}
	}
}

// ended returns why writing failed, nil if it did not.
func (b *bridge) ended() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failure
}

// input is one line from the client, without its end: what it says, or of a
// line that is too long the id to answer to.
type input struct {
	line    []byte
	id      json.RawMessage
	tooLong bool
}

// readLines sends every line of in until ctx ends.
func readLines(ctx context.Context, in io.Reader, lines chan<- input) error {
	reader := bufio.NewReaderSize(in, 64<<10)
	for {
		var next input
		line, err := readLine(reader, api.MaxMCPBody)
		if errors.Is(err, errLineTooLong) {
			var tail []byte
			tail, err = discardLine(reader, line)
			next = input{id: idOf(line, tail), tooLong: true}
		} else {
			next.line = bytes.TrimSpace(line)
		}
		if next.tooLong || len(next.line) > 0 {
			select {
			case lines <- next:
			case <-ctx.Done():
				return nil
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fault.Wrap(err, fault.InvalidArgument, "read a message", "Send one JSON-RPC message per line")
		}
	}
}

// tailSize is how much of the end of a line is kept when its middle is not: an
// id, and what may stand behind it.
const tailSize = 1 << 10

// discardLine reads the rest of a line and returns the end of the whole.
func discardLine(reader *bufio.Reader, line []byte) (tail []byte, err error) {
	cut := func(b []byte) []byte { return b[max(0, len(b)-tailSize):] }
	tail = append(tail, cut(line)...)
	for !bytes.HasSuffix(tail, []byte("\n")) {
		part, err := reader.ReadSlice('\n')
		tail = append(tail[:0], cut(append(tail, cut(part)...))...)
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return tail, err
		}
	}
	return tail, nil
}

// lastID finds the id where many clients write it: as the last member, behind
// the parameters. One with escapes in it is not looked for.
var lastID = regexp.MustCompile(`[,{]\s*"id"\s*:\s*(-?[0-9]+|"[^"\\]*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$`)

// idOf returns the id of a request of which only the beginning and the end are
// known, "null" where it cannot be told. An answer of the client has the id of
// somebody else's request.
func idOf(head, tail []byte) json.RawMessage {
	null := json.RawMessage("null")
	decoder := json.NewDecoder(bytes.NewReader(head))
	if start, err := decoder.Token(); err != nil || start != json.Delim('{') {
		return null
	}
	var id json.RawMessage
	request := false
	for {
		name, err := decoder.Token()
		if err != nil {
			break
		}
		var value json.RawMessage
		if decoder.Decode(&value) != nil {
			break
		}
		switch name {
		case "id":
			id = value
		case "method":
			request = true
		}
	}
	if found := lastID.FindSubmatch(tail); id == nil && found != nil {
		id = found[1]
	}
	if !request || id == nil {
		return null
	}
	return id
}

var errLineTooLong = errors.New("the line is too long")

// readLine reads to the next line feed, at most limit bytes. Of a longer line it
// returns the beginning, and leaves the rest.
func readLine(reader *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := reader.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > limit {
			return line, errLineTooLong
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// take starts passing one line on.
func (b *bridge) take(ctx context.Context, line []byte, calls *sync.WaitGroup, slots chan struct{}) {
	var members []envelope
	if line[0] != '[' {
		members = make([]envelope, 1)
		if err := json.Unmarshal(line, &members[0]); err != nil {
			b.answerError(json.RawMessage("null"), -32700, fault.New(fault.InvalidArgument, "read a message", "Send one JSON-RPC message per line", "%w", err))
			return
		}
	} else if err := json.Unmarshal(line, &members); err != nil {
		b.answerError(json.RawMessage("null"), -32700, fault.New(fault.InvalidArgument, "read a batch", "Send one JSON-RPC message per line", "%w", err))
		return
	}
	if len(members) == 1 && b.cancel(members[0]) {
		return
	}
	select {
	case slots <- struct{}{}:
	default:
		for _, m := range members {
			if key(m.ID) != "" && m.Method != "" {
				b.answerError(m.ID, rpcFailed, fault.New(fault.ServiceUnavailable, "start the call", "Wait for an answer first", "%d requests are in flight", maxInFlight))
			}
		}
		return
	}
	// Registered before anything else is read, so that a cancel finds it.
	ctx, cancel := context.WithCancel(ctx)
	flights := b.register(members, cancel)
	calls.Go(func() {
		defer func() { cancel(); b.forget(flights); <-slots }()
		b.pass(ctx, line, members, maps.Clone(flights))
	})
}

// register makes a flight of every request in a message.
func (b *bridge) register(members []envelope, cancel context.CancelFunc) map[string]*flight {
	flights := make(map[string]*flight)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range members {
		k := key(m.ID)
		if k == "" || m.Method == "" {
			continue
		}
		f := &flight{id: m.ID, cancel: cancel}
		if m.Method == "tools/call" {
			f.tool = "a tool call"
			var params struct{ Name string }
			if json.Unmarshal(m.Params, &params) == nil && params.Name != "" {
				f.tool = params.Name
			}
		}
		flights[k] = f
		b.flights[k] = f
	}
	return flights
}

func (b *bridge) forget(flights map[string]*flight) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, f := range flights {
		if b.flights[k] == f {
			delete(b.flights, k)
		}
	}
}

// cancel handles a cancel notification: the request is dropped, which the
// service takes for a cancel in every protocol version, and is not answered.
func (b *bridge) cancel(m envelope) bool {
	if m.Method != "notifications/cancelled" {
		return false
	}
	var params struct {
		RequestID json.RawMessage `json:"requestId"`
	}
	_ = json.Unmarshal(m.Params, &params)
	b.mu.Lock()
	defer b.mu.Unlock()
	if f := b.flights[key(params.RequestID)]; f != nil {
		f.canceled = true
		f.cancel()
	}
	return true
}

// pass sends one line and relays what comes back, again where that can do no
// harm and the service was away. It removes from flights what is answered.
func (b *bridge) pass(ctx context.Context, line []byte, members []envelope, flights map[string]*flight) {
	deadline := time.Now().Add(reconnectTimeout)
	eof := b.eof
	for tries := 1; ; tries++ {
		answered, err := b.try(ctx, line, members)
		for k := range answered {
			delete(flights, k)
		}
		again := len(answered) == 0 && repeatable(flights, err)
		if len(flights) == 0 && !again {
			return
		}
		if again && ctx.Err() == nil && time.Now().Before(deadline) && !(tries == lookAfter && b.dead(err)) {
			select {
			case <-time.After(retryPause):
				continue
			case <-eof:
				// Nobody waits for long behind a closed end.
				if grace := time.Now().Add(unsentGrace); grace.Before(deadline) {
					deadline = grace
				}
				eof = nil
				continue
			case <-ctx.Done():
			}
		}
		b.giveUp(flights, err)
		return
	}
}

// dead reports whether systemd has given the service up, so that waiting for
// it is of no use.
func (b *bridge) dead(err error) bool {
	err = api.Unreachable(err, b.socket)
	return b.explain(err) != err
}

// errRestarting is an answer of a service that is about to stop and did nothing.
var errRestarting = errors.New("the service is restarting")

// downError is an answer of a service that cannot start, so that asking again
// only has it fail again. It did nothing else.
type downError struct{ error }

func (e downError) Unwrap() error { return e.error }

// errNoAnswer is a response that ended before every request in it was answered.
var errNoAnswer = errors.New("the service went away")

// repeatable reports whether a message that failed may be sent again: nothing
// was sent, or nothing of it can have had an effect.
func repeatable(flights map[string]*flight, err error) bool {
	if errors.As(err, new(downError)) {
		return false
	}
	if unsent(err) {
		return true
	}
	for _, f := range flights {
		if f.tool != "" {
			return false
		}
	}
	return len(flights) > 0
}

// unsent reports whether the service has taken no notice of a message.
func unsent(err error) bool { return api.Unsent(err) || errors.Is(err, errRestarting) }

// giveUp answers the requests that the service did not answer.
func (b *bridge) giveUp(flights map[string]*flight, err error) {
	if err == nil {
		err = errNoAnswer
	}
	for _, f := range flights {
		b.mu.Lock()
		canceled, readOnly := f.canceled, b.readOnly[f.tool]
		b.mu.Unlock()
		var down downError
		switch {
		case canceled:
		case errors.As(err, &down):
			b.answerError(f.id, rpcFailed, b.forAgent(down.error))
		case errors.Is(err, errRestarting):
			b.answerError(f.id, rpcFailed, fault.New(fault.ServiceUnavailable, "start the call", "Repeat it: it had no effect", "%w", err))
		case f.tool != "" && !unsent(err):
			cause := errNoAnswer
			if why := b.explain(fault.Wrap(cause, fault.EffectUnknown, "reach the service", "")); !fault.Is(why, fault.EffectUnknown) {
				cause = fmt.Errorf("%w: %w", cause, b.forAgent(why))
			}
			b.answerError(f.id, rpcFailed, api.Interrupted(f.tool, readOnly, cause))
		default:
			b.answerError(f.id, rpcFailed, b.forAgent(b.explain(api.Unreachable(err, b.socket))))
		}
	}
}

// forAgent returns an error that names no socket or unit, which an agent must
// not be told and could do nothing with. What it leaves out goes to the person
// who runs the client.
func (b *bridge) forAgent(err error) error {
	if fault.Is(err, fault.Canceled) {
		return err
	}
	_, _ = fmt.Fprintf(b.detail, "abfleet mcp: %v\nhint: %s\n", err, fault.HintOf(err))
	return fault.New(fault.CodeOf(err), "reach the service",
		"It had no effect, and repeating it does not help: ask the person to run `abfleet doctor`, then `abfleet setup --now`", "it does not answer")
}

// try sends one line and relays the answers. It returns the ids that were
// answered.
func (b *bridge) try(ctx context.Context, line []byte, members []envelope) (map[string]bool, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, api.Base+api.MCPPath, bytes.NewReader(line))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json, text/event-stream")
	request.Header.Set(api.HeaderSession, b.session)
	request.Header.Set(api.HeaderClient, b.client)
	b.setVersion(request.Header, members)
	response, err := b.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusServiceUnavailable {
		return nil, errRestarting
	}
	answered := make(map[string]bool)
	reader := bufio.NewReaderSize(response.Body, 64<<10)
	kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	switch {
	case kind == "text/event-stream":
		err = readEvents(reader, func(data []byte) { b.relay(data, members, answered) })
	case kind == "application/json":
		var body []byte
		if body, err = io.ReadAll(io.LimitReader(reader, maxMessage)); err != nil {
			break
		}
		var refusal api.Answer
		if json.Unmarshal(body, &refusal) == nil && refusal.Error != nil && refusal.Error.Message != "" && !bytes.Contains(body, []byte(`"jsonrpc"`)) {
			if refusal.Error.Code == fault.ServiceUnavailable {
				return nil, downError{refusal.Error.Fault()}
			}
			b.refuse(members, answered, refusal.Error.Fault())
			break
		}
		b.relay(body, members, answered)
	case response.StatusCode >= http.StatusBadRequest:
		// The SDK's own refusals are text.
		text, _ := io.ReadAll(io.LimitReader(reader, 4<<10))
		b.refuse(members, answered, fault.New(fault.InvalidArgument, "pass the message on", "", "%s: %s", response.Status, strings.TrimSpace(string(text))))
	}
	return answered, err
}

// refuse answers every request of a message with one error.
func (b *bridge) refuse(members []envelope, answered map[string]bool, err error) {
	if raw, encodeErr := json.Marshal(rpcError(rpcFailed, err)); encodeErr == nil {
		b.refuseAll(members, answered, raw)
	}
}

// refuseAll answers every request of a message that has no answer yet.
func (b *bridge) refuseAll(members []envelope, answered map[string]bool, rpc json.RawMessage) {
	for _, m := range members {
		if k := key(m.ID); k != "" && m.Method != "" && !answered[k] {
			answered[k] = true
			b.answer(m.ID, rpc)
		}
	}
}

// setVersion sets the headers that repeat parts of the message.
func (b *bridge) setVersion(header http.Header, members []envelope) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range members {
		var params struct {
			Name string                     `json:"name"`
			URI  string                     `json:"uri"`
			Meta map[string]json.RawMessage `json:"_meta"`
		}
		_ = json.Unmarshal(m.Params, &params)
		var version string
		if json.Unmarshal(params.Meta[metaVersion], &version) == nil && version != "" {
			b.version = version
		}
		if m.Method == "initialize" {
			// Which version is spoken is what it asks.
			return
		}
		if b.version < headerVersions || m.Method == "" {
			continue
		}
		header.Set("Mcp-Method", m.Method)
		switch m.Method {
		case "tools/call", "prompts/get":
			header.Set("Mcp-Name", params.Name)
		case "resources/read":
			header.Set("Mcp-Name", params.URI)
		}
	}
	if b.version != "" {
		header.Set("Mcp-Protocol-Version", b.version)
	}
}

// readEvents calls message with the data of every event of a stream.
func readEvents(reader *bufio.Reader, message func([]byte)) error {
	var data []byte
	for {
		line, err := readLine(reader, maxMessage)
		text := bytes.TrimRight(line, "\r\n")
		switch value, isData := bytes.CutPrefix(text, []byte("data:")); {
		case isData:
			if len(data) > 0 {
				data = append(data, '\n')
			}
			data = append(data, bytes.TrimPrefix(value, []byte(" "))...)
			if len(data) > maxMessage {
				return errLineTooLong
			}
		case len(text) == 0 && len(data) > 0 && err == nil:
			message(data)
			data = nil
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// relay writes messages of the service as lines, and learns from them. An error
// without an id refuses all that was sent.
func (b *bridge) relay(data []byte, sent []envelope, answered map[string]bool) {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return
	}
	var members []envelope
	if data[0] == '[' {
		_ = json.Unmarshal(data, &members)
	} else {
		members = make([]envelope, 1)
		_ = json.Unmarshal(data, &members[0])
		if m := members[0]; m.Method == "" && m.Error != nil && key(m.ID) == "" {
			b.refuseAll(sent, answered, m.Error)
			return
		}
	}
	for _, m := range members {
		if m.Result != nil || m.Error != nil {
			answered[key(m.ID)] = true
			b.learn(m.Result)
		}
	}
	var line bytes.Buffer
	if json.Compact(&line, data) == nil {
		b.write(line.Bytes())
	}
}

// learn reads from a result which version was agreed on, and which tools only
// read.
func (b *bridge) learn(result json.RawMessage) {
	if !bytes.Contains(result, []byte(`"protocolVersion"`)) && !bytes.Contains(result, []byte(`"readOnlyHint"`)) {
		return
	}
	var known struct {
		ProtocolVersion string          `json:"protocolVersion"`
		ServerInfo      json.RawMessage `json:"serverInfo"`
		Tools           []struct {
			Name        string `json:"name"`
			Annotations struct {
				ReadOnlyHint bool `json:"readOnlyHint"`
			} `json:"annotations"`
		} `json:"tools"`
	}
	if json.Unmarshal(result, &known) != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if known.ProtocolVersion != "" && known.ServerInfo != nil {
		b.version = known.ProtocolVersion
	}
	for _, tool := range known.Tools {
		b.readOnly[tool.Name] = tool.Annotations.ReadOnlyHint
	}
}

// answerError answers a request in the service's place.
func (b *bridge) answerError(id json.RawMessage, code int, err error) {
	b.answer(id, rpcError(code, err))
}

// rpcError is the JSON-RPC form of an error.
func rpcError(code int, err error) map[string]any {
	e := api.ErrorOf(err)
	text := e.Message
	if e.Hint != "" {
		text += ". " + e.Hint
	}
	return map[string]any{"code": code, "message": text, "data": e}
}

func (b *bridge) answer(id json.RawMessage, rpcError any) {
	line, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "error": rpcError})
	if err == nil {
		b.write(line)
	}
}

// write writes one line. A client that is gone ends the bridge.
func (b *bridge) write(line []byte) {
	b.outMu.Lock()
	_, err := b.out.Write(append(line, '\n'))
	b.outMu.Unlock()
	if err != nil {
		b.mu.Lock()
		if b.failure == nil {
			b.failure = fmt.Errorf("cannot write to the client: %w", err)
		}
		b.mu.Unlock()
		b.fail()
	}
}
