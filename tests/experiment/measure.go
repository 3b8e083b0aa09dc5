package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"abfleet/runtime/proof"
)

// tree is a directory of the Identity, by its name on the machine.
func (s *subject) tree(name string) string {
	return filepath.Join(s.stateDir(), "identities", s.identityID, name)
}

func (s *subject) stateDir() string {
	return filepath.Join(s.Home(), strings.TrimPrefix(s.UserHome(), "/home/"), ".local/state/abfleet")
}

// sizeOf measures a tree.
func sizeOf(dir string) (Disk, error) {
	var disk Disk
	err := filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // of a browser that runs
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if stat := info.Sys().(*syscall.Stat_t); true {
			disk.ApparentBytes += stat.Size
			disk.AllocatedBytes += stat.Blocks * 512
		}
		return nil
	})
	return disk, err
}

// stamp is names, modes, sizes and times of a tree, to compare.
func stamp(dir string) (string, error) {
	var text strings.Builder
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(&text, path, info.Mode(), info.Size(), info.ModTime().UnixNano())
		return nil
	})
	return text.String(), err
}

// snapshot describes the Template Snapshot and returns its stamp.
func (s *subject) snapshot(report *Report) (string, error) {
	dir := s.tree("snapshot")
	state, err := os.Stat(filepath.Join(dir, "Local State"))
	if err != nil {
		return "", err
	}
	disk, err := sizeOf(dir)
	if err != nil {
		return "", err
	}
	report.Snapshot = &Snapshot{LocalStateBytes: state.Size(), Disk: disk, ReadOnly: true}
	err = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil && info.Mode().Perm()&0o222 != 0 {
			report.Snapshot.ReadOnly = false
		}
		return err
	})
	if err != nil {
		return "", err
	}
	return stamp(dir)
}

// cost measures trees and processes while both browsers run.
func (s *subject) cost(ctx context.Context) (*Cost, error) {
	cost := &Cost{Disk: map[string]Disk{}, RSSKiB: map[string]int64{}, PSSKiB: map[string]int64{}}
	var err error
	for _, name := range []string{"template", "snapshot"} {
		if cost.Disk[name], err = sizeOf(s.tree(name)); err != nil {
			return nil, err
		}
	}
	for _, name := range names {
		browser, err := s.generation(ctx, name)
		if err != nil {
			return nil, err
		}
		if cost.Disk["profile"+name], err = sizeOf(filepath.Join(s.Home(), strings.TrimPrefix(browser.Profile, "/home/"))); err != nil {
			return nil, err
		}
		// The slice holds display and browser.
		if cost.RSSKiB[name], cost.PSSKiB[name], err = s.memory(ctx, filepath.Dir(browser.Cgroup)); err != nil {
			return nil, err
		}
	}
	return cost, nil
}

// generation is the pidfile of a session's browser. Which one that is, no
// answer of the product tells; its journal does.
func (s *subject) generation(ctx context.Context, session string) (proof.Generation, error) {
	var g proof.Generation
	out, err := s.Journal(ctx, "-o", "cat", "--output-fields=ABF_INSTANCE", "-r", "-n", "1", "ABF_SESSION="+session, "ABF_EVENT=session_browser.started")
	if err != nil {
		return g, err
	}
	instance := strings.TrimSpace(out)
	data, err := os.ReadFile(s.Path(filepath.Join(s.RuntimeDir(), "abfleet", instance, "chromium.pid")))
	if err != nil {
		return g, fmt.Errorf("cannot find the browser of session %s: %w", session, err)
	}
	return g, json.Unmarshal(data, &g)
}

// memory adds up the processes below a cgroup, in KiB.
func (s *subject) memory(ctx context.Context, cgroup string) (rss, pss int64, err error) {
	out, err := s.RootSh(ctx, fmt.Sprintf(`find /sys/fs/cgroup%s -name cgroup.procs -exec cat {} + | while read -r pid; do cat /proc/$pid/smaps_rollup 2>/dev/null || true; done`, cgroup))
	if err != nil {
		return 0, 0, fmt.Errorf("cannot read the memory of %s: %w: %s", cgroup, err, out)
	}
	for scan := bufio.NewScanner(strings.NewReader(out)); scan.Scan(); {
		fields := strings.Fields(scan.Text())
		if len(fields) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "Rss:":
			rss += n
		case "Pss:":
			pss += n
		}
	}
	if pss == 0 {
		return 0, 0, fmt.Errorf("cannot read the memory of %s: no processes", cgroup)
	}
	return rss, pss, nil
}

// endpoints lists what listens in the rig's network namespace, and the sockets
// of ours in the file system and in the abstract name space.
func (s *subject) endpoints(ctx context.Context) (*Endpoints, error) {
	e := &Endpoints{AllPrivate: true}
	add := func(l Listener) {
		e.Listeners = append(e.Listeners, l)
		e.AllPrivate = e.AllPrivate && l.Private
	}
	out, err := s.Sh(ctx, "ss -ltnuH")
	if err != nil {
		return nil, fmt.Errorf("cannot list listeners: %w: %s", err, out)
	}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[4] == siteAddr {
			continue
		}
		addr, err := netip.ParseAddrPort(fields[4])
		add(Listener{Kind: fields[0], Address: fields[4], Private: err == nil && addr.Addr().IsLoopback()})
	}
	// X servers, browsers and the service use no abstract socket.
	if out, err = s.Sh(ctx, `ss -xlH | awk '$5 ~ /^@.*(X11|abfleet|chrom)/ { print $5 }'`); err != nil {
		return nil, fmt.Errorf("cannot list sockets: %w: %s", err, out)
	}
	for line := range strings.Lines(out) {
		add(Listener{Kind: "abstract", Address: strings.TrimSpace(line)})
	}
	// Of a path, the directories above count as well.
	if out, err = s.Sh(ctx, `find "$XDG_RUNTIME_DIR/abfleet" "$HOME/.local/state/abfleet" -type s -printf '%#m %p\n'`); err != nil {
		return nil, fmt.Errorf("cannot list sockets: %w: %s", err, out)
	}
	for line := range strings.Lines(out) {
		mode, path, _ := strings.Cut(strings.TrimSpace(line), " ")
		bits, err := strconv.ParseUint(mode, 8, 32)
		add(Listener{Kind: "unix", Address: path, Mode: mode, Private: err == nil && bits&0o077 == 0})
	}
	return e, nil
}
