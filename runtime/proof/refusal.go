package proof

import (
	"errors"
	"fmt"
)

// Reason names why evidence was refused. Reasons are stable: they are recorded
// in audit events and compared by tests.
type Reason string

// Reasons of a refused Live.
const (
	// RecordIncomplete: the record lacks a piece of evidence.
	RecordIncomplete Reason = "record_incomplete"
	// BootDiffers: the record is of another boot of this host.
	BootDiffers Reason = "boot_differs"
	// NoPidfile: the Generation's pidfile is not there.
	NoPidfile Reason = "no_pidfile"
	// PidfileUnsafe: the pidfile is a link, foreign, or open to others.
	PidfileUnsafe Reason = "pidfile_unsafe"
	// PidfileLegacy: a bare number, which authorises nothing.
	PidfileLegacy Reason = "pidfile_legacy"
	// PidfilePartial: unreadable, or a piece of evidence is missing in it.
	PidfilePartial Reason = "pidfile_partial"
	// PidfileDiffers: pidfile and record contradict each other.
	PidfileDiffers Reason = "pidfile_differs"
	// PIDGone: no process of that number, or only its zombie.
	PIDGone Reason = "pid_gone"
	// StartTimeDiffers: the number belongs to a later process.
	StartTimeDiffers Reason = "start_time_differs"
	// UIDDiffers: the process runs as another user.
	UIDDiffers Reason = "uid_differs"
	// PGIDDiffers: the process is in another group, or does not lead its own.
	PGIDDiffers Reason = "pgid_differs"
	// CgroupDiffers: the process, or the unit, is in another cgroup.
	CgroupDiffers Reason = "cgroup_differs"
	// CgroupIDDiffers: the cgroup has been made anew under the same path.
	CgroupIDDiffers Reason = "cgroup_id_differs"
	// UnitGone: systemd has no such unit.
	UnitGone Reason = "unit_gone"
	// UnitInactive: systemd has the unit but calls it inactive or failed.
	UnitInactive Reason = "unit_inactive"
	// InvocationDiffers: the unit was started anew under the same name.
	InvocationDiffers Reason = "invocation_differs"
	// UnitUnknown: systemd could not be asked.
	UnitUnknown Reason = "unit_unknown"
	// SignatureDiffers: the process does not look like its Role.
	SignatureDiffers Reason = "role_signature_differs"
	// RootMissing: the process does not hold the Instance's root file open.
	RootMissing Reason = "root_evidence_missing"
	// RootContradicts: the process holds another Instance's root file open.
	RootContradicts Reason = "root_evidence_contradicts"
	// ParentDiffers: the browser's parent is not the leader.
	ParentDiffers Reason = "parent_differs"
	// SingletonDiffers: the Profile's SingletonLock does not name the browser.
	SingletonDiffers Reason = "singleton_differs"
	// LockMissing: the process does not hold the lock of the Profile.
	LockMissing Reason = "lock_evidence_missing"
	// ListenerDiffers: another process listens on a socket of the Role, or on
	// its recorded TCP address.
	ListenerDiffers Reason = "listener_differs"
	// NoBrowser: no browser member is known.
	NoBrowser Reason = "no_browser"
	// Closed: the Live was closed.
	Closed Reason = "closed"
	// Unreadable: evidence exists but could not be read.
	Unreadable Reason = "evidence_unreadable"
)

// Reasons of a refused Vacant, beside UnitUnknown and Unreadable.
const (
	// Populated: a recorded cgroup, or the Stack's slice, has processes.
	Populated Reason = "populated"
	// StillAlive: a recorded process lives, wherever it is now.
	StillAlive Reason = "alive"
	// LockHeld: a process holds the flock of the Profile.
	LockHeld Reason = "lock_held"
	// LockUnsafe: the lock file is not a regular file of ours.
	LockUnsafe Reason = "lock_unsafe"
	// SingletonLive: the SingletonLock names a live browser.
	SingletonLive Reason = "singleton_live"
	// SingletonUnclear: the SingletonLock cannot be understood, or names
	// another host where no lock of ours says that the Profile is free.
	SingletonUnclear Reason = "singleton_unclear"
	// Elsewhere: a process with a Role signature of this Instance lives
	// outside all recorded cgroups.
	Elsewhere Reason = "role_signature_elsewhere"
	// DisplayLive: an X server of our user answers on the display.
	DisplayLive Reason = "display_live"
	// DisplayLockDiffers: the X lock does not name the dead process it should.
	DisplayLockDiffers Reason = "display_lock_differs"
	// DisplayBusy: an X server is just taking the display number.
	DisplayBusy Reason = "display_busy"
	// ListenerLive: somebody listens on a socket of ours, or on our TCP address.
	ListenerLive Reason = "listener_live"
)

// Reasons of a refused reconstruction, beside those above.
const (
	// Ambiguous: more than one process, or an incomplete one, may be the Role.
	Ambiguous Reason = "ambiguous"
	// ScopeContradicts: the process is where no process of this Role can be.
	ScopeContradicts Reason = "scope_contradicts"
)

// Refusal says that evidence is missing, partial or contradictory. It is the
// only error type that Verifier, Live and Vacant return for what they found;
// a context that ended is found behind it with errors.Is.
type Refusal struct {
	Reason Reason
	// Detail says what was expected and what was found. It may name units,
	// pids and paths: it is for operators, never for agents.
	Detail string
	// Err is the error that kept evidence from being read, if one did.
	Err error
}

func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Detail }

func (r *Refusal) Unwrap() error { return r.Err }

// Is makes errors.Is find a Refusal by its Reason alone, also where others are
// joined to it.
func (r *Refusal) Is(target error) bool {
	t, ok := target.(*Refusal)
	return ok && *t == Refusal{Reason: r.Reason}
}

// ReasonOf returns the Reason of the first Refusal in err's chain, or "".
func ReasonOf(err error) Reason {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Reason
	}
	return ""
}

// Ended reports whether err says that the recorded process does not exist any
// more: it has ended, its number belongs to a later process, or the host was
// restarted since. Nothing else follows from it; what the process may have left
// is for Vacant to say.
func Ended(err error) bool {
	switch ReasonOf(err) {
	case PIDGone, StartTimeDiffers, BootDiffers:
		return true
	}
	return false
}

func refuse(reason Reason, format string, args ...any) *Refusal {
	err := fmt.Errorf(format, args...)
	return &Refusal{Reason: reason, Detail: err.Error(), Err: errors.Unwrap(err)}
}
