package auth

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"abfleet/internal/audit"
)

// serveUnix serves RequirePeer on a unix socket that every user can reach, and
// returns its path.
func serveUnix(t *testing.T, next http.HandlerFunc) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "abfauth")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{dir: 0o755, path: 0o666} {
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	server := &http.Server{Handler: RequirePeer(next, deny), ConnContext: PeerContext}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })
	return path
}

func TestPeer(t *testing.T) {
	var peer Peer
	var actor audit.Actor
	path := serveUnix(t, func(w http.ResponseWriter, r *http.Request) {
		peer, _ = PeerFrom(r.Context())
		actor, _ = ActorFrom(r.Context())
	})
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
	answer, err := client.Get("http://fleet/")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("answered %s", answer.Status)
	}
	if want := (Peer{os.Getpid(), os.Getuid(), os.Getgid()}); peer != want {
		t.Errorf("peer %+v, want %+v", peer, want)
	}
	if actor.Kind != audit.KindOperator || actor.PID != os.Getpid() {
		t.Errorf("actor %+v", actor)
	}
}

func TestPeerOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: no other user to connect as")
	}
	path := serveUnix(t, func(http.ResponseWriter, *http.Request) { t.Error("another user got through") })
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The test binary may lie where that user cannot read it.
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(filepath.Dir(path), "client")
	if err := os.WriteFile(copied, data, 0o755); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	cmd := exec.Command(copied, "-test.run=^TestPeerHelper$")
	cmd.Env = []string{"ABF_TEST_PEER=" + path}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestPeerHelper is the client of TestPeerOfAnotherUser, in a process of that
// user.
func TestPeerHelper(t *testing.T) {
	path := os.Getenv("ABF_TEST_PEER")
	if path == "" {
		t.Skip("only for TestPeerOfAnotherUser")
	}
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
	answer, err := client.Get("http://fleet/")
	if err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != http.StatusUnauthorized {
		t.Errorf("answered %s", answer.Status)
	}
}

func TestPeerOnTCP(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		Handler:     RequirePeer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("got through") }), deny),
		ConnContext: PeerContext,
	}
	go func() { _ = server.Serve(listener) }()
	defer server.Close()
	answer, err := http.Get("http://" + listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusUnauthorized {
		t.Errorf("answered %s", answer.Status)
	}
}
