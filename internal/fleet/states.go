package fleet

import (
	"fmt"
	"strings"
)

// State is a state of an Identity, a Profile or a runtime, as it is stored and
// shown.
type State string

// States of a runtime, that is of the one Stack of a Profile or of a login.
const (
	Stopped      State = "stopped"      // nothing of it runs, proven
	Starting     State = "starting"     // a start is recorded, its outcome is not
	Controllable State = "controllable" // proven ours and answering
	Stopping     State = "stopping"     // a stop is recorded, its outcome is not
	Unverified   State = "unverified"   // its last observation proved nothing
	Broken       State = "BROKEN"       // a cleanup was not confirmed: it may run
	Quarantined  State = "quarantined"  // neither observation nor cleanup worked
)

// Ended is no state of a runtime: an Observation says by it that the
// browser is gone and the rest of the Stack is not.
const Ended State = "ended"

// States of an Identity and of a Profile; a Profile may also be Broken, and
// needs a login when a person says so.
const (
	NeedsLogin State = "NEEDS_LOGIN"
	Ready      State = "READY"
	Creating   State = "CREATING"
	Deleting   State = "DELETING" // an Identity that is being removed
)

// stateNone is before the first and after the last state.
const stateNone State = ""

// machine is one of the three things that have states.
type machine string

const (
	machineIdentity machine = "Identity"
	machineProfile  machine = "Profile"
	machineRuntime  machine = "Runtime"
)

// trigger is an event that may change a state.
type trigger string

const (
	onCreate      trigger = "create"
	onDiscard     trigger = "discard"
	onDelete      trigger = "delete"
	onLoggedOut   trigger = "logged out"
	onRenew       trigger = "renew"
	onSaved       trigger = "saved"
	onSaveFailed  trigger = "save failed"
	onStart       trigger = "start"
	onStarted     trigger = "started"
	onStartFailed trigger = "start failed"
	onStop        trigger = "stop"
	onStopDone    trigger = "stop done"
	onObserved    trigger = "observed"
	onCleaned     trigger = "cleaned"
	onRecovered   trigger = "recovered"
	onRestored    trigger = "restored"
)

// facts is what is known when a trigger comes. Proof and vacant are only ever
// set from the answer of a Runtime.
type facts struct {
	proof  bool // the Runtime proved the Stack ours and answering
	vacant bool // the Runtime proved that nothing of the Stack is left
	user   bool // a person's explicit action asks for it
	whole  bool // the Profile was complete once
}

// guard is a named condition on facts.
type guard string

const (
	always      guard = ""
	ifProof     guard = "proof"
	ifUser      guard = "a person asked"
	ifVacant    guard = "vacant"
	ifNotVacant guard = "not vacant"
	ifUnproven  guard = "neither proof nor vacant"
	ifRecovery  guard = "vacant and a person asked"
	ifWhole     guard = "vacant, a person asked, Profile whole"
	ifNotWhole  guard = "vacant, a person asked, Profile not whole"
)

var guards = map[guard]func(facts) bool{
	always:      func(facts) bool { return true },
	ifProof:     func(f facts) bool { return f.proof && !f.vacant },
	ifVacant:    func(f facts) bool { return f.vacant && !f.proof },
	ifUser:      func(f facts) bool { return f.user },
	ifNotVacant: func(f facts) bool { return !f.vacant },
	ifUnproven:  func(f facts) bool { return f.vacant == f.proof },
	ifRecovery:  func(f facts) bool { return f.vacant && f.user },
	ifWhole:     func(f facts) bool { return f.vacant && f.user && f.whole },
	ifNotWhole:  func(f facts) bool { return f.vacant && f.user && !f.whole },
}

// transition is one row of the table.
type transition struct {
	machine machine
	from    State
	on      trigger
	guard   guard
	to      State
	effect  string // for the reader and the diagram
}

