package profile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

const normalPreferences = `{"profile":{"exit_type":"Normal","name":"x"},"other":[1,2]}`

// tempDir is a directory that is removed with read-only trees in it.
func tempDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		if err := Remove(context.Background(), dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// write makes the files named, with their parents.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		p := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(p), 0o700)
		if err == nil {
			err = os.WriteFile(p, []byte(content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// used makes a profile as Chromium leaves it after Browser.close.
func used(t testing.TB, dir string) {
	t.Helper()
	write(t, dir, map[string]string{
		localState:                                      `{"os_crypt":{}}`,
		preferences:                                     normalPreferences,
		"Default/Network/Cookies":                       strings.Repeat("cookie", 5000),
		"Default/Sessions/Session_1":                    "tabs",
		"Default/Local Storage/leveldb/1":               "storage",
		"Default/Service Worker/CacheStorage/a/b/index": "sw cache",
		"Default/Service Worker/ScriptCache/1":          "sw script",
		"Default/IndexedDB/x.indexeddb.leveldb/2.log":   "idb",
		"Default/Extensions/abc/1.0/Cache/data.js":      "content",
		"Default/Storage/ext/site/def/Local Storage/1":  "partition",

		"Default/Cache/Cache_Data/f1":             "skip",
		"Default/Code Cache/js/x":                 "skip",
		"Default/GPUCache/data_1":                 "skip",
		"Default/DawnGraphiteCache/x":             "skip",
		"Default/Storage/ext/site/def/Cache/x":    "skip",
		"Default/Storage/ext/site/def/GPUCache/x": "skip",
		"GrShaderCache/x":                         "skip",
		"ShaderCache/x":                           "skip",
		"BrowserMetrics/x.pma":                    "skip",
		"BrowserMetrics-spare.pma":                "skip",
		"Crashpad/reports/x.dmp":                  "skip",
		"Safe Browsing/x.store":                   "skip",
		"OptimizationGuidePredictionModels/x":     "skip",
		"component_crx_cache/x":                   "skip",
		"segmentation_platform/x":                 "skip",
		"DevToolsActivePort":                      "9222",
	})
}

// listing describes a tree: path, mode, content of files.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		if !fi.Mode().IsRegular() {
			got[name] = fi.Mode().String()
			return nil
		}
		data, err := os.ReadFile(path)
		got[name] = fi.Mode().String() + " " + string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// only fails unless dir has exactly the entries named.
func only(t testing.TB, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, names) {
		t.Errorf("%s has %q, want %q", dir, got, names)
	}
}

func wantCode(t testing.TB, err error, code fault.Code) {
	t.Helper()
	if err == nil || fault.CodeOf(err) != code {
		t.Errorf("error is %v, its code %s, want %s", err, fault.CodeOf(err), code)
	}
}

func TestCloneKeepsWhatMatters(t *testing.T) {
	dir := tempDir(t)
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	used(t, src)
	past := time.Date(2020, 1, 2, 3, 4, 5, 678, time.UTC)
	l, err := net.Listen("unix", filepath.Join(src, "SS"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = errors.Join(
		os.Symlink("host-1234", filepath.Join(src, "SingletonLock")),
		os.Symlink("/etc/passwd", filepath.Join(src, "Default", "link")),
		os.Symlink("..", filepath.Join(src, "Default", "up")),
		unix.Mkfifo(filepath.Join(src, "Default", "fifo"), 0o600),
		os.Chtimes(filepath.Join(src, preferences), past, past),
		os.Chtimes(filepath.Join(src, "Default"), past, past),
	)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Clone(t.Context(), src, dst)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	files := 0
	var size int64
	for name, text := range listing(t, src) {
		mode, content, isFile := strings.Cut(text, " ")
		switch {
		case strings.HasSuffix(text, " skip"), name == "DevToolsActivePort", mode[0] == 'L', mode[0] == 'p', mode[0] == 'S':
		case isFile:
			files++
			size += int64(len(content))
			want[name] = text
		}
	}
	got := listing(t, dst)
	dirs := 0
	for name, text := range got {
		if text[0] == 'd' {
			dirs++
			if text != "drwx------" {
				t.Errorf("%s is %s", name, text)
			}
			if base := filepath.Base(name); (base == "Cache" || base == "GPUCache") && !strings.Contains(name, "Extensions") {
				t.Errorf("%s was copied", name)
			}
			continue
		}
		if want[name] != text {
			t.Errorf("%s is %q, want %q", name, text, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("not copied: %v", want)
	}
	if r.Files != files || r.Bytes != size || r.Dirs != dirs || r.Skipped != 4 || r.Duration <= 0 {
		t.Errorf("report is %+v, want %d files, %d bytes, %d directories", r, files, size, dirs)
	}
	for _, name := range []string{preferences, "Default"} {
		if fi, err := os.Stat(filepath.Join(dst, name)); err != nil || !fi.ModTime().Equal(past) {
			t.Errorf("%s has time %v, %v", name, fi.ModTime(), err)
		}
	}
	only(t, dir, "dst", "src")

	_, err = Clone(t.Context(), src, dst)
	if !errors.Is(err, fs.ErrExist) {
		t.Errorf("second clone: %v", err)
	}
}

func TestCloneRefusesUnsafeSources(t *testing.T) {
	dir := tempDir(t)
	src := filepath.Join(dir, "src")
	used(t, src)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(src, link); err != nil {
		t.Fatal(err)
	}
	_, err := Clone(t.Context(), link, filepath.Join(dir, "dst"))
	wantCode(t, err, fault.UnsafePath)
	_, err = Clone(t.Context(), filepath.Join(dir, "missing"), filepath.Join(dir, "dst"))
	wantCode(t, err, fault.NotFound)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Clone(ctx, src, filepath.Join(dir, "dst"))
	wantCode(t, err, fault.Canceled)
	only(t, dir, "link", "src")
	deep := filepath.Join(src, strings.Repeat("d/", maxDepth+2))
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err = Clone(t.Context(), src, filepath.Join(dir, "dst"))
	wantCode(t, err, fault.UnsafePath)
	if os.Geteuid() == 0 {
		if err := errors.Join(os.RemoveAll(filepath.Join(src, "d")), os.Chown(filepath.Join(src, preferences), 64017, 64017)); err != nil {
			t.Fatal(err)
		}
		_, err = Clone(t.Context(), src, filepath.Join(dir, "dst"))
		wantCode(t, err, fault.UnsafePath)
	}
	only(t, dir, "link", "src")
}

func TestCloneKeepsHoles(t *testing.T) {
	dir := tempDir(t)
	src := filepath.Join(dir, "src")
	used(t, src)
	const size = 64 << 20
	path := filepath.Join(src, "Default", "sparse")
	f, err := os.Create(path)
	if err == nil {
		_, err = f.WriteAt([]byte("middle"), size/2)
	}
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := Clone(t.Context(), src, filepath.Join(dir, "dst")); err != nil {
		t.Fatal(err)
	}
	var a, b unix.Stat_t
	copied := filepath.Join(dir, "dst", "Default", "sparse")
	if err := errors.Join(unix.Stat(path, &a), unix.Stat(copied, &b)); err != nil {
		t.Fatal(err)
	}
	if a.Size != b.Size || b.Blocks > a.Blocks+256 {
		t.Errorf("size %d in %d blocks became %d in %d", a.Size, a.Blocks, b.Size, b.Blocks)
	}
	x, err1 := os.ReadFile(path)
	y, err2 := os.ReadFile(copied)
	if err1 != nil || err2 != nil || !bytes.Equal(x, y) {
		t.Errorf("content differs, %v, %v", err1, err2)
	}
}

// TestPlainCopy covers file systems where copy_file_range fails.
func TestPlainCopy(t *testing.T) {
	dir := tempDir(t)
	write(t, dir, map[string]string{"a": strings.Repeat("0123456789", 1000)})
	src, err := os.Open(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.Create(filepath.Join(dir, "b"))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if err := errors.Join(copyPlain(src, dst, 0, 4000), copyPlain(src, dst, 4000, 10000)); err != nil {
		t.Fatal(err)
	}
	x, err1 := os.ReadFile(src.Name())
	y, err2 := os.ReadFile(dst.Name())
	if err1 != nil || err2 != nil || !bytes.Equal(x, y) {
		t.Errorf("content differs, %v, %v", err1, err2)
	}
	if err := copyPlain(src, dst, 9000, 11000); !errors.Is(err, errChanged) {
		t.Errorf("a source that became shorter: %v", err)
	}
}

func TestCaptureIsReadOnlyAndReplaces(t *testing.T) {
	dir := tempDir(t)
	template, snapshot := filepath.Join(dir, "template"), filepath.Join(dir, "snapshot")
	used(t, template)
	for _, text := range []string{"first", "second", "third"} {
		write(t, template, map[string]string{"Default/marker": text})
		if _, err := Capture(t.Context(), template, snapshot); err != nil {
			t.Fatal(err)
		}
		only(t, dir, "snapshot", "template")
		got := listing(t, snapshot)
		if got["Default/marker"] != "-r-------- "+text {
			t.Errorf("marker is %q", got["Default/marker"])
		}
		for name, mode := range got {
			if !strings.HasPrefix(mode, "dr-x------") && !strings.HasPrefix(mode, "-r-------- ") {
				t.Errorf("%s is %.12s", name, mode)
			}
		}
	}
	clone := filepath.Join(dir, "clone")
	if _, err := Clone(t.Context(), snapshot, clone); err != nil {
		t.Fatal(err)
	}
	write(t, clone, map[string]string{"Default/marker": "changed"})
	if got := listing(t, snapshot)["Default/marker"]; got != "-r-------- third" {
		t.Errorf("the snapshot's marker is %q", got)
	}
	if ok, why := ExitedCleanly(clone); !ok {
		t.Error(why)
	}
}

func TestCaptureRefusesUncleanProfiles(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"crashed": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, preferences), []byte(`{"profile":{"exit_type":"Crashed"}}`), 0o600)
		},
		"session ended": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, preferences), []byte(`{"profile":{"exit_type":"SessionEnded"}}`), 0o600)
		},
		"no exit type": func(dir string) error { return os.WriteFile(filepath.Join(dir, preferences), []byte(`{}`), 0o600) },
		"damaged":      func(dir string) error { return os.WriteFile(filepath.Join(dir, preferences), []byte(`{"prof`), 0o600) },
		"never used":   func(dir string) error { return os.Remove(filepath.Join(dir, preferences)) },
		"preferences elsewhere": func(dir string) error {
			p := filepath.Join(dir, preferences)
			return errors.Join(os.Rename(p, p+"2"), os.Symlink(p+"2", p))
		},
		"lock": func(dir string) error { return os.Symlink("host-1", filepath.Join(dir, "SingletonLock")) },
		"socket": func(dir string) error {
			return os.Symlink("/tmp/x", filepath.Join(dir, "SingletonSocket"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			template, snapshot := filepath.Join(dir, "template"), filepath.Join(dir, "snapshot")
			used(t, template)
			if _, err := Capture(t.Context(), template, snapshot); err != nil {
				t.Fatal(err)
			}
			before := listing(t, snapshot)
			if err := spoil(template); err != nil {
				t.Fatal(err)
			}
			_, err := Capture(t.Context(), template, snapshot)
			wantCode(t, err, fault.UncleanExit)
			if fault.HintOf(err) == "" {
				t.Error("no hint")
			}
			if after := listing(t, snapshot); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Error("the snapshot before was changed")
			}
			only(t, dir, "snapshot", "template")
		})
	}
	t.Run("no local state", func(t *testing.T) {
		dir := tempDir(t)
		template := filepath.Join(dir, "template")
		used(t, template)
		if err := os.Remove(filepath.Join(template, localState)); err != nil {
			t.Fatal(err)
		}
		_, err := Capture(t.Context(), template, filepath.Join(dir, "snapshot"))
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("error is %v", err)
		}
		only(t, dir, "template")
	})
}

