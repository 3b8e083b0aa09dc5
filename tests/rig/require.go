package rig

import (
	"context"
	"maps"
	"os"
	"regexp"
	"strings"
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

// insideEnv tells a test binary that it runs inside a rig, and how.
const insideEnv = "ABF_IN_RIG"

// Inside is the how of the InsideRun that this process is part of, "" outside.
func Inside() string { return os.Getenv(insideEnv) }

// NeedInside skips a test outside a rig.
func NeedInside(t testing.TB) {
	t.Helper()
	if Inside() == "" {
		t.Skip("runs inside the rig, through TestInRig")
	}
}

// InsideRun is one run of the calling package's own tests inside a rig.
type InsideRun struct {
	Tests  string // pattern of -test.run
	AsRoot bool
	How    string // what Inside returns there; not empty
	Least  int    // fewer passed tests are a failure
	// MaySkip is a pattern of tests for which the machine may lack something that
	// no rig can bring.
	MaySkip string
}

// TestInside boots a rig and runs the calling package's tests in it. A test that
// is skipped there ran nowhere, and is a failure, unless it may be: then it is
// seen to be skipped here.
func TestInside(t *testing.T, opts Options, runs ...InsideRun) {
	t.Helper()
	if Inside() != "" {
		t.Skip("this is the run inside the rig")
	}
	Require(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const program = "/opt/abfleet/inside.test"
	binds := map[string]string{self: program}
	maps.Copy(binds, opts.Binds)
	opts.Binds = binds
	r := BootTest(t, opts)
	for _, run := range runs {
		t.Run(run.How, func(t *testing.T) {
			start := r.User
			if run.AsRoot {
				start = r.Root
			}
			cmd := start(t.Context(), program, "-test.run="+run.Tests, "-test.v", "-test.timeout=8m")
			cmd.Env = append(cmd.Env, insideEnv+"="+run.How)
			out, err := cmd.CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				journal, _ := r.Journal(context.WithoutCancel(t.Context()), "-b", "--no-pager", "-n", "60", "-o", "cat")
				t.Fatalf("inside the rig: %v\n%s", err, journal)
			}
			if n := strings.Count(string(out), "\n--- PASS: Test"); n < run.Least {
				t.Errorf("only %d tests ran inside the rig", n)
			}
			for _, skipped := range regexp.MustCompile(`(?m)^ *--- SKIP: (\S+)`).FindAllStringSubmatch(string(out), -1) {
				switch {
				case skipped[1] == t.Name()[:strings.IndexByte(t.Name(), '/')]:
				case run.MaySkip != "" && regexp.MustCompile(run.MaySkip).MatchString(skipped[1]):
					t.Run(skipped[1], func(t *testing.T) { t.Skip("skipped inside the rig, with the reason above") })
				default:
					t.Errorf("%s was skipped inside the rig", skipped[1])
				}
			}
		})
	}
}

func probeCgroup(root string) error {
	dir, err := os.MkdirTemp(root, namePrefix+"probe-")
	if err != nil {
		return err
	}
	return os.Remove(dir)
}
