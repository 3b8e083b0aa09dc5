package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// namePrefix starts the names of a rig's cgroup and temporary home; what
	// follows says which process made it, so that leftovers of dead ones can be
	// told from the property of living ones.
	namePrefix = "abfleet-rig-"
	// tempDir holds temporary homes: on disk, as real homes are.
	tempDir = "/var/tmp"
)

// cgroupRoot is a directory of a writable cgroup2 mount: the machine's own, or,
// where it has none, a private one that only this process can see.
var cgroupRoot = sync.OnceValues(func() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for scan := bufio.NewScanner(f); scan.Scan(); {
		m, ok := parseMount(scan.Text())
		if ok && m.fstype == "cgroup2" && !strings.HasPrefix(m.root, "/..") && unix.Access(m.point, unix.W_OK) == nil {
			return m.point, nil
		}
	}
	fd, err := mountPrivateCgroup()
	if err != nil {
		return "", fmt.Errorf("this machine has no writable cgroup v2 tree: %w", err)
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), nil
})

// mountPrivateCgroup makes a cgroup2 mount that is in no mount table. Its
// descriptor stays open for the life of the process.
func mountPrivateCgroup() (int, error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
}

// ownName names a new rig of this process: pid namespace, pid and start time of
// the launcher, and a counter.
func ownName() (string, error) {
	ns, err := pidNamespace()
	if err != nil {
		return "", err
	}
	start, err := startTime(os.Getpid())
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s%d-%d-%d-%d", namePrefix, ns, os.Getpid(), start, bootCounter.Add(1)), nil
}

func pidNamespace() (uint64, error) {
	var stat unix.Stat_t
	err := unix.Stat("/proc/self/ns/pid", &stat)
	return stat.Ino, err
}

// startTime is when a process started, in clock ticks since the boot of the
// machine.
func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything; field 22 counts from before it.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("cannot read start time of process %d", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// abandoned says whether a name is that of a rig whose launcher, a process of
// our pid namespace, is dead.
func abandoned(name string) bool {
	rest, ok := strings.CutPrefix(name, namePrefix)
	parts := strings.Split(rest, "-")
	if !ok || len(parts) != 4 {
		return false
	}
	ns, err := pidNamespace()
	if err != nil || parts[0] != strconv.FormatUint(ns, 10) {
		return false
	}
	pid, err := strconv.Atoi(parts[1])
	if err != nil {
		return false
	}
	start, err := startTime(pid)
	if err != nil {
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	return parts[2] != strconv.FormatUint(start, 10)
}

// sweep removes cgroups and temporary homes of dead launchers. Their processes
// died with them, by the parent death signal; stragglers are killed.
func sweep(root string) error {
	groups, err := filepath.Glob(filepath.Join(root, namePrefix+"*"))
	if err != nil {
		return err
	}
	for _, group := range groups {
		if !abandoned(filepath.Base(group)) {
			continue
		}
		if err := endCgroup(group); err != nil {
			return fmt.Errorf("cannot sweep %s: %w", group, err)
		}
	}
	homes, err := filepath.Glob(filepath.Join(tempDir, namePrefix+"*"))
	if err != nil {
		return err
	}
	for _, home := range homes {
		if abandoned(filepath.Base(home)) {
			if err := os.RemoveAll(home); err != nil {
				return err
			}
		}
	}
	return nil
}

// endCgroup kills what is in a cgroup subtree, waits until it is empty and
// removes it. A subtree that does not exist is fine: another sweep may run.
func endCgroup(group string) error {
	ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
	defer cancel()
	if err := killCgroup(group); err != nil {
		return err
	}
	if err := awaitEmpty(ctx, group); err != nil {
		return err
	}
	return removeCgroup(group)
}

func killCgroup(group string) error {
	err := os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0)
	if gone(err) {
		return nil
	}
	return err
}

func gone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) }

func populated(group string) (bool, error) {
	text, err := os.ReadFile(filepath.Join(group, "cgroup.events"))
	if gone(err) {
		return false, nil
	}
	return strings.Contains(string(text), "populated 1"), err
}

// awaitEmpty waits until no process is left in a cgroup subtree.
func awaitEmpty(ctx context.Context, group string) error {
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(watch), "inotify")
	defer f.Close()
	if _, err := unix.InotifyAddWatch(watch, filepath.Join(group, "cgroup.events"), unix.IN_MODIFY); err != nil {
		if gone(err) {
			return nil
		}
		return err
	}
	deadline, _ := ctx.Deadline()
	if err := f.SetReadDeadline(deadline); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	for {
		busy, err := populated(group)
		if err != nil || !busy {
			return err
		}
		if _, err := f.Read(buf); err != nil {
			return fmt.Errorf("%s is still populated: %w", group, err)
		}
	}
}

// removeCgroup removes a subtree leaf first.
func removeCgroup(group string) error {
	entries, err := os.ReadDir(group)
	if err != nil {
		if gone(err) {
			return nil
		}
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroup(filepath.Join(group, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(group); err != nil && !gone(err) {
		return fmt.Errorf("cannot remove %s: %w", group, err)
	}
	return nil
}

// awaitExit waits until a process has ended; one that is gone already is fine.
func awaitExit(pid int, deadline time.Time) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
