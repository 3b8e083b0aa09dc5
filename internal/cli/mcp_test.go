package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
	"abfleet/internal/tools/toolstest"
)

// service is an MCP service on a unix socket that can go away.
type service struct {
	t       *testing.T
	socket  string
	handler http.Handler

	mu       sync.Mutex
	http     *http.Server
	requests []http.Header
}

func newService(t *testing.T, handler http.Handler) *service {
	s := &service{t: t, socket: filepath.Join(t.TempDir(), "control.sock"), handler: handler}
	t.Cleanup(s.stop)
	return s
}

func (s *service) start() {
	s.t.Helper()
	_ = os.Remove(s.socket)
	listener, err := net.Listen("unix", s.socket)
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.http = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests = append(s.requests, r.Header.Clone())
		s.mu.Unlock()
		s.handler.ServeHTTP(w, r)
	})}
	go s.http.Serve(listener)
}

// stop drops every connection.
func (s *service) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http != nil {
		_ = s.http.Close()
		s.http = nil
	}
}

func (s *service) last() http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[len(s.requests)-1]
}

// talk runs a bridge and returns its two ends.
func talk(t *testing.T, socket string) (send func(string), receive func() string, end func() error) {
	t.Helper()
	inRead, inWrite := io.Pipe()
	outRead, outWrite := io.Pipe()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = newBridge(socket, "s", outWrite).run(t.Context(), inRead)
		_ = outWrite.Close()
	}()
	lines := make(chan string, 64)
	go func() {
		scanner := bufio.NewScanner(outRead)
		scanner.Buffer(nil, 64<<20)
		for scanner.Scan() {
			lines <- scanner.Text()
		}
		close(lines)
	}()
	// The next test may change what this bridge reads to its end.
	t.Cleanup(func() { _ = inWrite.Close(); _ = outRead.Close(); <-done })
	send = func(line string) {
		t.Helper()
		if _, err := io.WriteString(inWrite, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	receive = func() string {
		t.Helper()
		select {
		case line, ok := <-lines:
			if !ok {
				return "EOF"
			}
			return line
		case <-time.After(10 * time.Second):
			t.Fatal("no message from the bridge")
			return ""
		}
	}
	end = func() error { _ = inWrite.Close(); <-done; return err }
	return send, receive, end
}

// failure reads an error answer.
func failure(t *testing.T, line string) (id string, e api.Error) {
	t.Helper()
	var m struct {
		ID    json.RawMessage
		Error struct {
			Code    int
			Message string
			Data    api.Error
		}
	}
	if err := json.Unmarshal([]byte(line), &m); err != nil || m.Error.Code == 0 {
		t.Fatalf("not an error: %s", line)
	}
	if !strings.HasPrefix(m.Error.Message, m.Error.Data.Message) || !strings.HasSuffix(m.Error.Message, m.Error.Data.Hint) {
		t.Errorf("message %q does not say %+v", m.Error.Message, m.Error.Data)
	}
	return string(m.ID), m.Error.Data
}

func shorten(t *testing.T, v *time.Duration, d time.Duration) {
	old := *v
	*v = d
	t.Cleanup(func() { *v = old })
}

// A client of the official SDK sees through the bridge what it would see at
// the service, in the newest and in an older protocol.
func TestBridgeWithSDKClient(t *testing.T) {
	ended := make(chan error, 1)
	started := make(chan struct{}, 1)
	server := mcp.NewServer(&mcp.Implementation{Name: "x", Version: "1"}, nil)
	schema := json.RawMessage(`{"type":"object"}`)
	server.AddTool(&mcp.Tool{Name: "echo", InputSchema: schema}, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: req.Params.GetProgressToken(), Message: "half"})
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: req.Extra.Header.Get(api.HeaderSession) + "\n" + string(req.Params.Arguments)}}}, nil
	})
	server.AddTool(&mcp.Tool{Name: "wait", InputSchema: schema}, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return nil, errors.New("not called")
	})
	sdk := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, &mcp.StreamableHTTPOptions{Stateless: true})
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), `"wait"`) {
			started <- struct{}{}
			<-r.Context().Done()
			ended <- r.Context().Err()
			return
		}
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		sdk.ServeHTTP(w, r)
	}))
	s.start()
	for _, newest := range []bool{true, false} {
		inRead, inWrite := io.Pipe()
		outRead, outWrite := io.Pipe()
		ran := make(chan error, 1)
		go func() { ran <- newBridge(s.socket, "s one", outWrite).run(t.Context(), inRead) }()
		progress := make(chan string, 1)
		client := mcp.NewClient(&mcp.Implementation{Name: "t", Version: "1"}, &mcp.ClientOptions{
			ProgressNotificationHandler: func(_ context.Context, req *mcp.ProgressNotificationClientRequest) { progress <- req.Params.Message },
		})
		opts := &mcp.ClientSessionOptions{}
		if !newest {
			opts.ProtocolVersion = "2025-06-18"
		}
		cs, err := client.Connect(t.Context(), &mcp.IOTransport{Reader: outRead, Writer: inWrite}, opts)
		if err != nil {
			t.Fatal(err)
		}
		list, err := cs.ListTools(t.Context(), nil)
		if err != nil || len(list.Tools) != 2 {
			t.Fatal(list, err)
		}
		params := &mcp.CallToolParams{Name: "echo", Arguments: map[string]any{"a": "line\nfeed"}}
		params.SetProgressToken("p")
		result, err := cs.CallTool(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := result.Content[0].(*mcp.TextContent).Text, "s one\n"+`{"a":"line\nfeed"}`; got != want {
			t.Errorf("result %q, want %q", got, want)
		}
		if got := <-progress; got != "half" {
			t.Errorf("progress %q", got)
		}
		version := s.last().Get("Mcp-Protocol-Version")
		if newest != (version >= headerVersions) {
			t.Errorf("newest %v: protocol version %q", newest, version)
		}
		ctx, cancel := context.WithCancel(t.Context())
		called := make(chan error, 1)
		go func() { _, err := cs.CallTool(ctx, &mcp.CallToolParams{Name: "wait"}); called <- err }()
		<-started
		cancel()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatal("the cancel did not reach the service")
		}
		if err := <-called; !errors.Is(err, context.Canceled) {
			t.Errorf("canceled call: %v", err)
		}
		if _, err := cs.CallTool(t.Context(), params); err != nil {
			t.Errorf("after the cancel: %v", err)
		}
		<-progress
		_ = cs.Close()
		_ = inWrite.Close()
		if err := <-ran; err != nil {
			t.Errorf("the bridge ended with %v", err)
		}
	}
}

