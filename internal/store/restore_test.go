package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"abfleet/internal/fault"
)

func anything(*Tx) error     { return nil }
func accepted(Summary) error { return nil }

// TestCopies protects the copies that an operator asks for: they hold the state,
// are nobody else's, replace nothing, and are made of a state that is in use by
// its service alone.
func TestCopies(t *testing.T) {
	path := statePath(t)
	s := mustOpen(t, path)
	put(t, s, "a", "one")
	dir := t.TempDir()
	live, closed := filepath.Join(dir, "live.db"), filepath.Join(dir, "closed.db")
	if err := s.CopyTo(t.Context(), live); err != nil {
		t.Fatal(err)
	}
	short(t, &lockTimeout, 0)
	if err := CopyClosed(t.Context(), path, closed); fault.CodeOf(err) != fault.StateInUse {
		t.Errorf("a copy beside the service: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := CopyClosed(t.Context(), path, closed); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{live, closed} {
		sum, err := Inspect(t.Context(), file, anything)
		if err != nil || sum.Records[Identities] != 1 || sum.Host != s.HostID() || sum.Revision == 0 || sum.Schema != schema {
			t.Errorf("%s holds %+v, %v", file, sum, err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", file, info.Mode(), err)
		}
		before, _ := os.ReadFile(file)
		if err := CopyClosed(t.Context(), path, file); fault.CodeOf(err) != fault.InvalidArgument {
			t.Errorf("a copy over %s: %v", file, err)
		}
		if after, _ := os.ReadFile(file); !bytes.Equal(before, after) {
			t.Errorf("%s was changed", file)
		}
	}
	if err := os.Truncate(path, 9000); err != nil {
		t.Fatal(err)
	}
	if err := CopyClosed(t.Context(), path, filepath.Join(dir, "torn.db")); fault.CodeOf(err) != fault.StateCorrupt {
		t.Errorf("a copy of a torn state: %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("failed copies left something: %v", entries)
	}
}

// TestRestoreRefused protects the state from a restore that must not be: it
// stays as it is, and nothing is left beside it.
func TestRestoreRefused(t *testing.T) {
	path := statePath(t)
	s := mustOpen(t, path)
	put(t, s, "a", "one")
	dir := t.TempDir()
	good, torn := filepath.Join(dir, "good.db"), filepath.Join(dir, "torn.db")
	if err := s.CopyTo(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(good)
	if err == nil {
		err = os.WriteFile(torn, data[:len(data)/2], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	short(t, &lockTimeout, 0)
	if _, err := Restore(t.Context(), path, good, anything, accepted, anything); fault.CodeOf(err) != fault.StateInUse {
		t.Errorf("beside the service: %v", err)
	}
	put(t, s, "b", "two")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(path)
	no := errors.New("no")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, try := range map[string]func() (string, error){
		"torn":     func() (string, error) { return Restore(t.Context(), path, torn, anything, accepted, anything) },
		"missing":  func() (string, error) { return Restore(t.Context(), path, dir+"/none", anything, accepted, anything) },
		"canceled": func() (string, error) { return Restore(canceled, path, good, anything, accepted, anything) },
		"records": func() (string, error) {
			return Restore(t.Context(), path, good, func(*Tx) error { return no }, accepted, anything)
		},
		"person": func() (string, error) {
			return Restore(t.Context(), path, good, anything, func(Summary) error { return no }, anything)
		},
		"amendment": func() (string, error) {
			return Restore(t.Context(), path, good, anything, accepted, func(*Tx) error { return no })
		},
	} {
		if kept, err := try(); err == nil || kept != "" {
			t.Errorf("%s: kept %q, %v", name, kept, err)
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
			t.Errorf("%s: the state was changed", name)
		}
		for _, left := range []string{path + ".restore", path + ".before-*"} {
			if found, _ := filepath.Glob(left); found != nil {
				t.Errorf("%s: %v is left", name, found)
			}
		}
	}

	kept, err := Restore(t.Context(), path, good, anything, accepted, anything)
	if err != nil {
		t.Fatal(err)
	}
	if was, _ := os.ReadFile(kept); !bytes.Equal(before, was) {
		t.Errorf("%s is not the state of before", kept)
	}
	s = mustOpen(t, path)
	if got := read(t, s); len(got) != 1 || got["a"] != "one" {
		t.Errorf("restored %v", got)
	}
	s.Close(t.Context())
}

// TestReadOnly protects a fleet whose state cannot be written: its start is
// refused, nothing takes the file's place.
func TestReadOnly(t *testing.T) {
	if os.Geteuid() == 0 {
		// Root may write anywhere.
		const nobody = 65534
		dir, err := os.MkdirTemp("", "read-only")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestReadOnly$")
		cmd.Env = []string{"TMPDIR=" + dir}
		cmd.Dir = dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if err := os.Chown(dir, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
			t.Errorf("as a normal user: %v: %s", err, out)
		}
		return
	}
	for _, readOnly := range []func(path string) error{
		func(path string) error { return os.Chmod(path, 0o400) },
		func(path string) error {
			return errors.Join(os.Remove(path+".lock"), os.Chmod(filepath.Dir(path), 0o500))
		},
	} {
		path := statePath(t)
		s := mustOpen(t, path)
		put(t, s, "a", "one")
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(path)
		if err := readOnly(path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Chmod(filepath.Dir(path), 0o700) })
		_, err := Open(t.Context(), path)
		if !errors.Is(err, fs.ErrPermission) || fault.CodeOf(err) != fault.UnsafePath || fault.HintOf(err) == "" {
			t.Errorf("open: %s %v", fault.CodeOf(err), err)
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
			t.Error("the state was changed")
		}
		if err := CopyClosed(t.Context(), path, filepath.Join(t.TempDir(), "copy.db")); err != nil {
			t.Errorf("copy: %v", err)
		}
	}
}
