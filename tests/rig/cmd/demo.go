package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"abfleet/tests/agent"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

// demoPrefix keeps the demo's units, state and port apart from an installed
// fleet's.
const demoPrefix = "abfleetdemo"

// loginWait bounds the demo's own login, the slowest step of a busy machine.
const loginWait = 60 * time.Second

// removalWait bounds the end of the demo, in which its browsers are closed.
const removalWait = time.Minute

// place is where the demo runs: a rig, or this machine's own user manager.
type place struct {
	command func(ctx context.Context, name string, args ...string) *exec.Cmd
	bin     string // directory of the programs, as seen there
	close   func() error
}

// abfleet is a command of the product. It is out of reach of Ctrl-C, which a
// terminal sends to everything in the foreground, the removal included.
func (p *place) abfleet(ctx context.Context, args ...string) *exec.Cmd {
	cmd := p.command(ctx, filepath.Join(p.bin, "abfleet"), append([]string{"--prefix", demoPrefix}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// say runs an abfleet command the way a person would and shows it.
func (p *place) say(ctx context.Context, args ...string) error {
	fmt.Println("$ abfleet --prefix", demoPrefix, strings.Join(args, " "))
	cmd := p.abfleet(ctx, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("abfleet %s: %w", args[0], err)
	}
	return nil
}

// uninstall ends the demo's fleet. It does not show that the state stays: of the
// demo's nothing does.
func (p *place) uninstall(ctx context.Context) error {
	fmt.Println("removing the demo: its units, its browsers, its login and all other state")
	if out, err := p.abfleet(ctx, "uninstall").CombinedOutput(); err != nil {
		return fmt.Errorf("abfleet uninstall: %w: %s", err, out)
	}
	return nil
}

// remove ends the demo and removes its units, then its state and its runtime
// files: those directories have the demo's name.
func (p *place) remove(ctx context.Context, uninstall func(context.Context) error) error {
	if err := uninstall(ctx); err != nil {
		return err
	}
	cmd := p.command(ctx, "sh", "-c", `state="${XDG_STATE_HOME:-$HOME/.local/state}/$1"
		test ! -d "$state" || chmod -R u+w "$state"
		rm -rf "$state" "${XDG_RUNTIME_DIR:?}/$1"`, "sh", demoPrefix)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot remove the demo's state: %w: %s", err, out)
	}
	return nil
}

// demo brings the whole product up on the local site and keeps it up until ctx
// ends.
func demo(ctx context.Context) (err error) {
	bin, err := filepath.Abs("bin")
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(bin, "abfleetd")); err != nil {
		return errors.New("cannot run the demo: no programs in bin/\nhint: make build")
	}
	p, err := findPlace(ctx, bin)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, p.close()); err == nil {
			fmt.Println("The demo is gone.")
		}
	}()

	done := make(chan struct{}, 1)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: site.SelfLogin(site.Handler(site.Options{}), func(site.Login) {
		select {
		case done <- struct{}{}:
		default:
		}
	})}
	go server.Serve(listener)
	defer server.Close()
	address := "http://" + listener.Addr().String()

	// What a demo left that was killed; usually there is nothing to uninstall.
	if err := p.remove(ctx, func(ctx context.Context) error { p.abfleet(ctx, "uninstall").Run(); return ctx.Err() }); err != nil {
		return err
	}
	defer func() {
		// ctx has ended by now; units and state still have to go.
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removalWait)
		defer cancel()
		err = errors.Join(err, p.remove(rctx, p.uninstall))
	}()
	if err := p.say(ctx, "setup", "--bin-dir", p.bin, "--now"); err != nil {
		return err
	}
	if err := p.say(ctx, "identity", "create", "demo"); err != nil {
		return err
	}
	if err := p.say(ctx, "identity", "login", "demo", "--url", address+site.SelfLoginPath); err != nil {
		return err
	}
	fmt.Println("the demo logs in by itself, as ada, on its own small site; on a real one you would do it in the page above")
	select {
	case <-done:
	case <-time.After(loginWait):
		return errors.New("cannot log in to the demo site: the login browser never got there")
	case <-ctx.Done():
		return nil
	}
	if err := p.say(ctx, "identity", "save", "demo"); err != nil {
		return err
	}
	if err := p.say(ctx, "session", "use", "demo-session", "demo"); err != nil {
		return err
	}
	if err := look(ctx, p, address+"/account"); err != nil {
		return err
	}
	var view struct{ View struct{ URL string } }
	out, err := p.abfleet(ctx, "view", "--session", "demo-session", "--json").Output()
	if err != nil {
		return fmt.Errorf("abfleet view: %w", err)
	}
	if err := json.Unmarshal(out, &view); err != nil {
		return err
	}
	fmt.Printf("\nA Session Browser is live. See and use it (the address holds its key):\n\n    %s\n\nCtrl-C ends the demo.\n", view.View.URL)
	<-ctx.Done()
	fmt.Println("\nstopping")
	return nil
}

// look is an MCP client that uses the Session Browser.
func look(ctx context.Context, p *place, url string) error {
	fmt.Println("$ an MCP client, over: abfleet mcp --session demo-session")
	bridge := p.abfleet(ctx, "mcp", "--session", "demo-session")
	bridge.Stderr = os.Stderr
	client, err := agent.Connect(ctx, bridge)
	if err != nil {
		return err
	}
	defer client.Close()
	for _, call := range []struct {
		tool string
		args map[string]any
	}{
		{"browser_navigate", map[string]any{"url": url}},
		{"browser_snapshot", nil},
	} {
		text, err := client.Call(ctx, call.tool, call.args)
		if err != nil {
			return err
		}
		fmt.Println("  ", call.tool)
		fmt.Println("    " + strings.ReplaceAll(text, "\n", "\n    "))
	}
	return nil
}

// findPlace decides who may run the demo where.
func findPlace(ctx context.Context, bin string) (*place, error) {
	if hostSystemd() {
		return hostPlace(bin)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("cannot run the demo: no systemd runs here, and a private one needs root\nhint: sudo make run")
	}
	fmt.Println("no systemd runs on this machine: booting a private one")
	r, err := rig.Boot(ctx, rig.Options{Name: "demo", HostNetwork: true, Binds: map[string]string{bin: rig.BinDir}})
	if err != nil {
		return nil, err
	}
	return &place{command: r.User, bin: rig.BinDir, close: r.Close}, nil
}

// hostPlace is this machine's own manager, for a normal user: the caller, or
// whoever called sudo.
func hostPlace(bin string) (*place, error) {
	command := func(ctx context.Context, name string, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = os.Environ()
		return cmd
	}
	if os.Geteuid() == 0 {
		name := os.Getenv("SUDO_USER")
		if name == "" || name == "root" {
			return nil, errors.New("cannot run the demo as root: Chromium's sandbox needs a normal user\nhint: run make run as the user who will use it")
		}
		u, err := user.Lookup(name)
		if err != nil {
			return nil, err
		}
		command = func(ctx context.Context, program string, args ...string) *exec.Cmd {
			run := "/run/user/" + u.Uid
			cmd := exec.CommandContext(ctx, "runuser", append([]string{"-u", name, "--", program}, args...)...)
			cmd.Env = []string{"HOME=" + u.HomeDir, "USER=" + name, "LOGNAME=" + name, "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin",
				"XDG_RUNTIME_DIR=" + run, "DBUS_SESSION_BUS_ADDRESS=unix:path=" + run + "/bus"}
			return cmd
		}
	}
	return &place{command: command, bin: bin, close: func() error { return nil }}, nil
}
