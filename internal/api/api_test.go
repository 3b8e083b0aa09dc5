package api

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"abfleet/internal/fault"
)

// What the service says and what its client's caller sees are the same three
// parts.
func TestErrorsSurviveTheWire(t *testing.T) {
	for _, err := range []error{
		fault.New(fault.IdentityNotFound, "find identity", "List them", "there is no %q: at all", "a: b"),
		&fault.Error{Code: fault.Internal, Op: "work"},
		fault.Wrap(errors.New("cannot read: EOF"), fault.NoSpace, "copy profile", "Free space"),
	} {
		got := ErrorOf(err).Fault()
		if got.Error() != err.Error() || fault.CodeOf(got) != fault.CodeOf(err) || fault.HintOf(got) != fault.HintOf(err) {
			t.Errorf("%v (%s, %s) became %v (%s, %s)", err, fault.CodeOf(err), fault.HintOf(err), got, got.Code, got.Hint)
		}
	}
}

func TestUnreachableServiceIsExplained(t *testing.T) {
	dir := t.TempDir()
	dead := filepath.Join(dir, "dead")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	_ = listener.Close()

	rude := filepath.Join(dir, "rude")
	closing, err := net.Listen("unix", rude)
	if err != nil {
		t.Fatal(err)
	}
	defer closing.Close()
	go func() {
		for {
			conn, err := closing.Accept()
			if err != nil {
				return
			}
			buf := make([]byte, 1)
			_, _ = conn.Read(buf)
			_ = conn.Close()
		}
	}()

	silent := filepath.Join(dir, "silent")
	waiting, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()

	other := filepath.Join(dir, "other")
	web, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler()}
	go server.Serve(web)
	defer server.Close()

	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	short, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	for _, test := range []struct {
		what, socket string
		ctx          context.Context
		code         fault.Code
		unsent       bool
	}{
		{"no socket", filepath.Join(dir, "none"), t.Context(), fault.ServiceUnavailable, true},
		{"nobody listens", dead, t.Context(), fault.ServiceUnavailable, true},
		{"a path that no socket can have", filepath.Join(dir, string(make([]byte, 200))), t.Context(), fault.ServiceUnavailable, true},
		{"dropped", rude, t.Context(), fault.EffectUnknown, false},
		{"silence", silent, short, fault.Timeout, false},
		{"canceled", silent, canceled, fault.Canceled, false},
		{"somebody else's socket", other, t.Context(), fault.ServiceUnavailable, false},
	} {
		client := NewClient(test.socket)
		_, err := client.Post(test.ctx, UsePath, SessionRequest{})
		if fault.CodeOf(err) != test.code {
			t.Errorf("%s: %v, code %s, want %s", test.what, err, fault.CodeOf(err), test.code)
		}
		if fault.HintOf(err) == "" && test.code != fault.Canceled {
			t.Errorf("%s: no hint", test.what)
		}
		request, requestErr := http.NewRequestWithContext(test.ctx, http.MethodPost, Base+UsePath, nil)
		if requestErr != nil {
			t.Fatal(requestErr)
		}
		if test.what == "silence" || test.what == "canceled" || test.what == "somebody else's socket" {
			continue
		}
		response, err := HTTPClient(test.socket).Do(request)
		if err == nil {
			_ = response.Body.Close()
		}
		if Unsent(err) != test.unsent {
			t.Errorf("%s: Unsent(%v) is %v", test.what, err, Unsent(err))
		}
	}
	if _, err := os.Stat(dead); err != nil {
		t.Error(err)
	}
}
