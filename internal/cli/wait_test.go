package cli

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// systemd has systemctl say what a manager would of the service.
func systemd(t *testing.T, properties ...string) {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\ncat <<'END'\n" + strings.Join(properties, "\n") + "\nEND\n"
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// silent is a service that takes requests and answers none.
func silent(t *testing.T) map[string]string {
	s := newService(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	s.start()
	return map[string]string{"AGENT_BROWSER_FLEET_SOCKET": s.socket}
}

func TestReadsEndWhenNobodyAnswers(t *testing.T) {
	systemd(t, "ActiveState=active", "SubState=running")
	shorten(t, &waitLook, 10*time.Millisecond)
	shorten(t, &readTimeout, 100*time.Millisecond)
	for _, args := range [][]string{{"session", "list"}, {"view"}, {"identity", "status", "x"}} {
		code, _, errOut := abfleet(t, silent(t), args...)
		if code != ExitUnreachable || !strings.Contains(errOut, "cannot reach the service: no answer on ") || !strings.Contains(errOut, "code: service_unavailable") {
			t.Errorf("%v: exit code %d, %q", args, code, errOut)
		}
	}
	if code, out, _ := abfleet(t, silent(t), "version"); code != ExitOK || !strings.Contains(out, "not reachable") {
		t.Errorf("version: exit code %d, %q", code, out)
	}
}

// A service that fails again and again while a request waits in its socket is
// not waited for.
func TestCommandsEndWhenTheServiceDoesNotStart(t *testing.T) {
	systemd(t, "ActiveState=activating", "SubState=auto-restart", "Result=exit-code", "ExecMainCode=1", "ExecMainStatus=203", "ExecMainExitTimestamp=Tue 2026-12-01 07:30:37 UTC")
	shorten(t, &waitLook, 10*time.Millisecond)
	shorten(t, &failedAfter, 50*time.Millisecond)
	for _, args := range [][]string{{"session", "list"}, {"identity", "save", "x"}} {
		code, _, errOut := abfleet(t, silent(t), args...)
		if want := "abfleet: cannot reach the service: it does not start: it ended as exit-code (last tried: exit status 203, Tue 2026-12-01 07:30:37 UTC)\n"; code != ExitUnreachable || !strings.HasPrefix(errOut, want) {
			t.Errorf("%v: exit code %d, %q, want %q", args, code, errOut, want)
		}
		if !strings.Contains(errOut, "abfleet setup --now, which also lifts systemd's start limit") {
			t.Errorf("no way out in %q", errOut)
		}
	}
}

// What takes long is not cut short, says what it waits for, and ends with Ctrl-C.
func TestLongCommandsTellWhatTheyWaitFor(t *testing.T) {
	shorten(t, &waitLook, 10*time.Millisecond)
	shorten(t, &readTimeout, 50*time.Millisecond)
	shorten(t, &tellAfter, 50*time.Millisecond)
	shorten(t, &tellAgain, time.Hour)
	shorten(t, &pingTimeout, 50*time.Millisecond)
	for name, test := range map[string]struct {
		unit []string
		want string
	}{
		"stopped":  {[]string{"ActiveState=active"}, "the service does not answer; look at it: systemctl --user status abfleetd.service"},
		"starting": {[]string{"ActiveState=activating", "StatusText=looking for browsers"}, "the service is starting: looking for browsers"},
	} {
		t.Run(name, func(t *testing.T) {
			systemd(t, test.unit...)
			env := silent(t)
			ctx, interrupt := context.WithTimeout(t.Context(), time.Second)
			defer interrupt()
			var out, errOut strings.Builder
			code := Main(ctx, []string{"identity", "save", "x"}, strings.NewReader(""), &out, &errOut, func(name string) string { return env[name] })
			if said := errOut.String(); code == ExitOK || strings.Count(said, "abfleet: waiting for ") != 1 || !strings.Contains(said, test.want) {
				t.Errorf("exit code %d, %q, want %q", code, said, test.want)
			}
		})
	}
	systemd(t, "ActiveState=active")
	s := newService(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodPost {
			time.Sleep(300 * time.Millisecond)
		}
		_, _ = w.Write([]byte(`{"ok":true,"identity":{"name":"x","state":"READY"},"version":{}}`))
	}))
	s.start()
	code, out, errOut := abfleet(t, map[string]string{"AGENT_BROWSER_FLEET_SOCKET": s.socket}, "identity", "save", "x")
	if code != ExitOK || !strings.Contains(out, "saved Identity x") || !strings.Contains(errOut, "the service works on it") {
		t.Errorf("exit code %d, %q, %q", code, out, errOut)
	}
}

// An answer of the service says more than its unit.
func TestAnswersAreNotExplained(t *testing.T) {
	systemd(t, "ActiveState=failed", "StatusText=old news")
	env := answering(t, http.StatusInternalServerError, `{"ok":false,"error":{"code":"service_unavailable","message":"cannot reach the service: it does not start: cannot open the state: in use","hint":"Stop the other"}}`, nil)
	code, _, errOut := abfleet(t, env, "identity", "list")
	if code != ExitUnreachable || !strings.HasPrefix(errOut, "abfleet: cannot reach the service: it does not start: cannot open the state: in use\nhint: Stop the other\n") {
		t.Errorf("exit code %d, %q", code, errOut)
	}
}
