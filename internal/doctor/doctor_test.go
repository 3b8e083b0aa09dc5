package doctor

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/store"
)

func TestMain(m *testing.M) {
	store.MaybeRunChecker()
	os.Exit(m.Run())
}

// TestStateCopy protects the way back from a damaged state: a copy that is
// missing or damaged is told while there still is a state to copy.
func TestStateCopy(t *testing.T) {
	home := filepath.Join(t.TempDir(), "home")
	env := &Env{Config: &config.Config{Home: home}}
	state := env.Config.StateFile()
	if text, err := checkStateCopy(t.Context(), env); err != nil || !strings.Contains(text, "no state yet") {
		t.Errorf("before the first start: %q, %v", text, err)
	}
	s, err := store.Open(t.Context(), state)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.WithoutCancel(t.Context()))
	wantCode := func(what string) {
		t.Helper()
		if _, err := checkStateCopy(t.Context(), env); fault.CodeOf(err) != fault.StateCorrupt || fault.HintOf(err) == "" {
			t.Errorf("%s: %v, hint %q", what, err, fault.HintOf(err))
		}
	}
	wantCode("a missing copy")
	if err := s.Backup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if text, err := checkStateCopy(t.Context(), env); err != nil || text != s.CopyPath() {
		t.Errorf("a good copy beside the service: %q, %v", text, err)
	}
	if err := os.Truncate(s.CopyPath(), 5000); err != nil {
		t.Fatal(err)
	}
	wantCode("a torn copy")
}

func TestRun(t *testing.T) {
	old := checkTimeout
	checkTimeout = 10 * time.Millisecond
	t.Cleanup(func() { checkTimeout = old })
	bad := fault.New(fault.NoSpace, "store", "Free space", "full")
	good := func(context.Context, *Env) (string, error) { return "fine", nil }
	findings := Run(t.Context(), &Env{}, []Check{
		{Code: "a", Title: "A", Severity: SeverityError, Run: good},
		{Code: "b", Title: "B", Severity: SeverityWarning, Needs: []string{"a"}, Run: func(context.Context, *Env) (string, error) { return "", bad }},
		{Code: "c", Title: "C", Severity: SeverityError, Needs: []string{"a", "b"}, Run: good},
		{Code: "d", Title: "D", Severity: SeverityError, Needs: []string{"c"}, Run: good},
		{Code: "e", Title: "E", Severity: SeverityError, Run: func(context.Context, *Env) (string, error) { return "", skip("not here") }},
	})
	want := []api.Finding{
		{Code: "a", Title: "A", Severity: "error", Status: "ok", Text: "fine"},
		{Code: "b", Title: "B", Severity: "warning", Status: "failed", Text: "cannot store: full", Hint: "Free space"},
		{Code: "c", Title: "C", Severity: "error", Status: "skipped", Text: "not checked without: b"},
		{Code: "d", Title: "D", Severity: "error", Status: "skipped", Text: "not checked without: c"},
		{Code: "e", Title: "E", Severity: "error", Status: "skipped", Text: "not here"},
	}
	for i, f := range findings {
		if f != want[i] {
			t.Errorf("got %+v, want %+v", f, want[i])
		}
	}
	if !OK(findings) || Summary(findings) != "" {
		t.Error("a warning counts as an error")
	}
	stuck := Run(t.Context(), &Env{}, []Check{{Code: "s", Severity: SeverityError, Run: func(ctx context.Context, _ *Env) (string, error) {
		<-ctx.Done()
		return "", ctx.Err()
	}}})
	if OK(stuck) || !strings.Contains(Summary(stuck), "not ready: s ") {
		t.Errorf("a check that hangs: %+v, %q", stuck, Summary(stuck))
	}
}

// Every check of the registry says what to do when it fails: with nothing of
// what it looks for there, none may be silent.
func TestFailedChecksHaveHints(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "none")
	env := &Env{
		Config: &config.Config{Home: nowhere, RoleHelper: nowhere, Chromium: nowhere, Display: config.DisplayXvnc, Xvnc: nowhere, Manager: config.ManagerUser},
		Getenv: func(string) string { return "" }, UID: 0, Socket: nowhere,
	}
	codes := map[string]bool{}
	for _, f := range Run(t.Context(), env, Checks()) {
		if codes[f.Code] {
			t.Errorf("two checks have the code %s", f.Code)
		}
		codes[f.Code] = true
		if f.Status == StatusFailed && (f.Hint == "" || !strings.HasPrefix(f.Text, "cannot ")) {
			t.Errorf("%s: %q, hint %q", f.Code, f.Text, f.Hint)
		}
	}
	for _, code := range []string{"user", "runtime_dir", "dbus", "role_helper", "chromium", "xvnc", "service"} {
		if !codes[code] {
			t.Errorf("there is no check %s", code)
		}
	}
	for _, check := range Checks() {
		for _, need := range check.Needs {
			if !codes[need] {
				t.Errorf("%s needs %s, which does not exist", check.Code, need)
			}
		}
	}
}

