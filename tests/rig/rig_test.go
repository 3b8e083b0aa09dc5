package rig_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/tests/rig"
)

func must(t *testing.T) func(string, error) string {
	return func(out string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(out)
	}
}

// cgroups lists the rig cgroups that belong to this test process.
func cgroups(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		groups, err := filepath.Glob(filepath.Join(root, fmt.Sprintf("abfleet-rig-*-%d-*", os.Getpid())))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, groups...)
	}
	return found
}

func mountTable(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTwoRigsAreSeparateMachines(t *testing.T) {
	rig.Require(t)
	marker, err := os.CreateTemp("/tmp", "abfleet-rig-marker-")
	if err != nil {
		t.Fatal(err)
	}
	marker.Close()
	t.Cleanup(func() { os.Remove(marker.Name()) })
	hostname, _ := os.Hostname()
	mounts := mountTable(t)

	var rigs []*rig.Rig
	for _, name := range []string{"one", "two"} {
		r, err := rig.Boot(t.Context(), rig.Options{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		rigs = append(rigs, r)
	}
	one, two := rigs[0], rigs[1]
	for _, r := range rigs {
		if got := must(t)(r.Sh(t.Context(), "systemctl is-system-running; systemctl --user is-system-running")); got != "running\nrunning" {
			failed, _ := r.RootSh(t.Context(), "systemctl --failed --no-pager")
			t.Errorf("the managers say %q, want running\n%s", got, failed)
		}
		if got := must(t)(r.Sh(t.Context(), "id -u; id -g; id -G; pwd; echo $HOME $XDG_RUNTIME_DIR; grep ^NoNewPrivs /proc/self/status; grep ^CapEff /proc/self/status")); got !=
			"1500\n1500\n1500\n/home/tester\n/home/tester /run/user/1500\nNoNewPrivs:\t0\nCapEff:\t0000000000000000" {
			t.Errorf("a command of the user sees %q", got)
		}
		// Only what a login gives, and PATH programs of the build.
		if got := must(t)(r.Sh(t.Context(), "env | cut -d= -f1 | sort | tr '\\n' ' '")); got != "DBUS_SESSION_BUS_ADDRESS HOME LANG LOGNAME PATH PWD SHELL USER XDG_RUNTIME_DIR" {
			t.Errorf("its environment holds %s", got)
		}
		if got := must(t)(r.Sh(t.Context(), "stat -c '%A %U' /tmp/.X11-unix /dev/shm /tmp; ls /tmp | grep -c marker || true")); !strings.HasPrefix(got, "drwxrwxrwt root\ndrwxrwxrwt root\ndrwxrwxrwt root\n0") {
			t.Errorf("directories in /tmp: %s", got)
		}
		if got := must(t)(r.Sh(t.Context(), "cat /proc/net/dev | grep -c :; stat -f -c %T /sys/fs/cgroup")); got != "1\ncgroup2fs" {
			t.Errorf("network devices and cgroup type: %s", got)
		}
		// It writes the value that is there: a rig without this protection must not
		// make its own test change the machine.
		if out, err := r.RootSh(t.Context(), "v=$(cat /proc/sys/vm/swappiness) && echo $v > /proc/sys/vm/swappiness"); err == nil {
			t.Errorf("root inside can set a sysctl of the machine: %s", out)
		}
		// Neither a service nor a command from outside may set the clock (bit 25).
		if got := must(t)(r.RootSh(t.Context(), `for p in 1 self; do bnd=$(sed -n 's/^CapBnd:\t//p' /proc/$p/status); echo $(( (0x$bnd >> 25) & 1 )) $(( (0x$bnd >> 21) & 1 )); done`)); got != "0 1\n0 1" {
			t.Errorf("capabilities SYS_TIME and SYS_ADMIN of PID 1 and of root's commands: %s", got)
		}
	}
	if a, b := must(t)(one.Sh(t.Context(), "hostname; cat /proc/sys/kernel/random/boot_id /etc/machine-id")), must(t)(two.Sh(t.Context(), "hostname; cat /proc/sys/kernel/random/boot_id /etc/machine-id")); a == b {
		t.Errorf("both rigs have hostname, boot id and machine id %q", a)
	} else if host, _ := os.ReadFile("/proc/sys/kernel/random/boot_id"); strings.Contains(a, strings.TrimSpace(string(host))) {
		t.Error("the rig has the machine's boot id")
	}
	if now, _ := os.Hostname(); now != hostname {
		t.Errorf("the machine's hostname became %q", now)
	}

	for _, r := range rigs {
		pid := r.PID()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
		if _, err := os.Stat(r.Home()); err == nil {
			t.Errorf("temporary home %s is left", r.Home())
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			t.Errorf("PID 1 %d is left", pid)
		}
		if err := r.User(t.Context(), "true").Run(); err == nil {
			t.Error("a command ran in a closed rig")
		}
	}
	if left := cgroups(t); len(left) > 0 {
		t.Errorf("cgroups left: %v", left)
	}
	if after := mountTable(t); after != mounts {
		t.Errorf("the machine's mounts changed:\n%s\nbefore:\n%s", after, mounts)
	}
	if _, err := os.Stat(marker.Name()); err != nil {
		t.Errorf("the machine's /tmp was touched: %v", err)
	}
}

func TestHomeSurvivesPoweroffAndPowerCut(t *testing.T) {
	rig.Require(t)
	home := t.TempDir()
	var boots []string
	end := []func(*rig.Rig) error{
		func(r *rig.Rig) error { return r.Poweroff(t.Context()) },
		func(r *rig.Rig) error { return r.PowerCut(t.Context()) },
		(*rig.Rig).Close,
	}
	for i := range end {
		r := rig.BootTest(t, rig.Options{Home: home})
		got := must(t)(r.Sh(t.Context(), "cat log 2>/dev/null; echo boot >> log; sync log; touch /tmp/gone /var/tmp/gone; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id"))
		lines := strings.Split(got, "\n")
		if len(lines) != i+2 {
			t.Errorf("boot %d finds %q in its home", i, lines[:len(lines)-2])
		}
		boots = append(boots, strings.Join(lines[len(lines)-2:], " "))
		if err := end[i](r); err != nil {
			t.Fatal(err)
		}
		select {
		case <-r.Exited():
		default:
			t.Fatal("PID 1 is still there")
		}
		if left := cgroups(t); len(left) > 0 {
			t.Errorf("cgroups left: %v", left)
		}
	}
	machine := boots[0][:32]
	for i, b := range boots {
		if b[:32] != machine {
			t.Errorf("boot %d has machine id %s, boot 0 had %s", i, b[:32], machine)
		}
		if i > 0 && b == boots[i-1] {
			t.Errorf("boot %d has the boot id of the one before", i)
		}
	}
	if _, err := os.Stat(filepath.Join(home, "tester", "log")); err != nil {
		t.Error(err)
	}
}

// A clean shutdown tells the services, a power cut does not.
func TestPoweroffIsAShutdown(t *testing.T) {
	for name, clean := range map[string]bool{"poweroff": true, "power cut": false} {
		t.Run(name, func(t *testing.T) {
			home := t.TempDir()
			r := rig.BootTest(t, rig.Options{Home: home})
			must(t)(r.Sh(t.Context(), `systemd-run --user --quiet --unit=witness -p Type=notify -p NotifyAccess=all sh -c 'trap "echo told > $HOME/told; sync; exit" TERM; systemd-notify --ready; while :; do sleep 1000 & wait; done'`))
			var err error
			if clean {
				err = r.Poweroff(t.Context())
			} else {
				err = r.PowerCut(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = os.Stat(filepath.Join(home, "tester", "told"))
			if told := err == nil; told != clean {
				t.Errorf("the service was told: %v, want %v", told, clean)
			}
		})
	}
}

func TestDialAndListenAreTheUsers(t *testing.T) {
	r := rig.BootTest(t, rig.Options{})
	// A listener of the rig's own reports the peer it sees.
	path := r.RuntimeDir() + "/peer.sock"
	l, err := r.Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peers := make(chan *unix.Ucred, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			peers <- nil
			return
		}
		defer c.Close()
		raw, err := c.(*net.UnixConn).SyscallConn()
		if err != nil {
			peers <- nil
			return
		}
		var cred *unix.Ucred
		raw.Control(func(fd uintptr) { cred, _ = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		io.WriteString(c, "hello\n")
		peers <- cred
	}()
	c, err := r.Dial(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "hello\n" {
		t.Errorf("read %q, %v", line, err)
	}
	cred := <-peers
	if cred == nil || cred.Uid != 1500 || cred.Gid != 1500 || cred.Pid == 0 {
		t.Errorf("the peer's credentials are %+v, want uid and gid 1500", cred)
	} else if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cred.Pid)); err != nil || !strings.Contains(string(status), "Uid:\t1500\t1500\t1500\t1500") {
		t.Errorf("the peer is not a living process of the user: %v\n%s", err, status)
	}
	if got := must(t)(r.Sh(t.Context(), "stat -c '%u %F' "+path)); got != "1500 socket" {
		t.Errorf("the socket is %s", got)
	}

	// TCP ports are those of the rig's network.
	tcp, err := r.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "from the test\n")
			c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(tcp.Addr().String())
	if got := must(t)(r.Sh(t.Context(), "bash -c 'exec 3<>/dev/tcp/127.0.0.1/"+port+"; cat <&3'")); got != "from the test" {
		t.Errorf("inside, the port says %q", got)
	}
	if c, err := net.Dial("tcp", tcp.Addr().String()); err == nil {
		c.Close()
		t.Error("the rig's port is reachable from the machine")
	}
	if _, err := r.Dial(t.Context(), "unix", "/run/nothing.sock"); err == nil || !strings.Contains(err.Error(), syscall.ENOENT.Error()) {
		t.Errorf("dial of a missing socket: %v", err)
	}
	// What the user may not reach stays out of reach.
	must(t)(r.RootSh(t.Context(), "systemd-socket-activate -l /run/root.sock true >/dev/null 2>&1 & until [ -S /run/root.sock ]; do :; done; chmod 600 /run/root.sock"))
	if c, err := r.Dial(t.Context(), "unix", "/run/root.sock"); err == nil {
		c.Close()
		t.Error("the user reached a socket of root")
	}
}

func TestMaskInstallBindAndTmpfs(t *testing.T) {
	bin := t.TempDir()
	data := t.TempDir()
	for name, text := range map[string]string{bin + "/hello": "#!/bin/sh\necho hello\n", data + "/file": "data"} {
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r := rig.BootTest(t, rig.Options{Mask: []string{"/usr/bin/setsid", "/usr/share/doc/bash"}, Binds: map[string]string{data: "/opt/data", data + "/file": "/etc/one"}})
	for path, want := range map[string]string{"/usr/bin/setsid": "absent", "/usr/share/doc/bash": "absent", "/usr/bin/env": "present", "/opt/data/file": "present", "/etc/one": "present"} {
		if got := must(t)(r.Sh(t.Context(), "[ -e "+path+" ] && echo present || echo absent")); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	if _, err := os.Stat("/usr/bin/setsid"); err != nil {
		t.Errorf("the machine lost a program: %v", err)
	}
	if _, err := r.RootSh(t.Context(), "touch /opt/data/new"); err == nil {
		t.Error("a bind is writable")
	}

	if err := r.Install(t.Context(), bin); err != nil {
		t.Fatal(err)
	}
	if got := must(t)(r.Sh(t.Context(), "command -v hello; hello")); got != rig.BinDir+"/hello\nhello" {
		t.Errorf("installed program: %s", got)
	}
	upgrade := t.TempDir()
	if err := os.WriteFile(upgrade+"/hello", []byte("#!/bin/sh\necho newer\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.Install(t.Context(), upgrade); err != nil {
		t.Fatal(err)
	}
	// The user's units see it too: it is a mount of the rig, not of a command.
	if got := must(t)(r.Sh(t.Context(), "systemd-run --user --quiet --pipe --wait "+rig.BinDir+"/hello")); got != "newer" {
		t.Errorf("upgraded program: %s", got)
	}

	if err := r.MountTmpfs(t.Context(), "/home/tester/small", "64k"); err != nil {
		t.Fatal(err)
	}
	if out, err := r.Sh(t.Context(), "dd if=/dev/zero of=small/big bs=1k count=100"); err == nil || !strings.Contains(err.Error(), "No space left") {
		t.Errorf("a full disk: %s %v", out, err)
	}
}

func TestCommandsAreMovableAndDieWithTheirContext(t *testing.T) {
	r := rig.BootTest(t, rig.Options{})
	// The user's manager can take a process of ours into a scope.
	got := must(t)(r.Sh(t.Context(), "cat /proc/self/cgroup | grep ^0::; systemd-run --user --quiet --scope --unit=mine grep ^0:: /proc/self/cgroup"))
	if !regexp.MustCompile(`(?s)^0::/rig\.cmd/\d+\n0::/user\.slice/user-1500\.slice/user@1500\.service/.*/mine\.scope$`).MatchString(got) {
		t.Errorf("cgroups of a command and of its scope: %s", got)
	}
	if err := r.User(t.Context(), "sh", "-c", "exit 7").Run(); err == nil || err.(*exec.ExitError).ExitCode() != 7 {
		t.Errorf("exit status: %v", err)
	}
	if err := r.User(t.Context(), "sh", "-c", "kill -TERM $$").Run(); err == nil || err.(*exec.ExitError).Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("a killed command: %v", err)
	}

	// A signal reaches the program; extra files and variables too.
	cmd := r.User(t.Context(), "sh", "-c", `trap 'echo $EXTRA; cat <&3; exit 0' TERM; echo ready; while :; do sleep 1000 & wait; done`)
	extra, err := os.CreateTemp(t.TempDir(), "extra")
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(extra, "inherited\n")
	extra.Seek(0, 0)
	cmd.ExtraFiles = append(cmd.ExtraFiles, extra)
	cmd.Env = append(cmd.Env, "EXTRA=variable")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(stdout)
	if line, err := lines.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	var said [2]string
	for i := range said {
		if said[i], err = lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	if said != [2]string{"variable\n", "inherited\n"} {
		t.Errorf("the signalled command says %q", said)
	}

	// The end of the context takes children too, in sessions of their own.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd = r.User(ctx, "sh", "-c", "setsid sh -c 'echo $$; exec sleep 1000' & wait")
	if stdout, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	cmd.Wait()
	if got := must(t)(r.Sh(t.Context(), "grep -qs '^State:.[^ZX]' /proc/"+strings.TrimSpace(pid)+"/status && echo lives || echo dead")); got != "dead" {
		t.Errorf("process %s of an ended command %s", strings.TrimSpace(pid), got)
	}
}

func TestJournalHoldsTheUsersLines(t *testing.T) {
	r := rig.BootTest(t, rig.Options{})
	must(t)(r.Sh(t.Context(), "systemd-run --user --quiet --wait --unit=talker echo a line of the user"))
	must(t)(r.RootSh(t.Context(), "journalctl --sync"))
	if got := must(t)(r.Journal(t.Context(), "-o", "cat", "_SYSTEMD_USER_UNIT=talker.service")); !strings.Contains(got, "a line of the user") {
		t.Errorf("journal: %s", got)
	}
	if got := must(t)(r.Sh(t.Context(), "journalctl --user --no-pager -q -o cat -u talker.service")); !strings.Contains(got, "a line of the user") {
		t.Errorf("the user's own view of the journal: %s", got)
	}
}

func TestHybridCgroupBoots(t *testing.T) {
	r := rig.BootTest(t, rig.Options{HybridCgroup: true})
	got := must(t)(r.Sh(t.Context(), "stat -f -c %T /sys/fs/cgroup /sys/fs/cgroup/unified; systemctl --user is-system-running; systemd-run --user --quiet --wait --pipe echo runs"))
	if got != "tmpfs\ncgroup2fs\nrunning\nruns" {
		t.Errorf("hybrid rig: %s", got)
	}
}

func TestHostNetworkIsTheMachines(t *testing.T) {
	r := rig.BootTest(t, rig.Options{HostNetwork: true})
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if got := must(t)(r.Sh(t.Context(), "readlink /proc/self/ns/net")); got != own {
		t.Errorf("network namespace %s, want the machine's %s", got, own)
	}
}

// The browser that the product drives has its own sandbox in a rig.
func TestChromiumIsSandboxed(t *testing.T) {
	rig.Require(t)
	const chromium = "/usr/lib/chromium/chromium"
	if _, err := os.Stat(chromium); err != nil {
		t.Skipf("needs Chromium: %v", err)
	}
	r := rig.BootTest(t, rig.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	common := []string{"--headless=new", "--password-store=basic", "--no-first-run", "--disable-gpu", "--user-data-dir=/home/tester/p"}
	out, err := r.User(ctx, chromium, append(common, "--dump-dom", "data:text/html,<title>x</title><p>hello from <b>the rig</b>")...).Output()
	if err != nil || !strings.Contains(string(out), "<p>hello from <b>the rig</b>") {
		t.Fatalf("dumped %q, %v", out, err)
	}

	cmd := r.User(ctx, chromium, append(common, "--remote-debugging-port=0", "data:text/html,sandbox")...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	var seen []string
	for lines.Scan() && !strings.Contains(lines.Text(), "DevTools listening") {
		seen = append(seen, lines.Text())
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, stderr)
	// The renderer may start a moment after the port: look until it is there.
	script := `for p in /proc/[0-9]*; do tr '\0' ' ' < $p/cmdline 2>/dev/null | grep -q -- '[-]-type=renderer' || continue
		grep ^Seccomp: $p/status; [ "$(readlink $p/ns/user)" != "$(readlink /proc/1/ns/user)" ] && echo own user namespace; exit 0; done; exit 3`
	for {
		out, err := r.RootSh(ctx, script)
		if err == nil {
			if want := "Seccomp:\t2\nown user namespace\n"; out != want {
				t.Errorf("the renderer has %q, want %q", out, want)
			}
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("no renderer: %v\n%s", err, strings.Join(seen, "\n"))
		}
	}
	cancel()
	cmd.Wait()
}

// A test that is killed leaves no process, and the next Boot removes its traces.
func TestKilledLauncherLeavesNothing(t *testing.T) {
	rig.Require(t)
	if os.Getenv("ABF_RIG_VICTIM") != "" {
		r := rig.BootTest(t, rig.Options{})
		fmt.Printf("victim %d %s\n", r.PID(), r.Home())
		select {}
	}
	victim := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledLauncherLeavesNothing$", "-test.v")
	victim.Env = append(os.Environ(), "ABF_RIG_VICTIM=1")
	stdout, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	var home string
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if n, _ := fmt.Sscanf(lines.Text(), "victim %d %s", &pid, &home); n == 2 {
			break
		}
	}
	if pid == 0 {
		t.Fatal("the victim did not boot")
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	victim.Process.Kill()
	victim.Wait()
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000); n != 1 {
		t.Fatalf("PID 1 outlives its launcher: %v", err)
	}
	r := rig.BootTest(t, rig.Options{})
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	groups, _ := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/abfleet-rig-*-%d-*", victim.Process.Pid))
	if len(groups) > 0 {
		t.Errorf("cgroups of the victim are left: %v", groups)
	}
	if _, err := os.Stat(home); err == nil {
		t.Errorf("home of the victim is left: %s", home)
	}
}

// On machines with a unified cgroup tree (a rig is one) and on those with none at
// all, rigs boot as well.
func TestOtherCgroupLayouts(t *testing.T) {
	rig.Require(t)
	if os.Getenv("ABF_RIG_INNER") != "" {
		t.Skip("already on another layout")
	}
	inner := "ABF_RIG_INNER=1"
	args := []string{"-test.run=^(TestTwoRigsAreSeparateMachines|TestKilledLauncherLeavesNothing|TestHybridCgroupBoots)$"}
	t.Run("unified", func(t *testing.T) {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		r := rig.BootTest(t, rig.Options{Binds: map[string]string{self: "/opt/rig.test"}})
		cmd := r.Root(t.Context(), "/opt/rig.test", args...)
		cmd.Env = append(cmd.Env, inner)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("none", func(t *testing.T) {
		script := `while m=$(findmnt --noheadings --output TARGET --types cgroup2 | head -n 1) && [ -n "$m" ]; do umount --lazy "$m"; done; exec "$0" "$@"`
		cmd := exec.CommandContext(t.Context(), "sh", append([]string{"-ec", script, os.Args[0]}, args...)...)
		cmd.Env = append(os.Environ(), inner)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if left := cgroups(t); len(left) > 0 {
			t.Errorf("cgroups left: %v", left)
		}
	})
}

// A boot that cannot succeed says why, and leaves nothing.
func TestFailedBootIsExplained(t *testing.T) {
	rig.Require(t)
	_, err := rig.Boot(t.Context(), rig.Options{Binds: map[string]string{"/nowhere": "/opt/x"}})
	if err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("bind of a missing path: %v", err)
	}
	_, err = rig.Boot(t.Context(), rig.Options{Mask: []string{"/lib/systemd/system/dbus.socket", "/lib/systemd/system/dbus.service", "/lib/systemd/system/systemd-logind.service"}})
	if err == nil || !strings.Contains(err.Error(), "user manager") || !strings.Contains(err.Error(), "console") {
		t.Errorf("a rig without D-Bus: %v", err)
	}
	if left := cgroups(t); len(left) > 0 {
		t.Errorf("cgroups left: %v", left)
	}
	homes, _ := filepath.Glob(fmt.Sprintf("/var/tmp/abfleet-rig-*-%d-*", os.Getpid()))
	if len(homes) > 0 {
		t.Errorf("homes left: %v", homes)
	}
}
