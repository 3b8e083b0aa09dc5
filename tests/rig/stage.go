package rig

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	systemdPath = "/lib/systemd/systemd"
	// scratch is where the stage builds the new root: any directory that every
	// machine has, hidden under a tmpfs in the rig's mount namespace only.
	scratch = "/tmp"
	newRoot = scratch + "/root"
	// notifyPath is systemd's notification socket inside the rig.
	notifyPath = "/run/rig/notify"
)

// maskedUnits would change the machine (sysctls, clock, audit), wait for devices
// that a rig has not, or only make noise.
var maskedUnits = []string{
	"systemd-sysctl.service", "systemd-timesyncd.service", "systemd-journald-audit.socket", "systemd-modules-load.service",
	"systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "proc-sys-fs-binfmt_misc.mount",
	"systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket", "systemd-udevd-kernel.socket",
	"dev-hugepages.mount", "dev-mqueue.mount", "sys-fs-fuse-connections.mount", "sys-kernel-config.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
	"getty.target", "getty-static.service", "console-getty.service", "getty@tty1.service", "serial-getty@ttyS0.service", "container-getty@1.service",
	"systemd-ask-password-console.path", "systemd-ask-password-wall.path", "systemd-initctl.socket",
	"systemd-hwdb-update.service", "systemd-journal-catalog-update.service", "systemd-update-done.service", "ldconfig.service", "systemd-firstboot.service",
	"systemd-tmpfiles-clean.timer", "systemd-random-seed.service", "systemd-repart.service", "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service",
	"systemd-remount-fs.service", "systemd-pstore.service", "e2scrub_reap.service", "apt-daily.timer", "apt-daily-upgrade.timer",
}

// droppedCapabilities are those by which a rig's root could act on the kernel
// that it shares with the machine.
var droppedCapabilities = []uintptr{
	unix.CAP_SYS_MODULE, unix.CAP_SYS_RAWIO, unix.CAP_SYS_TIME, unix.CAP_SYSLOG, unix.CAP_AUDIT_CONTROL, unix.CAP_AUDIT_READ,
	unix.CAP_MAC_ADMIN, unix.CAP_MAC_OVERRIDE, unix.CAP_WAKE_ALARM, unix.CAP_BLOCK_SUSPEND, unix.CAP_SYS_PACCT,
}

// bootStage runs as PID 1 of the new namespaces, on the main thread of a fresh
// process. It ends by becoming systemd.
func bootStage() {
	stage := os.NewFile(3, "rig stage")
	unix.CloseOnExec(3)
	fail := func(err error) {
		text, _ := json.Marshal(stageMessage{Error: err.Error()})
		stage.Write(text)
		os.Exit(1)
	}
	buf := make([]byte, 256<<10)
	n, err := stage.Read(buf)
	if err != nil {
		os.Exit(1)
	}
	var spec bootSpec
	if err := json.Unmarshal(buf[:n], &spec); err != nil {
		fail(err)
	}
	if err := enterNewRoot(&spec); err != nil {
		fail(err)
	}
	notify, err := becomeMachine(&spec)
	if err != nil {
		fail(err)
	}
	ready, _ := json.Marshal(stageMessage{})
	if err := unix.Sendmsg(3, ready, unix.UnixRights(notify), nil, 0); err != nil {
		fail(fmt.Errorf("cannot hand over the notification socket: %w", err))
	}
	unix.Close(notify)
	argv := []string{systemdPath, "--system", "--unit=multi-user.target", "--show-status=yes"}
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TERM=dumb", "SYSTEMD_COLORS=0",
		"container=rig", "NOTIFY_SOCKET=" + notifyPath,
	}
	fail(fmt.Errorf("cannot run systemd: %w", unix.Exec(systemdPath, argv, env)))
}

