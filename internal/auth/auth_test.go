package auth

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
)

const (
	testToken = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"
	testHost  = "127.0.0.1:7000"
)

// clock is a clock that tests move.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func newAuth(t *testing.T, trusted ...string) (*Auth, *clock) {
	t.Helper()
	c := &clock{time.Unix(1_800_000_000, 0)}
	a, err := New(Options{Token: testToken, Trusted: trusted, Now: c.now, Deny: deny})
	if err != nil {
		t.Fatal(err)
	}
	return a, c
}

// deny answers as the server does, with the code where a test can read it.
func deny(w http.ResponseWriter, _ *http.Request, err error) {
	code := fault.CodeOf(err)
	status, ok := HTTPStatus(code)
	if !ok {
		status = http.StatusInternalServerError
	}
	w.Header().Set("Code", string(code))
	w.WriteHeader(status)
}

func request(method, host string, header ...string) *http.Request {
	r := httptest.NewRequest(method, "http://"+testHost+"/api/agent-browser-fleet/state", nil)
	r.Host = host
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

func loginRequest(token string, header ...string) *http.Request {
	body, _ := json.Marshal(map[string]string{"token": token})
	r := httptest.NewRequest(http.MethodPost, "http://"+testHost+"/api/agent-browser-fleet/auth/login", strings.NewReader(string(body)))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Origin", "http://"+testHost)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func do(h http.Handler, r *http.Request) (int, fault.Code) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, fault.Code(w.Header().Get("Code"))
}

// logIn returns the cookie of a login at host.
func logIn(t *testing.T, a *Auth, host string) *http.Cookie {
	t.Helper()
	r := loginRequest(testToken, "Origin", "http://"+host)
	r.Host = host
	w := httptest.NewRecorder()
	a.LoginHandler().ServeHTTP(w, r)
	cookies := w.Result().Cookies()
	if w.Code != http.StatusOK || len(cookies) != 1 {
		t.Fatalf("login answered %d %s with cookies %v", w.Code, w.Header().Get("Code"), cookies)
	}
	return cookies[0]
}

// reached is a handler that says so, and checks who it is told about.
func reached(t *testing.T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if actor, ok := ActorFrom(r.Context()); !ok || actor.Kind != audit.KindUser {
			t.Errorf("actor %+v, %v", actor, ok)
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

func TestAuthority(t *testing.T) {
	a, _ := newAuth(t, "Fleet.example.org", "desk.example.org:8443", "[fd00::1]:9000")
	page := a.Page(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	for _, host := range []string{
		"localhost", "localhost:7000", "LocalHost:7000", "127.0.0.1", "127.0.0.1:7000", "127.8.9.10:1", "[::1]", "[::1]:7000",
		"fleet.example.org", "fleet.example.org:1234", "FLEET.example.ORG", "desk.example.org:8443", "[fd00::1]:9000",
	} {
		if status, code := do(page, request(http.MethodGet, host)); status != http.StatusNoContent {
			t.Errorf("%q is refused: %d %s", host, status, code)
		}
	}
	for _, host := range []string{
		"", "evil.example.org", "evil.example.org:7000", "localhost.evil.example.org", "127.0.0.1.evil.example.org",
		"desk.example.org", "desk.example.org:8444", "sub.fleet.example.org", "[fd00::1]:9001",
		"localhost.", "127.1", "0x7f.0.0.1", "2130706433", "0.0.0.0:7000", "10.0.0.1", "[::]", "::1", "[::ffff:127.0.0.1]", "[::1%25lo]",
		"localhost:", "localhost:0", "localhost:99999", "localhost:7000:7000", "user@localhost", "localhost/x", "localhost?x", "localhost#x",
		"evil.example.org@127.0.0.1:7000", " localhost", "localhost ", "local\thost", "127.0.0.1:7000,evil.example.org",
	} {
		if status, code := do(page, request(http.MethodGet, host)); status != http.StatusForbidden || code != fault.UntrustedAuthority {
			t.Errorf("%q is not refused: %d %s", host, status, code)
		}
	}
}

func TestTrustedAuthoritiesAreChecked(t *testing.T) {
	for _, entry := range []string{"", "https://fleet.example.org", "a/b", "a:b:c", "a b", "a:0"} {
		if _, err := New(Options{Token: testToken, Trusted: []string{entry}, Deny: deny}); !fault.Is(err, fault.InvalidConfig) {
			t.Errorf("%q: %v", entry, err)
		}
	}
}

func TestOrigin(t *testing.T) {
	a, _ := newAuth(t, "fleet.example.org")
	api, socket := a.API(reached(t)), a.WebSocket(reached(t))
	const own = "http://" + testHost
	for _, c := range []struct {
		what   string
		door   http.Handler
		method string
		header []string
		ok     bool
	}{
		{"GET of the page's script", api, "GET", []string{"Sec-Fetch-Site", "same-origin"}, true},
		{"GET typed by a person", api, "GET", []string{"Sec-Fetch-Site", "none"}, true},
		{"GET without fetch metadata", api, "GET", nil, true},
		{"GET with its own Origin", api, "GET", []string{"Origin", own}, true},
		{"GET from another port of this host", api, "GET", []string{"Sec-Fetch-Site", "same-site"}, false},
		{"GET from elsewhere", api, "GET", []string{"Sec-Fetch-Site", "cross-site"}, false},
		{"GET with two claims", api, "GET", []string{"Sec-Fetch-Site", "same-origin", "Sec-Fetch-Site", "cross-site"}, false},
		{"GET with an unknown claim", api, "GET", []string{"Sec-Fetch-Site", "Same-Origin"}, false},
		{"GET with another Origin", api, "GET", []string{"Origin", "http://127.0.0.1:7001"}, false},
		{"GET with Origin null", api, "GET", []string{"Origin", "null"}, false},
		{"POST of the page's script", api, "POST", []string{"Origin", own, "Sec-Fetch-Site", "same-origin"}, true},
		{"POST without fetch metadata", api, "POST", []string{"Origin", own}, true},
		{"POST without Origin", api, "POST", nil, false},
		{"POST without Origin, claimed ours", api, "POST", []string{"Sec-Fetch-Site", "same-origin"}, false},
		{"POST claimed typed", api, "POST", []string{"Origin", own, "Sec-Fetch-Site", "none"}, false},
		{"POST of another port's form", api, "POST", []string{"Origin", "http://127.0.0.1:7001", "Sec-Fetch-Site", "same-site"}, false},
		{"POST of a sandboxed frame", api, "POST", []string{"Origin", "null", "Sec-Fetch-Site", "cross-site"}, false},
		{"POST with two Origins", api, "POST", []string{"Origin", own, "Origin", own}, false},
		{"POST with another scheme", api, "POST", []string{"Origin", "ftp://" + testHost}, false},
		{"POST with https", api, "POST", []string{"Origin", "https://" + testHost}, true},
		{"POST with a path in Origin", api, "POST", []string{"Origin", own + "/"}, false},
		{"POST with a user in Origin", api, "POST", []string{"Origin", "http://evil@" + testHost}, false},
		{"POST with a name that starts the same", api, "POST", []string{"Origin", own + "0"}, false},
		{"POST with the other name of this host", api, "POST", []string{"Origin", "http://localhost:7000"}, false},
		{"preflight of another site", api, "OPTIONS", []string{"Origin", "https://evil.example.org"}, false},
		{"websocket of the page", socket, "GET", []string{"Origin", own}, true},
		{"websocket without Origin", socket, "GET", nil, false},
		{"websocket of another site", socket, "GET", []string{"Origin", "https://evil.example.org"}, false},
		{"websocket of another port", socket, "GET", []string{"Origin", "http://127.0.0.1:7001"}, false},
	} {
		r := request(c.method, testHost, c.header...)
		r.AddCookie(logIn(t, a, testHost))
		status, code := do(c.door, r)
		if c.ok && status != http.StatusNoContent || !c.ok && (status != http.StatusForbidden || code != fault.BadOrigin) {
			t.Errorf("%s: %d %s", c.what, status, code)
		}
	}
}

func TestOriginDefaultPort(t *testing.T) {
	for _, c := range []struct {
		origin, host string
		want         bool
	}{
		{"http://fleet.example.org", "fleet.example.org", true},
		{"http://Fleet.example.org", "fleet.example.org:80", true},
		{"https://fleet.example.org", "fleet.example.org:443", true},
		{"https://fleet.example.org", "fleet.example.org:80", false},
		{"http://[::1]:7000", "[::1]:7000", true},
		{"http://", "", false},
	} {
		if got := sameOrigin(c.origin, c.host); got != c.want {
			t.Errorf("%q on %q: %v", c.origin, c.host, got)
		}
	}
}

func TestCookie(t *testing.T) {
	a, c := newAuth(t)
	api := a.API(reached(t))
	cookie := logIn(t, a, testHost)

	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Path != "/" || cookie.MaxAge != 86400 || cookie.Domain != "" {
		t.Errorf("attributes: %v", cookie)
	}
	if strings.Contains(cookie.Value, testToken) || strings.Contains(cookie.Name, ":") {
		t.Errorf("cookie: %v", cookie)
	}
	if err := cookie.Valid(); err != nil {
		t.Error(err)
	}
	if other := logIn(t, a, testHost); other.Value == cookie.Value {
		t.Error("two logins have the same cookie")
	}
	with := func(a *Auth, host string, cookies ...*http.Cookie) int {
		r := request(http.MethodGet, host)
		for _, cookie := range cookies {
			r.AddCookie(cookie)
		}
		status, _ := do(a.API(reached(t)), r)
		return status
	}
	named := func(name, value string) *http.Cookie { return &http.Cookie{Name: name, Value: value} }

	t.Run("valid", func(t *testing.T) {
		if got := with(a, testHost, cookie); got != http.StatusNoContent {
			t.Errorf("answered %d", got)
		}
	})
	t.Run("after a restart of the service", func(t *testing.T) {
		again, err := New(Options{Token: testToken, Now: c.now, Deny: deny})
		if err != nil {
			t.Fatal(err)
		}
		if got := with(again, testHost, cookie); got != http.StatusNoContent {
			t.Errorf("answered %d", got)
		}
	})
	t.Run("under another token", func(t *testing.T) {
		other, err := New(Options{Token: "x" + testToken[1:], Now: c.now, Deny: deny})
		if err != nil {
			t.Fatal(err)
		}
		if got := with(other, testHost, cookie); got != http.StatusUnauthorized {
			t.Errorf("answered %d", got)
		}
	})
	t.Run("stolen for another port", func(t *testing.T) {
		const port = "127.0.0.1:7001"
		if CookieName(port) == cookie.Name {
			t.Error("the name does not depend on the port")
		}
		if got := with(a, port, cookie, named(CookieName(port), cookie.Value)); got != http.StatusUnauthorized {
			t.Errorf("answered %d", got)
		}
	})
	t.Run("beside a planted one", func(t *testing.T) {
		if got := with(a, testHost, named(cookie.Name, "planted"), cookie, named(cookie.Name, "")); got != http.StatusNoContent {
			t.Errorf("answered %d", got)
		}
	})
	t.Run("changed", func(t *testing.T) {
		parts := strings.Split(cookie.Value, ".")
		later := strconv.FormatInt(c.at.Add(48*time.Hour).Unix(), 10)
		for _, value := range []string{
			"", ".", "...", "1", testToken, parts[0] + "." + parts[1] + "." + parts[2], parts[0] + "." + parts[1] + "." + parts[2] + ".",
			parts[0] + "." + later + "." + parts[2] + "." + parts[3],
			"2." + parts[1] + "." + parts[2] + "." + parts[3],
			parts[0] + "." + parts[1] + "." + parts[2] + "x." + parts[3],
			cookie.Value + "A", cookie.Value + "=", cookie.Value[:len(cookie.Value)-1], strings.ToUpper(cookie.Value),
		} {
			if got := with(a, testHost, named(cookie.Name, value)); got != http.StatusUnauthorized {
				t.Errorf("%q answered %d", value, got)
			}
		}
	})
	t.Run("a day later", func(t *testing.T) {
		c.at = c.at.Add(CookieLife - time.Second)
		if got := with(a, testHost, cookie); got != http.StatusNoContent {
			t.Errorf("a second before: answered %d", got)
		}
		c.at = c.at.Add(time.Second)
		if got := with(a, testHost, cookie); got != http.StatusUnauthorized {
			t.Errorf("at its end: answered %d", got)
		}
	})
	if status, code := do(api, request(http.MethodGet, testHost)); status != http.StatusUnauthorized || code != fault.Unauthorized {
		t.Errorf("without a cookie: %d %s", status, code)
	}
}

func TestLogin(t *testing.T) {
	a, _ := newAuth(t)
	for _, c := range []struct {
		what   string
		change func(*http.Request) *http.Request
		status int
		code   fault.Code
	}{
		{"wrong token", func(*http.Request) *http.Request { return loginRequest("x" + testToken[1:]) }, 401, fault.InvalidToken},
		{"token with more behind it", func(*http.Request) *http.Request { return loginRequest(testToken + "x") }, 401, fault.InvalidToken},
		{"empty token", func(*http.Request) *http.Request { return loginRequest("") }, 401, fault.InvalidToken},
		{"another origin", func(r *http.Request) *http.Request { r.Header.Set("Origin", "http://localhost:7000"); return r }, 403, fault.BadOrigin},
		{"no origin", func(r *http.Request) *http.Request { r.Header.Del("Origin"); return r }, 403, fault.BadOrigin},
		{"rebound name", func(r *http.Request) *http.Request { r.Host = "evil.example.org"; return r }, 403, fault.UntrustedAuthority},
		{"form post", func(r *http.Request) *http.Request {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			return r
		}, 415, fault.UnsupportedMediaType},
		{"text that is JSON", func(r *http.Request) *http.Request {
			r.Header.Set("Content-Type", "text/plain")
			return r
		}, 415, fault.UnsupportedMediaType},
		{"GET", func(*http.Request) *http.Request { return request(http.MethodGet, testHost) }, 400, fault.InvalidArgument},
		{"no body", func(*http.Request) *http.Request { return body("") }, 400, fault.InvalidArgument},
		{"not JSON", func(*http.Request) *http.Request { return body("token=" + testToken) }, 400, fault.InvalidArgument},
		{"a list", func(*http.Request) *http.Request { return body(`["` + testToken + `"]`) }, 400, fault.InvalidArgument},
		{"more behind it", func(*http.Request) *http.Request { return body(`{"token":"` + testToken + `"} {}`) }, 400, fault.InvalidArgument},
		{"rubbish behind it", func(*http.Request) *http.Request { return body(`{"token":"` + testToken + `"}]`) }, 400, fault.InvalidArgument},
		{"huge body", func(*http.Request) *http.Request { return body(`{"token":"` + strings.Repeat("x", 1<<16) + `"}`) }, 413, fault.BodyTooLarge},
		{"huge tail", func(*http.Request) *http.Request {
			return body(`{"token":"` + testToken + `"}` + strings.Repeat(" ", 1<<16))
		}, 413, fault.BodyTooLarge},
	} {
		w := httptest.NewRecorder()
		a.LoginHandler().ServeHTTP(w, c.change(loginRequest(testToken)))
		if got := fault.Code(w.Header().Get("Code")); w.Code != c.status || got != c.code {
			t.Errorf("%s: %d %s, want %d %s", c.what, w.Code, got, c.status, c.code)
		}
		if len(w.Result().Cookies()) != 0 {
			t.Errorf("%s: got a cookie", c.what)
		}
	}
	logIn(t, a, testHost)
}

func body(text string) *http.Request {
	r := loginRequest("")
	r.Body = http.NoBody
	if text != "" {
		r = httptest.NewRequest(http.MethodPost, "http://"+testHost+"/", strings.NewReader(text))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Origin", "http://"+testHost)
	}
	return r
}

func TestLoginIsLimited(t *testing.T) {
	a, c := newAuth(t)
	login := a.LoginHandler()
	for i := range maxFailures {
		if status, _ := do(login, loginRequest("wrong")); status != http.StatusUnauthorized {
			t.Fatalf("try %d answered %d", i, status)
		}
	}
	w := httptest.NewRecorder()
	login.ServeHTTP(w, loginRequest("wrong"))
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") != "3" {
		t.Errorf("one more answered %d, retry after %q", w.Code, w.Header().Get("Retry-After"))
	}
	if status, code := do(login, loginRequest("wrong again")); status != http.StatusTooManyRequests || code != fault.TooManyAttempts {
		t.Errorf("another wrong token answered %d %s", status, code)
	}
	// Nobody can keep a person out by guessing.
	logIn(t, a, testHost)
	c.at = c.at.Add(failureInterval)
	logIn(t, a, testHost)
	// A person's good logins use nothing up.
	for range 3 * maxFailures {
		logIn(t, a, testHost)
	}
	if status, _ := do(login, loginRequest("wrong")); status != http.StatusUnauthorized {
		t.Errorf("after the wait: %d", status)
	}
	if status, _ := do(login, loginRequest("wrong")); status != http.StatusTooManyRequests {
		t.Errorf("and again: %d", status)
	}
}

func TestStatus(t *testing.T) {
	a, _ := newAuth(t)
	read := func(r *http.Request) map[string]any {
		w := httptest.NewRecorder()
		a.StatusHandler().ServeHTTP(w, r)
		var answer map[string]any
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		return answer
	}
	r := request(http.MethodGet, testHost)
	if got := read(r); got["ok"] != true || got["authenticated"] != false || got["mode"] != "token" {
		t.Errorf("without a cookie: %v", got)
	}
	r.AddCookie(logIn(t, a, testHost))
	if got := read(r); got["authenticated"] != true {
		t.Errorf("with a cookie: %v", got)
	}
	if status, _ := do(a.StatusHandler(), request(http.MethodGet, testHost, "Sec-Fetch-Site", "same-site")); status != http.StatusForbidden {
		t.Errorf("to another port's page: %d", status)
	}
}

func FuzzCookie(f *testing.F) {
	at := time.Unix(1_800_000_000, 0)
	a, err := New(Options{Token: testToken, Now: func() time.Time { return at }, Deny: deny})
	if err != nil {
		f.Fatal(err)
	}
	// The same in every worker process.
	claim := "1." + strconv.FormatInt(at.Add(time.Hour).Unix(), 10) + ".AAAAAAAAAAAAAAAAAAAAAA"
	good := claim + "." + encoding.EncodeToString(a.sign(testHost, claim))
	if !a.valid(testHost, good) {
		f.Fatal("the good one is not valid")
	}
	f.Add(good)
	f.Add(good[:len(good)-5] + "\n" + good[len(good)-5:])
	f.Add("1.2.3.4")
	f.Add(".")
	f.Fuzz(func(t *testing.T, value string) {
		if a.valid(testHost, value) && value != good {
			t.Errorf("%q is valid", value)
		}
	})
}

func FuzzAuthority(f *testing.F) {
	for _, host := range []string{"localhost:80", "[::1]:7", "127.0.0.1", "evil.example.org", "[::1%25lo]:1"} {
		f.Add(host)
	}
	a, err := New(Options{Token: testToken, Deny: deny})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, host string) {
		r := request(http.MethodGet, host)
		if a.checkAuthority(r) != nil {
			return
		}
		name, _, ok := splitAuthority(host)
		if ip, err := netip.ParseAddr(name); !ok || name != "localhost" && (err != nil || !ip.IsLoopback()) {
			t.Errorf("%q (%q) is trusted", host, name)
		}
	})
}
