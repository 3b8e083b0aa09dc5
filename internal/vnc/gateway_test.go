package vnc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"abfleet/internal/fault"
)

func TestSelector(t *testing.T) {
	for query, want := range map[string][3]string{
		"session=a":                  {"a", "", ""},
		"identity=b":                 {"", "b", ""},
		"session=my/../odd%20id&x=1": {"my/../odd id", "", ""},
		"":                           {"", "", "error"},
		"session=":                   {"", "", "error"},
		"session=a&identity=b":       {"", "", "error"},
		"session=a&session=b":        {"", "", "error"},
		"identity=&session=a":        {"", "", "error"},
		"session=%zz":                {"", "", "error"},
		"session=a;identity=b":       {"", "", "error"},
	} {
		session, identity, err := Selector(httptest.NewRequest(http.MethodGet, "/ws?"+query, nil))
		if session != want[0] || identity != want[1] || (err != nil) != (want[2] != "") {
			t.Errorf("%q: got %q, %q, %v", query, session, identity, err)
		}
		if err != nil && !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: code %s", query, fault.CodeOf(err))
		}
	}
}

// noVNC of 2021 and later offers no sub-protocol and aborts when it gets one
// (F-17); older ones insist on it.
func TestSubprotocolIsEchoedOnlyWhenOffered(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) { _ = accept(conn) }), Options{})
	for name, c := range map[string]struct {
		offered []string
		want    string
	}{
		"none offered":    {nil, ""},
		"binary offered":  {[]string{"binary"}, "binary"},
		"both offered":    {[]string{"base64", "binary"}, "binary"},
		"another offered": {[]string{"base64"}, ""},
	} {
		ws := r.open(t, &websocket.DialOptions{Subprotocols: c.offered})
		if got := ws.Subprotocol(); got != c.want {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

// A page that waits for a browser asks again every few seconds; the journal
// tells of what an operator can mend.
func TestWaitingIsNotLogged(t *testing.T) {
	for code, want := range map[fault.Code]bool{fault.BrowserStopped: false, fault.SessionNotFound: false, fault.BrowserNotControllable: true} {
		r := serve(t, func() (net.Conn, error) { return nil, fault.New(code, "view browser", "", "for a test") }, Options{})
		var journal bytes.Buffer
		r.Log = slog.New(slog.NewTextHandler(&journal, nil))
		closing(t, r.open(t, nil))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		// It returns when the handler has.
		if err := r.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(journal.String(), "viewer refused"); got != want {
			t.Errorf("%s: logged: %v, want %v", code, got, want)
		}
	}
}

func TestUnresolvedTargets(t *testing.T) {
	for code, want := range map[fault.Code]websocket.StatusCode{
		fault.Unauthorized:           CloseNotAllowed,
		fault.SessionNotFound:        CloseNotFound,
		fault.IdentityNotFound:       CloseNotFound,
		fault.IdentityNotSelected:    CloseBrowserStopped,
		fault.LoginNotRunning:        CloseBrowserStopped,
		fault.BrowserStopped:         CloseBrowserStopped,
		fault.ViewerUnavailable:      CloseNoDisplay,
		fault.BrowserNotControllable: CloseUnavailable,
		fault.Internal:               CloseUnavailable,
	} {
		r := serve(t, func() (net.Conn, error) {
			return nil, fault.New(code, "view browser", "", "unit abfleet-x9-display-1.scope is gone")
		}, Options{})
		end := closing(t, r.open(t, nil))
		if end.Code != want {
			t.Errorf("%s: closed with %v, want %d", code, end, want)
		}
		if end.Reason == "" || len(end.Reason) > 123 || containsInternals(end.Reason) {
			t.Errorf("%s: viewer was told %q", code, end.Reason)
		}
	}
}

func containsInternals(text string) bool {
	for _, r := range text {
		if !(r >= 'a' && r <= 'z' || r == ' ') {
			return true
		}
	}
	return false
}

func TestInvalidTargetIsNotUpgraded(t *testing.T) {
	r := serve(t, func() (net.Conn, error) {
		return nil, fault.New(fault.InvalidArgument, "view browser", "", "which?")
	}, Options{})
	_, answer, err := websocket.Dial(context.Background(), r.url(), nil)
	if err == nil || answer == nil || answer.StatusCode != http.StatusBadRequest {
		t.Errorf("got %v, %v", answer, err)
	}
}

// A request that is no upgrade must not leave a display connection behind.
func TestPlainRequest(t *testing.T) {
	closed := make(chan struct{})
	r := serve(t, display(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn)
		close(closed)
	}), Options{})
	answer, err := http.Get(r.server.URL + "/?session=s")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("answered %s", answer.Status)
	}
	select {
	case <-closed:
	case <-time.After(patience):
		t.Error("the display's connection stays open")
	}
}

func TestStoppedBrowserIsToldFromLostDisplay(t *testing.T) {
	for name, c := range map[string]struct {
		running error
		want    websocket.StatusCode
	}{
		"browser runs":    {nil, CloseDisplayGone},
		"browser stopped": {errors.New("stopped"), CloseBrowserStopped},
	} {
		t.Run(name, func(t *testing.T) {
			dial := display(t, func(conn net.Conn) { _ = accept(conn) })
			r := serve(t, dial, Options{})
			r.Resolve = func(context.Context, *http.Request) (Target, error) {
				conn, err := dial()
				return Target{Conn: conn, Password: password, Running: func(context.Context) error { return c.running }}, err
			}
			ws := r.open(t, nil)
			_ = viewerHandshake(stream(t, ws))
			if end := closing(t, ws); end.Code != c.want {
				t.Errorf("closed with %v, want %d", end, c.want)
			}
		})
	}
}

func TestGatewayClose(t *testing.T) {
	r := serve(t, display(t, func(conn net.Conn) {
		if accept(conn) == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	}), Options{})
	ws := r.open(t, nil)
	if err := viewerHandshake(stream(t, ws)); err != nil {
		t.Fatal(err)
	}
	if n := r.Viewers(); n != 1 {
		t.Errorf("%d viewers", n)
	}
	told := make(chan websocket.CloseError, 1)
	go func() { told <- closing(t, ws) }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if end := <-told; end.Code != websocket.StatusServiceRestart {
		t.Errorf("closed with %v", end)
	}
	if n := r.Viewers(); n != 0 {
		t.Errorf("%d viewers left", n)
	}
	if _, answer, err := websocket.Dial(ctx, r.url(), nil); err == nil || answer == nil {
		t.Errorf("a closed gateway accepts viewers: %v", err)
	}
}
