package server

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"abfleet/internal/api"
	"abfleet/internal/fleet"
	"abfleet/internal/vnc"
)

// browser returns a client with a cookie jar, logged in if token is right.
func (r *rig) browser(t *testing.T, token string) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.web+api.SignInPath, strings.NewReader(`{"token":"`+token+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Origin", r.web)
	read(t, client, request)
	return client
}

func read(t *testing.T, client *http.Client, request *http.Request) (*http.Response, string) {
	t.Helper()
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(body)
}

func TestWebDoors(t *testing.T) {
	r := newRig(t, nil)
	host := strings.TrimPrefix(r.web, "http://")
	in, out := r.browser(t, testToken), r.browser(t, strings.Repeat("x", 43))
	for _, test := range []struct {
		what, method, path string
		client             *http.Client
		change             func(*http.Request)
		status             int
		code               string
	}{
		{"the page needs no cookie", "GET", "/", out, nil, 0, ""},
		{"the page has one host", "GET", "/", in, func(q *http.Request) { q.Host = "evil.example:80" }, 403, "untrusted_authority"},
		{"status", "GET", api.StatusPath, out, nil, 200, ""},
		{"status has one method", "POST", api.StatusPath, out, nil, 405, "invalid_argument"},
		{"login has one method", "GET", api.SignInPath, out, nil, 405, "invalid_argument"},
		{"state with the cookie", "GET", api.StatePath, in, nil, 200, ""},
		{"state without it", "GET", api.StatePath, out, nil, 401, "unauthorized"},
		{"state from another site", "GET", api.StatePath, in, func(q *http.Request) { q.Header.Set("Origin", "http://evil.example") }, 403, "bad_origin"},
		{"state from another port", "GET", api.StatePath, in, func(q *http.Request) { q.Header.Set("Sec-Fetch-Site", "same-site") }, 403, "bad_origin"},
		{"state under a rebound name", "GET", api.StatePath, in, func(q *http.Request) { q.Host = "evil.example" }, 403, "untrusted_authority"},
		{"state to post", "POST", api.StatePath, in, func(q *http.Request) { q.Header.Set("Origin", "http://"+host) }, 405, "invalid_argument"},
		{"no such path", "GET", api.WebPrefix + "/nothing", in, nil, 404, "not_found"},
		{"no such path, without the cookie", "GET", api.WebPrefix + "/nothing", out, nil, 401, "unauthorized"},
		{"the control API is not here", "GET", api.IdentitiesPath, in, nil, 404, ""},
		{"MCP is not here", "POST", api.MCPPath, in, nil, 405, ""},
		{"a viewer without the cookie", "GET", api.SocketPath + "?session=s", out, func(q *http.Request) { q.Header.Set("Origin", "http://"+host) }, 401, "unauthorized"},
		{"a viewer without Origin", "GET", api.SocketPath + "?session=s", in, nil, 403, "bad_origin"},
		{"a viewer of nothing", "GET", api.SocketPath, in, func(q *http.Request) { q.Header.Set("Origin", "http://"+host) }, 400, "invalid_argument"},
	} {
		request, err := http.NewRequestWithContext(t.Context(), test.method, r.web+test.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if test.change != nil {
			test.change(request)
		}
		response, body := read(t, test.client, request)
		if test.status != 0 && response.StatusCode != test.status {
			t.Errorf("%s: %s %s, want %d", test.what, response.Status, body, test.status)
		}
		if test.code != "" {
			var answer api.Answer
			if json.Unmarshal([]byte(body), &answer) != nil || answer.OK || answer.Error == nil || string(answer.Error.Code) != test.code {
				t.Errorf("%s: %s, want code %s", test.what, body, test.code)
			}
			if got := response.Header.Get("Cache-Control"); got != "no-store" {
				t.Errorf("%s: Cache-Control %q", test.what, got)
			}
		}
		for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"} {
			if got := response.Header.Get(name); got != want {
				t.Errorf("%s: %s %q", test.what, name, got)
			}
		}
		if policy := response.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || !strings.Contains(policy, "frame-ancestors 'self'") {
			t.Errorf("%s: Content-Security-Policy %q", test.what, policy)
		}
	}
}

func TestStateShowsNoInternals(t *testing.T) {
	r := newRig(t, nil)
	r.fleet.identities = []fleet.IdentityView{
		{ID: "identity-1", Name: "work", Login: fleet.LoginView{State: fleet.Controllable}},
		{ID: "identity-2", Name: "home", Login: fleet.LoginView{State: fleet.Stopped}},
	}
	r.fleet.sessions = []fleet.SessionView{{Session: "s", IdentityID: "identity-1", IdentityName: "work", State: fleet.Starting}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.web+api.StatePath, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, body := read(t, r.browser(t, testToken), request)
	const want = `{"ok":true,"state":{"sessions":[{"session":"s","identity":"work","running":false}],"logins":[{"identity":"identity-1","name":"work","running":true}]}}`
	if strings.TrimSpace(body) != want {
		t.Errorf("state\n%s, want\n%s", body, want)
	}
}

func TestViewerIsToldWhy(t *testing.T) {
	r := newRig(t, nil)
	client := r.browser(t, testToken)
	host := strings.TrimPrefix(r.web, "http://")
	for query, want := range map[string]websocket.StatusCode{
		"?session=s":  vnc.CloseBrowserStopped,
		"?identity=i": vnc.CloseBrowserStopped,
	} {
		ws, _, err := websocket.Dial(t.Context(), "ws://"+host+api.SocketPath+query, &websocket.DialOptions{
			HTTPClient: client, HTTPHeader: http.Header{"Origin": {r.web}},
		})
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = ws.Read(t.Context())
		if got := websocket.CloseStatus(err); got != want {
			t.Errorf("%s: closed with %d (%v), want %d", query, got, err, want)
		}
	}
}