func TestBridgeSurvivesARestart(t *testing.T) {
	shorten(t, &retryPause, 10*time.Millisecond)
	called := make(chan string, 8)
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m envelope
		_ = json.NewDecoder(r.Body).Decode(&m)
		called <- m.Method
		switch {
		case m.ID == nil:
			w.WriteHeader(http.StatusAccepted)
		case m.Method == "tools/list":
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"look","annotations":{"readOnlyHint":true}},{"name":"act","annotations":{"readOnlyHint":false}}]}}`, m.ID)
		case strings.Contains(string(m.Params), "quick"):
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, "event: message\ndata: {\"jsonrpc\":\"2.0\",\ndata: \"id\":%s,\"result\":{}}\n\n", m.ID)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	s.start()
	send, receive, end := talk(t, s.socket)
	send(`{"jsonrpc":"2.0","id":"l","method":"tools/list"}`)
	receive()
	<-called
	for _, tool := range []string{"look", "act", "unheard-of"} {
		send(`{"jsonrpc":"2.0","id":"` + tool + `","method":"tools/call","params":{"name":"` + tool + `"}}`)
		<-called
	}
	s.stop()
	for range 3 {
		id, e := failure(t, receive())
		want := api.Interrupted(strings.Trim(id, `"`), id == `"look"`, errNoAnswer)
		if e.Message != want.Error() || (e.Code == "effect_unknown") != (id != `"look"`) {
			t.Errorf("%s: %+v, want %v", id, e, want)
		}
	}
	// Nobody listens. The message waits for the next service.
	send(`{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"quick"}}`)
	send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	s.start()
	if got := receive(); got != `{"jsonrpc":"2.0","id":4,"result":{}}` {
		t.Errorf("after the restart: %s", got)
	}
	for range 2 {
		<-called
	}
	if err := end(); err != nil {
		t.Error(err)
	}
}

