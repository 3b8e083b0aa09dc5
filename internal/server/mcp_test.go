package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/api"
)

// promptly is how soon a cancel has to reach the handler.
const promptly = 200 * time.Millisecond

// endedBy waits for the hanging tool to end and checks why and how soon.
func endedBy(t *testing.T, r *rig, since time.Time, want error) {
	t.Helper()
	cause := await(t, r.hang.ended, "the end of the handler's context")
	if took := time.Since(since); took > promptly {
		t.Errorf("the handler's context ended after %v, want at most %v", took, promptly)
	}
	if !errors.Is(cause, want) {
		t.Errorf("it ended because %q, want %q", cause, want)
	}
}

// post sends one raw JSON-RPC body.
func (r *rig) post(ctx context.Context, version, client, body string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, api.Base+api.MCPPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json, text/event-stream")
	request.Header.Set(api.HeaderSession, "s")
	if client != "" {
		request.Header.Set(api.HeaderClient, client)
	}
	if version != "" {
		request.Header.Set("MCP-Protocol-Version", version)
	}
	if version >= "2026-07-28" {
		var m struct {
			Method string
			Params struct{ Name string }
		}
		_ = json.Unmarshal([]byte(body), &m)
		request.Header.Set("Mcp-Method", m.Method)
		if m.Params.Name != "" {
			request.Header.Set("Mcp-Name", m.Params.Name)
		}
	}
	return api.HTTPClient(r.socket).Do(request)
}

func callBody(version, id, tool string) string {
	meta := ""
	if version >= "2026-07-28" {
		meta = `,"_meta":{"io.modelcontextprotocol/protocolVersion":"` + version + `","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
	}
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":%q,"arguments":{}%s}}`, id, tool, meta)
}

var versions = []string{"", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"}

func TestDroppedRequestCancelsTheCall(t *testing.T) {
	r := newRig(t, nil)
	for _, version := range versions {
		t.Run("protocol "+version, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				response, err := r.post(ctx, version, "", callBody(version, "1", "wait"))
				if err == nil {
					_, err = io.ReadAll(response.Body)
				}
				failed <- err
			}()
			select {
			case <-r.hang.started:
			case err := <-failed:
				t.Fatalf("the call ended early: %v", err)
			}
			start := time.Now()
			cancel()
			endedBy(t, r, start, errClientGone)
			<-failed
		})
	}
}

func TestCancelNotificationCancelsTheCall(t *testing.T) {
	r := newRig(t, nil)
	for _, version := range versions {
		for _, id := range []string{`7`, `"7"`} {
			t.Run("protocol "+version+" id "+id, func(t *testing.T) {
				answer := make(chan string, 1)
				go func() {
					response, err := r.post(t.Context(), version, "", callBody(version, id, "wait"))
					if err != nil {
						answer <- err.Error()
						return
					}
					body, _ := io.ReadAll(response.Body)
					answer <- string(body)
				}()
				select {
				case <-r.hang.started:
				case early := <-answer:
					t.Fatalf("the call ended early: %s", early)
				}
				start := time.Now()
				// A string id is not the number.
				other := map[string]string{`7`: `"7"`, `"7"`: `7`}[id]
				for _, target := range []string{other, id} {
					response, err := r.post(t.Context(), version, "", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":`+target+`,"reason":"enough"}}`)
					if err != nil {
						t.Fatal(err)
					}
					if response.StatusCode != http.StatusAccepted {
						body, _ := io.ReadAll(response.Body)
						t.Fatalf("cancel: %s %s", response.Status, body)
					}
					if target == other {
						select {
						case <-r.hang.ended:
							t.Fatal("a cancel for another id ended the call")
						default:
						}
						start = time.Now()
					}
				}
				endedBy(t, r, start, errCanceledByClient)
				if got := await(t, answer, "the answer"); !strings.Contains(got, "effect_unknown") || !strings.Contains(got, "may have taken effect") {
					t.Errorf("answer %s", got)
				}
			})
		}
	}
}

func TestSDKClientCancels(t *testing.T) {
	r := newRig(t, nil)
	cs := r.connect(t, "s", "", nil)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := cs.CallTool(ctx, &mcp.CallToolParams{Name: "wait"})
		failed <- err
	}()
	await(t, r.hang.started, "the start of the call")
	start := time.Now()
	cancel()
	await(t, r.hang.ended, "the end of the handler's context")
	if took := time.Since(start); took > promptly {
		t.Errorf("the handler's context ended after %v", took)
	}
	<-failed
	// The same client object goes on.
	if _, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "quick"}); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

