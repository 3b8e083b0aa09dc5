package main

import (
	"context"
	"log/slog"
	"net"
	"time"

	"abfleet/internal/fault"
	"abfleet/internal/sd"
)

var (
	// startStep is the time that systemd is asked for again and again while
	// browsers are found again; it restarts a start that is stuck for longer.
	startStep = time.Minute
	// stopTimeout bounds the stop of the service, which stops no browser.
	stopTimeout = 15 * time.Second
)

// closers are closed last first, within one deadline. What then fails is told
// and no more: the service ends either way.
type closers struct {
	log *slog.Logger
	all []func(context.Context) error
}

func (c *closers) add(f func(context.Context) error) { c.all = append(c.all, f) }

func (c *closers) close(timeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for i := len(c.all) - 1; i >= 0; i-- {
		if err := c.all[i](ctx); err != nil {
			c.log.Error("the stop was not complete", sd.ErrorKey, err)
		}
	}
}

// extending runs f while it asks systemd for more time.
func extending(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	ticker := time.NewTicker(startStep / 2)
	defer ticker.Stop()
	for {
		sd.Extend(startStep)
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return <-done
		case <-ticker.C:
		}
	}
}

// listen returns the sockets from systemd, or those of the flags.
func listen(control, web string) (map[string][]net.Listener, error) {
	listeners, err := sd.Listeners(sd.ControlSocket, sd.WebSocket)
	if err != nil || listeners != nil {
		return listeners, err
	}
	if control == "" || web == "" {
		return nil, fault.New(fault.InvalidArgument, "find the sockets of the service",
			"Start it through its socket units (abfleet setup --now), or pass --listen-control and --listen-web", "systemd passed none")
	}
	controlListener, err := sd.ListenControl(control)
	if err != nil {
		return nil, err
	}
	webListener, err := sd.ListenWeb(web)
	if err != nil {
		return nil, err
	}
	return map[string][]net.Listener{sd.ControlSocket: {controlListener}, sd.WebSocket: {webListener}}, nil
}
