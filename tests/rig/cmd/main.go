// Command rig boots a private systemd by hand, to look around in it.
//
//	rig boot    boots, prints its PID 1 and waits for Ctrl-C
//	rig shell   boots and opens a shell as its normal user
//	rig deps    installs the Debian packages that are missing
//	rig run     the demo: see README.md
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"abfleet/tests/rig"
)

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	if len(args) == 1 && args[0] == "deps" {
		return deps(ctx)
	}
	if len(args) == 1 && args[0] == "run" {
		return demo(ctx)
	}
	if len(args) == 0 || args[0] != "boot" && args[0] != "shell" {
		return errors.New("usage: rig boot|shell [-home DIR] [-bin DIR] [-bind HOST:INSIDE] [-mask PATH] [-host-network] [-hybrid-cgroup] [-root]")
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	var opts rig.Options
	var binds list
	var mask list
	flags.StringVar(&opts.Home, "home", "", "directory shown as /home; kept")
	flags.BoolVar(&opts.HostNetwork, "host-network", false, "share the machine's network")
	flags.BoolVar(&opts.HybridCgroup, "hybrid-cgroup", false, "boot on a hybrid cgroup tree")
	flags.Var(&binds, "bind", "read-only bind HOST:INSIDE; may be repeated")
	flags.Var(&mask, "mask", "path that does not exist inside; may be repeated")
	bin := flags.String("bin", "", "directory of programs shown at "+rig.BinDir)
	asRoot := flags.Bool("root", false, "open the shell as root")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	opts.Mask = mask
	opts.Binds = map[string]string{}
	for _, bind := range binds {
		host, inside, ok := strings.Cut(bind, ":")
		if !ok {
			return fmt.Errorf("cannot use bind %q: want HOST:INSIDE", bind)
		}
		opts.Binds[host] = inside
	}

	r, err := rig.Boot(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if *bin != "" {
		if err := r.Install(ctx, *bin); err != nil {
			return err
		}
	}
	fmt.Printf("rig is up: its PID 1 is %d, its /home is %s\n", r.PID(), r.Home())
	if args[0] == "boot" {
		select {
		case <-ctx.Done():
		case <-r.Exited():
		}
		return nil
	}
	return shell(ctx, r, *asRoot)
}

// shell opens one on a terminal of the rig's own, so that job control works.
func shell(ctx context.Context, r *rig.Rig, asRoot bool) error {
	argv := []string{"script", "--quiet", "--return", "--command", "exec bash", "/dev/null"}
	start := r.User
	if asRoot {
		start = r.Root
	}
	cmd := start(ctx, argv[0], argv[1:]...)
	cmd.Env = append(cmd.Env, "TERM="+os.Getenv("TERM"))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil // the status of the last command typed
	}
	return err
}