// enterNewRoot leaves the machine's mounts for an overlay of its root.
func enterNewRoot(spec *bootSpec) error {
	// We were cloned into the rig's cgroup; it becomes the root of what the rig
	// sees. (clone would take the parent's cgroup as that root.)
	if err := unix.Unshare(unix.CLONE_NEWCGROUP | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	// In a chroot "/" is no mount: work on the mounts needs the root of the
	// namespace, names need the chroot.
	oldRoot, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	own, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Setns(own, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("cannot make mounts private: %w", err)
	}
	if err := errors.Join(unix.Fchdir(oldRoot), unix.Chroot(".")); err != nil {
		return err
	}

	// What comes from the machine is cloned first: the scratch mount hides part
	// of its tree.
	binds := map[string]int{}
	for host, inside := range spec.Binds {
		fd, err := cloneTree(host, true)
		if err != nil {
			return err
		}
		binds[inside] = fd
	}
	home, err := cloneTree(spec.Home, false)
	if err != nil {
		return err
	}
	console, err := cloneTree(spec.Console, false)
	if err != nil {
		return err
	}
	devices, err := cloneDevices()
	if err != nil {
		return err
	}
	lowers, err := lowerMounts()
	if err != nil {
		return err
	}
	if err := mount("tmpfs", scratch, "tmpfs", 0, "mode=0700"); err != nil {
		return err
	}
	for i, lower := range lowers {
		upper, work := fmt.Sprintf("%s/upper%d", scratch, i), fmt.Sprintf("%s/work%d", scratch, i)
		target := filepath.Join(newRoot, lower)
		// The root of an overlay takes mode and owner from its upper directory.
		if err := copyDir(lower, upper); err != nil {
			return err
		}
		if err := errors.Join(os.Mkdir(work, 0o700), os.MkdirAll(target, 0o755)); err != nil {
			return err
		}
		if err := mount("overlay", target, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work); err != nil {
			return err
		}
	}
	if err := mountPseudo(spec, devices, console); err != nil {
		return err
	}
	if err := attach(home, newRoot+"/home", false); err != nil {
		return err
	}
	for _, inside := range sortedKeys(binds) {
		if err := attachAt(binds[inside], filepath.Join(newRoot, inside)); err != nil {
			return err
		}
	}

	target, err := unix.Open(newRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Setns(own, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	if err := unix.Fchdir(target); err != nil {
		return err
	}
	switch err := unix.PivotRoot(".", "."); err {
	case nil:
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("cannot leave the machine's root: %w", err)
		}
	case unix.EINVAL:
		// The namespace's root is the initial rootfs, which cannot be pivoted.
		if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("cannot move the new root: %w", err)
		}
		if err := unix.Chroot("."); err != nil {
			return err
		}
	default:
		return fmt.Errorf("pivot_root: %w", err)
	}
	return os.Chdir("/")
}

// mountPseudo mounts what is private to the rig and independent of the overlay.
func mountPseudo(spec *bootSpec, devices map[string]int, console int) error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	in := func(path string) string { return newRoot + path }
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/home"} {
		if err := os.MkdirAll(in(dir), 0o755); err != nil {
			return err
		}
	}
	if err := mount("proc", in("/proc"), "proc", quiet, ""); err != nil {
		return err
	}
	// A fresh boot id at each boot; it sits on a read-only copy of /proc/sys, so
	// that nothing inside can set a sysctl of the machine.
	if err := mount(in("/proc/sys"), in("/proc/sys"), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	bootID := scratch + "/boot_id"
	if err := os.WriteFile(bootID, []byte(spec.BootID+"\n"), 0o444); err != nil {
		return err
	}
	if err := mount(bootID, in("/proc/sys/kernel/random/boot_id"), "", unix.MS_BIND, ""); err != nil {
		return err
	}
	readOnly := []string{"/proc/sys/kernel/random/boot_id"}
	// A kernel without magic keys has no such file.
	if _, err := os.Stat(in("/proc/sysrq-trigger")); err == nil {
		if err := mount(in("/proc/sysrq-trigger"), in("/proc/sysrq-trigger"), "", unix.MS_BIND, ""); err != nil {
			return err
		}
		readOnly = append(readOnly, "/proc/sysrq-trigger")
	}
	for _, path := range append(readOnly, "/proc/sys") {
		if err := mount("", in(path), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|quiet, ""); err != nil {
			return err
		}
	}

	if err := mount("sysfs", in("/sys"), "sysfs", quiet, ""); err != nil {
		return err
	}
	if err := mountCgroup(in("/sys/fs/cgroup"), spec.Hybrid); err != nil {
		return err
	}
	if err := mount("", in("/sys"), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|quiet, ""); err != nil {
		return err
	}

	if err := mountDev(in("/dev"), devices, console); err != nil {
		return err
	}
	for path, mode := range map[string]string{"/run": "0755", "/tmp": "1777", "/var/tmp": "1777"} {
		if err := mount("tmpfs", in(path), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode="+mode); err != nil {
			return err
		}
	}
	return nil
}

func mountCgroup(target string, hybrid bool) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if !hybrid {
		return mount("cgroup2", target, "cgroup2", flags, "")
	}
	if err := mount("tmpfs", target, "tmpfs", flags, "mode=0755"); err != nil {
		return err
	}
	// systemd keeps a v1 hierarchy of its own beside unified on hybrid machines.
	// A real one would outlive the rig and show on the machine; cgroup2 mounted a
	// second time in its place serves systemd as well.
	for _, name := range []string{"unified", "systemd"} {
		if err := os.Mkdir(filepath.Join(target, name), 0o755); err != nil {
			return err
		}
		if err := mount("cgroup2", filepath.Join(target, name), "cgroup2", flags, ""); err != nil {
			return err
		}
	}
	return nil
}

