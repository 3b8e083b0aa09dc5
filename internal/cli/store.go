package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/internal/store"
)

// storeFile is what a state file holds, as it is shown.
type storeFile struct {
	Path       string     `json:"path"`
	Error      *api.Error `json:"error,omitempty"`
	Format     int        `json:"format,omitempty"`
	Host       string     `json:"host,omitempty"`
	Revision   uint64     `json:"revision,omitempty"`
	Identities int        `json:"identities"`
	Profiles   int        `json:"profiles"`
	Bindings   int        `json:"bindings"`
	Runtimes   int        `json:"runtimes"`
	Intents    int        `json:"intents"`
	Events     int        `json:"events"`
	LastEvent  time.Time  `json:"last_event,omitzero"`
}

func (a *app) storeCommand() *cobra.Command {
	check := &cobra.Command{
		Use: "check [FILE]", Short: "Check the state file and its kept copy, or FILE, and say what they hold", Args: cobra.MaximumNArgs(1),
		Long: "check reads a snapshot of the state, which the service makes while it runs: it\nnever waits for a check. It fails when the state, or FILE, is damaged or its\nrecords contradict each other; a bad copy alone is told.",
		RunE: func(cmd *cobra.Command, args []string) error { return a.checkStore(cmd.Context(), args) },
	}
	backup := &cobra.Command{
		Use: "backup FILE", Short: "Write a checked copy of the state to FILE, also while the service runs", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			cfg, err := a.stateConfig()
			if err != nil {
				return err
			}
			if err := a.copyState(cmd.Context(), cfg, path); err != nil {
				return err
			}
			file, err := inspect(cmd.Context(), path, path)
			if err != nil {
				return err
			}
			a.showStore(map[string]any{"ok": true, "file": file}, func() { a.storeFile(file) })
			return nil
		},
	}
	r := &restore{app: a}
	restore := &cobra.Command{
		Use: "restore FILE", Short: "Put FILE in the place of the state, while the fleet is stopped", Args: cobra.ExactArgs(1),
		Long: "restore replaces the state by a copy of FILE, which it checks first. The state of\nbefore is kept beside it. What was recorded after FILE was made is forgotten: later\nIdentity Bindings are gone, later Profiles stay on the disk without a record.",
		RunE: func(cmd *cobra.Command, args []string) error { return r.run(cmd.Context(), args[0]) },
	}
	restore.Flags().BoolVarP(&r.sure, "yes", "y", false, "do not ask")
	restore.Flags().BoolVar(&r.otherHost, "other-host", false, "accept the state of another host")
	return group("store", "Check, back up and restore the state", check, backup, restore)
}

// stateConfig is the configuration of the installed service. A wrong one could
// name another fleet's state.
func (a *app) stateConfig() (*config.Config, error) {
	env := a.host()
	return env.Config, env.ConfigError
}

// copyState writes a checked copy of the state to an absolute path. The service
// makes it where one runs.
func (a *app) copyState(ctx context.Context, cfg *config.Config, path string) error {
	err := store.CopyClosed(ctx, cfg.StateFile(), path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, lerr := os.Lstat(cfg.StateFile()); errors.Is(lerr, fs.ErrNotExist) {
			return store.Missing(cfg.StateFile())
		}
		return err
	case fault.CodeOf(err) != fault.StateInUse:
		return err
	}
	_, err = a.post(ctx, api.CopyStatePath, api.CopyState{Path: path})
	return err
}