// What has no effect is asked again when its answer is lost.
func TestBridgeRepeatsWhatIsHarmless(t *testing.T) {
	shorten(t, &retryPause, time.Millisecond)
	tries := 0
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tries++
		switch tries {
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
		}
	}))
	s.start()
	send, receive, _ := talk(t, s.socket)
	send(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	if got := receive(); !strings.Contains(got, "result") || tries != 3 {
		t.Errorf("%s after %d tries", got, tries)
	}
}

func TestBridgeGivesUp(t *testing.T) {
	shorten(t, &retryPause, time.Millisecond)
	shorten(t, &reconnectTimeout, 20*time.Millisecond)
	send, receive, _ := talk(t, filepath.Join(t.TempDir(), "none"))
	send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"act"}}`)
	answer := receive()
	if id, e := failure(t, answer); id != "1" || e.Code != "service_unavailable" || !strings.Contains(e.Hint, "abfleet setup") {
		t.Errorf("%s %+v", id, e)
	}
	// An agent is told of no socket and no unit.
	if found := toolstest.LeakCheck(answer, "none"); found != nil {
		t.Errorf("%q in %s", found, answer)
	}
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	s.start()
	send, receive, _ = talk(t, s.socket)
	send(`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"act"}}`)
	if id, e := failure(t, receive()); id != "2" || e.Code != "service_unavailable" || !strings.Contains(e.Hint, "no effect") {
		t.Errorf("%s %+v", id, e)
	}
}

// A service that cannot start is not asked again, and the agent is not told
// what is wrong with the host.
func TestBridgeStopsAtAServiceThatCannotStart(t *testing.T) {
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusInternalServerError)
		_ = json.NewEncoder(w).Encode(api.Answer{Error: &api.Error{Code: "service_unavailable", Message: "cannot reach the service: it does not start: cannot open /secret/state.db: in use"}})
	}))
	s.start()
	send, receive, _ := talk(t, s.socket)
	for id, method := range map[string]string{"1": "initialize", "2": "tools/call"} {
		before := len(s.requests)
		send(`{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `","params":{"name":"act"}}`)
		answer := receive()
		if got, e := failure(t, answer); got != id || e.Message != "cannot reach the service: it does not answer" || !strings.Contains(e.Hint, "abfleet doctor") {
			t.Errorf("%s: %s %+v", method, got, e)
		}
		if asked := len(s.requests) - before; asked != 1 {
			t.Errorf("%s was sent %d times", method, asked)
		}
	}
}

