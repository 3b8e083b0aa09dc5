package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"time"

	"abfleet/internal/config"
)

// Evidence is what a Runtime needs to prove that a running Stack is ours. The
// fleet stores it and hands it back; it never looks inside.
type Evidence = json.RawMessage

// Runtime starts, observes and stops Stacks and handles the directory trees
// that belong to them. The fleet never runs two calls about one Instance or
// about one directory at the same time, except Observe, Watch, Examine,
// OpenCDP and OpenViewer, which may run beside anything. Implementations pass fleettest.Contract.
type Runtime interface {
	// CreateProfile makes an empty Profile directory and its missing parents,
	// all 0700. A directory that is there already and safe is no error.
	CreateProfile(ctx context.Context, profileDir string) error

	// CaptureSnapshot makes snapshotDir a read-only copy of the vacant
	// profile at profileDir. The old snapshot stays until the new one is
	// complete. A profile whose browser did not end cleanly is refused with
	// fault.UncleanExit.
	CaptureSnapshot(ctx context.Context, profileDir, snapshotDir string) error

	// RemoveTree removes a directory that no Stack uses; a profile in use is
	// refused with fault.ProfileBusy. One that is absent is no error.
	RemoveTree(ctx context.Context, dir string) error

	// Sweep finishes or undoes what a crash left of the three calls above and
	// of clones among the entries of dir. An absent dir is no error.
	Sweep(ctx context.Context, dir string) error

	// Start starts a Stack and returns when it is controllable: ownership
	// proven, CDP answering, the viewer endpoint present and private. When it
	// fails or ctx ends, it cleans up with a deadline of its own and says in
	// a *StartError whether the cleanup is proven.
	Start(ctx context.Context, req StartRequest) (Evidence, error)

	// Observe says what became of a Stack, changing nothing. An error means
	// that it could not look.
	Observe(ctx context.Context, ev Evidence) (Observation, error)

	// Stop ends a Stack and all that is left of it, cleanly where possible,
	// and returns nil only when its absence is proven. Stopping what is gone
	// already is no error. What is not proven to be ours is not touched, and
	// an error.
	Stop(ctx context.Context, ev Evidence, reason string) (StopReport, error)

	// Watch returns nil once something of a Stack that was controllable has
	// ended: one of its processes, scopes or cgroups. What that means, Observe
	// tells. It waits for the kernel's events and systemd's, without polling. Its
	// error is that of ctx, or says why nothing can be watched.
	Watch(ctx context.Context, ev Evidence) error

	// Examine says what is left of a Stack whose cleanup is not proven, and what
	// Recover would make of it. It changes nothing.
	Examine(ctx context.Context, req RecoverRequest) (Examination, error)

	// Recover is Explicit Runtime Recovery, which only a person's release or
	// login may ask for: it stops the Stack as Stop does, and where a role's
	// ownership is not proven any more but can be reconstructed beyond doubt, it
	// does that first. Any ambiguity is an error and changes nothing. It returns
	// nil only when the absence of the Stack is proven, as Stop does.
	Recover(ctx context.Context, req RecoverRequest) (StopReport, error)

	// OpenCDP connects to the browser of a Stack whose ownership it proves
	// first. The connection carries raw NUL-delimited CDP messages.
	OpenCDP(ctx context.Context, ev Evidence) (net.Conn, error)

	// OpenViewer connects to the display of a Stack in the same way. One that has
	// none is fault.ViewerUnavailable, which no waiting changes.
	OpenViewer(ctx context.Context, ev Evidence) (Viewer, error)
}

// StartRequest says what to start.
type StartRequest struct {
	// Instance is the Stack's short id, stable over its restarts; Generation
	// grows by one or more with every start of it.
	Instance   string
	Generation uint64
	// Profile is the directory the browser runs on.
	Profile string
	// CloneFrom, when not empty, is the snapshot that Profile is cloned from
	// first. Profile does not exist then, and the clone is complete or absent.
	CloneFrom string
	// Limits bound the whole Stack.
	Limits config.Limits
	// URL is opened in a new tab, or none when it is empty.
	URL string
	// Session and Identity are labels for the journal. Session is empty for a
	// login.
	Session, Identity string
	// Record is called with all evidence known so far each time before a role
	// is released. An error aborts the start: that role was never ours.
	Record func(ctx context.Context, ev Evidence) error
}