func TestClientsOfOneSessionAreKeptApart(t *testing.T) {
	r := newRig(t, nil)
	call := func(client string) context.CancelFunc {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			response, err := r.post(ctx, "2025-11-25", client, callBody("2025-11-25", "3", "wait"))
			if err == nil {
				_, _ = io.Copy(io.Discard, response.Body)
			}
		}()
		await(t, r.hang.started, "the start of the call")
		return cancel
	}
	cancelAs := func(client string) {
		response, err := r.post(t.Context(), "2025-11-25", client, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}`)
		if err != nil || response.StatusCode != http.StatusAccepted {
			t.Fatal(response, err)
		}
	}
	leaveA, leaveB := call("a"), call("b")
	cancelAs("a")
	if cause := await(t, r.hang.ended, "the end of a's call"); !errors.Is(cause, errCanceledByClient) {
		t.Errorf("a's call ended because %v", cause)
	}
	if len(r.hang.ended) != 0 {
		t.Error("b's call was canceled by a")
	}
	leaveB()
	if cause := await(t, r.hang.ended, "the end of b's call"); !errors.Is(cause, errClientGone) {
		t.Errorf("b's call ended because %v", cause)
	}
	leaveA()

	// Two that cannot be told apart: neither is ended by the other's cancel.
	first, second := call(""), call("")
	cancelAs("")
	if len(r.hang.ended) != 0 {
		t.Error("an ambiguous cancel ended a call")
	}
	first()
	await(t, r.hang.ended, "the end of the first call")
	cancelAs("")
	if cause := await(t, r.hang.ended, "the end of the second call"); !errors.Is(cause, errCanceledByClient) {
		t.Errorf("the second call ended because %v", cause)
	}
	second()
}

func TestCancelOfOneBatchMember(t *testing.T) {
	r := newRig(t, nil)
	answer := make(chan string, 1)
	go func() {
		response, err := r.post(t.Context(), "2025-03-26", "", "["+callBody("", "1", "wait")+","+callBody("", "2", "quick")+","+callBody("", "3", "wait")+"]")
		if err != nil {
			answer <- err.Error()
			return
		}
		body, _ := io.ReadAll(response.Body)
		answer <- response.Status + " " + string(body)
	}()
	for range 2 {
		select {
		case <-r.hang.started:
		case early := <-answer:
			t.Fatalf("the batch ended early: %s", early)
		}
	}
	for _, id := range []string{"1", "3"} {
		if len(r.hang.ended) != 0 {
			t.Fatalf("a member ended before its cancel")
		}
		start := time.Now()
		if _, err := r.post(t.Context(), "2025-03-26", "", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":`+id+`}}`); err != nil {
			t.Fatal(err)
		}
		endedBy(t, r, start, errCanceledByClient)
	}
	if got := await(t, answer, "the answer"); strings.Count(got, `"code":"effect_unknown"`) != 2 || !strings.Contains(got, "s//agent") || strings.Contains(got, batchKey) {
		t.Errorf("answer %s", got)
	}
}

// Params are optional in JSON-RPC, and the official clients leave them out where
// they have none. One panic here would end the service for everybody.
func TestRequestsWithoutParams(t *testing.T) {
	r := newRig(t, nil)
	for _, member := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`,
		`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":null}`,
		`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":null}}`,
		`{"jsonrpc":"2.0","id":1,"method":"ping"}`,
	} {
		for _, body := range []string{member, "[" + member + "]"} {
			answer, err := r.post(t.Context(), "2025-03-26", "", body)
			if err != nil {
				t.Errorf("%s: %v", body, err)
				continue
			}
			text, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			if err != nil || !strings.Contains(string(text), `"result":`) {
				t.Errorf("%s: %v %s", body, err, text)
			}
		}
	}
}

