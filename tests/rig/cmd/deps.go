package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// packages are the Debian packages that the product and its tests run on, each
// with a file that shows that it is there.
var packages = []struct{ name, file string }{
	{"systemd", "/lib/systemd/systemd"},
	{"dbus", "/usr/bin/dbus-daemon"},
	{"dbus-user-session", "/usr/lib/systemd/user/dbus.socket"},
	{"libpam-systemd", "/lib/x86_64-linux-gnu/security/pam_systemd.so"},
	{"chromium", "/usr/lib/chromium/chromium"},
	{"tigervnc-standalone-server", "/usr/bin/Xvnc"},
	{"fonts-liberation", "/usr/share/fonts/truetype/liberation"},
	{"fonts-noto-cjk", "/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc"},
	{"iproute2", "/usr/bin/ss"},
	{"util-linux", "/usr/bin/setpriv"},
	{"procps", "/usr/bin/ps"},
	{"xvfb", "/usr/bin/Xvfb"},
	{"x11vnc", "/usr/bin/x11vnc"},
	{"xdotool", "/usr/bin/xdotool"},
	{"strace", "/usr/bin/strace"},
}

// missing lists the packages that are not installed.
func missing() []string {
	var names []string
	for _, p := range packages {
		if installed(p.name, p.file) {
			continue
		}
		names = append(names, p.name)
	}
	return names
}

// installed asks dpkg where the file is not where this architecture's Debian
// has it.
func installed(name, file string) bool {
	if _, err := os.Stat(file); err == nil {
		return true
	}
	out, err := exec.Command("dpkg-query", "-W", "-f", "${db:Status-Status}", name).Output()
	return err == nil && string(out) == "installed"
}

// deps installs what is missing where that is allowed without asking: as root
// on a machine that systemd does not run. Elsewhere it names the command.
func deps(ctx context.Context) error {
	names := missing()
	if len(names) == 0 {
		return nil
	}
	if os.Geteuid() != 0 || hostSystemd() {
		return fmt.Errorf("cannot run here yet: missing packages\nhint: sudo apt-get install --no-install-recommends %s", strings.Join(names, " "))
	}
	fmt.Println("installing Debian packages:", strings.Join(names, " "))
	for _, args := range [][]string{{"update", "-qq"}, append([]string{"install", "-y", "-qq", "--no-install-recommends"}, names...)} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("cannot install packages: apt-get %s: %w\n%s", args[0], err, out)
		}
	}
	if names := missing(); len(names) > 0 {
		return errors.New("cannot install packages: still missing after apt-get: " + strings.Join(names, " "))
	}
	return nil
}

// hostSystemd reports whether this machine's PID 1 is systemd, by the test of
// sd_booted(3).
func hostSystemd() bool {
	_, err := os.Lstat("/run/systemd/system")
	return err == nil
}
