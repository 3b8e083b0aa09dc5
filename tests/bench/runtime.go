package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/profile"
	"abfleet/runtime/stack"
	"abfleet/runtime/unit"
)

const helper = "/opt/abfleet/bin/abfleet-role"

// since is the time passed in milliseconds.
func since(t time.Time) float64 { return float64(time.Since(t).Microseconds()) / 1000 }

// benchScope compares what a role's scope costs (spawn, scope, verification,
// read-back) with a bare StartTransientUnit round trip around a sleeping
// process.
func benchScope(b *bencher) error {
	m, err := unit.Dial(b, unit.Options{})
	if err != nil {
		return err
	}
	defer m.Close()
	conn, err := systemd.NewUserConnectionContext(b)
	if err != nil {
		return err
	}
	defer conn.Close()
	r := row{Name: "scope around a role", Peer: "bare StartTransientUnit", Limit: 4, Unit: "ms"}
	for i := range b.n * 2 {
		t := time.Now()
		child, err := holder.Spawn(b, helper)
		if err != nil {
			return err
		}
		if _, err := m.StartScope(b, unit.Scope{Name: fmt.Sprintf("bench-%d.scope", i), Slice: "bench.slice", Description: "bench", PID: child.PID(), KillSignal: syscall.SIGTERM, TimeoutStop: 5 * time.Second}); err != nil {
			return err
		}
		r.Ours = append(r.Ours, since(t))
		child.Abort()

		cmd := exec.Command("/bin/sleep", "60")
		if err := cmd.Start(); err != nil {
			return err
		}
		done := make(chan string, 1)
		t = time.Now()
		props := []systemd.Property{{Name: "PIDs", Value: dbus.MakeVariant([]uint32{uint32(cmd.Process.Pid)})}, {Name: "CollectMode", Value: dbus.MakeVariant("inactive-or-failed")}}
		if _, err := conn.StartTransientUnitContext(b, fmt.Sprintf("bare-%d.scope", i), "fail", props, done); err != nil {
			return err
		}
		<-done
		r.Other = append(r.Other, since(t))
		cmd.Process.Kill()
		cmd.Wait()
	}
	return b.emit(r)
}

func load(name string) (*config.Config, error) {
	file := filepath.Join(os.Getenv("HOME"), name+".toml")
	text := fmt.Sprintf("home = %q\ntmp_dir = %q\n[programs]\nrole_helper = %q\n", filepath.Join(os.Getenv("HOME"), name), os.Getenv("HOME")+"/t", helper)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return config.Load(file, os.Getenv)
}

// used is a Runtime with a Template Snapshot of a profile that has been used.
func used(b *bencher, name string) (*config.Config, *stack.Runtime, error) {
	cfg, err := load(name)
	if err != nil {
		return nil, nil, err
	}
	r, err := stack.New(b, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, nil, err
	}
	if err := makeSnapshot(b, r, cfg); err != nil {
		r.Close()
		return nil, nil, err
	}
	return cfg, r, nil
}

func makeSnapshot(b *bencher, r *stack.Runtime, cfg *config.Config) error {
	dir := cfg.TemplateDir("identity-1")
	if err := r.CreateProfile(b, dir); err != nil {
		return err
	}
	ev, err := r.Start(b, fleet.StartRequest{Instance: "benchlogin", Generation: 1, Profile: dir, URL: "data:text/html,<h1>bench</h1>"})
	if err != nil {
		return err
	}
	if _, err := r.Stop(b, ev, "bench"); err != nil {
		return err
	}
	return r.CaptureSnapshot(b, dir, cfg.SnapshotDir("identity-1"))
}

