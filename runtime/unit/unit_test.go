package unit

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sddbus "github.com/coreos/go-systemd/v22/dbus"
	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

func TestParseProcCgroup(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"0::/user.slice/a.scope\n", "/user.slice/a.scope"},
		{"0::/\n", "/"},
		{"12:memory:/wrong\n1:name=systemd:/wrong\n0::/right\n", "/right"},
		{"4:misc:/0::/trap\n0::/right\n", "/right"},
		{"12:memory:/only/v1\n", ""},
		{"", ""},
		{"0::\n", ""},
		{"0::relative\n", ""},
		{"0::/a\n0::/b\n", ""},
		{"0::/gone.scope (deleted)\n", ""},
		{"0::/../outside\n", ""},
		{"0::/a/../b\n", ""},
		{"0::/a//b\n", ""},
	} {
		got, err := parseProcCgroup([]byte(c.in))
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("parseProcCgroup(%q) = %q, %v; want %q", c.in, got, err, c.want)
		}
	}
}

func FuzzParseProcCgroup(f *testing.F) {
	f.Add([]byte("0::/user.slice/a.scope\n"))
	f.Add([]byte("12:memory:/x\n0::/y (deleted)\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parseProcCgroup(data)
		if err != nil {
			return
		}
		if !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.Contains(p, "/../") {
			t.Errorf("accepted %q", p)
		}
		if !strings.Contains(string(data), "0::"+p) {
			t.Errorf("%q is not in the input", p)
		}
	})
}

func TestParseEvents(t *testing.T) {
	for in, want := range map[string]bool{"populated 1\nfrozen 0\n": true, "frozen 0\npopulated 0\n": false} {
		if got, err := parseEvents([]byte(in)); err != nil || got != want {
			t.Errorf("parseEvents(%q) = %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "frozen 0\n", "populated 2\n", "populated"} {
		if _, err := parseEvents([]byte(in)); err == nil {
			t.Errorf("parseEvents(%q) found an answer", in)
		}
	}
}

// An empty ControlGroup joined to the mount point would be the root cgroup with
// every process of the host.
func TestPathsThatNameNoUnitAreRefused(t *testing.T) {
	saved := cgroupMount
	t.Cleanup(func() { cgroupMount = saved })
	// On a hybrid machine every path would be refused for that alone.
	cgroupMount = unifiedMount(t)
	if _, err := CgroupRoot(); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"", "/", "a", "/a/..", "/a/../b", "//", "/a/", "/.", "/a\x00b"} {
		cg := Cgroup{Path: p}
		if pids, err := cg.Procs(); err == nil {
			t.Errorf("Procs of %q = %v", p, pids)
		}
		if populated, err := cg.Populated(); err == nil {
			t.Errorf("Populated of %q = %v", p, populated)
		}
		if id, err := cg.ID(); err == nil {
			t.Errorf("ID of %q = %d", p, id)
		}
		if err := cg.WaitEmpty(t.Context()); err == nil {
			t.Errorf("WaitEmpty of %q returned", p)
		}
		if _, err := cg.Subtree(); err == nil {
			t.Errorf("Subtree of %q worked", p)
		}
	}
}

func TestOnlyTheUnifiedLayoutIsAccepted(t *testing.T) {
	saved := cgroupMount
	t.Cleanup(func() { cgroupMount = saved })

	cgroupMount = t.TempDir()
	_, err := CgroupRoot()
	if !fault.Is(err, fault.CgroupUnsupported) || fault.HintOf(err) == "" || strings.Contains(err.Error(), "hybrid") {
		t.Errorf("a legacy layout gave %v", err)
	}
	cgroupMount = filepath.Join(t.TempDir(), "missing")
	if _, err := CgroupRoot(); !fault.Is(err, fault.CgroupUnsupported) {
		t.Errorf("no cgroups at all gave %v", err)
	}

	v2 := unifiedMount(t)
	cgroupMount = t.TempDir()
	if err := os.Symlink(v2, filepath.Join(cgroupMount, "unified")); err != nil {
		t.Fatal(err)
	}
	if _, err := CgroupRoot(); !fault.Is(err, fault.CgroupUnsupported) || !strings.Contains(err.Error(), "hybrid") {
		t.Errorf("a hybrid layout gave %v", err)
	}
	cgroupMount = v2
	if root, err := CgroupRoot(); err != nil || root != v2 {
		t.Errorf("a unified layout gave %q, %v", root, err)
	}
}

// unifiedMount returns where this machine mounts cgroup v2.
func unifiedMount(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir
		}
	}
	t.Skip("this machine mounts cgroup v2 nowhere we know")
	return ""
}

func TestNamesThatReachOtherUnitsAreRefused(t *testing.T) {
	for _, name := range []string{"", ".scope", "a", "a.service", "a*.scope", "a/b.scope", "a b.scope", strings.Repeat("a", 260) + ".scope"} {
		if err := validName(name, ".scope"); err == nil {
			t.Errorf("%q was accepted", name)
		}
	}
	if err := validName("abfleet-k3j2.slice", ".slice"); err != nil {
		t.Error(err)
	}
}

func TestUnitPathIsSystemds(t *testing.T) {
	for _, name := range []string{"abfleet.slice", "abfleet-k3j2m-display-1.scope", "9a.scope", "a_b@c.scope"} {
		want := "/org/freedesktop/systemd1/unit/" + sddbus.PathBusEscape(name)
		if got := string(unitPath(name)); got != want {
			t.Errorf("unitPath(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestNoBusIsSystemdUnavailable(t *testing.T) {
	dead := filepath.Join(t.TempDir(), "bus")
	for _, address := range []string{"disabled:", "unix:path=" + dead, "unix:path=/dev/null", ";"} {
		m, err := Dial(t.Context(), Options{Address: address})
		if err == nil {
			m.Close()
		}
		if !fault.Is(err, fault.SystemdUnavailable) || fault.HintOf(err) == "" {
			t.Errorf("Dial(%q) = %v", address, err)
		}
	}
}

func TestPollEndsWithItsContext(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	fds := []unix.PollFd{{Fd: int32(p[0]), Events: unix.POLLIN}}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Poll(ctx, fds, 0) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || fds[0].Revents != 0 {
		t.Errorf("a cancelled Poll gave %v, events %#x", err, fds[0].Revents)
	}
	if err := Poll(t.Context(), fds, time.Millisecond); err != nil || fds[0].Revents != 0 {
		t.Errorf("a Poll past its limit gave %v, events %#x", err, fds[0].Revents)
	}
	if _, err := unix.Write(p[1], []byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := Poll(t.Context(), fds, 0); err != nil || fds[0].Revents&unix.POLLIN == 0 {
		t.Errorf("a Poll with an event gave %v, events %#x", err, fds[0].Revents)
	}
}

func TestParseOOMKills(t *testing.T) {
	for text, want := range map[string]int{
		"low 0\nhigh 3\nmax 2\noom 2\noom_kill 7\noom_group_kill 0\n": 7,
		"oom_kill 0\n":  0,
		"oom 2\n":       -1,
		"oom_kill -1\n": -1,
		"":              -1,
	} {
		got, err := parseOOMKills([]byte(text))
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}
