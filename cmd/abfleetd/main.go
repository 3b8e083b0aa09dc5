// Command abfleetd is the service of the fleet. systemd starts it through its
// sockets; see units/ and abfleet setup.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/sd"
	"abfleet/internal/store"
)

// Exit statuses of a start that the same configuration on the same host will
// not get beyond, after sysexits(3). The unit does not restart the service then.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitUnavailable = 69
	exitConfig      = 78
)

func main() {
	store.MaybeRunChecker()
	os.Exit(run())
}

func run() int {
	flags := flag.NewFlagSet("abfleetd", flag.ContinueOnError)
	configFile := flags.String("config", "", "configuration `file` (default $XDG_CONFIG_HOME/abfleet/config.toml)")
	control := flags.String("listen-control", "", "unix socket `path` to listen on when systemd passes no sockets")
	web := flags.String("listen-web", "", "loopback `address` to listen on when systemd passes no sockets")
	debug := flags.Bool("debug", false, "log details")
	version := flags.Bool("version", false, "print the version and exit")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return exitUsage
	}
	if *version {
		fmt.Println("abfleetd", api.Version)
		return 0
	}
	level := slog.LevelInfo
	if *debug {
		level = slog.LevelDebug
	}
	log := sd.NewLogger(level)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	var listeners map[string][]net.Listener
	err := func() (err error) {
		if listeners, err = listen(*control, *web); err != nil {
			return err
		}
		cfg, err := config.Load(*configFile, os.Getenv)
		if err != nil {
			return err
		}
		return serve(ctx, stop, cfg, listeners, log)
	}()
	if err == nil {
		return 0
	}
	log.Error(err.Error(), sd.EventKey, string(sd.ServiceFailed), "code", string(fault.CodeOf(err)), "hint", fault.HintOf(err))
	sd.Status(fmt.Sprintf("%s: %v (%s)", fault.CodeOf(err), err, fault.HintOf(err)))
	status := exitStatus(err)
	if status != exitFailed {
		refuse(listeners, err)
	}
	return status
}

func exitStatus(err error) int {
	switch fault.CodeOf(err) {
	case fault.InvalidConfig, fault.InvalidArgument:
		return exitConfig
	case fault.StateInUse, fault.StateCorrupt, fault.StateTooNew, fault.UnsafePath, fault.ReadOnly, fault.CgroupUnsupported, fault.PortTaken:
		return exitUnavailable
	}
	return exitFailed
}
