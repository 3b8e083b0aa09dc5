package rig

import (
	"os"
	"testing"
)

// Require skips a test, saying why, on a machine that cannot boot a rig: not
// root, no systemd installed, or no writable cgroup v2 tree.
func Require(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the rig creates namespaces and mounts")
	}
	if _, err := os.Stat(systemdPath); err != nil {
		t.Skipf("needs systemd installed: %v", err)
	}
	root, err := cgroupRoot()
	if err == nil {
		err = probeCgroup(root)
	}
	if err != nil {
		t.Skipf("needs a writable cgroup v2 tree: %v", err)
	}
}

// BootTest boots a rig for one test, or fails it, and closes it at its end, when
// anything left behind fails the test.
func BootTest(t testing.TB, opts Options) *Rig {
	t.Helper()
	Require(t)
	r, err := Boot(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func probeCgroup(root string) error {
	dir, err := os.MkdirTemp(root, namePrefix+"probe-")
	if err != nil {
		return err
	}
	return os.Remove(dir)
}
