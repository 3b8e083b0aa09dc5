package role

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The bar that warns of stealth's flag takes room from every page: a managed
// policy hides it where the machine has one, else a flag with side effects does.
// Neither touches the sandbox.
func TestWarningBar(t *testing.T) {
	policyDir = t.TempDir()
	flag := func() bool {
		args := Chromium{Program: "/c", Stealth: true}.Args()
		if slices.Contains(args, "--no-sandbox") || !slices.Contains(args, "--disable-blink-features=AutomationControlled") {
			t.Errorf("%q", args)
		}
		return slices.Contains(args, "--test-type")
	}
	if !flag() {
		t.Error("no policy, and the bar shows")
	}
	for text, hidden := range map[string]bool{
		`{"CommandLineFlagSecurityWarningsEnabled": false}`: true,
		`{"CommandLineFlagSecurityWarningsEnabled": true}`:  false,
		`{"Other": false}`: false,
		`{`:                false,
	} {
		if err := os.WriteFile(filepath.Join(policyDir, "fleet.json"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if flag() == hidden {
			t.Errorf("%s: --test-type is %t", text, !hidden)
		}
	}
}

// What logins depend on, and what a Chromium that people have does not survive.
func TestFlags(t *testing.T) {
	args := Chromium{Program: "/c"}.Args()
	if slices.Contains(args, "--no-first-run") {
		t.Error("Debian's Chromium 150.0.7871.46 crashes with --no-first-run")
	}
	if !slices.Contains(args, "--password-store=basic") {
		t.Error("cookies are encrypted with a key of the desktop, which clones and other hosts lack")
	}
}

// The port is believed only once the file that names it is whole, and never one
// of an earlier browser.
func TestDebuggingPort(t *testing.T) {
	profile := t.TempDir()
	for _, c := range []struct {
		file  string
		port  int
		ready bool
	}{
		{"38369\n/devtools/browser/5ea2ecfe", 38369, true},
		{"", 0, false}, {"38", 0, false}, {"38369\n", 0, false},
		{"0\n/devtools/browser/5ea2ecfe", 0, true}, {"70000\n/devtools/browser/x", 0, true}, {"x\n/devtools/browser/x", 0, true},
	} {
		if err := os.WriteFile(filepath.Join(profile, portFile), []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		port, err := DebuggingPort(profile)
		if port != c.port || errors.Is(err, ErrNotReady) == c.ready || (err == nil) != (c.port > 0) {
			t.Errorf("%q: %d %v", c.file, port, err)
		}
	}
	for range 2 {
		if err := ForgetPort(profile); err != nil {
			t.Fatal(err)
		}
		if port, err := DebuggingPort(profile); !errors.Is(err, ErrNotReady) {
			t.Errorf("a port that was forgotten: %d %v", port, err)
		}
	}
}