// deviceNumbers are the device files a rig has: those every container has.
var deviceNumbers = map[string]int{
	"null": int(unix.Mkdev(1, 3)), "zero": int(unix.Mkdev(1, 5)), "full": int(unix.Mkdev(1, 7)),
	"random": int(unix.Mkdev(1, 8)), "urandom": int(unix.Mkdev(1, 9)), "tty": int(unix.Mkdev(5, 0)),
}

// cloneDevices prepares the machine's own device files, for machines where
// mknod is denied.
func cloneDevices() (map[string]int, error) {
	trees := map[string]int{}
	for name := range deviceNumbers {
		fd, err := cloneTree("/dev/"+name, false)
		if err != nil {
			return nil, err
		}
		trees[name] = fd
	}
	return trees, nil
}

func mountDev(dev string, devices map[string]int, console int) error {
	if err := mount("tmpfs", dev, "tmpfs", unix.MS_NOSUID, "mode=0755"); err != nil {
		return err
	}
	for name, number := range deviceNumbers {
		path := filepath.Join(dev, name)
		err := unix.Mknod(path, unix.S_IFCHR|0o666, number)
		if err == nil {
			err = os.Chmod(path, 0o666)
		} else if errors.Is(err, unix.EPERM) {
			err = attachAt(devices[name], path)
		}
		if err != nil {
			return fmt.Errorf("cannot make /dev/%s: %w", name, err)
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	if err := errors.Join(os.Mkdir(dev+"/pts", 0o755), os.Mkdir(dev+"/shm", 0o1777)); err != nil {
		return err
	}
	if err := mount("devpts", dev+"/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"); err != nil {
		return err
	}
	if err := mount("tmpfs", dev+"/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	if err := os.WriteFile(dev+"/console", nil, 0o600); err != nil {
		return err
	}
	return attach(console, dev+"/console", false)
}

// becomeMachine writes, in the new root, what makes it a machine of its own and
// returns the notification socket that systemd will use.
func becomeMachine(spec *bootSpec) (int, error) {
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return -1, err
	}
	if !spec.HostNetwork {
		if err := loopbackUp(); err != nil {
			return -1, err
		}
	}
	for _, path := range spec.Mask {
		if err := os.RemoveAll(path); err != nil {
			return -1, fmt.Errorf("cannot mask %s: %w", path, err)
		}
	}
	if err := writeConfiguration(spec); err != nil {
		return -1, err
	}
	if err := os.Mkdir(filepath.Dir(notifyPath), 0o755); err != nil {
		return -1, err
	}
	notify, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(notify, &unix.SockaddrUnix{Name: notifyPath}); err != nil {
		return -1, fmt.Errorf("cannot bind %s: %w", notifyPath, err)
	}
	return notify, dropCapabilities()
}

// dropCapabilities takes droppedCapabilities, for good, from what the calling
// thread executes from here on.
func dropCapabilities() error {
	for _, capability := range droppedCapabilities {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0); err != nil {
			return fmt.Errorf("cannot drop capability %d: %w", capability, err)
		}
	}
	return nil
}

// writeConfiguration makes /etc that of a plain machine: only the units that
// packages ship, nothing the machine's administrator enabled, no disks, and the
// normal user with linger.
func writeConfiguration(spec *bootSpec) error {
	for _, path := range []string{"/etc/systemd", "/etc/fstab", "/etc/crypttab", "/etc/machine-id", "/etc/hostname", "/var/lib/systemd/linger", "/var/log/journal"} {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/etc/systemd/system", "/etc/systemd/system-generators", "/etc/systemd/user", "/var/lib/systemd/linger", "/var/log/journal", BinDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for path, text := range map[string]string{
		"/etc/fstab":      "",
		"/etc/machine-id": spec.MachineID + "\n",
		"/etc/hostname":   spec.Hostname + "\n",
		"/etc/hosts":      "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 " + spec.Hostname + "\n",
		// Persistent, because only then users can read their own journal; it is in
		// the overlay. "Audit=" leaves the kernel's auditing, the machine's, alone.
		"/etc/systemd/journald.conf":           "[Journal]\nStorage=persistent\nReadKMsg=no\nAudit=\nRuntimeMaxUse=64M\nSystemMaxUse=64M\n",
		"/var/lib/systemd/linger/" + spec.User: "",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	// logind starts a lingering user's manager, but asks PID 1 for it too late for
	// PID 1's "ready" to include it.
	wants := "/etc/systemd/system/multi-user.target.wants"
	if err := os.Mkdir(wants, 0o755); err != nil {
		return err
	}
	if err := os.Symlink("/lib/systemd/system/user@.service", fmt.Sprintf("%s/user@%d.service", wants, spec.UID)); err != nil {
		return err
	}
	for _, unit := range maskedUnits {
		if err := os.Symlink("/dev/null", "/etc/systemd/system/"+unit); err != nil {
			return err
		}
	}
	// Generators read the machine's disks, kernel command line and init scripts.
	for _, dir := range []string{"/usr/lib/systemd/system-generators", "/lib/systemd/system-generators", "/usr/local/lib/systemd/system-generators"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if err := os.Symlink("/dev/null", "/etc/systemd/system-generators/"+e.Name()); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
		}
	}
	id := strconv.Itoa(spec.UID)
	for _, account := range []struct {
		path, line string
		mode       os.FileMode
	}{
		{"/etc/passwd", spec.User + ":x:" + id + ":" + id + "::/home/" + spec.User + ":/bin/bash", 0o644},
		{"/etc/group", spec.User + ":x:" + id + ":", 0o644},
		{"/etc/shadow", spec.User + ":*:19000:0:99999:7:::", 0o640},
		{"/etc/gshadow", spec.User + ":!::", 0o640},
	} {
		if err := setAccount(account.path, account.line, account.mode); err != nil {
			return err
		}
	}
	return nil
}