// transitions is every change of state that there is. docs/states.md is made
// from it, and a test walks it.
var transitions = []transition{
	{machineIdentity, stateNone, onCreate, always, NeedsLogin, "no snapshot yet"},
	{machineIdentity, NeedsLogin, onSaved, ifVacant, Ready, "first Template Snapshot"},
	{machineIdentity, NeedsLogin, onSaveFailed, always, NeedsLogin, "problem kept"},
	{machineIdentity, Ready, onSaved, ifVacant, Ready, "new Template Snapshot"},
	{machineIdentity, Ready, onSaveFailed, always, Ready, "last good snapshot kept"},
	{machineIdentity, NeedsLogin, onDelete, ifRecovery, Deleting, "not usable any more"},
	{machineIdentity, Ready, onDelete, ifRecovery, Deleting, "not usable any more"},
	{machineIdentity, Deleting, onDiscard, ifVacant, stateNone, "trees and records removed"},

	{machineProfile, stateNone, onCreate, always, Creating, "reserved"},
	{machineProfile, Creating, onStarted, ifProof, Ready, "clone complete"},
	{machineProfile, Creating, onDiscard, ifVacant, stateNone, "tree and record removed"},
	{machineProfile, Creating, onStartFailed, ifNotVacant, Broken, "not allocated again"},
	{machineProfile, Creating, onStopDone, ifNotVacant, Broken, "not allocated again"},
	{machineProfile, Ready, onStarted, ifProof, Ready, ""},
	{machineProfile, Ready, onStartFailed, ifNotVacant, Broken, "not allocated again"},
	{machineProfile, Ready, onStopDone, ifNotVacant, Broken, "not allocated again"},
	{machineProfile, Broken, onRecovered, ifWhole, Ready, "may be allocated again"},
	{machineProfile, Broken, onRecovered, ifNotWhole, Creating, ""},
	{machineProfile, Creating, onRestored, ifUser, Ready, "finished after the copy was made"},
	{machineProfile, Broken, onRestored, ifUser, Broken, "finished after the copy was made"},
	{machineProfile, Ready, onLoggedOut, ifUser, NeedsLogin, "not allocated again"},
	{machineProfile, Creating, onLoggedOut, ifUser, Creating, ""},
	{machineProfile, NeedsLogin, onRenew, ifVacant, Creating, "cloned anew from a newer Template Snapshot"},
	{machineProfile, Creating, onDelete, ifRecovery, stateNone, "removed with its Identity"},
	{machineProfile, Ready, onDelete, ifRecovery, stateNone, "removed with its Identity"},
	{machineProfile, NeedsLogin, onDelete, ifRecovery, stateNone, "removed with its Identity"},
	{machineProfile, Broken, onDelete, ifRecovery, stateNone, "removed with its Identity"},

	{machineRuntime, Stopped, onStart, always, Starting, "generation counted"},
	{machineRuntime, Starting, onStarted, ifProof, Controllable, "evidence stored"},
	{machineRuntime, Starting, onStartFailed, ifVacant, Stopped, "Binding kept"},
	{machineRuntime, Starting, onStartFailed, ifNotVacant, Broken, "Binding kept"},
	{machineRuntime, Starting, onStop, always, Stopping, ""},
	{machineRuntime, Controllable, onStop, always, Stopping, ""},
	{machineRuntime, Unverified, onStop, always, Stopping, ""},
	{machineRuntime, Stopping, onStop, always, Stopping, ""},
	{machineRuntime, Stopping, onStopDone, ifVacant, Stopped, ""},
	{machineRuntime, Stopping, onStopDone, ifNotVacant, Broken, "Binding kept"},
	{machineRuntime, Starting, onObserved, ifProof, Controllable, "adopted"},
	{machineRuntime, Starting, onObserved, ifVacant, Stopped, ""},
	{machineRuntime, Starting, onObserved, ifUnproven, Unverified, "cleaned up next"},
	{machineRuntime, Controllable, onObserved, ifProof, Controllable, "adopted"},
	{machineRuntime, Controllable, onObserved, ifVacant, Stopped, "its end is audited"},
	{machineRuntime, Controllable, onObserved, ifUnproven, Unverified, "cleaned up next"},
	{machineRuntime, Stopping, onObserved, ifProof, Controllable, "stopped again if so wanted"},
	{machineRuntime, Stopping, onObserved, ifVacant, Stopped, ""},
	{machineRuntime, Stopping, onObserved, ifUnproven, Unverified, "cleaned up next"},
	{machineRuntime, Unverified, onObserved, ifProof, Controllable, "adopted"},
	{machineRuntime, Unverified, onObserved, ifVacant, Stopped, "its end is audited"},
	{machineRuntime, Unverified, onObserved, ifUnproven, Unverified, "cleaned up next"},
	{machineRuntime, Quarantined, onObserved, ifProof, Controllable, "adopted"},
	{machineRuntime, Quarantined, onObserved, ifVacant, Stopped, "its end is audited"},
	{machineRuntime, Quarantined, onObserved, ifUnproven, Quarantined, "cleaned up next"},
	{machineRuntime, Unverified, onCleaned, ifVacant, Stopped, ""},
	{machineRuntime, Unverified, onCleaned, ifNotVacant, Quarantined, "not exposed"},
	{machineRuntime, Quarantined, onCleaned, ifVacant, Stopped, ""},
	{machineRuntime, Quarantined, onCleaned, ifNotVacant, Quarantined, "not exposed"},
	{machineRuntime, Broken, onCleaned, always, Broken, "never READY by it"},
	{machineRuntime, Broken, onRecovered, ifRecovery, Stopped, "error cleared"},
}

// next returns the state after a trigger. A trigger that has no row is a
// mistake in this package, not in what a caller asked for.
func next(m machine, from State, on trigger, f facts) (State, error) {
	for _, t := range transitions {
		if t.machine == m && t.from == from && t.on == on && guards[t.guard](f) {
			return t.to, nil
		}
	}
	return from, fmt.Errorf("%s in state %q has no transition on %q with %+v", m, from, on, f)
}

// diagram returns docs/states.md.
func diagram() string {
	var b strings.Builder
	b.WriteString("# States\n\nMade from the table in internal/fleet/states.go by `go test ./internal/fleet -run TestDiagram -update`.\n" +
		"`[*]` is before the first and after the last state; the condition is in brackets.\n")
	name := func(s State) string {
		if s == stateNone {
			return "[*]"
		}
		return string(s)
	}
	for _, m := range []machine{machineIdentity, machineProfile, machineRuntime} {
		fmt.Fprintf(&b, "\n## %s\n\n```mermaid\nstateDiagram-v2\n", m)
		if m == machineRuntime {
			fmt.Fprintf(&b, "    [*] --> %s\n", Stopped)
		}
		for _, t := range transitions {
			if t.machine != m {
				continue
			}
			fmt.Fprintf(&b, "    %s --> %s: %s", name(t.from), name(t.to), t.on)
			if t.guard != always {
				fmt.Fprintf(&b, " [%s]", t.guard)
			}
			if t.effect != "" {
				fmt.Fprintf(&b, " / %s", t.effect)
			}
			b.WriteByte('\n')
		}
		b.WriteString("```\n")
	}
	return b.String()
}