func TestSessionComesFromTheHeader(t *testing.T) {
	r := newRig(t, nil)
	progress := make(chan string, 1)
	cs := r.connect(t, "session one", "client 2", &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, req *mcp.ProgressNotificationClientRequest) {
		progress <- req.Params.Message
	}})
	params := &mcp.CallToolParams{Name: "quick"}
	params.SetProgressToken("p")
	result, err := cs.CallTool(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	if got := result.Content[0].(*mcp.TextContent).Text; got != "session one/client 2/agent" {
		t.Errorf("caller %q", got)
	}
	if got := await(t, progress, "the progress notification"); got != "half" {
		t.Errorf("progress %q", got)
	}

	// A session of the protocol means nothing: a client that brings one along
	// from before a restart is served, and none is given.
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, api.Base+api.MCPPath, strings.NewReader(callBody("", "1", "quick")))
	if err != nil {
		t.Fatal(err)
	}
	request.Header = http.Header{
		api.HeaderSession: {"s"}, "Content-Type": {"application/json"}, "Accept": {"application/json, text/event-stream"}, "Mcp-Session-Id": {"of the last run"},
	}
	response, err := api.HTTPClient(r.socket).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if !strings.Contains(string(body), "s//agent") || response.Header.Get("Mcp-Session-Id") != "" {
		t.Errorf("with a foreign Mcp-Session-Id: %s %v %s", response.Status, response.Header, body)
	}

	for name, set := range map[string]http.Header{
		"none":    {},
		"empty":   {api.HeaderSession: {""}},
		"long":    {api.HeaderSession: {strings.Repeat("x", 201)}},
		"control": {api.HeaderSession: {"a\tb"}},
		"client":  {api.HeaderSession: {"s"}, api.HeaderClient: {strings.Repeat("x", 201)}},
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, api.Base+api.MCPPath, strings.NewReader(callBody("", "1", "quick")))
		if err != nil {
			t.Fatal(err)
		}
		request.Header = set
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Mcp-Session-Id", "ignored")
		response, err := api.HTTPClient(r.socket).Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		var answer struct{ Error struct{ Data api.Error } }
		if err := json.Unmarshal(body, &answer); err != nil {
			t.Errorf("%s: %s", name, body)
		}
		if response.StatusCode != http.StatusBadRequest || !strings.HasPrefix(answer.Error.Data.Message, "cannot tell the session: ") || answer.Error.Data.Hint == "" {
			t.Errorf("%s: %s %s", name, response.Status, body)
		}
	}
}

func TestBodyLimit(t *testing.T) {
	r := newRig(t, nil)
	response, err := r.post(t.Context(), "", "", strings.Repeat(" ", api.MaxMCPBody+1))
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("status %s", response.Status)
	}
}

// A body that stops arriving must not hold a connection for ever, and the
// deadline for it must not end a call that runs longer.
func TestBodyDeadline(t *testing.T) {
	old := bodyTimeout
	bodyTimeout = 50 * time.Millisecond
	t.Cleanup(func() { bodyTimeout = old })
	r := newRig(t, nil)
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAbfleet-Session: s\r\nContent-Length: 100\r\n\r\n{")
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != http.StatusGatewayTimeout {
		t.Errorf("status %s", response.Status)
	}

	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if response, err := r.post(ctx, "2025-11-25", "", callBody("2025-11-25", "1", "wait")); err == nil {
			_, _ = io.Copy(io.Discard, response.Body)
		}
	}()
	await(t, r.hang.started, "the start of the call")
	select {
	case cause := <-r.hang.ended:
		t.Errorf("the call ended: %v", cause)
	case <-time.After(4 * bodyTimeout):
	}
	cancel()
	await(t, r.hang.ended, "the end of the call")
}

