package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
)

func TestMain(m *testing.M) {
	befall()
	MaybeRunChecker()
	if os.Getenv("STORE_TEST_FAULT") != "" {
		readPastEnd()
	}
	if path := os.Getenv("STORE_TEST_HOLD"); path != "" {
		hold(path)
	}
	if dir := os.Getenv("STORE_TEST_FULL"); dir != "" {
		fillDisk(dir)
	}
	os.Exit(m.Run())
}

// hold is another service: it opens the state, says so and keeps it until its
// standard input ends.
func hold(path string) {
	s, err := Open(context.Background(), path)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("open")
	var b [1]byte
	os.Stdin.Read(b[:])
	s.Close(context.Background())
	os.Exit(0)
}

// fillDisk is a service whose disk gets full, on a file system of its own. It
// prints what is wrong and ends with 1, or ends with 0.
func fillDisk(dir string) {
	check := func(ok bool, format string, args ...any) {
		if !ok {
			fmt.Printf(format+"\n", args...)
			os.Exit(1)
		}
	}
	err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=0700"))
	check(err == nil, "mount: %v", err)
	ctx := context.Background()
	path := filepath.Join(dir, "home", "state.db")
	s, err := Open(ctx, path)
	check(err == nil, "open: %v", err)
	stored := 0
	for err == nil && stored < 10_000 {
		err = s.Update(ctx, func(tx *Tx) error {
			return things.Put(tx, &Record[thing]{Key: fmt.Sprint("k", stored), Value: thing{"v", strings.Repeat("x", 4000)}})
		})
		if err == nil {
			stored++
		}
	}
	check(stored > 10 && fault.CodeOf(err) == fault.NoSpace && fault.HintOf(err) != "", "after %d records: %v", stored, err)
	count := func(s *Store) (n int) {
		err := s.View(ctx, func(tx *Tx) error {
			list, err := things.List(tx)
			n = len(list)
			return err
		})
		check(err == nil, "read on a full disk: %v", err)
		return n
	}
	check(count(s) == stored, "%d of %d records on a full disk", count(s), stored)
	err = s.Backup(ctx)
	check(fault.CodeOf(err) == fault.NoSpace, "copy on a full disk: %v", err)
	err = s.Close(ctx)
	check(fault.CodeOf(err) == fault.NoSpace, "close on a full disk: %v", err)

	// More space, by mounting the same file system larger.
	err = unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=64m,mode=0700")
	check(err == nil, "remount: %v", err)
	s, err = Open(ctx, path)
	check(err == nil, "open after a full disk: %v", err)
	check(count(s) == stored, "%d of %d records after a full disk", count(s), stored)
	err = s.Update(ctx, func(tx *Tx) error { return things.Put(tx, &Record[thing]{Key: "after"}) })
	check(err == nil, "write after a full disk: %v", err)
	err = s.Close(ctx)
	check(err == nil, "close: %v", err)

	// What a kernel does to a file system with errors.
	before, err := os.ReadFile(path)
	check(err == nil, "%v", err)
	err = unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	check(err == nil, "remount: %v", err)
	_, err = Open(ctx, path)
	check(fault.CodeOf(err) == fault.ReadOnly && fault.HintOf(err) != "", "open on a read-only file system: %v", err)
	err = CheckFile(ctx, path)
	check(err == nil, "check on a read-only file system: %v", err)
	after, err := os.ReadFile(path)
	check(err == nil && bytes.Equal(before, after), "the state was changed: %v", err)
	os.Exit(0)
}

// TestFullDisk protects what is stored from a disk that gets full: writes fail
// with a clear error, and everything before them is there; and from one that can
// only be read.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts a small file system; run as root")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"STORE_TEST_FULL=" + t.TempDir()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

type thing struct {
	Name string `json:"name"`
	Pad  string `json:"pad,omitempty"`
}

var things = Table[thing]{Identities}

func statePath(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "home")
	return filepath.Join(dir, "state.db")
}

