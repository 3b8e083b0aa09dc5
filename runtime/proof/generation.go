package proof

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"abfleet/runtime/unit"
)

// The Roles that exist.
const (
	RoleDisplay  = "display"
	RoleVNC      = "vnc" // the VNC server of a display that has none itself
	RoleChromium = "chromium"
)

// Member is one process of a Generation.
type Member struct {
	PID int `json:"pid"`
	// StartTime is field 22 of /proc/PID/stat, in clock ticks since boot. With
	// the pid and the boot it names one process for good.
	StartTime uint64 `json:"start_time"`
	PGID      int    `json:"pgid"`
	UID       int    `json:"uid"`
}

// Generation is the recorded evidence of one start of one Role. It is written
// to the store and to the pidfile before the Role is released.
type Generation struct {
	Instance string `json:"instance"`
	Role     string `json:"role"`
	// Number only grows within an Instance; it is the last part of Unit.
	Number       uint64 `json:"generation"`
	Unit         string `json:"unit"`
	InvocationID string `json:"invocation_id"`
	Cgroup       string `json:"cgroup"`
	CgroupID     uint64 `json:"cgroup_id"`
	BootID       string `json:"boot_id"`
	// Leader is the process that was put into the scope: the display server, or
	// the holder of Chromium.
	Leader Member `json:"leader"`
	// Browser is Chromium's browser process, recorded before the Stack is ready.
	Browser *Member `json:"browser,omitempty"`
	// Profile and LockFile are paths, set for the chromium Role.
	Profile  string `json:"profile,omitempty"`
	LockFile string `json:"lock_file,omitempty"`
	// Display is the X display number, 0 for none.
	Display int `json:"display,omitempty"`
	// Root is the path of the Instance's runtime-root evidence file.
	Root string `json:"root"`
	// Sockets are paths of the unix sockets that this Role listens on. For the
	// vnc Role, and for a display Role that serves VNC itself, they include the
	// one that VNC is served on.
	Sockets []string `json:"sockets,omitempty"`
	// Listener is the TCP address that the browser listens on beside its
	// debugging pipe, "" for none. It is recorded with the browser.
	Listener string `json:"listener,omitempty"`
}

// incomplete returns what is missing for the Generation to prove anything.
func (g Generation) incomplete() string {
	switch {
	case g.Instance == "":
		return "instance"
	case g.Role != RoleDisplay && g.Role != RoleVNC && g.Role != RoleChromium:
		return "role"
	case g.Number == 0:
		return "generation"
	case g.Unit == "":
		return "unit"
	case len(g.InvocationID) != 32:
		return "invocation id"
	case g.Cgroup == "" || g.Cgroup == "/" || filepath.Base(g.Cgroup) != g.Unit:
		return "cgroup"
	case g.CgroupID == 0:
		return "cgroup id"
	case g.BootID == "":
		return "boot id"
	case !g.Leader.complete():
		return "leader"
	case g.Browser != nil && !g.Browser.complete():
		return "browser"
	case !filepath.IsAbs(g.Root):
		return "root"
	case g.Role != RoleChromium && g.Display <= 0:
		return "display"
	case g.Role == RoleVNC && len(g.Sockets) == 0:
		return "socket"
	case g.Role == RoleChromium && (!filepath.IsAbs(g.Profile) || !filepath.IsAbs(g.LockFile)):
		return "profile"
	}
	return ""
}

// members are the recorded processes.
func (g Generation) members() []Member {
	var all []Member
	if g.Leader.PID > 0 {
		all = append(all, g.Leader)
	}
	if g.Browser != nil && g.Browser.PID > 0 {
		all = append(all, *g.Browser)
	}
	return all
}

// orphaned reports whether the browser process leads the Generation: its holder
// has died, and a recovery has proven the browser by itself.
func (g Generation) orphaned() bool {
	return g.Role == RoleChromium && g.Browser != nil && *g.Browser == g.Leader
}

// complete wants a process that leads its own group. PGID 0 and 1 would reach
// far more than one process.
func (m Member) complete() bool {
	return m.PID > 1 && m.StartTime > 0 && m.PGID == m.PID && m.UID >= 0
}

