package stack

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"abfleet/internal/config"
	"abfleet/internal/fleet"
)

// TestLimits protects the host from a browser: its limits are those of its
// slice when it runs, they are gone with it, and the next start has others.
func TestLimits(t *testing.T) {
	w := newWorld(t)
	const instance = "llllllllll"
	dir := w.cfg.TemplateDir("identity-1")
	if err := w.CreateProfile(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	slice := w.cfg.Slice(instance)
	show := func() string {
		out, err := exec.Command("systemctl", "--user", "show", slice, "-p", "MemoryHigh,MemoryMax,TasksMax,CPUWeight").Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(strings.Fields(string(out)), " ")
	}
	plain := show()
	// A slice that an earlier service left behind has limits of its own.
	if out, err := exec.Command("systemctl", "--user", "start", slice).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	for i, c := range []struct {
		limits config.Limits
		want   string
	}{
		{config.Limits{MemoryHigh: 3 << 30, MemoryMax: 4 << 30, TasksMax: 2000, CPUWeight: 50}, "CPUWeight=50 MemoryHigh=3221225472 MemoryMax=4294967296 TasksMax=2000"},
		{config.Limits{MemoryMax: config.Infinity, TasksMax: 1500}, "CPUWeight=[not set] MemoryHigh=infinity MemoryMax=infinity TasksMax=1500"},
		{config.Limits{}, plain},
	} {
		ev, err := w.Start(t.Context(), fleet.StartRequest{Instance: instance, Generation: uint64(i) + 1, Profile: dir, Limits: c.limits})
		if err != nil {
			t.Fatal(err)
		}
		if got := show(); got != c.want {
			t.Errorf("with %+v the slice has %s, want %s", c.limits, got, c.want)
		}
		if i == 0 {
			enforced(t, ev, map[string]string{"memory.high": "3221225472", "memory.max": "4294967296", "pids.max": "2000", "cpu.weight": "50"})
		}
		if _, err := w.Stop(t.Context(), ev, "test"); err != nil {
			t.Fatal(err)
		}
		if got := show(); got != plain {
			t.Errorf("after the stop the slice has %s, want %s", got, plain)
		}
	}
	outOfMemory(t, w)
}

// outOfMemory checks that a browser that the kernel kills for its memory is told
// as that, where there is the controller.
func outOfMemory(t *testing.T, w *world) {
	t.Run("memory.oom", func(t *testing.T) {
		const instance = "oooooooooo"
		dir := w.cfg.TemplateDir("identity-2")
		if err := w.CreateProfile(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		ev, err := w.Start(t.Context(), fleet.StartRequest{Instance: instance, Generation: 1, Profile: dir, Limits: config.Limits{MemoryMax: 4 << 30}})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop(t.Context(), ev, "test")
		e, err := decode(ev)
		if err != nil {
			t.Fatal(err)
		}
		limit := filepath.Join("/sys/fs/cgroup", filepath.Dir(e.Chromium.Cgroup), "memory.max")
		if _, err := os.Stat(limit); errors.Is(err, fs.ErrNotExist) {
			t.Skip("this host gives its users no memory controller")
		}
		if out, err := exec.Command("systemctl", "--user", "set-property", "--runtime", w.cfg.Slice(instance), "MemoryMax=16M").CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, out)
		}
		if err := w.Watch(t.Context(), ev); err != nil {
			t.Fatal(err)
		}
		obs, err := w.Observe(t.Context(), ev)
		if err != nil || obs.Exit == nil || obs.Exit.OOMKills == 0 || obs.Exit.Trigger != fleet.TriggerSignal || obs.Exit.Signal != "SIGKILL" || obs.Exit.Clean {
			t.Errorf("it ended as %+v, %+v, %v", obs, obs.Exit, err)
		}
	})
}

// enforced checks that the kernel has the limits too, where it has the
// controllers.
func enforced(t *testing.T, ev fleet.Evidence, want map[string]string) {
	e, err := decode(ev)
	if err != nil {
		t.Fatal(err)
	}
	for file, value := range want {
		t.Run(file, func(t *testing.T) {
			got, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", filepath.Dir(e.Chromium.Cgroup), file))
			if errors.Is(err, fs.ErrNotExist) {
				t.Skipf("this host gives its users no %s controller", strings.SplitN(file, ".", 2)[0])
			}
			if err != nil || strings.TrimSpace(string(got)) != value {
				t.Errorf("the kernel has %s %q, want %s", file, got, value)
			}
		})
	}
}