func mustOpen(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func put(t *testing.T, s *Store, key, name string) {
	t.Helper()
	err := s.Update(t.Context(), func(tx *Tx) error {
		r, err := things.Get(tx, key)
		if errors.Is(err, ErrNotFound) {
			r, err = &Record[thing]{Key: key}, nil
		}
		if err != nil {
			return err
		}
		r.Value.Name = name
		return things.Put(tx, r)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestCompareAndSwap protects every writer from silently undoing another's
// write.
func TestCompareAndSwap(t *testing.T) {
	s := mustOpen(t, statePath(t))
	defer s.Close(t.Context())
	put(t, s, "a", "first")
	var stale *Record[thing]
	if err := s.View(t.Context(), func(tx *Tx) (err error) { stale, err = things.Get(tx, "a"); return err }); err != nil {
		t.Fatal(err)
	}
	if stale.Host != s.HostID() || stale.Epoch != 1 || stale.Rev == 0 {
		t.Errorf("record %+v does not say who wrote it", stale)
	}
	put(t, s, "a", "second")
	stale.Value.Name = "stale"
	for name, write := range map[string]func(*Tx) error{
		"put":    func(tx *Tx) error { return things.Put(tx, stale) },
		"delete": func(tx *Tx) error { return things.Delete(tx, stale) },
		"create": func(tx *Tx) error { return things.Put(tx, &Record[thing]{Key: "a"}) },
		"revive": func(tx *Tx) error { return things.Put(tx, &Record[thing]{Key: "b", Rev: 1}) },
	} {
		if err := s.Update(t.Context(), write); !errors.Is(err, ErrConflict) {
			t.Errorf("%s: %v, want a conflict", name, err)
		}
	}
	var list []*Record[thing]
	if err := s.View(t.Context(), func(tx *Tx) (err error) { list, err = things.List(tx); return err }); err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || list[0].Value.Name != "second" {
		t.Errorf("after refused writes: %+v", list)
	}
}

// TestFailedUpdate protects "one transaction": no part of a failed one stays,
// and nobody hears of it.
func TestFailedUpdate(t *testing.T) {
	s := mustOpen(t, statePath(t))
	defer s.Close(t.Context())
	changes, events := s.Watch(t.Context()), s.Events().Subscribe(t.Context(), 8)
	boom := errors.New("boom")
	err := s.Update(t.Context(), func(tx *Tx) error {
		if err := things.Put(tx, &Record[thing]{Key: "a"}); err != nil {
			return err
		}
		if err := tx.Audit(audit.Event{Type: audit.IdentityCreated}); err != nil {
			return err
		}
		return boom
	})
	if err != boom {
		t.Fatalf("error %v, want the function's own", err)
	}
	put(t, s, "b", "kept")
	if c := <-changes; c.Key != "b" || c.Deleted {
		t.Errorf("first change seen is %+v", c)
	}
	if err := s.Update(t.Context(), func(tx *Tx) error { return tx.Audit(audit.Event{Type: audit.LoginStarted}) }); err != nil {
		t.Fatal(err)
	}
	if e := <-events; e.Type != audit.LoginStarted || e.ID != 1 {
		t.Errorf("first event seen is %+v", e)
	}
}

// TestAuditRetention protects the disk: the newest events stay, in order.
func TestAuditRetention(t *testing.T) {
	s := mustOpen(t, statePath(t))
	defer s.Close(t.Context())
	const extra = 37
	for done := 0; done < maxEvents+extra; done += 1000 {
		err := s.Update(t.Context(), func(tx *Tx) error {
			for range min(1000, maxEvents+extra-done) {
				if err := tx.Audit(audit.Event{Type: audit.IdentityCreated}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	err := s.View(t.Context(), func(tx *Tx) error {
		all, err := tx.Events(0, 2*maxEvents)
		if err != nil {
			return err
		}
		if len(all) != maxEvents || all[0].ID != extra+1 || all[len(all)-1].ID != maxEvents+extra {
			t.Errorf("%d events from %d to %d", len(all), all[0].ID, all[len(all)-1].ID)
		}
		last, err := tx.Events(maxEvents+extra-2, 10)
		if err != nil {
			return err
		}
		if len(last) != 2 || last[0].ID != maxEvents+extra-1 {
			t.Errorf("events after a cursor: %+v", last)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestSecondService protects the state from two services at once, whether the
// other one is this process or another.
func TestSecondService(t *testing.T) {
	short(t, &lockTimeout, 200*time.Millisecond)
	path := statePath(t)
	s := mustOpen(t, path)
	if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.StateInUse {
		t.Errorf("same process: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"STORE_TEST_HOLD=" + path}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 64)
	n, _ := out.Read(line)
	if string(line[:n]) != "open\n" {
		t.Fatalf("the other service says %q", line[:n])
	}
	if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.StateInUse || fault.HintOf(err) == "" {
		t.Errorf("other process: %v", err)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, path).Close(t.Context())
}

// TestEpoch protects the order of runs.
func TestEpoch(t *testing.T) {
	path := statePath(t)
	s := mustOpen(t, path)
	host := s.HostID()
	if len(host) != 32 || s.meta.Epoch != 1 {
		t.Errorf("first run: host %q epoch %d", host, s.meta.Epoch)
	}
	s.Close(t.Context())
	s = mustOpen(t, path)
	defer s.Close(t.Context())
	if s.HostID() != host || s.meta.Epoch != 2 {
		t.Errorf("second run: host %q epoch %d", s.HostID(), s.meta.Epoch)
	}
}

// TestModes protects the state from other users.
func TestModes(t *testing.T) {
	path := statePath(t)
	mustOpen(t, path).Close(t.Context())
	for _, p := range []string{path, path + ".copy", path + ".lock"} {
		info, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != 0o600 {
			t.Errorf("%s has mode %v", filepath.Base(p), info.Mode())
		}
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.UnsafePath {
		t.Errorf("a readable state file: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".copy", path); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.UnsafePath {
		t.Errorf("a symbolic link: %v", err)
	}
}

// fill makes a file with several pages in every place: records, events, freed
// pages.
func fill(t *testing.T, path string) map[string]string {
	t.Helper()
	s := mustOpen(t, path)
	content := map[string]string{}
	for i := range 120 {
		key := fmt.Sprintf("k%03d", i)
		content[key] = "v" + key
		err := s.Update(t.Context(), func(tx *Tx) error {
			r := &Record[thing]{Key: key, Value: thing{content[key], strings.Repeat("x", i*13)}}
			if err := tx.Audit(audit.Event{Type: audit.IdentityCreated, Summary: key}); err != nil {
				return err
			}
			return things.Put(tx, r)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := 0; i < 120; i += 7 {
		key := fmt.Sprintf("k%03d", i)
		delete(content, key)
		err := s.Update(t.Context(), func(tx *Tx) error {
			r, err := things.Get(tx, key)
			if err != nil {
				return err
			}
			return things.Delete(tx, r)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return content
}

func read(t *testing.T, s *Store) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := s.View(t.Context(), func(tx *Tx) error {
		list, err := things.List(tx)
		for _, r := range list {
			got[r.Key] = r.Value.Name
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// TestDamage protects users from a damaged disk: whatever part of the file is
// cut off or overwritten, the service either refuses with the file kept, or
// shows exactly what was stored. Nothing crashes the process that opens it,
// and it never comes up empty.
func TestDamage(t *testing.T) {
	path := statePath(t)
	content := fill(t, path)
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	pages := len(sound) / page
	random := rand.New(rand.NewPCG(1, 2))

	damages := map[string][]byte{}
	for i := range 24 {
		cut := len(sound) * i / 24
		damages[fmt.Sprintf("cut at %d", cut)] = sound[:cut]
	}
	for _, cut := range []int{1, 15, 79, page - 1, page, page + 1, 2*page - 1, 2 * page, len(sound) - page, len(sound) - 1} {
		damages[fmt.Sprintf("cut at %d", cut)] = sound[:cut]
	}
	step := max(1, pages/40)
	if testing.Short() {
		step = max(1, pages/10)
	}
	for p := 0; p < pages; p += step {
		b := bytes.Clone(sound)
		clear(b[p*page : (p+1)*page])
		damages[fmt.Sprintf("page %d zeroed", p)] = b
		b = bytes.Clone(sound)
		for i := range page {
			b[p*page+i] = byte(random.Uint32())
		}
		damages[fmt.Sprintf("page %d random", p)] = b
		b = bytes.Clone(sound)
		clear(b[p*page+page/2 : (p+1)*page])
		damages[fmt.Sprintf("page %d torn", p)] = b
	}
	damages["page 0 and 1 zeroed"] = append(make([]byte, 2*page), sound[2*page:]...)
	damages["all zero"] = make([]byte, len(sound))
	damages["empty"] = nil
	damages["text"] = []byte("this is no database\n")

	fatal := map[string]bool{
		"empty": true, "text": true, "all zero": true, "page 0 and 1 zeroed": true, "page 0 zeroed": true,
		"page 0 random": true, "cut at 1": true, fmt.Sprintf("cut at %d", 2*page): true,
	}
	refused, unharmed := 0, 0
	for name, data := range damages {
		dir := filepath.Join(t.TempDir(), "home")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		damaged := filepath.Join(dir, "state.db")
		if err := os.WriteFile(damaged, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(t.Context(), damaged)
		if err == nil {
			if got := read(t, s); !maps.Equal(got, content) {
				t.Errorf("%s: opened with %d records where %d were stored", name, len(got), len(content))
			}
			err := s.View(t.Context(), func(tx *Tx) error {
				all, err := tx.Events(0, maxEvents)
				if len(all) != 120 {
					t.Errorf("%s: opened with %d of 120 events", name, len(all))
				}
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			s.Close(t.Context())
			if fatal[name] {
				t.Errorf("%s: not noticed", name)
			}
			unharmed++
			continue
		}
		refused++
		if fault.CodeOf(err) != fault.StateCorrupt {
			t.Errorf("%s: %v", name, err)
			continue
		}
		kept, _ := filepath.Glob(damaged + ".corrupt-*")
		if len(kept) != 1 || !strings.Contains(err.Error(), kept[0]) {
			t.Errorf("%s: kept %v, error %v", name, kept, err)
			continue
		}
		if b, err := os.ReadFile(kept[0]); err != nil || !bytes.Equal(b, data) {
			t.Errorf("%s: the kept file is not the damaged one", name)
		}
		if _, err := os.Lstat(damaged); err == nil {
			t.Errorf("%s: there is still a state file", name)
		}
		// The next start must not begin a new fleet in its place.
		if _, err := Open(t.Context(), damaged); fault.CodeOf(err) != fault.StateCorrupt {
			t.Errorf("%s: second start: %v", name, err)
		}
	}
	t.Logf("%d damages to a file of %d pages: %d refused, %d harmless", len(damages), pages, refused, unharmed)
}

// TestRestore protects the way back that the hint describes.
func TestRestore(t *testing.T) {
	path := statePath(t)
	content := fill(t, path)
	if err := os.Truncate(path, int64(3*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), path)
	hint := fault.HintOf(err)
	_, from, ok := strings.Cut(hint, ": abfleet store restore ")
	if fault.CodeOf(err) != fault.StateCorrupt || !ok {
		t.Fatalf("error %v, hint %q", err, hint)
	}
	if _, err := Restore(t.Context(), path, strings.Trim(from, "'"), anything, accepted, anything); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, path)
	if got := read(t, s); len(got) != len(content) {
		t.Errorf("%d of %d records restored", len(got), len(content))
	}
	// Several commits, each followed by a check: the metas of a copy start
	// out equal, which must not look like damage later.
	for i := range 3 {
		put(t, s, "after", fmt.Sprint(i))
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, path)
	}
	s.Close(t.Context())
}

// TestMissing protects a used fleet from starting empty when its file is gone.
func TestMissing(t *testing.T) {
	for name, leave := range map[string]func(dir string) error{
		"identities": func(dir string) error { return os.MkdirAll(filepath.Join(dir, "identities", "identity-x"), 0o700) },
		"copy":       func(dir string) error { return os.WriteFile(filepath.Join(dir, "state.db.copy"), nil, 0o600) },
		"kept":       func(dir string) error { return os.WriteFile(filepath.Join(dir, "state.db.corrupt-1"), nil, 0o600) },
	} {
		path := statePath(t)
		if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := leave(filepath.Dir(path)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.StateCorrupt {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s: a state file was made", name)
		}
		// A damaged file is named whatever else is there: the start that kept
		// it aside may have been one that nobody saw.
		if err := os.WriteFile(path+".corrupt-2", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "state.db.corrupt-2") {
			t.Errorf("%s and a damaged file: %v", name, err)
		}
	}
}

// TestKeepAside protects a kept file from a second damage in the same second.
func TestKeepAside(t *testing.T) {
	dir := t.TempDir()
	path, now := filepath.Join(dir, "state.db"), time.Now()
	seen := map[string]bool{}
	for i := range 3 {
		if err := os.WriteFile(path, []byte{byte(i)}, 0o600); err != nil {
			t.Fatal(err)
		}
		kept, err := keepAside(path, now)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := os.ReadFile(kept); seen[kept] || len(b) != 1 || b[0] != byte(i) {
			t.Errorf("kept %d as %s with %v", i, kept, b)
		}
		seen[kept] = true
	}
}

// TestNewerSchema protects a state from an older program.
func TestNewerSchema(t *testing.T) {
	path := statePath(t)
	s := mustOpen(t, path)
	err := s.Update(t.Context(), func(tx *Tx) error {
		r, err := metaTable.Get(tx, metaKey)
		if err != nil {
			return err
		}
		r.Value.Schema = schema + 1
		return metaTable.Put(tx, r)
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Close(t.Context())
	if _, err := Open(t.Context(), path); fault.CodeOf(err) != fault.StateTooNew {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the file is gone: %v", err)
	}
}

// The copy that a damaged state file is replaced by is never older than a day
// for long, and one that could not be made is made later.
func TestKeepCopy(t *testing.T) {
	s := mustOpen(t, statePath(t))
	defer s.Close(t.Context())
	put(t, s, "a", "one")
	if err := s.Backup(t.Context()); err != nil {
		t.Fatal(err)
	}
	was := copyRetry
	copyRetry = time.Millisecond
	defer func() { copyRetry = was }()
	yesterday := time.Now().Add(-copyInterval - time.Minute)
	if err := os.Chtimes(s.CopyPath(), yesterday, yesterday); err != nil {
		t.Fatal(err)
	}
	obstacle := s.CopyPath() + ".new"
	if err := os.MkdirAll(filepath.Join(obstacle, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	failed, done := make(chan struct{}), make(chan struct{})
	log := slog.New(onError{slog.DiscardHandler, sync.OnceFunc(func() { close(failed) })})
	go func() { s.KeepCopy(ctx, log); close(done) }()
	defer func() { cancel(); <-done }()
	<-failed
	// In one step: a try that finds the directory half removed takes its name.
	if err := os.Rename(obstacle, filepath.Join(t.TempDir(), "obstacle")); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(10 * time.Second); ; {
		info, err := os.Stat(s.CopyPath())
		if err != nil {
			t.Fatal(err)
		}
		if time.Since(info.ModTime()) < time.Hour {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the copy is of %v", info.ModTime())
		}
	}
}

// onError is a log that tells of errors.
type onError struct {
	slog.Handler
	tell func()
}

func (h onError) Enabled(context.Context, slog.Level) bool { return true }

func (h onError) Handle(_ context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError {
		h.tell()
	}
	return nil
}

// TestBackup protects the last good copy: it is replaced only by a checked
// one, also while writers are at work.
func TestBackup(t *testing.T) {
	path := statePath(t)
	s := mustOpen(t, path)
	defer s.Close(t.Context())
	put(t, s, "a", "one")
	if err := s.Backup(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(s.CopyPath())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	put(t, s, "a", "two")
	if err := s.Backup(ctx); err == nil {
		t.Error("a cancelled copy succeeded")
	}
	if b, _ := os.ReadFile(s.CopyPath()); !bytes.Equal(b, first) {
		t.Error("a failed copy replaced the good one")
	}
	if _, err := os.Lstat(s.CopyPath() + ".new"); err == nil {
		t.Error("a failed copy left its temporary file")
	}
	if err := s.Backup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := CheckFile(t.Context(), s.CopyPath()); err != nil {
		t.Error(err)
	}
}

func short(t *testing.T, d *time.Duration, v time.Duration) {
	t.Helper()
	old := *d
	*d = v
	t.Cleanup(func() { *d = old })
}

// TestListUnreadable protects who walks a list before looking at the error: a
// record of another form is an error, and no record.
func TestListUnreadable(t *testing.T) {
	s := mustOpen(t, statePath(t))
	defer s.Close(t.Context())
	err := s.Update(t.Context(), func(tx *Tx) error {
		return Table[string]{Profiles}.Put(tx, &Record[string]{Key: "p", Value: "no object"})
	})
	if err != nil {
		t.Fatal(err)
	}
	err = s.View(t.Context(), func(tx *Tx) error {
		list, err := Table[struct{ Name string }]{Profiles}.List(tx)
		for _, r := range list {
			if r == nil {
				t.Error("the list has a record that is not there")
			}
		}
		return err
	})
	if err == nil {
		t.Error("a record that cannot be read is no error")
	}
}