// contradicts returns the first field in which two records of one Generation
// differ. A browser and its listener may be known to one of them only: they are
// recorded later than the rest, and a crash may lie between the two writes.
func (g Generation) contradicts(o Generation) string {
	switch {
	case g.Instance != o.Instance:
		return "instance"
	case g.Role != o.Role:
		return "role"
	case g.Number != o.Number:
		return "generation"
	case g.Unit != o.Unit:
		return "unit"
	case g.InvocationID != o.InvocationID:
		return "invocation id"
	case g.Cgroup != o.Cgroup || g.CgroupID != o.CgroupID:
		return "cgroup"
	case g.BootID != o.BootID:
		return "boot id"
	case g.Leader != o.Leader:
		return "leader"
	case g.Browser != nil && o.Browser != nil && *g.Browser != *o.Browser:
		return "browser"
	case g.Profile != o.Profile || g.LockFile != o.LockFile:
		return "profile"
	case g.Display != o.Display:
		return "display"
	case g.Root != o.Root:
		return "root"
	case g.Listener != "" && o.Listener != "" && g.Listener != o.Listener:
		return "listener"
	}
	return ""
}

// Capture fills in the evidence of a Generation from its scope and from /proc.
// base brings what only the caller knows: Instance, Role, Number, Root, and what
// the Role needs of Profile, LockFile, Display and Sockets. The caller makes sure
// that the number is still the process it means: it is unreaped by us and still
// blocked in the trampoline, or the start time of what was captured is compared
// with that of what was examined. It must be a live process of our user, lead its
// own process group and be in the scope's cgroup.
func Capture(info unit.Info, pid int, base Generation) (Generation, error) {
	g := base
	g.Unit, g.InvocationID, g.Cgroup, g.CgroupID = info.Name, info.InvocationID, info.ControlGroup, info.CgroupID
	boot, err := bootID()
	if err != nil {
		return Generation{}, refuse(Unreadable, "boot id: %w", err)
	}
	g.BootID = boot
	m, _, err := observe(pid)
	if err != nil {
		return Generation{}, err
	}
	if m.UID != os.Geteuid() {
		return Generation{}, refuse(UIDDiffers, "process %d runs as uid %d, we as %d", pid, m.UID, os.Geteuid())
	}
	if m.PGID != pid {
		return Generation{}, refuse(PGIDDiffers, "process %d does not lead its group %d", pid, m.PGID)
	}
	g.Leader = m
	if err := inCgroup(pid, g); err != nil {
		return Generation{}, err
	}
	if missing := g.incomplete(); missing != "" {
		return Generation{}, refuse(RecordIncomplete, "no valid %s", missing)
	}
	return g, nil
}

// observe reads what identifies a live process. The error is a *Refusal.
func observe(pid int) (Member, stat, error) {
	s, err := readStat(pid)
	if err == nil && s.dead() {
		return Member{}, s, refuse(PIDGone, "process %d has ended", pid)
	}
	var uid int
	if err == nil {
		uid, err = readUID(pid)
	}
	if err != nil {
		return Member{}, s, unreadable(pid, err)
	}
	return Member{PID: pid, StartTime: s.StartTime, PGID: s.PGID, UID: uid}, s, nil
}

// unreadable is the Refusal for evidence that could not be read from /proc.
func unreadable(pid int, err error) *Refusal {
	if errors.Is(err, errGone) {
		return refuse(PIDGone, "there is no process %d", pid)
	}
	return refuse(Unreadable, "process %d: %w", pid, err)
}

// inCgroup checks that the process is in the recorded cgroup and that this is
// still the recorded directory.
func inCgroup(pid int, g Generation) error {
	cg, err := unit.OfPID(pid)
	if err != nil {
		if !alive(pid) {
			return unreadable(pid, errGone)
		}
		return refuse(CgroupDiffers, "cgroup of process %d: %w", pid, err)
	}
	if cg.Path != g.Cgroup {
		return refuse(CgroupDiffers, "process %d is in %s, not in %s", pid, cg.Path, g.Cgroup)
	}
	id, err := cg.ID()
	if err != nil {
		return refuse(CgroupDiffers, "cgroup of process %d: %w", pid, err)
	}
	if id != g.CgroupID {
		return refuse(CgroupIDDiffers, "cgroup %s has number %d, not %d", cg.Path, id, g.CgroupID)
	}
	return nil
}

// same checks that a process is the recorded one.
func (m Member) same(got Member) error {
	switch {
	case got.StartTime != m.StartTime:
		return refuse(StartTimeDiffers, "process %d started at tick %d, not %d", m.PID, got.StartTime, m.StartTime)
	case got.UID != m.UID:
		return refuse(UIDDiffers, "process %d runs as uid %d, not %d", m.PID, got.UID, m.UID)
	case got.PGID != m.PGID:
		return refuse(PGIDDiffers, "process %d is in group %d, not %d", m.PID, got.PGID, m.PGID)
	}
	return nil
}

// String names the Generation for operators.
func (g Generation) String() string {
	return fmt.Sprintf("%s generation %d of %s", g.Role, g.Number, g.Instance)
}
