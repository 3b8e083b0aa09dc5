package safefs

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

func wantCode(t *testing.T, err error, code fault.Code) {
	t.Helper()
	if err == nil || fault.CodeOf(err) != code {
		t.Errorf("error is %v, its code %s, want %s", err, fault.CodeOf(err), code)
	}
	if err != nil && code != fault.Internal && fault.HintOf(err) == "" {
		t.Errorf("no hint with: %v", err)
	}
}

func TestEnsureDirMakesPrivateParents(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	top := filepath.Join(t.TempDir(), "a")
	path := filepath.Join(top, "b", "c")
	for range 2 { // the second time everything is there
		if err := EnsureDir(path); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{top, filepath.Join(top, "b"), path} {
		if err := CheckPrivate(p); err != nil {
			t.Error(err)
		}
	}
	wantCode(t, EnsureDir(""), fault.UnsafePath)
}

func TestCheckDirRefuses(t *testing.T) {
	dir := t.TempDir()
	mk := func(name string, mode fs.FileMode) string {
		p := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(p, 0o700), os.Chmod(p, mode)); err != nil {
			t.Fatal(err)
		}
		return p
	}
	good := mk("good", 0o700)
	file := filepath.Join(dir, "file")
	link := filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink(good, link)); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{good, good + "/", mk("shared", 0o755), mk("readonly", 0o500)} {
		if err := CheckDir(p); err != nil {
			t.Error(err)
		}
	}
	for _, p := range []string{link, link + "/", link + "//", file, mk("group", 0o770), mk("world", 0o707), mk("sticky", 0o777|fs.ModeSticky), ""} {
		wantCode(t, CheckDir(p), fault.UnsafePath)
	}
	wantCode(t, CheckDir(filepath.Join(dir, "missing")), fault.NotFound)
	wantCode(t, CheckDir(filepath.Join(file, "below")), fault.UnsafePath)
	wantCode(t, CheckPrivate(filepath.Join(dir, "shared")), fault.UnsafePath)
	wantCode(t, CheckPrivate(filepath.Join(dir, "readonly")), fault.UnsafePath)
	wantCode(t, EnsureDir(link), fault.UnsafePath)
}

func TestCheckDirRefusesForeignOwner(t *testing.T) {
	foreign := "/"
	if os.Geteuid() == 0 {
		foreign = t.TempDir()
		if err := os.Chown(foreign, 64017, 64017); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, CheckDir(foreign), fault.UnsafePath)
	wantCode(t, CheckPrivate(foreign), fault.UnsafePath)
}

func TestWriteFileReplacesAsAWhole(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	victim := filepath.Join(dir, "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("keep"), 0o600), os.Symlink(victim, path)); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "", "three"} {
		if err := WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("content is %q, %v, want %q", got, err, text)
		}
	}
	if fi, err := os.Lstat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode is %v, %v", fi.Mode(), err)
	}
	if got, err := os.ReadFile(victim); err != nil || string(got) != "keep" {
		t.Errorf("the link was followed: %q, %v", got, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
}

func TestWriteFileFailsWithNothingLeft(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "sub")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	wantCode(t, WriteFile(sub, []byte("x"), 0o600), fault.UnsafePath)
	wantCode(t, WriteFile(filepath.Join(dir, "missing", "f"), nil, 0o600), fault.NotFound)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
	// A write error keeps its code.
	if got := fault.CodeOf(classify(&fs.PathError{Op: "write", Err: unix.EDQUOT}, "write f")); got != fault.NoSpace {
		t.Errorf("quota is %s", got)
	}
}

func TestOpenPrivate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	f, err := OpenPrivate(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("descriptor flags are %x, %v", flags, err)
	}
	f.Close()

	link := filepath.Join(dir, "link")
	open := filepath.Join(dir, "open")
	fifo := filepath.Join(dir, "fifo")
	sock := filepath.Join(dir, "sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = errors.Join(os.Symlink(path, link), os.WriteFile(open, []byte("content"), 0o600), os.Chmod(open, 0o640), unix.Mkfifo(fifo, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, second(OpenPrivate(link, os.O_RDONLY, 0)), fault.UnsafePath)
	wantCode(t, second(OpenPrivate(fifo, os.O_RDONLY, 0)), fault.UnsafePath)
	wantCode(t, second(OpenPrivate(open, os.O_RDWR|os.O_TRUNC, 0)), fault.UnsafePath)
	wantCode(t, second(OpenPrivate(dir, os.O_RDONLY, 0)), fault.UnsafePath)
	if second(OpenPrivate(sock, os.O_RDONLY, 0)) == nil {
		t.Error("a socket was opened")
	}
	wantCode(t, second(OpenPrivate(filepath.Join(dir, "missing"), os.O_RDONLY, 0)), fault.NotFound)
	if got, err := os.ReadFile(open); err != nil || string(got) != "content" {
		t.Errorf("a refused file was truncated: %q, %v", got, err)
	}
	f, err = OpenPrivate(path, os.O_RDWR|os.O_TRUNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || fi.Size() != 0 {
		t.Errorf("a file of ours was not truncated: %v, %v", fi.Size(), err)
	}
}

func second(f *os.File, err error) error {
	if f != nil {
		f.Close()
	}
	return err
}
