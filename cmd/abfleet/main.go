// Command abfleet is the fleet's command line; see abfleet --help.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"abfleet/internal/cli"
	"abfleet/internal/store"
)

func main() {
	store.MaybeRunChecker()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	stop()
	os.Exit(code)
}
