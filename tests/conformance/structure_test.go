package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

// layers says which packages of this module each package may import. A key or
// a value ending in "/..." covers a subtree. What is not listed may import
// nothing of ours, so a new package has to be placed here on purpose.
var layers = map[string][]string{
	"internal/fault":  {},
	"internal/safefs": {"internal/fault"},
	"internal/config": {"internal/fault", "internal/safefs"},
	"internal/audit":  {"internal/fault"},
	"internal/store":  {"internal/fault", "internal/safefs", "internal/audit"},
	"internal/fleet":  {"internal/fault", "internal/safefs", "internal/store", "internal/audit", "internal/config"},
	"internal/cdp":    {"internal/fault"},
	"internal/page":   {"internal/fault", "internal/cdp"},
	"internal/vnc":    {"internal/fault"},
	"internal/auth":   {"internal/fault", "internal/audit", "internal/safefs"},
	"internal/api":    {"internal/fault", "internal/fleet", "internal/audit"},
	"internal/sd":     {"internal/fault", "internal/audit"},
	"internal/doctor": {"internal/fault", "internal/config", "internal/api", "internal/store"},

	"internal/tools":            {"internal/fault", "internal/safefs", "internal/page", "internal/cdp"},
	"internal/tools/playwright": {"internal/fault", "internal/tools", "internal/page", "internal/cdp"},
	"internal/tools/agent":      {"internal/fault", "internal/tools", "internal/fleet"},

	"internal/server":     {"internal/fault", "internal/config", "internal/tools", "internal/fleet", "internal/vnc", "internal/auth", "internal/api", "internal/audit", "internal/doctor", "internal/server/web", "internal/sd", "internal/page"},
	"internal/server/web": {"internal/fault"},
	"internal/cli":        {"internal/fault", "internal/config", "internal/api", "internal/doctor", "internal/auth", "internal/safefs", "internal/store", "internal/fleet", "units"},
	"units":               {},

	"runtime/unit":    {"internal/fault"},
	"runtime/proof":   {"internal/fault", "internal/safefs", "runtime/unit"},
	"runtime/role":    {"internal/fault"},
	"runtime/holder":  {},
	"runtime/profile": {"internal/fault", "internal/safefs"},
	"runtime/stack":   {"internal/fault", "internal/safefs", "internal/config", "internal/cdp", "internal/fleet", "runtime/..."},

	"cmd/...":   {"internal/...", "runtime/...", "units"},
	"tests/...": {"internal/...", "runtime/...", "tests/...", "units"},
}

type pkg struct {
	ImportPath string
	Doc        string
	GoFiles    []string
	CgoFiles   []string
	Imports    []string
	Deps       []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Doc,GoFiles,CgoFiles,Imports,Deps", "abfleet/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	dec := json.NewDecoder(bytes.NewReader(out))
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// match reports whether path falls under pattern, where "a/..." covers a and
// everything below it.
func match(pattern, path string) bool {
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == base || strings.HasPrefix(path, base+"/")
	}
	return pattern == path
}

// TestImports protects the one direction in which imports point, above all
// that the proof and lifecycle code never depends on the use cases and that
// nothing which parses a network's input reaches it directly.
func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, "abfleet/")
		var allowed []string
		found := false
		for pattern, list := range layers {
			if match(pattern, path) {
				allowed, found = list, true
			}
		}
		if !found && len(p.GoFiles) > 0 {
			// Test doubles live beside what they double: fleet/fleettest.
			if parent := path[:strings.LastIndex(path, "/")+1] + "..."; strings.HasSuffix(path, "test") {
				allowed, found = append([]string{strings.TrimSuffix(parent, "/...")}, "internal/...", "tests/..."), true
			}
		}
		if !found {
			t.Errorf("%s has no place in the layers", path)
			continue
		}
	imports:
		for _, imp := range p.Imports {
			rel, ours := strings.CutPrefix(imp, "abfleet/")
			if !ours {
				continue
			}
			for _, a := range allowed {
				if match(a, rel) {
					continue imports
				}
			}
			t.Errorf("%s imports %s, which its layer does not allow", path, rel)
		}
	}
}

// TestHolderIsSmall protects the memory of the process that is paid once per
// browser: the standard library without net/http, x/sys and the X protocol.
func TestHolderIsSmall(t *testing.T) {
	for _, p := range packages(t) {
		if p.ImportPath != "abfleet/cmd/abfleet-role" {
			continue
		}
		for _, d := range p.Deps {
			first, _, _ := strings.Cut(d, "/")
			switch {
			case d == "net/http":
				t.Errorf("abfleet-role depends on net/http")
			case strings.Contains(first, ".") && !strings.HasPrefix(d, "golang.org/x/sys/") && !strings.HasPrefix(d, "github.com/jezek/xgb"):
				t.Errorf("abfleet-role depends on %s", d)
			}
		}
		return
	}
	t.Fatal("no package cmd/abfleet-role")
}

// TestPackageDocs protects the reader: every package says what it is for.
func TestPackageDocs(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && strings.TrimSpace(p.Doc) == "" {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

// TestNoCgo protects the static binaries.
func TestNoCgo(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.CgoFiles) > 0 {
			t.Errorf("%s uses cgo", p.ImportPath)
		}
	}
}
