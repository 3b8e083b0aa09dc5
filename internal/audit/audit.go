// Package audit holds what the fleet tells about itself: who did what to which
// Identity or Session Browser, and how it went. Events are appended to the
// store in the transaction that made the change, so that no change is without
// its event and no event without its change; after the commit the same events
// go to one Feed, from which the journal handler and every watcher read.
package audit

import (
	"time"
)

// Kind says what sort of caller an Actor is.
type Kind string

// The kinds of actors.
const (
	KindAgent    Kind = "agent"    // a model, through an MCP channel
	KindUser     Kind = "user"     // a person, through the page or the sidebar
	KindOperator Kind = "operator" // a person on the host, through the CLI
	KindSystem   Kind = "system"   // the service itself
)

// Actor is who asked for a change, as the authenticated channel says it.
type Actor struct {
	Kind Kind `json:"kind"`
	// Name is the name the channel vouches for: a login name, a client's
	// name. It may be empty.
	Name string `json:"name,omitempty"`
	// How is the channel: "mcp", "http", "cli", "reconcile".
	How string `json:"how,omitempty"`
	// PID is the peer's process id where the channel proves one, else 0.
	PID int `json:"pid,omitempty"`
}

// Person reports whether a person acts, on the host or through the page.
func (a Actor) Person() bool { return a.Kind == KindUser || a.Kind == KindOperator }

// System is the service acting by itself, for the stated reason.
func System(how string) Actor { return Actor{Kind: KindSystem, How: how} }

// Type names what happened. Types are part of the public interface: they are
// never renamed.
type Type string

// The types that exist.
const (
	IdentityCreated    Type = "identity.created"
	IdentityRenamed    Type = "identity.renamed"
	IdentityDeleted    Type = "identity.deleted"
	IdentityLimited    Type = "identity.limited"
	LoginStarted       Type = "login.started"
	LoginStartFailed   Type = "login.start_failed"
	LoginStopped       Type = "login.stopped"
	LoginEnded         Type = "login.ended"
	LoginAdopted       Type = "login.adopted"
	SnapshotSaved      Type = "template.snapshot_saved"
	SnapshotFailed     Type = "template.snapshot_failed"
	BindingCreated     Type = "binding.created"
	BindingSwitched    Type = "binding.switched"
	SwitchUndone       Type = "binding.switch_undone"
	BindingReleased    Type = "binding.released"
	ReleaseUndone      Type = "binding.release_undone"
	SessionStarted     Type = "session_browser.started"
	SessionStartFailed Type = "session_browser.start_failed"
	SessionStopped     Type = "session_browser.stopped"
	SessionEnded       Type = "session_browser.ended"
	SessionAdopted     Type = "session_browser.adopted"
	ProfileDiscarded   Type = "profile.discarded"
	RuntimeUnverified  Type = "runtime.unverified"
	RuntimeCleaned     Type = "runtime.cleaned"
	RuntimeBroken      Type = "runtime.broken"
	RuntimeQuarantined Type = "runtime.quarantined"
	RuntimeRecovered   Type = "runtime.recovered"
	StateCopied        Type = "state.copied"
	// Gap is never stored: a Feed hands it to a watcher in place of the
	// events that the watcher was too slow to take.
	Gap Type = "gap"
)

// Event is one entry of the audit trail.
type Event struct {
	// ID grows by one with every event of this host. It is 0 on a Gap.
	ID    uint64    `json:"id"`
	At    time.Time `json:"at"`
	Type  Type      `json:"type"`
	Actor Actor     `json:"actor"`
	// Session and Identity are the ids of what the event is about, where it
	// is about one.
	Session  string `json:"session,omitempty"`
	Identity string `json:"identity,omitempty"`
	// Summary is one sentence for a person. It names no profile, instance,
	// unit, port or path.
	Summary string `json:"summary"`
	// Details are for the operator's journal only and may name internals;
	// see Public.
	Details map[string]string `json:"details,omitempty"`
}

// Public returns the event without what may never leave in an answer to an
// agent, to HTTP or to a page.
func (e Event) Public() Event {
	e.Details = nil
	e.Actor.PID = 0
	return e
}