func TestStopAnswersCallsInFlight(t *testing.T) {
	oldDrain, oldGrace := drainGrace, cancelGrace
	drainGrace, cancelGrace = 20*time.Millisecond, 20*time.Millisecond
	t.Cleanup(func() { drainGrace, cancelGrace = oldDrain, oldGrace })
	r := newRig(t, nil)
	answers := make(chan string, 3)
	names := []string{"wait", "look", "stuck"}
	for _, name := range names {
		cs := r.connect(t, "s", name, nil)
		go func() {
			result, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: name})
			if err != nil {
				answers <- name + ": " + err.Error()
				return
			}
			meta, _ := json.Marshal(result.Meta)
			answers <- fmt.Sprintf("%s: %v %s %s", name, result.IsError, result.Content[0].(*mcp.TextContent).Text, meta)
		}()
		await(t, r.hang.started, "the start of "+name)
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
	for range names {
		got := await(t, answers, "an answer")
		name, text, _ := strings.Cut(got, ": ")
		wantCode, wantHint := "effect_unknown", "It may have taken effect"
		if name == "look" {
			wantCode, wantHint = "canceled", "It had no effect"
		}
		for _, want := range []string{"true ### Error", "Error: cannot finish " + name + ": the service is stopping", wantCode, wantHint} {
			if !strings.Contains(text, want) {
				t.Errorf("%s answered %q, want %q in it", name, text, want)
			}
		}
	}
	// Later requests of open connections are told that nothing happened.
	if _, err := r.mcp.calls.add(t.Context(), callKey{}, "wait"); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("a call after Stop: %v", err)
	}
}

func TestStopLetsShortCallsFinish(t *testing.T) {
	r := newRig(t, nil)
	cs := r.connect(t, "s", "", nil)
	answered := make(chan error, 1)
	go func() {
		result, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "stuck"})
		if err == nil && result.IsError {
			err = errors.New("the call failed")
		}
		answered <- err
	}()
	await(t, r.hang.started, "the start of the call")
	stopped := make(chan error, 1)
	go func() { stopped <- r.Stop(t.Context()) }()
	r.hang.stuck <- struct{}{}
	if err := await(t, answered, "the answer"); err != nil {
		t.Error(err)
	}
	if err := await(t, stopped, "the stop"); err != nil {
		t.Error(err)
	}
}

func TestCallTimeout(t *testing.T) {
	old := callTimeout
	callTimeout = 10 * time.Millisecond
	t.Cleanup(func() { callTimeout = old })
	r := newRig(t, nil)
	result, err := r.connect(t, "s", "", nil).CallTool(t.Context(), &mcp.CallToolParams{Name: "look"})
	if err != nil {
		t.Fatal(err)
	}
	if text := result.Content[0].(*mcp.TextContent).Text; !result.IsError || !strings.Contains(text, "deadline") {
		t.Errorf("answer %q", text)
	}
}

func TestParseMessages(t *testing.T) {
	for _, test := range []struct {
		body string
		want string
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x"}}`, `false: 1 "x" call;`},
		{`{"id":9007199254740993,"method":"ping"}`, `false: 9007199254740993 "" call;`},
		{`{"id":null,"method":"ping"}`, `false:  "" ;`},
		{`{"id":true,"method":"ping"}`, `false:  "" ;`},
		{`{"id":"","method":"ping"}`, `false: "" "" call;`},
		{`{"id":1,"result":{}}`, `false: 1 "" ;`},
		{`[{"id":1,"method":"a"},{"method":"notifications/cancelled","params":{"requestId":"q"}}]`, `true: 1 "" call; "" cancels "q";`},
		{`[]`, `true:`},
		{`nonsense`, `false:`},
		{`[1]`, `false:`},
	} {
		messages, batch := parseMessages([]byte(test.body))
		var got bytes.Buffer
		fmt.Fprintf(&got, "%v:", batch)
		for _, m := range messages {
			if id := m.canceledID(); id != "" {
				fmt.Fprintf(&got, " %q cancels %s;", m.toolName(), id)
				continue
			}
			fmt.Fprintf(&got, " %s %q", requestID(m.ID), m.toolName())
			if m.isCall() {
				got.WriteString(" call;")
			} else {
				got.WriteString(" ;")
			}
		}
		if got.String() != test.want {
			t.Errorf("%s: got %q, want %q", test.body, got.String(), test.want)
		}
	}
}
