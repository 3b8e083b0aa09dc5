package doctor

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

type unixStat = syscall.Stat_t

// The first arguments under which this program runs as its own probe.
const (
	namespaceProbe = "abfleet-probe-namespaces"
	scopeProbe     = "abfleet-probe-scope"
)

// A check that needs a child process starts this very program again, which is
// there for sure, under a name that makes it do nothing.
func init() {
	if len(os.Args) != 1 {
		return
	}
	switch os.Args[0] {
	case namespaceProbe:
		os.Exit(0)
	case scopeProbe:
		// Lives until the check closes the pipe, or dies.
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
}

func checkUserNamespaces(ctx context.Context, _ *Env) (string, error) {
	return "a process can have its own user, pid and network namespaces", UserNamespaces(ctx)
}

// UserNamespaces makes the namespaces that Chromium's sandbox needs, in a child
// that ends at once, and returns which setting of this host or of the calling
// unit forbids them.
func UserNamespaces(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{namespaceProbe}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// A new network namespace needs a capability inside the new user
		// namespace: some hosts give the namespace and deny that.
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}},
	}
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fault.New(fault.Timeout, "make user namespaces", "", "%w", ctx.Err())
	}
	cause, hint := blame("/proc")
	if cause == "" {
		cause, hint = "the kernel or a container forbids it", "Allow unprivileged user namespaces on this host"
	}
	return fault.New(fault.UserNamespacesDenied, "make user namespaces for Chromium's sandbox", hint, "%s: %w", cause, errno(err))
}

// errno returns the system's own error behind a failed start.
func errno(err error) error {
	var number syscall.Errno
	if errors.As(err, &number) {
		return number
	}
	return err
}

// blame names the setting that forbids user namespaces, as read from proc.
func blame(proc string) (cause, hint string) {
	read := func(path string) string {
		data, err := os.ReadFile(proc + path)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(data))
	}
	switch {
	case read("/sys/user/max_user_namespaces") == "0":
		return "the sysctl user.max_user_namespaces is 0", "Run as root: sysctl user.max_user_namespaces=10000"
	case read("/sys/kernel/unprivileged_userns_clone") == "0":
		return "the sysctl kernel.unprivileged_userns_clone is 0", "Run as root: sysctl kernel.unprivileged_userns_clone=1"
	case seccompFiltered(read("/self/status")):
		return "a seccomp filter of the unit or container forbids it", "Remove RestrictNamespaces= and other sandbox settings from the service's unit (systemctl --user cat abfleetd), or allow user namespaces in the container"
	case read("/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
		return "AppArmor restricts it (kernel.apparmor_restrict_unprivileged_userns is 1)", "Install an AppArmor profile with `userns,` for abfleet-role and Chromium, or run as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
	}
	return "", ""
}

// seccompFiltered reads from a /proc/PID/status whether a filter is in force.
func seccompFiltered(status string) bool {
	for line := range bytes.Lines([]byte(status)) {
		if value, ok := bytes.CutPrefix(line, []byte("Seccomp:")); ok {
			return string(bytes.TrimSpace(value)) == "2"
		}
	}
	return false
}