func TestRemove(t *testing.T) {
	dir := tempDir(t)
	template, snapshot := filepath.Join(dir, "template"), filepath.Join(dir, "snapshot")
	used(t, template)
	if _, err := Capture(t.Context(), template, snapshot); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(dir, "outside")
	write(t, outside, map[string]string{"keep": "me"})
	closed := filepath.Join(template, "closed")
	err := errors.Join(
		os.Symlink(outside, filepath.Join(template, "link")),
		os.Symlink(outside, filepath.Join(dir, "top")),
		os.MkdirAll(filepath.Join(closed, "in"), 0o700),
		os.Chmod(closed, 0),
	)
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, Remove(t.Context(), filepath.Join(dir, "top")), fault.UnsafePath)
	// A link in the place of the tree that is taken apart.
	planted := filepath.Join(dir, "planted")
	if err := errors.Join(os.Mkdir(planted, 0o700), os.Symlink(outside, planted+suffixRemoving)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, Remove(t.Context(), planted), fault.UnsafePath)
	only(t, outside, "keep")
	if err := errors.Join(os.Remove(planted+suffixRemoving), os.Remove(planted)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantCode(t, Remove(ctx, snapshot), fault.Canceled)
	only(t, dir, "outside", "snapshot.removing", "template", "top")
	for _, p := range []string{snapshot, template, filepath.Join(dir, "missing"), filepath.Join(dir, "no", "parent")} {
		if err := Remove(t.Context(), p); err != nil {
			t.Error(err)
		}
	}
	only(t, dir, "outside", "top")
	only(t, outside, "keep")
}

