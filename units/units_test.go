package units

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// systemd's own parser has the last word, also about another prefix and odd
// paths. It needs no running systemd.
func TestUnitsAreUnderstoodBySystemd(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	for _, p := range []struct {
		Params
		web netip.AddrPort
	}{
		{Params{Prefix: "abfleet"}, netip.MustParseAddrPort("127.0.0.1:20001")},
		{Params{Prefix: "abfleetdemo", Socket: "/run/x %y/control.sock", Config: "demo $1/con%fig.toml", Environment: []string{`AGENT_BROWSER_FLEET_HOME=/x y/%z "q" \t`}}, netip.MustParseAddrPort("[::1]:20001")},
	} {
		t.Run(p.Prefix, func(t *testing.T) {
			// The runtime directory is where verify keeps its sockets.
			dir, run := t.TempDir(), t.TempDir()
			p.BinDir = filepath.Join(dir, "b in")
			if p.Config != "" {
				p.Config = filepath.Join(dir, p.Config)
			}
			if err := os.Mkdir(p.BinDir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(p.BinDir, "abfleetd"), []byte("#!/bin/sh\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			files, err := Render(p.Params)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, WebPort(p.Prefix, p.web))
			args := []string{"verify", "--user", "--recursive-errors=yes", "--man=no"}
			for _, file := range files {
				path := filepath.Join(dir, file.Name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(file.Content), 0o644); err != nil {
					t.Fatal(err)
				}
				if filepath.Ext(path) != ".conf" {
					args = append(args, path)
				}
			}
			cmd := exec.CommandContext(t.Context(), analyze, args...)
			cmd.Env = []string{"PATH=/usr/bin:/bin", "XDG_RUNTIME_DIR=" + run, "HOME=" + dir, "SYSTEMD_UNIT_PATH=" + dir + ":", "LC_ALL=C"}
			out, err := cmd.CombinedOutput()
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, dir) || strings.Contains(line, p.Prefix) {
					t.Errorf("systemd-analyze: %s", line)
				}
			}
			if err != nil {
				t.Errorf("systemd-analyze: %v\n%s", err, out)
			}
		})
	}
}

// The settings that would leak into roles, and that would end browsers with
// the service (facts of systemd 252: a scope's process inherits the sandbox of
// whoever forked it).
func TestServiceHasNoSandboxSetting(t *testing.T) {
	files, err := Render(Params{Prefix: "abfleet", BinDir: "/usr/bin"})
	if err != nil {
		t.Fatal(err)
	}
	forbidden := []string{
		"NoNewPrivileges", "PrivateTmp", "PrivateDevices", "PrivateUsers", "PrivateNetwork", "ProtectSystem", "ProtectHome", "ProtectProc",
		"ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectClock", "ProtectControlGroups", "ProtectHostname",
		"RestrictNamespaces", "RestrictAddressFamilies", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute",
		"SystemCallFilter", "SystemCallArchitectures", "DynamicUser", "RootDirectory", "RuntimeDirectory",
	}
	for _, file := range files {
		for line := range strings.Lines(file.Content) {
			key, _, _ := strings.Cut(strings.TrimSpace(line), "=")
			if slices.Contains(forbidden, key) {
				t.Errorf("%s: %s", file.Name, line)
			}
		}
	}
}

func TestPrefixIsEverywhere(t *testing.T) {
	files, err := Render(Params{Prefix: "zz", BinDir: "/usr/bin"})
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, WebPort("zz", netip.MustParseAddrPort("127.0.0.1:1"))) {
		if !strings.HasPrefix(file.Name, "zz") {
			t.Errorf("unit is called %s", file.Name)
		}
		for line := range strings.Lines(file.Content) {
			if strings.Contains(line, "abfleet") && !strings.Contains(line, "/abfleetd") && !strings.Contains(line, "abfleet(1)") && !strings.HasPrefix(line, "#") {
				t.Errorf("%s: %s", file.Name, line)
			}
		}
	}
}

// A path that setup wrote into a unit is read back as it was.
func TestUnquote(t *testing.T) {
	for _, text := range []string{"", "/srv/a b", `/srv/50% "x" \y`, `\x22`, `%%`, `\\x5c`} {
		word := quote(text)
		if got := Unquote(word[1 : len(word)-1]); got != text {
			t.Errorf("%q is read back as %q", text, got)
		}
	}
}
