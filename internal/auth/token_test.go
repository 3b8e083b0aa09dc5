package auth

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"abfleet/internal/fault"
)

func TestLoadToken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access-token")
	if _, err := ReadToken(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing token: %v", err)
	}
	first, err := LoadToken(path)
	if err != nil {
		t.Fatal(err)
	}
	if !tokenForm.MatchString(first) {
		t.Errorf("the token is %q", first)
	}
	if again, err := LoadToken(path); err != nil || again != first {
		t.Errorf("the second time: %q, %v", again, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
}

// Processes that race to make the token must agree, and nobody may see a part
// of it.
func TestLoadTokenRace(t *testing.T) {
	for range 20 {
		path := filepath.Join(t.TempDir(), "access-token")
		tokens := make([]string, 8)
		var all sync.WaitGroup
		for i := range tokens {
			all.Go(func() {
				token, err := LoadToken(path)
				if err != nil {
					t.Error(err)
				}
				tokens[i] = token
			})
		}
		all.Wait()
		for _, token := range tokens {
			if token != tokens[0] {
				t.Fatalf("two tokens: %q and %q", tokens[0], token)
			}
		}
	}
}

// The loser of the race has found no token, and must not replace the one that
// came meanwhile: the winner may have handed it out.
func TestCreateTokenKeepsTheFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access-token")
	first, err := LoadToken(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := createToken(path); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadToken(path); err != nil || got != first {
		t.Errorf("the token is now %q, %v", got, err)
	}
}

func TestReadTokenRefuses(t *testing.T) {
	good := strings.Repeat("a", 43)
	for name, c := range map[string]struct {
		make func(path string) error
		want fault.Code
	}{
		"readable by others": {func(p string) error { return os.WriteFile(p, []byte(good), 0o644) }, fault.UnsafePath},
		"symbolic link": {func(p string) error {
			if err := os.WriteFile(p+".real", []byte(good), 0o600); err != nil {
				return err
			}
			return os.Symlink(p+".real", p)
		}, fault.UnsafePath},
		"directory":   {func(p string) error { return os.Mkdir(p, 0o700) }, fault.UnsafePath},
		"empty":       {func(p string) error { return os.WriteFile(p, nil, 0o600) }, fault.InvalidToken},
		"short":       {func(p string) error { return os.WriteFile(p, []byte("abc\n"), 0o600) }, fault.InvalidToken},
		"two lines":   {func(p string) error { return os.WriteFile(p, []byte(good+"\n"+good+"\n"), 0o600) }, fault.InvalidToken},
		"other bytes": {func(p string) error { return os.WriteFile(p, []byte(good[1:]+" "), 0o600) }, fault.InvalidToken},
		"very long":   {func(p string) error { return os.WriteFile(p, []byte(strings.Repeat(good, 1<<12)), 0o600) }, fault.InvalidToken},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "access-token")
			if err := c.make(path); err != nil {
				t.Fatal(err)
			}
			token, err := LoadToken(path)
			if !fault.Is(err, c.want) {
				t.Errorf("got %q, %v, want code %s", token, err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), good) {
				t.Errorf("the error shows the content: %v", err)
			}
		})
	}
}
