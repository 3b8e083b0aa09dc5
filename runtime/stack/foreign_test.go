package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
	"abfleet/runtime/role"
)

// foreign is something of somebody else's beside a Stack of ours.
type foreign struct {
	t     *testing.T
	procs map[int]string    // start time of each process
	files map[string]string // what each file or link held
}

// process starts one and waits until ready says that it is there.
func (f *foreign) process(dir string, ready func() bool, args ...string) *exec.Cmd {
	f.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), "DBUS_SESSION_BUS_ADDRESS=disabled:", "BREAKPAD_DUMP_LOCATION="+f.t.TempDir())
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
	})
	err := await(f.t.Context(), dir, nil, func(context.Context) error {
		if !ready() {
			return role.ErrNotReady
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.procs[cmd.Process.Pid] = startOf(f.t, cmd.Process.Pid)
	return cmd
}

func (f *foreign) file(path string) {
	f.t.Helper()
	f.files[path] = f.held(path)
}

func (f *foreign) held(path string) string {
	if target, err := os.Readlink(path); err == nil {
		return "link to " + target
	}
	st, err := os.Lstat(path)
	if err != nil {
		return err.Error()
	}
	data, _ := os.ReadFile(path)
	return fmt.Sprintf("%s %d %s", st.Mode(), st.Sys().(*syscall.Stat_t).Ino, data)
}

func (f *foreign) untouched(when string) {
	f.t.Helper()
	for pid, start := range f.procs {
		if got := startOf(f.t, pid); got != start {
			f.t.Errorf("%s: foreign process %d started at %q, not %q", when, pid, got, start)
		}
	}
	for path, was := range f.files {
		if got := f.held(path); got != was {
			f.t.Errorf("%s: foreign %s is %q, not %q", when, path, got, was)
		}
	}
}

// TestForeignThings protects what is somebody else's. Beside each of them a Stack
// of ours starts, stops and is recovered, or is refused in plain words; whatever
// it is, it lives on as the same process, was sent no signal, and its files are
// as they were.
func TestForeignThings(t *testing.T) {
	next := role.FirstDisplay
	xserver := func(f *foreign, options ...string) {
		rfb := filepath.Join(f.t.TempDir(), "rfb")
		f.process("/tmp", func() bool { _, err := os.Stat(role.XSocket(next)); return err == nil && role.DisplayTaken(next) },
			append([]string{"Xvnc", role.XDisplay(next), "-rfbport", "-1", "-rfbunixpath", rfb, "-SecurityTypes", "None", "-nolisten", "tcp"}, options...)...)
		f.file(role.XLock(next))
		f.file(role.XSocket(next))
	}
	pidfile := func(member func() proof.Member) func(*foreign, *world, evidence) {
		return func(f *foreign, w *world, e evidence) {
			g := *e.Display
			g.Leader = member()
			data := fmt.Appendf(nil, `{"instance":%q,"role":"display","generation":%d,"unit":%q,"invocation_id":%q,"cgroup":%q,"cgroup_id":%d,"boot_id":%q,`+
				`"leader":{"pid":%d,"start_time":%d,"pgid":%d,"uid":%d},"display":%d,"root":%q,"sockets":[%q]}`,
				g.Instance, g.Number, g.Unit, g.InvocationID, g.Cgroup, g.CgroupID, g.BootID,
				g.Leader.PID, g.Leader.StartTime, g.Leader.PGID, g.Leader.UID, g.Display, g.Root, g.Sockets[0])
			if err := os.WriteFile(w.files(e.Instance).pidfile(role.NameDisplay), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	memberOf := func(pid int) proof.Member {
		var start uint64
		fmt.Sscan(startOf(t, pid), &start)
		return proof.Member{PID: pid, PGID: pid, StartTime: start, UID: os.Getuid()}
	}
	for i, c := range []struct {
		name    string
		before  func(f *foreign, w *world, dir, instance string) // made before the start
		refused fault.Code                                       // of the start; "" where it works
		during  func(f *foreign, w *world, e evidence)           // made while it runs
		unsure  bool                                             // with the record lost, a recovery is refused
	}{
		{name: "a Chromium of the same user on its own profile", before: func(f *foreign, w *world, dir, _ string) {
			own := t.TempDir()
			f.process(own, func() bool { _, _, ok := proof.ReadSingleton(own); return ok },
				w.cfg.Chromium, "--headless=new", "--user-data-dir="+own, "--remote-debugging-port=0", "about:blank")
			f.file(filepath.Join(own, "SingletonLock"))
		}},
		{name: "an Xvnc on the next display", before: func(f *foreign, _ *world, _, _ string) { xserver(f) }},
		{name: "an X server with a lock and no abstract socket on our next number", before: func(f *foreign, _ *world, _, _ string) {
			xserver(f, "-nolisten", "local")
		}},
		{name: "a foreign X lock", before: func(f *foreign, _ *world, _, _ string) {
			lock := role.XLock(next)
			if err := os.WriteFile(lock, fmt.Appendf(nil, "%10d\n", os.Getppid()), 0o444); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Remove(lock) })
			f.file(lock)
		}},
		{name: "an X path without a lock that a stranger serves", before: func(f *foreign, _ *world, _, _ string) {
			f.listener(role.XSocket(next))
		}},
		{name: "our killed display's X path, now served by a stranger", during: func(f *foreign, w *world, e evidence) {
			path := role.XSocket(e.Display.Display)
			if err := syscall.Kill(e.Display.Leader.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if err := w.verifier.AwaitEnd(t.Context(), *e.Display); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			f.listener(path)
			t.Cleanup(func() { os.Remove(role.XLock(e.Display.Display)) })
		}},
		{name: "a SingletonLock that names another host", before: func(f *foreign, _ *world, dir, _ string) {
			lock := filepath.Join(dir, "SingletonLock")
			if err := os.Symlink("elsewhere-4711", lock); err != nil {
				t.Fatal(err)
			}
			f.file(lock)
		}, refused: fault.ProfileBusy},
		{name: "a world-writable profile", before: func(f *foreign, _ *world, dir, _ string) {
			if err := errors.Join(os.WriteFile(filepath.Join(dir, "Local State"), []byte("{}"), 0o600), os.Chmod(dir, 0o777)); err != nil {
				t.Fatal(err)
			}
			f.file(filepath.Join(dir, "Local State"))
		}, refused: fault.UnsafePath},
		{name: "a runtime directory that is a symbolic link", before: func(f *foreign, w *world, _, _ string) {
			theirs := t.TempDir()
			if err := errors.Join(os.Chmod(theirs, 0o700), os.WriteFile(filepath.Join(theirs, "root"), []byte("theirs"), 0o600)); err != nil {
				t.Fatal(err)
			}
			w.cfg.RuntimeDir = filepath.Join(t.TempDir(), "run")
			if err := os.Symlink(theirs, w.cfg.RuntimeDir); err != nil {
				t.Fatal(err)
			}
			f.file(filepath.Join(theirs, "root"))
			f.file(w.cfg.RuntimeDir)
		}, refused: fault.UnsafePath},
		{name: "an instance directory that is a symbolic link", before: func(f *foreign, w *world, _, instance string) {
			theirs := t.TempDir()
			if err := errors.Join(os.WriteFile(filepath.Join(theirs, "root"), []byte("theirs"), 0o600), os.Symlink(theirs, w.cfg.InstanceDir(instance))); err != nil {
				t.Fatal(err)
			}
			f.file(filepath.Join(theirs, "root"))
			f.file(w.cfg.InstanceDir(instance))
		}, refused: fault.UnsafePath},
		{name: "a pidfile that names init", during: pidfile(func() proof.Member { return proof.Member{PID: 1, PGID: 1, StartTime: memberOf(1).StartTime} })},
		{name: "a pidfile that names ourselves", during: pidfile(func() proof.Member { return memberOf(os.Getpid()) }), unsure: true},
		{name: "a pidfile that names another program", during: func(f *foreign, w *world, e evidence) {
			cmd := f.process("/tmp", func() bool { return true }, "sleep", "600")
			pidfile(func() proof.Member { return memberOf(cmd.Process.Pid) })(f, w, e)
		}, unsure: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			bystander := newStandIn(t, "chromium", "", nil, "--user-data-dir="+t.TempDir())
			f := &foreign{t: t, procs: map[int]string{1: startOf(t, 1), os.Getpid(): startOf(t, os.Getpid())}, files: map[string]string{}}
			dir := w.cfg.TemplateDir("identity-1")
			if err := w.CreateProfile(t.Context(), dir); err != nil {
				t.Fatal(err)
			}
			instance := fmt.Sprintf("fffffffff%c", 'a'+i)
			if c.before != nil {
				c.before(f, w, dir, instance)
			}
			check := func(when string) {
				t.Helper()
				f.untouched(when)
				bystander.unharmed(when)
			}
			req := fleet.RecoverRequest{Instance: instance, Profile: dir}
			generation := uint64(0)
			start := func() (fleet.Evidence, error) {
				generation++
				return w.Start(t.Context(), fleet.StartRequest{Instance: instance, Generation: generation, Profile: dir, URL: "about:blank"})
			}
			// Nothing of ours runs yet.
			if _, err := w.Recover(t.Context(), req); err != nil && c.refused == "" {
				t.Errorf("recovery of nothing: %v", err)
			}
			check("after a recovery of nothing")
			ev, err := start()
			if c.refused != "" {
				var refused *fleet.StartError
				if !errors.As(err, &refused) || !fault.Is(err, c.refused) {
					t.Errorf("start: %v, want %s", err, c.refused)
				}
				check("after a refused start")
				return
			}
			for _, lost := range []bool{false, true} {
				if err != nil {
					t.Fatal(err)
				}
				e, derr := decode(ev)
				if derr != nil {
					t.Fatal(derr)
				}
				if c.during != nil {
					c.during(f, w, e)
				}
				check("while it runs")
				when := "after a stop"
				if lost {
					when = "after a recovery without a record"
					_, err = w.Recover(t.Context(), req)
					if c.unsure {
						if !errors.Is(err, &proof.Refusal{Reason: proof.Ambiguous}) || !strings.Contains(err.Error(), "is recorded as") {
							t.Errorf("recovery: %v, want a refusal", err)
						}
						check("after a refused recovery")
						_, err = w.Stop(t.Context(), ev, "test")
					}
				} else {
					_, err = w.Stop(t.Context(), ev, "test")
				}
				if err != nil {
					t.Fatalf("%s: %v", when, err)
				}
				check(when)
				if !lost {
					ev, err = start()
				}
			}
		})
	}
}

// listener has a program of somebody else's listen on a path.
func (f *foreign) listener(path string) {
	f.t.Helper()
	f.process(filepath.Dir(path), func() bool { st, err := os.Lstat(path); return err == nil && st.Mode()&os.ModeSocket != 0 },
		"systemd-socket-activate", "--listen="+path, "sleep", "600")
	f.file(path)
	f.t.Cleanup(func() { os.Remove(path) })
}