// Only the programs of the configured display are asked for, by the name of the
// package that brings them.
func TestProgramsOfTheDisplay(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "none")
	packages := map[string]string{"xvnc": "tigervnc-standalone-server", "xvfb": "xvfb", "x11vnc": "x11vnc"}
	for display, wanted := range map[string][]string{
		config.DisplayXvnc: {"xvnc"}, config.DisplayXvfb: {"xvfb", "x11vnc"}, config.DisplayNone: nil,
	} {
		env := &Env{Config: &config.Config{Display: display, Xvnc: nowhere, Xvfb: nowhere, X11vnc: nowhere}}
		for _, check := range Checks() {
			install, ok := packages[check.Code]
			if !ok {
				continue
			}
			f := run(t.Context(), env, check, nil)
			if !slices.Contains(wanted, check.Code) {
				if f.Status != StatusSkipped {
					t.Errorf("display %s: %s is %s: %s", display, check.Code, f.Status, f.Text)
				}
			} else if f.Status != StatusFailed || !strings.Contains(f.Hint, "apt-get install "+install+";") {
				t.Errorf("display %s: %s is %s, hint %q", display, check.Code, f.Status, f.Hint)
			}
		}
	}
}

func TestCgroupHierarchies(t *testing.T) {
	if _, err := cgroupAt(t.TempDir()); fault.CodeOf(err) != fault.CgroupUnsupported || !strings.Contains(err.Error(), "cgroup v1") {
		t.Errorf("no cgroup2 anywhere: %v", err)
	}
	if _, err := cgroupAt(filepath.Join(t.TempDir(), "none")); fault.CodeOf(err) != fault.CgroupUnsupported {
		t.Errorf("no directory: %v", err)
	}
}

func TestBooted(t *testing.T) {
	dir := t.TempDir()
	comm := filepath.Join(dir, "comm")
	if err := os.WriteFile(comm, []byte("tini\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := bootedAt(dir, comm); err != nil {
		t.Error(err)
	}
	if _, err := bootedAt(filepath.Join(dir, "none"), comm); fault.CodeOf(err) != fault.SystemdUnavailable || !strings.Contains(err.Error(), `PID 1 is "tini", not systemd`) {
		t.Errorf("another init: %v", err)
	}
}

func TestBlame(t *testing.T) {
	for want, files := range map[string]map[string]string{
		"user.max_user_namespaces":         {"sys/user/max_user_namespaces": "0\n", "sys/kernel/unprivileged_userns_clone": "0\n"},
		"kernel.unprivileged_userns_clone": {"sys/user/max_user_namespaces": "100\n", "sys/kernel/unprivileged_userns_clone": "0\n", "self/status": "Seccomp:\t2\n"},
		"seccomp":                          {"self/status": "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n", "sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
		"AppArmor":                         {"self/status": "Seccomp:\t0\n", "sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
		"":                                 {"sys/user/max_user_namespaces": "100\n", "sys/kernel/unprivileged_userns_clone": "1\n"},
	} {
		proc := t.TempDir()
		for name, content := range files {
			path := filepath.Join(proc, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		cause, hint := blame(proc)
		if !strings.Contains(cause, want) || (want == "") != (cause == "") || (cause == "") != (hint == "") {
			t.Errorf("%v: blames %q (%q), want %q", files, cause, hint, want)
		}
	}
}

func TestPrivate(t *testing.T) {
	dir := t.TempDir()
	open, file, link := filepath.Join(dir, "open"), filepath.Join(dir, "file"), filepath.Join(dir, "link")
	err := errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o770), os.WriteFile(file, nil, 0o600), os.Symlink(dir, link))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := private(dir, os.Geteuid()); err != nil {
		t.Errorf("a private directory: %v", err)
	}
	for what, test := range map[string]struct {
		path string
		uid  int
	}{"group may write": {open, os.Geteuid()}, "file": {file, os.Geteuid()}, "symlink": {link, os.Geteuid()}, "absent": {dir + "/x", os.Geteuid()}, "foreign": {dir, os.Geteuid() + 1}} {
		if err := private(test.path, test.uid); err == nil {
			t.Errorf("%s passes", what)
		}
	}
}

func TestSpace(t *testing.T) {
	env := &Env{Config: &config.Config{Home: filepath.Join(t.TempDir(), "not", "made", "yet")}}
	if _, err := space(env, 1); err != nil {
		t.Error(err)
	}
	if _, err := space(env, 1<<62); fault.CodeOf(err) != fault.NoSpace {
		t.Errorf("an exabyte is there: %v", err)
	}
}

// A program that hangs takes its children with it.
func TestHangingProgramLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	fifo, script := filepath.Join(dir, "fifo"), filepath.Join(dir, "program")
	// Every process of it holds the fifo.
	err := errors.Join(syscall.Mkfifo(fifo, 0o600),
		os.WriteFile(script, []byte("#!/bin/sh\nexec 3>"+fifo+"\n(sleep 30; true) &\necho ready >&3\nwait\n"), 0o755))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		f, err := os.Open(fifo)
		if err == nil {
			_, err = f.Read(make([]byte, 16))
			cancel()
		}
		if err == nil {
			_, err = io.ReadAll(f)
		}
		ended <- err
	}()
	if _, err := version(ctx, script, "run program", "Install it", "--version"); fault.CodeOf(err) != fault.ProgramMissing {
		t.Errorf("a program that hangs: %v", err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("a child of the program lives on")
	}
}
