package auth_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"abfleet/internal/auth"
	"abfleet/internal/fault"
	"abfleet/internal/vnc"
)

// A display may be looked for only once the request has passed authority,
// Origin and cookie: else a stranger learns which sessions exist, and opens
// connections to them.
func TestGatewayResolvesOnlyAfterAuth(t *testing.T) {
	const token = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"
	deny := func(w http.ResponseWriter, _ *http.Request, err error) {
		status, ok := auth.HTTPStatus(fault.CodeOf(err))
		if !ok {
			status = http.StatusInternalServerError
		}
		w.WriteHeader(status)
	}
	guard, err := auth.New(auth.Options{Token: token, Deny: deny})
	if err != nil {
		t.Fatal(err)
	}
	resolved := 0
	gateway := &vnc.Gateway{Deny: deny, Resolve: func(ctx context.Context, _ *http.Request) (vnc.Target, error) {
		resolved++
		if _, ok := auth.ActorFrom(ctx); !ok {
			t.Error("resolved for nobody")
		}
		return vnc.Target{}, fault.New(fault.SessionNotFound, "view browser", "", "no such session")
	}}
	mux := http.NewServeMux()
	mux.Handle("POST /login", guard.LoginHandler())
	mux.Handle("/ws", guard.WebSocket(gateway))
	server := httptest.NewServer(mux)
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")

	login, _ := http.NewRequest(http.MethodPost, server.URL+"/login", strings.NewReader(`{"token":"`+token+`"}`))
	login.Header.Set("Content-Type", "application/json")
	login.Header.Set("Origin", server.URL)
	answer, err := http.DefaultClient.Do(login)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("login answered %s", answer.Status)
	}
	cookie := answer.Cookies()[0]
	good := cookie.Name + "=" + cookie.Value

	dial := func(host string, header ...string) (*websocket.Conn, *http.Response, error) {
		h := http.Header{}
		for i := 0; i < len(header); i += 2 {
			h.Set(header[i], header[i+1])
		}
		return websocket.Dial(context.Background(), server.URL+"/ws?session=a", &websocket.DialOptions{HTTPHeader: h, Host: host})
	}
	for name, c := range map[string]struct {
		host   string
		header []string
		status int
	}{
		"no cookie":         {host, []string{"Origin", server.URL}, 401},
		"changed cookie":    {host, []string{"Origin", server.URL, "Cookie", good + "x"}, 401},
		"no Origin":         {host, []string{"Cookie", good}, 403},
		"another Origin":    {host, []string{"Origin", "http://127.0.0.1:1", "Cookie", good}, 403},
		"another authority": {"evil.example.org", []string{"Origin", "http://evil.example.org", "Cookie", good}, 403},
		"another site":      {host, []string{"Origin", server.URL, "Cookie", good, "Sec-Fetch-Site", "same-site"}, 403},
	} {
		ws, answer, err := dial(c.host, c.header...)
		if err == nil {
			_ = ws.CloseNow()
			t.Errorf("%s: accepted", name)
		} else if answer == nil || answer.StatusCode != c.status {
			t.Errorf("%s: got %v, %v, want %d", name, answer, err, c.status)
		}
	}
	if resolved != 0 {
		t.Errorf("resolved %d targets for strangers", resolved)
	}

	ws, _, err := dial(host, "Origin", server.URL, "Cookie", good)
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if _, _, err := ws.Read(context.Background()); websocket.CloseStatus(err) != vnc.CloseNotFound {
		t.Errorf("got %v", err)
	}
	if resolved != 1 {
		t.Errorf("resolved %d targets", resolved)
	}
}