func TestSweepFinishesCrashes(t *testing.T) {
	for name, c := range map[string]struct{ before, after []string }{
		"clone":                      {[]string{"a", "b.new"}, []string{"a"}},
		"first snapshot":             {[]string{"a", "snapshot.next"}, []string{"a"}},
		"exchanged":                  {[]string{"snapshot", "snapshot.next"}, []string{"snapshot"}},
		"between the renames":        {[]string{"snapshot.next", "snapshot.previous"}, []string{"snapshot"}},
		"after the renames":          {[]string{"snapshot", "snapshot.previous"}, []string{"snapshot"}},
		"removing":                   {[]string{"a", "a.removing", "b.next.removing"}, []string{"a"}},
		"nothing":                    {[]string{"a", "snapshot"}, []string{"a", "snapshot"}},
		"a removal of what is built": {[]string{"a.new", "a.new.removing"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			for _, n := range c.before {
				write(t, dir, map[string]string{n + "/sub/name": n})
				if err := errors.Join(os.Chmod(filepath.Join(dir, n, "sub"), 0o500), os.Chmod(filepath.Join(dir, n), 0o500)); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // sweeping twice changes nothing
				if err := Sweep(dir); err != nil {
					t.Fatal(err)
				}
				only(t, dir, c.after...)
			}
			if name == "between the renames" {
				if got, err := os.ReadFile(filepath.Join(dir, "snapshot/sub/name")); err != nil || string(got) != "snapshot.previous" {
					t.Errorf("the snapshot is %q, %v", got, err)
				}
			}
			for _, n := range c.after {
				os.Chmod(filepath.Join(dir, n), 0o700)
				os.Chmod(filepath.Join(dir, n, "sub"), 0o700)
			}
		})
	}
	dir := tempDir(t)
	write(t, dir, map[string]string{"file.new": "a file of that name is not ours"})
	if err := errors.Join(os.Symlink("/etc", filepath.Join(dir, "link.removing")), Sweep(dir), Sweep(filepath.Join(dir, "missing"))); err != nil {
		t.Error(err)
	}
	only(t, dir, "file.new", "link.removing")
}

