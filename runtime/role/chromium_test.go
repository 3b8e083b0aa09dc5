package role

import (
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