// setAccount puts one line into an account file in place of lines with the same
// name or, where the file has numbers, the same number.
func setAccount(path, line string, mode os.FileMode) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	want := strings.Split(line, ":")
	numbered := want[1] == "x"
	var out []string
	for have := range strings.Lines(string(old)) {
		have = strings.TrimSuffix(have, "\n")
		fields := strings.Split(have, ":")
		if fields[0] == want[0] || numbered && len(fields) > 2 && fields[2] == want[2] {
			continue
		}
		out = append(out, have)
	}
	return os.WriteFile(path, []byte(strings.Join(append(out, line), "\n")+"\n"), mode)
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("cannot bring up loopback: %w", err)
	}
	return nil
}

// lowerMounts lists what has to be overlaid: the root, and file systems of their
// own that hold parts of the operating system.
func lowerMounts() ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lowers := []string{"/"}
	for scan := bufio.NewScanner(f); scan.Scan(); {
		m, ok := parseMount(scan.Text())
		if !ok || slices.Contains([]string{"tmpfs", "autofs", "proc", "sysfs", "devpts"}, m.fstype) || slices.Contains(lowers, m.point) {
			continue
		}
		for _, top := range []string{"/usr", "/etc", "/var", "/opt"} {
			if m.point != top && !strings.HasPrefix(m.point, top+"/") || strings.HasPrefix(m.point, "/var/tmp") {
				continue
			}
			if info, err := os.Stat(m.point); err == nil && info.IsDir() {
				lowers = append(lowers, m.point)
			}
		}
	}
	sort.Strings(lowers)
	return lowers, nil
}

type mountPoint struct{ root, point, options, fstype, super string }

// parseMount reads one line of mountinfo.
func parseMount(line string) (mountPoint, bool) {
	left, right, ok := strings.Cut(line, " - ")
	a, b := strings.Fields(left), strings.Fields(right)
	if !ok || len(a) < 6 || len(b) < 3 {
		return mountPoint{}, false
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	return mountPoint{root: unescape.Replace(a[3]), point: unescape.Replace(a[4]), options: a[5], fstype: b[0], super: b[2]}, true
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("cannot mount %s on %s: %w", fstype, target, err)
	}
	return nil
}

// cloneTree makes a detached copy of the mount that shows path.
func cloneTree(path string, recursive bool) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags)
	if err != nil {
		return -1, fmt.Errorf("cannot clone mount of %s: %w", path, err)
	}
	return fd, nil
}

// attach mounts a detached tree on an existing path.
func attach(tree int, target string, readOnly bool) error {
	if readOnly {
		attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, attr); err != nil {
			return fmt.Errorf("cannot make %s read-only: %w", target, err)
		}
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("cannot attach %s: %w", target, err)
	}
	return nil
}

// attachAt mounts a detached tree read-only, making the place for it.
func attachAt(tree int, target string) error {
	var stat unix.Stat_t
	if err := unix.Fstat(tree, &stat); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if stat.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		return attach(tree, target, true)
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	f.Close()
	return attach(tree, target, stat.Mode&unix.S_IFMT == unix.S_IFREG)
}

// copyDir makes an empty directory with the mode and owner of another one.
func copyDir(from, to string) error {
	var stat unix.Stat_t
	if err := unix.Stat(from, &stat); err != nil {
		return err
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	return errors.Join(os.Chown(to, int(stat.Uid), int(stat.Gid)), unix.Chmod(to, stat.Mode&0o7777))
}

func sortedKeys(m map[string]int) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
