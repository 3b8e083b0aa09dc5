package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/cdp"
	"abfleet/internal/config"
	"abfleet/runtime/role"
)

// display is an Xvnc that the bench starts itself, with the fleet's own flags.
type display struct {
	role.Display
	cfg *config.Config
	dir string // its files, and the TMPDIR of a browser on it
	cmd *exec.Cmd
}

// newDisplay prepares the files of an Xvnc with that number.
func newDisplay(cfg *config.Config, number int) (*display, error) {
	dir, err := os.MkdirTemp(os.Getenv("HOME"), "h")
	if err != nil {
		return nil, err
	}
	d := role.Display{Program: cfg.Xvnc, Number: number, Width: cfg.ScreenWidth, Height: cfg.ScreenHeight, Name: "hand",
		Authority: dir + "/xauth", PasswordFile: dir + "/pw", RFBSocket: dir + "/rfb", Home: dir}
	return &display{Display: d, cfg: cfg, dir: dir}, errors.Join(
		os.WriteFile(d.Authority, role.Authority(d.Number, role.NewCookie()), 0o600),
		os.WriteFile(d.PasswordFile, role.VNCPasswordFile(role.NewVNCPassword()), 0o600))
}

// start returns when the server answers viewers. It has no other sign of that
// than its sockets, so that they are asked until ctx or the start timeout ends.
func (d *display) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.StartTimeout)
	defer cancel()
	d.cmd = &exec.Cmd{Path: d.Program, Args: d.Args(), Env: d.Env()}
	if err := d.cmd.Start(); err != nil {
		return err
	}
	for {
		err := role.RFBReady(ctx, d.RFBSocket, d.cmd.Process.Pid)
		if !errors.Is(err, role.ErrNotReady) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// close ends the server and removes its files.
func (d *display) close() {
	if d.cmd != nil && d.cmd.Process != nil {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		_ = d.cmd.Wait() // it was told to end
	}
	_ = os.RemoveAll(d.dir)
}

// chromium is a browser that the bench starts itself, with the fleet's own flags.
type chromium struct {
	*cdp.Conn
	cmd  *exec.Cmd
	page string // target id of the first page
}

// browser starts a browser on the display and returns when it has a page.
func (d *display) browser(ctx context.Context, profile string) (*chromium, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.StartTimeout)
	defer cancel()
	c := role.Chromium{Program: d.cfg.Chromium, Profile: profile, Display: d.Number, Authority: d.Authority, Width: d.cfg.ScreenWidth, Height: d.cfg.ScreenHeight,
		Home: os.Getenv("HOME"), TempDir: d.dir, Stealth: d.cfg.Stealth, Restore: true}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "cdp"), os.NewFile(uintptr(fds[1]), "cdp")
	defer theirs.Close()
	defer ours.Close()
	b := &chromium{cmd: &exec.Cmd{Path: c.Program, Args: c.Args(), Env: c.Env(), ExtraFiles: []*os.File{theirs, theirs}, Stdout: io.Discard}}
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	if err := b.cmd.Start(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	b.Conn = cdp.New(conn)
	events := b.Subscribe(cdp.Filter{Session: b.Root(), Methods: []string{"Target.targetCreated", "Target.targetInfoChanged"}})
	defer events.Close()
	if err := b.Root().Call(ctx, "Target.setDiscoverTargets", map[string]any{"discover": true}, nil); err != nil {
		return nil, errors.Join(err, b.kill())
	}
	for {
		ev, err := events.Next(ctx)
		if err != nil {
			return nil, errors.Join(err, b.kill())
		}
		var target struct {
			TargetInfo struct {
				TargetID string `json:"targetId"`
				Type     string `json:"type"`
			} `json:"targetInfo"`
		}
		if err := json.Unmarshal(ev.Params, &target); err != nil {
			return nil, errors.Join(err, b.kill())
		}
		if target.TargetInfo.Type == "page" {
			b.page = target.TargetInfo.TargetID
			return b, nil
		}
	}
}

// close ends the browser as the fleet does.
func (b *chromium) close(ctx context.Context) error {
	if err := b.Root().Call(ctx, "Browser.close", nil, nil); err != nil {
		return errors.Join(fmt.Errorf("close the browser: %w", err), b.kill())
	}
	err := b.cmd.Wait()
	return errors.Join(err, b.Conn.Close())
}

func (b *chromium) kill() error {
	err := errors.Join(b.Conn.Close(), b.cmd.Process.Kill())
	_ = b.cmd.Wait() // it was killed
	return err
}
