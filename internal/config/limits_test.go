package config

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLimits protects who bounds browsers: limits are read as systemd writes
// them, and what would let no browser run, or means something else than it says,
// is refused with the place.
func TestLimits(t *testing.T) {
	load := func(text string) (*Config, error) {
		file := filepath.Join(t.TempDir(), "c.toml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return Load(file, func(key string) string {
			return map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/1"}[key]
		})
	}
	c, err := load("[limits]\nmemory_high = \"1536M\"\nmemory_max = \"2G\"\ntasks_max = 800\ncpu_weight = 50\n")
	if want := (Limits{MemoryHigh: 1536 << 20, MemoryMax: 2 << 30, TasksMax: 800, CPUWeight: 50}); err != nil || c.Limits != want {
		t.Errorf("limits are %+v, %v", c, err)
	}
	if c, err = load("[limits]\ntasks_max = \"infinity\"\n"); err != nil || c.Limits != (Limits{TasksMax: Infinity}) {
		t.Errorf("no limit is %+v, %v", c, err)
	}
	for _, bad := range []string{
		"tasks_max = 0", "memory_max = \"0\"", "memory_max = \"-1\"", "memory_max = \"2GB\"", "memory_max = \"50%\"", "memory_max = \"\"", "memory_max = \"G\"",
		"memory_max = \"17179869184G\"", "memory_max = 1.5", "cpu_weight = 0", "cpu_weight = 10001", "cpu_weight = \"infinity\"", "swap = 1",
	} {
		if _, err := load("[limits]\n" + bad + "\n"); err == nil || !strings.Contains(err.Error(), "load configuration") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	own := Limits{MemoryMax: Infinity, TasksMax: 3}.Over(Limits{MemoryMax: 1, CPUWeight: 2})
	if own != (Limits{MemoryMax: Infinity, TasksMax: 3, CPUWeight: 2}) {
		t.Errorf("an Identity's own limits give %+v", own)
	}
	text, err := json.Marshal(own)
	var again Limits
	if err == nil {
		err = json.Unmarshal(text, &again)
	}
	if err != nil || again != own {
		t.Errorf("stored as %s, read as %+v, %v", text, again, err)
	}
}