// benchClone compares a slim clone with cp and one sync of the same tree, on
// the home directory's file system.
func benchClone(b *bencher) error {
	cfg, r, err := used(b, "clone")
	if err != nil {
		return err
	}
	defer r.Close()
	src := cfg.TemplateDir("identity-1")
	out := row{Name: "slim clone of a Profile", Peer: "cp --reflink=auto + sync", Limit: 0.6, Unit: "ms"}
	for i := range b.n {
		dst := filepath.Join(cfg.Home, fmt.Sprintf("ours%d", i))
		t := time.Now()
		if _, err := profile.Clone(b, src, dst); err != nil {
			return err
		}
		out.Ours = append(out.Ours, since(t))
		if err := profile.Remove(b, dst); err != nil {
			return err
		}
		dst = filepath.Join(cfg.Home, fmt.Sprintf("cp%d", i))
		t = time.Now()
		if err := exec.Command("sh", "-c", "cp -a --reflink=auto -- \"$1\" \"$2\" && sync -f \"$2\"", "sh", src, dst).Run(); err != nil {
			return err
		}
		out.Other = append(out.Other, since(t))
		if err := os.RemoveAll(dst); err != nil {
			return err
		}
	}
	return b.emit(out)
}

// benchStack compares a whole start, from the selection of an Identity at the
// service's socket to a controllable browser, with the clone of its Profile and
// all that is recorded on the way, with the same two programs started by hand one
// after the other on a ready profile.
func benchStack(b *bencher) error {
	if err := install(b, "start"); err != nil {
		return err
	}
	cfg, err := config.Load("", os.Getenv)
	if err != nil {
		return err
	}
	snapshots, err := filepath.Glob(cfg.SnapshotDir("*"))
	if err != nil || len(snapshots) != 1 {
		return fmt.Errorf("snapshots %q: %w", snapshots, err)
	}
	service := api.NewClient(controlSocket())
	out := row{Name: "select to controllable", Peer: "Xvnc, then Chromium by hand", Limit: 1.15, Unit: "ms"}
	for i := range b.n {
		session := fmt.Sprintf("start-%d", i)
		t := time.Now()
		if _, err := service.Post(b, api.UsePath, api.SessionRequest{Session: session, Identity: "start"}); err != nil {
			return err
		}
		out.Ours = append(out.Ours, since(t))
		if _, err := service.Post(b, api.StopSessionPath, api.SessionRequest{Session: session}); err != nil {
			return err
		}
		dir := filepath.Join(filepath.Dir(snapshots[0]), fmt.Sprintf("hand%d", i))
		if _, err := profile.Clone(b, snapshots[0], dir); err != nil {
			return err
		}
		took, err := byHand(b, cfg, dir)
		if err != nil {
			return err
		}
		out.Other = append(out.Other, took)
	}
	return b.emit(out)
}

// benchHolder measures the memory of what holds a browser's CDP pipe.
func benchHolder(b *bencher) error {
	cfg, r, err := used(b, "holder")
	if err != nil {
		return err
	}
	defer r.Close()
	out := row{Name: "holder memory (PSS)", Unit: "MB", Ceiling: 6}
	ev, err := r.Start(b, fleet.StartRequest{Instance: "benchstack", Generation: 1, Profile: cfg.ProfileDir("identity-1", "ours"), CloneFrom: cfg.SnapshotDir("identity-1")})
	if err != nil {
		return err
	}
	var e struct {
		Chromium struct {
			Leader struct {
				PID int `json:"pid"`
			} `json:"leader"`
		} `json:"chromium"`
	}
	if err := json.Unmarshal(ev, &e); err != nil {
		return err
	}
	for range b.n {
		size, err := memory(e.Chromium.Leader.PID)
		if err != nil {
			return err
		}
		out.Ours = append(out.Ours, size)
	}
	_, err = r.Stop(b, ev, "bench")
	return errors.Join(err, b.emit(out))
}

// byHand starts a display and then a browser with the fleet's own flags, waits
// for the first page, and closes both.
func byHand(ctx context.Context, cfg *config.Config, dir string) (float64, error) {
	d, err := newDisplay(cfg, 700)
	if err != nil {
		return 0, err
	}
	defer d.close()
	t := time.Now()
	if err := d.start(ctx); err != nil {
		return 0, err
	}
	browser, err := d.browser(ctx, dir)
	if err != nil {
		return 0, err
	}
	took := since(t)
	return took, browser.close(ctx)
}

// memory is the proportional set size of a process in MB.
func memory(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	var kb float64
	for line := range strings.SplitSeq(string(text), "\n") {
		if n, _ := fmt.Sscanf(line, "Pss: %f kB", &kb); n == 1 {
			return kb / 1024, nil
		}
	}
	return 0, fs.ErrNotExist
}
