package role

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A viewer's password goes to the recorded server and to nobody else who may
// listen on its path by then.
func TestWhoListens(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "rfb")
	if err := RFBReady(t.Context(), socket, os.Getpid()); !errors.Is(err, ErrNotReady) {
		t.Errorf("nobody listens yet: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	greeting := "RFB 003.008\n"
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Write([]byte(greeting))
			conn.Close()
		}
	}()
	if err := RFBReady(t.Context(), socket, os.Getpid()); err != nil {
		t.Errorf("the server itself: %v", err)
	}
	if err := RFBReady(t.Context(), socket, os.Getppid()); err == nil || errors.Is(err, ErrNotReady) {
		t.Errorf("another process is ready: %v", err)
	}
	if conn, err := DialRFB(t.Context(), socket, os.Getppid()); err == nil {
		conn.Close()
		t.Error("a connection to another process")
	}
}