func (a *app) checkStore(ctx context.Context, args []string) error {
	if len(args) == 1 {
		file, err := inspect(ctx, args[0], args[0])
		if err != nil {
			return err
		}
		a.showStore(map[string]any{"ok": true, "file": file}, func() { a.storeFile(file) })
		return nil
	}
	cfg, err := a.stateConfig()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "abfleet-check-")
	if err != nil {
		return fault.Wrap(err, fault.Internal, "check fleet state", "Free space for a copy of the state, or name another directory with TMPDIR")
	}
	defer os.RemoveAll(dir)
	copied := store.CopyOf(cfg.StateFile())
	kept, kerr := inspect(ctx, copied, copied)
	if kerr != nil {
		kept.Error = api.ErrorOf(kerr)
	}
	var state storeFile
	snapshot := filepath.Join(dir, "state.db")
	if err = a.copyState(ctx, cfg, snapshot); err == nil {
		state, err = inspect(ctx, snapshot, cfg.StateFile())
	}
	if err != nil {
		if fault.CodeOf(err) == fault.StateCorrupt {
			hint := "Restore a backup: abfleet store restore FILE"
			if kerr == nil {
				hint = "Restore the kept copy: abfleet store restore " + fault.Word(copied)
			}
			return fault.New(fault.StateCorrupt, "check fleet state", hint, "%s: %w", cfg.StateFile(), err)
		}
		return err
	}
	a.showStore(map[string]any{"ok": true, "file": state, "copy": kept}, func() {
		a.storeFile(state)
		a.storeFile(kept)
	})
	return nil
}

// inspect checks the file at path, which is shown as that at shown.
func inspect(ctx context.Context, path, shown string) (storeFile, error) {
	if _, err := os.Lstat(path); err != nil {
		return storeFile{Path: shown}, fault.New(fault.InvalidArgument, "check fleet state", "Name a file that can be read", "%w", err)
	}
	s, err := store.Inspect(ctx, path, fleet.CheckStore)
	return described(s, shown), err
}

func described(s store.Summary, shown string) storeFile {
	return storeFile{
		Path: shown, Format: s.Schema, Host: s.Host, Revision: s.Revision,
		Identities: s.Records[store.Identities], Profiles: s.Records[store.Profiles], Bindings: s.Records[store.Bindings],
		Runtimes: s.Records[store.Runtimes], Intents: s.Records[store.Intents], Events: s.Events, LastEvent: s.LastEvent,
	}
}

func (a *app) showStore(value map[string]any, text func()) {
	if a.json {
		a.writeJSON(value)
		return
	}
	text()
}

func (a *app) storeFile(f storeFile) {
	if f.Error != nil {
		a.printf("%s: not usable: %s\n", f.Path, f.Error.Message)
		return
	}
	a.printf("%s: sound\n  format %d, host %s, revision %d\n  %s\n  %d audit events, the last %s\n",
		f.Path, f.Format, f.Host, f.Revision, f.numbers(), f.Events, when(f.LastEvent))
}

func (f storeFile) numbers() string {
	return fmt.Sprintf("Identities %d, Profiles %d, Bindings %d, runtimes %d, intents %d", f.Identities, f.Profiles, f.Bindings, f.Runtimes, f.Intents)
}

// restore is one run of store restore.
type restore struct {
	*app
	sure, otherHost bool
}

const opRestore = "restore fleet state"

