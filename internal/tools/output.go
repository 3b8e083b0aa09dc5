package tools

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// Bounds of what a session's output directory keeps of the files that tools
// named themselves. Those that a caller named are the caller's.
const (
	maxFiles = 500
	maxBytes = 256 << 20
)

// tidyEvery is after how many files the bounds are enforced.
const tidyEvery = 50

// ownName is how tools name files: a kind and the time.
var ownName = regexp.MustCompile(`^[a-z]+-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-\d{3}Z(-\d+)?\.[a-z]+$`)

// output opens the session's output directory. Nothing that is written through
// the returned root leaves it.
func (c *Call) output() (*os.Root, string, error) {
	dir := c.host.opts.OutputDir(c.Caller.Session)
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := safefs.EnsureDir(d); err != nil {
			return nil, "", err
		}
	}
	root, err := os.OpenRoot(dir)
	return root, dir, err
}

// Save writes a file into the session's output directory, named kind-<time>.ext,
// and returns its path.
func (c *Call) Save(kind, ext string, data []byte) (string, error) {
	root, dir, err := c.output()
	if err != nil {
		return "", saveFault(err)
	}
	defer root.Close()
	stamp := strings.NewReplacer(":", "-", ".", "-").Replace(c.host.opts.Now().UTC().Format("2006-01-02T15:04:05.000Z"))
	for n := 1; n < 100; n++ {
		name := kind + "-" + stamp
		if n > 1 { // several in one millisecond
			name += fmt.Sprintf("-%d", n)
		}
		name += "." + ext
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return "", saveFault(err)
		}
		_, err = f.Write(data)
		if err = errors.Join(err, f.Close()); err != nil {
			return "", saveFault(errors.Join(err, root.Remove(name)))
		}
		if c.host.saved.Add(1)%tidyEvery == 0 {
			tidy(root)
		}
		return filepath.Join(dir, name), nil
	}
	return "", saveFault(fs.ErrExist)
}

// tidy removes the oldest files that tools named themselves, beyond the bounds.
func tidy(root *os.Root) {
	type file struct {
		name string
		size int64
	}
	var files []file
	var total int64
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !ownName.MatchString(e.Name()) {
			continue
		}
		if info, err := e.Info(); err == nil {
			files = append(files, file{e.Name(), info.Size()})
			total += info.Size()
		}
	}
	// The time in the name orders them, whatever the kind.
	slices.SortFunc(files, func(a, b file) int {
		_, x, _ := strings.Cut(a.name, "-")
		_, y, _ := strings.Cut(b.name, "-")
		return cmp.Compare(x, y)
	})
	for len(files) > maxFiles || total > maxBytes && len(files) > 1 {
		// What cannot be removed now is tried again at the next file.
		_ = root.Remove(files[0].name)
		total -= files[0].size
		files = files[1:]
	}
}

// A File is a name the caller gave, checked to be inside the output directory.
type File struct {
	// Path is where it is written, as answers show it.
	Path string
	name string // relative to the output directory
}

// File resolves a file name that the caller gave. It stays below the session's
// output directory.
func (c *Call) File(name string) (File, error) {
	dir := c.host.opts.OutputDir(c.Caller.Session)
	rel := name
	if filepath.IsAbs(name) {
		var err error
		if rel, err = filepath.Rel(dir, filepath.Clean(name)); err != nil {
			rel = ""
		}
	}
	rel = filepath.Clean(rel)
	if rel == "." || !filepath.IsLocal(rel) || strings.HasSuffix(name, "/") || strings.ContainsRune(name, 0) {
		return File{}, fault.New(fault.FileAccessDenied, "write file", "give a relative file name",
			"File access denied: %s is outside allowed roots. Allowed roots: %s", oneLine(name), dir)
	}
	return File{Path: filepath.Join(dir, rel), name: rel}, nil
}

// SaveAs writes a file of the caller's name, replacing it.
func (c *Call) SaveAs(f File, data []byte) error {
	root, _, err := c.output()
	if err != nil {
		return saveFault(err)
	}
	defer root.Close()
	if err := root.MkdirAll(filepath.Dir(f.name), 0o700); err != nil {
		return saveFault(err)
	}
	return saveFault(root.WriteFile(f.name, data, 0o600))
}

func saveFault(err error) error {
	var known *fault.Error
	if err == nil || errors.As(err, &known) || errors.Is(err, context.Canceled) {
		return err
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		err = path.Err // the caller knows what it named
	}
	if errors.Is(err, syscall.ENOSPC) {
		return fault.Wrap(err, fault.NoSpace, "write file", "free disk space, then try again")
	}
	return fault.Wrap(err, fault.FileAccessDenied, "write file", "give another file name")
}
