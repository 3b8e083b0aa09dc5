package proof

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// maxPidfile caps a pidfile, in bytes. One has about one kilobyte.
const maxPidfile = 64 << 10

// PidfilePath returns where the pidfile of a Generation is: beside the
// Instance's root file, named after the Role.
func PidfilePath(g Generation) string {
	return filepath.Join(filepath.Dir(g.Root), g.Role+".pid")
}

// WritePidfile replaces a pidfile in one step. It refuses a Generation that
// would prove nothing.
func WritePidfile(path string, g Generation) error {
	if missing := g.incomplete(); missing != "" {
		return refuse(RecordIncomplete, "no valid %s", missing)
	}
	data, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		return err
	}
	return safefs.WriteFile(path, append(data, '\n'), 0o600)
}

// ReadPidfile reads a pidfile. A pidfile that is missing, unsafe, legacy or
// partial is a *Refusal.
func ReadPidfile(path string) (Generation, error) {
	f, err := safefs.OpenPrivate(path, os.O_RDONLY, 0)
	if err != nil {
		switch {
		case errors.Is(err, os.ErrNotExist):
			return Generation{}, refuse(NoPidfile, "%w", err)
		case fault.Is(err, fault.UnsafePath):
			return Generation{}, refuse(PidfileUnsafe, "%w", err)
		}
		return Generation{}, refuse(Unreadable, "%w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPidfile+1))
	if err != nil {
		return Generation{}, refuse(Unreadable, "pidfile %s: %w", path, err)
	}
	g, err := parsePidfile(data)
	if err != nil {
		r := err.(*Refusal)
		r.Detail = path + ": " + r.Detail
		return Generation{}, r
	}
	return g, nil
}

// parsePidfile wants one JSON object that is complete. The error is a *Refusal.
func parsePidfile(data []byte) (Generation, error) {
	if len(data) > maxPidfile {
		return Generation{}, refuse(PidfilePartial, "larger than %d bytes", maxPidfile)
	}
	text := strings.TrimSpace(string(data))
	if text != "" && strings.Trim(text, "0123456789 \t\n") == "" {
		return Generation{}, refuse(PidfileLegacy, "a bare number")
	}
	var g Generation
	if err := json.Unmarshal(data, &g); err != nil {
		return Generation{}, refuse(PidfilePartial, "%w", err)
	}
	if missing := g.incomplete(); missing != "" {
		return Generation{}, refuse(PidfilePartial, "no valid %s", missing)
	}
	return g, nil
}
