package main

import (
	"context"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/fault"
	"abfleet/internal/sd"
)

var (
	// refuseQuiet is how long no caller must come before all are answered:
	// who comes later may have repaired what was wrong. refuseTimeout is how
	// long a start that failed stays to answer them.
	refuseQuiet   = 10 * time.Millisecond
	refuseTimeout = 3 * time.Second
)

// refuse tells everybody who waits in the sockets why the service does not
// start. Left waiting, they would hear nothing, and systemd would start the
// service again for them, and again. The page's callers are not known yet, so
// they are told no more than whom to ask.
func refuse(listeners map[string][]net.Listener, cause error) {
	arrived := make(chan struct{}, 1)
	var open, serving sync.WaitGroup
	server := func(why error) *http.Server {
		answer, _ := json.Marshal(api.Answer{Error: api.ErrorOf(why)})
		return &http.Server{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, api.MaxMCPBody))
				w.Header().Set("Content-Type", "application/json")
				w.Header().Set("Connection", "close")
				// Not 503, after which a bridge tries again.
				w.WriteHeader(http.StatusInternalServerError)
				_, _ = w.Write(answer)
			}),
			ReadTimeout: refuseTimeout, ErrorLog: log.New(io.Discard, "", 0),
			ConnState: func(_ net.Conn, state http.ConnState) {
				switch state {
				case http.StateNew:
					open.Add(1)
					select {
					case arrived <- struct{}{}:
					default:
					}
				case http.StateClosed:
					open.Done()
				}
			},
		}
	}
	const op = "reach the service"
	control := server(fault.New(fault.ServiceUnavailable, op, fault.HintOf(cause), "it does not start: %s: %w", fault.CodeOf(cause), cause))
	web := server(fault.New(fault.ServiceUnavailable, op, "Run `abfleet doctor` on its host", "it does not start"))
	defer control.Close()
	defer web.Close()
	for _, l := range listeners[sd.ControlSocket] {
		serving.Go(func() { _ = control.Serve(l) })
	}
	for _, l := range listeners[sd.WebSocket] {
		serving.Go(func() { _ = web.Serve(l) })
	}
	ctx, cancel := context.WithTimeout(context.Background(), refuseTimeout)
	defer cancel()
	for quiet := false; !quiet; {
		select {
		case <-arrived:
		case <-time.After(refuseQuiet):
			quiet = true
		case <-ctx.Done():
			quiet = true
		}
	}
	// Who was taken is known once nobody is taken any more. Whoever comes later
	// waits for the next start.
	for _, all := range listeners {
		for _, l := range all {
			_ = l.Close()
		}
	}
	serving.Wait()
	// Not Shutdown, which drops requests that it finds unread.
	answered := make(chan struct{})
	go func() { open.Wait(); close(answered) }()
	select {
	case <-answered:
	case <-ctx.Done():
	}
}