// With nothing sent, the end of the client's input is the end of the bridge.
func TestBridgeEndsAtEOFWhenTheServiceIsDown(t *testing.T) {
	shorten(t, &unsentGrace, 50*time.Millisecond)
	send, receive, end := talk(t, filepath.Join(t.TempDir(), "none"))
	send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	send(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	start := time.Now()
	if err := end(); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > eofGrace/2 {
		t.Errorf("it took %v", took)
	}
	if id, e := failure(t, receive()); id != "1" || e.Code != "service_unavailable" {
		t.Errorf("%s %+v", id, e)
	}
}

func TestBridgeAnswersRefusals(t *testing.T) {
	answers := map[string]func(http.ResponseWriter){
		"text": func(w http.ResponseWriter) { http.Error(w, "Bad Request: no", http.StatusBadRequest) },
		"envelope": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			_ = json.NewEncoder(w).Encode(api.Answer{Error: &api.Error{Code: "unauthorized", Message: "cannot answer: no", Hint: "Go away"}})
		},
		"rpc": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":"rpc","error":{"code":-32601,"message":"cannot x","data":{"message":"cannot x"}}}`)
		},
	}
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m struct{ ID string }
		_ = json.NewDecoder(r.Body).Decode(&m)
		answers[m.ID](w)
	}))
	s.start()
	send, receive, _ := talk(t, s.socket)
	for id, want := range map[string]string{"text": "400 Bad Request: Bad Request: no", "envelope": "cannot answer: no", "rpc": "cannot x"} {
		send(`{"jsonrpc":"2.0","id":"` + id + `","method":"m"}`)
		if gotID, e := failure(t, receive()); gotID != `"`+id+`"` || !strings.HasSuffix(e.Message, want) {
			t.Errorf("%s: %s %+v", id, gotID, e)
		}
	}
	send(`nonsense`)
	if id, e := failure(t, receive()); id != "null" || e.Code != "invalid_argument" {
		t.Errorf("%s %+v", id, e)
	}
	send(`[nonsense`)
	failure(t, receive())
}

func TestBridgeCapsCallsInFlight(t *testing.T) {
	s := newService(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	s.start()
	shorten(t, &eofGrace, time.Millisecond)
	send, receive, end := talk(t, s.socket)
	for i := range maxInFlight + 1 {
		send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"act"}}`, i))
	}
	if id, e := failure(t, receive()); id != fmt.Sprint(maxInFlight) || !strings.Contains(e.Message, "in flight") {
		t.Errorf("%s %+v", id, e)
	}
	go func() {
		for receive() != "EOF" {
		}
	}()
	if err := end(); err != nil {
		t.Error(err)
	}
}

func TestBridgeEndsWithItsClient(t *testing.T) {
	ended := make(chan struct{})
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "wait") {
			<-r.Context().Done()
			close(ended)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
	}))
	s.start()
	// Standard output is closed: the next answer ends the bridge, and with it
	// the call that hangs.
	inRead, inWrite := io.Pipe()
	outRead, outWrite := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- newBridge(s.socket, "s", outWrite).run(t.Context(), inRead) }()
	_ = outRead.Close()
	_, _ = io.WriteString(inWrite, `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"wait"}}`+"\n")
	_, _ = io.WriteString(inWrite, `{"jsonrpc":"2.0","id":1,"method":"ping"}`+"\n")
	select {
	case err := <-done:
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the bridge goes on without its client")
	}
	<-ended
}

// A message beyond the limit costs its own answer and nothing else.
func TestBridgeOutlivesLargeMessages(t *testing.T) {
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m envelope
		_ = json.NewDecoder(r.Body).Decode(&m)
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{}}`, m.ID)
	}))
	s.start()
	send, receive, end := talk(t, s.socket)
	large := strings.Repeat("x", api.MaxMCPBody)
	tests := []struct{ line, id string }{
		{`{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"act","arguments":{"text":"` + large + `"}}}`, "7"},
		{`{"method":"tools/call","id":"a","params":{"name":"act","arguments":{"text":"` + large + `"}}}`, `"a"`},
		// As the TypeScript and Python SDKs write it.
		{`{"method":"tools/call","params":{"arguments":{"text":"` + large + `"}},"jsonrpc":"2.0","id":8}`, "8"},
		{`{"method":"tools/call","params":{"arguments":{"text":"` + large + `"}}, "id": "b c", "jsonrpc": "2.0" }`, `"b c"`},
		// Not the id of this message, or not one that this side gave.
		{`{"method":"tools/call","params":{"text":"` + large + `","id":9}}`, "null"},
		{`{"method":"tools/call","params":{"text":"` + large + `"},"a\",\"id":9}`, "null"},
		{`{"jsonrpc":"2.0","id":9,"result":{"text":"` + large + `"}}`, "null"},
		{`{"jsonrpc":"2.0","result":{"text":"` + large + `"},"id":9}`, "null"},
		{`[{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"text":"` + large + `"}}]`, "null"},
		{large + large, "null"},
	}
	// Wherever the limit falls, and whatever was read at once.
	for pad := 0; pad < 200; pad += 25 {
		tests = append(tests, struct{ line, id string }{`{"method":"m","params":{"text":"` + large[:len(large)-pad] + `"},"jsonrpc":"2.0","id":"` + strings.Repeat("i", 160) + `"}`, `"` + strings.Repeat("i", 160) + `"`})
	}
	for _, test := range tests {
		send(test.line)
		shape := test.line[:60] + "..." + test.line[len(test.line)-60:]
		if id, e := failure(t, receive()); id != test.id || e.Code != "body_too_large" || e.Hint == "" {
			t.Errorf("%s: answered %s with %+v, want id %s", shape, id, e, test.id)
		}
		send(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
		if got := receive(); got != `{"jsonrpc":"2.0","id":1,"result":{}}` {
			t.Errorf("%s: then %s", shape, got)
		}
	}
	if err := end(); err != nil {
		t.Error(err)
	}
}

