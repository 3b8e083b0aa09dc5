package main

import (
	"context"
	"log/slog"
	"net"

	"abfleet/internal/api"
	"abfleet/internal/auth"
	"abfleet/internal/config"
	"abfleet/internal/doctor"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/sd"
	"abfleet/internal/server"
	"abfleet/internal/store"
	"abfleet/runtime/stack"
)

// serve runs the service until ctx ends, it is idle, or it fails. Connections
// wait in their sockets until all browsers of the last run are accounted for.
func serve(ctx context.Context, again func(), cfg *config.Config, listeners map[string][]net.Listener, log *slog.Logger) error {
	env := doctor.NewEnv(cfg, "")
	if err := doctor.Refusal(ctx, env); err != nil {
		return err
	}
	state, err := store.Open(ctx, cfg.StateFile())
	if err != nil {
		return err
	}
	stop, cancel := context.WithCancel(context.Background())
	defer cancel()
	closing := closers{log: log}
	defer closing.close(stopTimeout)
	closing.add(state.Close)
	token, err := auth.LoadToken(cfg.TokenFile())
	if err != nil {
		return err
	}
	stacks, err := stack.New(ctx, cfg, log)
	if err != nil {
		return err
	}
	closing.add(func(context.Context) error { stacks.Close(); return nil })
	f, err := fleet.New(fleet.Options{Config: cfg, Store: withFaults(state), Runtime: stacks, Log: log})
	if err != nil {
		return fault.Wrap(err, fault.Internal, "set up the fleet", "")
	}
	closing.add(f.Close)
	teller := server.NewTeller(f, log)
	go teller.Tell(f.Watch(stop))
	if err := extending(ctx, func() error { return f.Reconcile(ctx) }); err != nil {
		log.Error("not everything of the last run is accounted for", sd.ErrorKey, err)
	}
	guard, err := auth.New(auth.Options{Token: token, Deny: server.Deny})
	if err != nil {
		return err
	}
	mcpServer, host := newMCP(cfg, f)
	closing.add(func(context.Context) error { host.Close(); return nil })
	s, err := server.New(ctx, server.Deps{
		Fleet: f, Auth: guard, Token: token, Log: log, MCP: mcpServer, IdleExit: cfg.IdleExit, Attended: collect,
		CopyState: state.CopyTo,
		Doctor:    func(ctx context.Context) []api.Finding { return doctor.Run(ctx, env, doctor.Checks()) },
	})
	if err != nil {
		return err
	}
	closing.add(s.Stop)
	failed := make(chan error, 8)
	for _, l := range listeners[sd.ControlSocket] {
		go func() { failed <- s.ServeControl(l) }()
	}
	for _, l := range listeners[sd.WebSocket] {
		go func() { failed <- s.ServeWeb(l) }()
	}
	sd.Ready(teller.Status())
	log.Info("the service is ready", sd.EventKey, string(sd.ServiceStarted), "version", api.Version)
	go func() {
		if err := f.RestartWanted(stop); err != nil {
			log.Warn("not every browser of the last run was started again", sd.ErrorKey, err)
		}
	}()
	go teller.Examine(stop, env)
	go state.KeepCopy(stop, log)
	go sd.Watchdog(stop, log,
		sd.Check{Name: "state file", Run: func(ctx context.Context) error { return state.View(ctx, func(*store.Tx) error { return nil }) }},
		sd.Check{Name: "systemd", Run: stacks.Ping})

	select {
	case <-ctx.Done():
		// A second signal ends the service at once.
		again()
		log.Info("the service stops", sd.EventKey, string(sd.ServiceStopping))
	case <-s.Idle():
		log.Info("the service has nothing to do and exits", sd.EventKey, string(sd.ServiceIdle))
	case err = <-failed:
	}
	sd.Stopping("stopping; browsers stay", stopTimeout)
	return fault.Wrap(err, fault.Internal, "serve", "Look at the sockets: systemctl --user status abfleetd-control.socket abfleetd-web.socket")
}
