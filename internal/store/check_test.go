package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// accidents are what befalls a helper. One that returns lets the helper go on.
var accidents = map[string]func(path string){
	"term": func(string) { end(unix.SIGTERM) },
	"int":  func(string) { end(unix.SIGINT) },
	"kill": func(string) { end(unix.SIGKILL) },
	"quit": func(string) { end(unix.SIGQUIT) },
	"abrt": func(string) { endUncaught(unix.SIGABRT) },
	"segv": func(string) { endUncaught(unix.SIGSEGV) },
	"bus":  func(string) { endUncaught(unix.SIGBUS) },
	"bus once": func(path string) {
		if os.Remove(accidentOf(path)) == nil {
			endUncaught(unix.SIGBUS)
		}
	},
	// The limit is on a user's processes, and root has none.
	"no thread": func(string) {
		none := unix.Rlimit{Cur: 0, Max: 0}
		if err := unix.Setrlimit(unix.RLIMIT_NPROC, &none); err != nil {
			panic(err)
		}
		if os.Geteuid() == 0 {
			if err := syscall.Setuid(65534); err != nil {
				panic(err)
			}
		}
		for range 64 {
			go func() { runtime.LockOSThread(); _ = unix.Pause() }()
		}
		_ = unix.Pause()
	},
	// What is mapped stays, and nothing is added.
	"no memory": func(string) {
		little := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
		if err := unix.Setrlimit(unix.RLIMIT_AS, &little); err != nil {
			panic(err)
		}
	},
	"group": func(string) {
		if unix.Getpgrp() != os.Getpid() {
			end(unix.SIGINT)
		}
	},
}

// accidentOf names the file that says which accident befalls the helpers of a
// state file. They have no environment that could.
func accidentOf(path string) string { return path + ".accident" }

// befall runs the accident that a test has prepared for this helper.
func befall() {
	if len(os.Args) != 3 || os.Args[1] != CheckerCommand {
		return
	}
	if name, err := os.ReadFile(accidentOf(os.Args[2])); err == nil {
		accidents[string(name)](os.Args[2])
	}
}

// end sends this process a signal and waits for its end.
func end(signal syscall.Signal) {
	if err := unix.Kill(os.Getpid(), signal); err != nil {
		panic(err)
	}
	_ = unix.Pause()
}

// endUncaught is end in a program in which the Go runtime does not report the
// signal, but dies of it, as of one in the middle of a system call.
func endUncaught(signal syscall.Signal) {
	panic(syscall.Exec("/bin/sh", []string{"sh", "-c", fmt.Sprintf("ulimit -c 0; kill -%d $$", int(signal))}, nil))
}

// TestHelperAccidents protects a sound file from whatever ends its helper: the
// start fails and says that it may be repeated, the file stays, and the next
// start has everything. What crashes on the file every time is the file's.
func TestHelperAccidents(t *testing.T) {
	for name, want := range map[string]fault.Code{
		"term": fault.Internal, "int": fault.Internal, "kill": fault.Internal, "quit": fault.Internal, "abrt": fault.Internal,
		"no thread": fault.Internal, "no memory": fault.Internal,
		"segv": fault.StateCorrupt, "bus": fault.StateCorrupt, "bus once": "", "group": "",
	} {
		t.Run(name, func(t *testing.T) {
			path := statePath(t)
			s := mustOpen(t, path)
			put(t, s, "a", "kept")
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(accidentOf(path), []byte(name), 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), path)
			if want == "" {
				if err != nil {
					t.Fatal(err)
				}
				s.Close(t.Context())
				return
			}
			t.Log(err)
			if fault.CodeOf(err) != want {
				t.Errorf("%v with code %s, want %s", err, fault.CodeOf(err), want)
			}
			kept, _ := filepath.Glob(path + ".corrupt-*")
			if want == fault.StateCorrupt {
				if len(kept) != 1 {
					t.Errorf("kept %v", kept)
				}
				return
			}
			if len(kept) != 0 || !strings.Contains(fault.HintOf(err), "start the service again") {
				t.Errorf("kept %v, hint %q", kept, fault.HintOf(err))
			}
			if err := os.Remove(accidentOf(path)); err != nil {
				t.Fatal(err)
			}
			if s, err = Open(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			if got := read(t, s); got["a"] != "kept" {
				t.Errorf("then it holds %v", got)
			}
			s.Close(t.Context())
		})
	}
}

// TestJudge protects a sound file from a host that is short of something when
// bbolt opens it.
func TestJudge(t *testing.T) {
	for _, cause := range []error{unix.ENOMEM, unix.ENOLCK, unix.EMFILE, unix.EIO, bolterrors.ErrTimeout, bolterrors.ErrInvalidMapping} {
		var damaged *Damaged
		if err := judge(fault.New(fault.Internal, opOpen, "", "%w", cause)); errors.As(err, &damaged) || !errors.Is(err, cause) {
			t.Errorf("%v became %v", cause, err)
		}
	}
	for _, cause := range []error{bolterrors.ErrInvalid, bolterrors.ErrChecksum, bolterrors.ErrVersionMismatch} {
		var damaged *Damaged
		if err := judge(fault.New(fault.Internal, opOpen, "", "%w", cause)); !errors.As(err, &damaged) {
			t.Errorf("%v became %v", cause, err)
		}
	}
}

// TestCrashed protects the difference between a helper that crashed on what it
// read and one that lacked something. The words are the Go runtime's.
func TestCrashed(t *testing.T) {
	for report, want := range map[string]bool{
		"runtime: failed to create new OS thread (have 2 already; errno=11)\nruntime: may need to increase max user processes (ulimit -u)\nfatal error: newosproc\n": false,
		"fatal error: runtime: out of memory\n":          false,
		"fatal error: runtime: cannot allocate memory\n": false,
		"": false,
		"unexpected fault address 0x7f\nfatal error: fault\n":                       true,
		"SIGBUS: bus error\n[signal SIGBUS: bus error code=0x2 addr=0x7f pc=0x4]\n": true,
		"panic: page 3 already freed\n\ngoroutine 7 [running]:\n":                   true,
		"runtime: goroutine stack exceeds 1000000000-byte limit\n":                  true,
	} {
		if got := crashed(syscall.WaitStatus(exitGo<<8), report); got != want {
			t.Errorf("%q: crashed %v", report, got)
		}
	}
	// A real one, so that the words are not only remembered.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"STORE_TEST_FAULT=1"}
	out, _ := cmd.CombinedOutput()
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !crashed(status, string(out)) {
		t.Errorf("a real fault: %v, %q", cmd.ProcessState, out)
	}
}

// readPastEnd reads a mapped page beyond the end of its file, in a goroutine of
// its own, as bbolt's check does.
func readPastEnd() {
	f, err := os.CreateTemp("", "fault")
	if err != nil {
		panic(err)
	}
	os.Remove(f.Name())
	b, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	go func() { fmt.Println(b[0]) }()
	_ = unix.Pause()
}
