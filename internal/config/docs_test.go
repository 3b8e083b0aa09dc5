package config

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"testing"
)

// TestDocs protects who writes a configuration file: docs/CONFIGURATION.md has
// every key that is read, and no other.
func TestDocs(t *testing.T) {
	var keys []string
	var walk func(prefix string, section reflect.Type)
	walk = func(prefix string, section reflect.Type) {
		for i := range section.NumField() {
			f := section.Field(i)
			if f.Type.Kind() != reflect.Struct {
				keys = append(keys, prefix+f.Tag.Get("toml"))
				continue
			}
			name := f.Tag.Get("toml")
			walk(prefix+name+".", f.Type)
		}
	}
	walk("", reflect.TypeFor[file]())
	page, err := os.ReadFile("../../docs/CONFIGURATION.md")
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllSubmatch(page, -1) {
		told = append(told, string(row[1]))
	}
	slices.Sort(keys)
	slices.Sort(told)
	if !slices.Equal(keys, told) {
		t.Errorf("docs/CONFIGURATION.md has the keys\n%q, want\n%q", told, keys)
	}
}