func TestCreate(t *testing.T) {
	dir := tempDir(t)
	// Without a chmod the directory would be 0500.
	old := unix.Umask(0o200)
	defer unix.Umask(old)
	p := filepath.Join(dir, "template")
	if err := Create(p); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(p); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("mode is %v, %v", fi.Mode(), err)
	}
	if err := Create(p); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second create: %v", err)
	}
}

func TestCloneRefusesSourcesInUse(t *testing.T) {
	dir := tempDir(t)
	src := filepath.Join(dir, "src")
	used(t, src)
	path := filepath.Join(src, "Default", "growing")
	if err := os.WriteFile(path, make([]byte, 64<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	started, stop, stopped := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		for n := 0; ; n++ {
			if n == 1 {
				close(started)
			}
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if _, err := f.Write([]byte{1}); err != nil {
				stopped <- err
				return
			}
		}
	}()
	<-started
	_, err = Clone(t.Context(), src, filepath.Join(dir, "dst"))
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	wantCode(t, err, fault.ProfileBusy)
	only(t, dir, "src")
}

// TestNoSpace fills a small tmpfs, mounted in namespaces of its own.
func TestNoSpace(t *testing.T) {
	const env = "ABFLEET_TEST_SMALL_DISK"
	if mnt := os.Getenv(env); mnt != "" {
		noSpaceInside(t, mnt)
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestNoSpace$", "-test.v")
	cmd.Env = append(os.Environ(), env+"="+t.TempDir())
	id := []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}}
	gid := []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: id, GidMappings: gid,
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN}}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) {
		t.Skip("no user namespaces here: ", err)
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func noSpaceInside(t *testing.T, mnt string) {
	if err := unix.Mount("small", mnt, "tmpfs", 0, "size=2m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	src := filepath.Join(mnt, "src")
	used(t, src)
	write(t, src, map[string]string{"Default/big": strings.Repeat("x", 1200<<10)})
	before := listing(t, src)
	_, err := Clone(t.Context(), src, filepath.Join(mnt, "dst"))
	wantCode(t, err, fault.NoSpace)
	_, err = Capture(t.Context(), src, filepath.Join(mnt, "snapshot"))
	wantCode(t, err, fault.NoSpace)
	only(t, mnt, "src")
	if fmt.Sprint(listing(t, src)) != fmt.Sprint(before) {
		t.Error("the source was changed")
	}
}

func BenchmarkClone(b *testing.B) {
	dir := b.TempDir()
	src := filepath.Join(dir, "src")
	used(b, src)
	for i := range 120 {
		write(b, src, map[string]string{fmt.Sprintf("Default/many/%d/file", i): strings.Repeat("x", 8000)})
	}
	i := 0
	for b.Loop() {
		i++
		if _, err := Clone(b.Context(), src, filepath.Join(dir, fmt.Sprint("dst", i))); err != nil {
			b.Fatal(err)
		}
	}
}