func (r *restore) run(ctx context.Context, from string) error {
	cfg, err := r.stateConfig()
	if err != nil {
		return err
	}
	if err := r.stopped(ctx); err != nil {
		return err
	}
	next, err := inspect(ctx, from, from)
	if err != nil {
		return err
	}
	path := cfg.StateFile()
	before, known := r.before(ctx, cfg)
	if known && before.Host != next.Host && !r.otherHost {
		return fault.New(fault.InvalidArgument, opRestore, "Name a copy of this host's state, or add --other-host when this one is to take over the other's",
			"%s is the state of another host", from)
	}
	now := before.numbers()
	if !known {
		now = "not readable"
	}
	_, _ = fmt.Fprintf(r.errOut, "now:   %s\nafter: %s, as of %s\n", now, next.numbers(), when(next.LastEvent))
	if err := r.confirm(opRestore, r.sure, "Restore it? What was recorded later is forgotten: Identity Bindings made since are gone, Profiles made since stay on the disk without a record."); err != nil {
		return err
	}
	var trees map[string][]string
	verify := func(tx *store.Tx) (err error) {
		if err := fleet.CheckStore(tx); err != nil {
			return err
		}
		trees, err = fleet.Trees(tx)
		return err
	}
	kept, err := store.Restore(ctx, path, from, verify, func(s store.Summary) error {
		if s.Host != next.Host || s.Revision != next.Revision {
			return fault.New(fault.InvalidArgument, opRestore, "Run it again", "%s changed meanwhile", from)
		}
		return r.stopped(ctx)
	}, func(tx *store.Tx) error {
		return fleet.AmendRestored(tx, cfg.ProfileDir, func(dir string) (bool, error) {
			_, err := os.Lstat(dir)
			if errors.Is(err, fs.ErrNotExist) {
				return false, nil
			}
			return err == nil, err
		})
	})
	if err != nil {
		if fault.CodeOf(err) == fault.StateInUse {
			return r.refuse("another process holds the state")
		}
		return err
	}
	left := unnamed(cfg, trees)
	r.showStore(map[string]any{"ok": true, "file": next, "kept": kept, "left": left}, func() {
		r.printf("restored %s from %s\n", path, from)
		if kept != "" {
			r.printf("the state of before is %s\n", kept)
		}
		for _, dir := range left {
			r.printf("no record names %s; it is left\n", dir)
		}
		sockets, _, _ := r.newSetup().unitNames()
		r.printf("start the fleet again: systemctl --user start %s\n", strings.Join(sockets, " "))
	})
	return nil
}

// before is what the state holds that is about to be replaced; known is false
// where it cannot be read, being damaged or missing.
func (r *restore) before(ctx context.Context, cfg *config.Config) (_ storeFile, known bool) {
	dir, err := os.MkdirTemp("", "abfleet-restore-")
	if err != nil {
		return storeFile{}, false
	}
	defer os.RemoveAll(dir)
	snapshot := filepath.Join(dir, "state.db")
	if err := store.CopyClosed(ctx, cfg.StateFile(), snapshot); err != nil {
		return storeFile{}, false
	}
	// Contradicting records still have a host.
	s, err := store.Inspect(ctx, snapshot, func(*store.Tx) error { return nil })
	return described(s, cfg.StateFile()), err == nil
}

// stopped refuses while systemd has the service or a socket, which would start
// it, not inactive.
func (r *restore) stopped(ctx context.Context) error {
	s := r.newSetup()
	sockets, service, _ := s.unitNames()
	for _, unit := range append(sockets, service) {
		switch state := s.property(ctx, unit, "ActiveState"); state {
		case "inactive", "failed":
		case "":
			return fault.New(fault.SystemdUnavailable, opRestore, "Run it in a login session of this user: it has to be certain that the service is stopped", "systemd does not say whether %s is active", unit)
		default:
			return r.refuse(unit + " is " + state)
		}
	}
	return nil
}

func (r *restore) refuse(why string) error {
	sockets, service, _ := r.newSetup().unitNames()
	return fault.New(fault.StateInUse, opRestore, "Stop it first, browsers go on: systemctl --user stop "+strings.Join(append(sockets, service), " "), "%s", why)
}

// unnamed returns the directories of Identities and Profiles that no record
// names.
func unnamed(cfg *config.Config, trees map[string][]string) []string {
	left := []string{}
	for _, id := range subdirectories(cfg.IdentitiesDir()) {
		named, ok := trees[id]
		if !ok {
			left = append(left, cfg.IdentityDir(id))
			continue
		}
		for _, profile := range subdirectories(cfg.ProfilesDir(id)) {
			if !slices.Contains(named, profile) {
				left = append(left, cfg.ProfileDir(id, profile))
			}
		}
	}
	return left
}

func subdirectories(path string) []string {
	entries, _ := os.ReadDir(path)
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}
