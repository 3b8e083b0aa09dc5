package main

import (
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/fault"
	"abfleet/internal/sd"
)

// Whoever waited in the sockets for a service that cannot start is told why,
// also a caller that says nothing, and the service then ends.
func TestRefuseAnswersWhoWaits(t *testing.T) {
	old := refuseTimeout
	refuseTimeout = 500 * time.Millisecond
	t.Cleanup(func() { refuseTimeout = old })
	socket := filepath.Join(t.TempDir(), "control.sock")
	control, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := api.NewClient(socket).Post(t.Context(), api.UsePath, api.SessionRequest{Session: "s", Identity: strings.Repeat("x", 60_000)})
			errs <- err
		}()
	}
	page, err := net.Dial("tcp", web.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	if _, err := page.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	silent, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()

	start := time.Now()
	refuse(map[string][]net.Listener{sd.ControlSocket: {control}, sd.WebSocket: {web}},
		fault.New(fault.StateInUse, "open the state", "Stop the other service first", "another process holds /secret"))
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	for range 3 {
		err := <-errs
		if fault.CodeOf(err) != fault.ServiceUnavailable || fault.HintOf(err) != "Stop the other service first" ||
			err.Error() != "cannot reach the service: it does not start: state_in_use: cannot open the state: another process holds /secret" {
			t.Errorf("%v, hint %q", err, fault.HintOf(err))
		}
	}
	answer := make([]byte, 4096)
	n, _ := page.Read(answer)
	if text := string(answer[:n]); !strings.Contains(text, " 500 ") || !strings.Contains(text, "it does not start") || strings.Contains(text, "secret") {
		t.Errorf("the page is told %q", text)
	}
}

// Nobody is taken in the last moment and then left without an answer: systemd
// keeps the socket, and who was not taken waits there for the next start.
func TestRefuseDropsNobody(t *testing.T) {
	old := refuseQuiet
	refuseQuiet = time.Millisecond
	t.Cleanup(func() { refuseQuiet = old })
	socket := filepath.Join(t.TempDir(), "control.sock")
	first, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := first.(*net.UnixListener).File()
	if err != nil {
		t.Fatal(err)
	}
	first.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = first.Close()
	done := make(chan struct{})
	var starts sync.WaitGroup
	starts.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			control, err := net.FileListener(kept)
			if err != nil {
				t.Error(err)
				return
			}
			refuse(map[string][]net.Listener{sd.ControlSocket: {control}}, fault.New(fault.StateInUse, "open", "", "in use"))
		}
	})
	for range 300 {
		if _, err := api.NewClient(socket).Get(t.Context(), api.VersionPath, nil); !api.Answered(err) {
			t.Errorf("a request was taken and not answered: %v", err)
			break
		}
		// At any point of the next end.
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	}
	close(done)
	starts.Wait()
	_ = kept.Close()
}