// A refusal of the whole POST has no id. It is the answer of every request in
// it, and nothing else is heard of it.
func TestBridgeSpreadsRefusals(t *testing.T) {
	const refusal = `{"code":-32000,"message":"cannot tell the session: the session id has 201 characters. Hint","data":{"code":"invalid_session_id","message":"cannot tell the session: the session id has 201 characters","hint":"Hint"}}`
	kind := "application/json"
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := `{"jsonrpc":"2.0","id":null,"error":` + refusal + `}`
		w.Header().Set("Content-Type", kind)
		if kind != "application/json" {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", body)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, body)
	}))
	s.start()
	send, receive, end := talk(t, s.socket)
	for _, kind = range []string{"application/json", "text/event-stream"} {
		for _, test := range []struct {
			line string
			ids  []string
		}{
			{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}`, []string{"1"}},
			{`{"jsonrpc":"2.0","method":"notifications/initialized"}`, nil},
			{`{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{"name":"act"}}`, []string{`"c"`}},
			{`[{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"act"}},{"jsonrpc":"2.0","method":"n"},{"jsonrpc":"2.0","id":3,"method":"tools/list"}]`, []string{"2", "3"}},
		} {
			send(test.line)
			for _, want := range test.ids {
				if id, e := failure(t, receive()); id != want || e.Code != "invalid_session_id" || e.Hint != "Hint" {
					t.Errorf("%s: answered %s with %+v", test.line, id, e)
				}
			}
		}
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if got := receive(); got != "EOF" {
		t.Errorf("after all answers: %s", got)
	}
}

// endless is a line without end. It counts what is read of it.
type endless struct{ left int }

func (e *endless) Read(p []byte) (int, error) {
	if e.left <= 0 {
		return 0, io.EOF
	}
	for i := range p {
		p[i] = 'x'
	}
	e.left -= len(p)
	return len(p), nil
}

func TestBridgeDoesNotCollectEndlessLines(t *testing.T) {
	const size = 512 << 20
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var out strings.Builder
	if err := newBridge("none", "s", &out).run(t.Context(), &endless{size}); err != nil {
		t.Errorf("ended with %v", err)
	}
	runtime.ReadMemStats(&after)
	if id, e := failure(t, out.String()); id != "null" || e.Code != "body_too_large" {
		t.Errorf("answered %s", out.String())
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > size/8 {
		t.Errorf("it took %d MB to read a line of %d MB", took>>20, size>>20)
	}
}
