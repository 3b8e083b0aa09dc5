package conformance

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestPromises protects what users were promised from being held by nothing:
// docs/LIFECYCLE.md has every promise, in order, each with a test that exists or
// with the part of the product that will bring it.
func TestPromises(t *testing.T) {
	root := filepath.Join("..", "..")
	page, err := os.ReadFile(filepath.Join(root, "docs", "LIFECYCLE.md"))
	if err != nil {
		t.Fatal(err)
	}
	var exist []string
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "node_modules":
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(source, -1) {
			exist = append(exist, string(m[1]))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var want, have []string
	for section, n := range map[string]int{"L": 17, "R": 38} {
		for i := range n {
			want = append(want, fmt.Sprint(section, i+1))
		}
	}
	for _, row := range regexp.MustCompile(`(?m)^\| ([LR]\d+) \| (.+) \| (.*) \|$`).FindAllStringSubmatch(string(page), -1) {
		have = append(have, row[1])
		tests := regexp.MustCompile(`\bTest\w+`).FindAllString(row[3], -1)
		for _, name := range tests {
			if !slices.Contains(exist, name) {
				t.Errorf("%s is held by %s, which there is not", row[1], name)
			}
		}
		if len(tests) == 0 && !strings.Contains(row[3], "later: ") && !strings.HasPrefix(row[3], "as ") {
			t.Errorf("%s is held by nothing: %s", row[1], row[2])
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	if !slices.Equal(want, have) {
		t.Errorf("the page has the promises %v, want %v", have, want)
	}
}