// StartError is a failed Start. Confirmed means that nothing of the Stack is
// left, as proven as after Stop.
type StartError struct {
	Confirmed bool
	Err       error
}

func (e *StartError) Error() string { return e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// ErrUndecided is in the chain of an error of Start or Stop when it could not
// be found out what is left, as while the host shuts down: nothing is wrong with
// the Stack, and it is looked at again later.
var ErrUndecided = errors.New("the service manager cannot be asked")

// Observation is what Observe saw.
type Observation struct {
	// State is one of Stopped (proven vacant), Ended (the browser
	// is proven gone, another role or leftovers are not: Stop clears them),
	// Controllable (proven) and Unverified (anything else).
	State State
	// Reason says why, for the operator.
	Reason string
	// Exit is how the browser ended, nil while it runs or when unknown.
	Exit *ExitReport
}

// ExitReport is how a browser ended.
type ExitReport struct {
	// Clean means that Chromium closed its profile in order.
	Clean bool `json:"clean"`
	// Trigger is what ended it: one of the Trigger constants.
	Trigger string `json:"trigger,omitempty"`
	// Signal is the name of the signal that ended it, if one did.
	Signal string `json:"signal,omitempty"`
	// Detail is one phrase for a person: "killed by SIGKILL".
	Detail   string    `json:"detail,omitempty"`
	OOMKills int       `json:"oom_kills,omitempty"`
	At       time.Time `json:"at"`
}

// Triggers of an ExitReport.
const (
	TriggerStop     = "stop"     // the fleet closed it
	TriggerOperator = "operator" // somebody stopped its unit through systemd, which went on
	TriggerShutdown = "shutdown" // systemd stopped it as the user's manager or the host went down
	TriggerSignal   = "signal"   // a signal of somebody else's, or the kernel's
	TriggerBrowser  = "browser"  // it exited by itself
	TriggerUnknown  = "unknown"
)

// StopReport says how a proven stop went.
type StopReport struct {
	// Clean means that Chromium closed its profile in order.
	Clean bool
	// Detail is one phrase for a person.
	Detail string
}

// RecoverRequest says which Stack is meant. Evidence may be missing or refused:
// Instance and Profile are what the fleet knows by itself.
type RecoverRequest struct {
	Instance string
	// Profile is the directory the browser ran on.
	Profile  string
	Evidence Evidence
}

// Examination is what Examine found. It names units, processes and paths: it is
// for operators.
type Examination struct {
	// Vacant means that nothing of the Stack is left.
	Vacant bool `json:"vacant"`
	// Recoverable means that every role that is left is proven ours, or can be.
	Recoverable bool `json:"recoverable"`
	// Reason is why the Stack is not vacant, empty when it is.
	Reason string            `json:"reason,omitempty"`
	Roles  []RoleExamination `json:"roles,omitempty"`
}

// Verdicts of Examine on a role.
const (
	VerdictGone            = "gone"            // no process of it is left
	VerdictProven          = "proven"          // its recorded Proof holds
	VerdictReconstructible = "reconstructible" // one process proves to be it by other evidence
	VerdictAmbiguous       = "ambiguous"       // neither
)

// RoleExamination is the evidence about one role of a Stack.
type RoleExamination struct {
	Role    string `json:"role"`
	Verdict string `json:"verdict"`
	// PID is the process that the verdict is about, 0 for none.
	PID int `json:"pid,omitempty"`
	// For is the evidence that the process is ours, Against what is missing or
	// contradicts it: one phrase each.
	For     []string `json:"for,omitempty"`
	Against []string `json:"against,omitempty"`
}

// Viewer is a connection to a display, before the RFB handshake, with the
// password that the handshake will ask for.
type Viewer struct {
	Conn     net.Conn
	Password []byte
}
