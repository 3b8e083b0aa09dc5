// Package fault holds the errors that reach people and models: one stable code,
// one sentence of the form "cannot <verb> <object>: <cause>", and a hint that
// says what to do next. MCP, HTTP and the CLI show the same three parts.
package fault

import (
	"errors"
	"fmt"
)

// Code names a class of failure. Codes are part of the public interface: they
// are never renamed, and clients may branch on them.
type Code string

// The codes that exist. docs/ERRORS.md is made from this list and its comments.
const (
	Internal               Code = "internal"                 // a defect of the fleet; report it
	InvalidArgument        Code = "invalid_argument"         // an argument does not make sense
	InvalidName            Code = "invalid_name"             // not a usable name for an Identity
	InvalidSession         Code = "invalid_session_id"       // the session is missing or malformed
	InvalidConfig          Code = "invalid_config"           // the configuration has a wrong or unknown setting
	IdentityNotFound       Code = "identity_not_found"       // no Identity has this id or name
	DuplicateIdentity      Code = "duplicate_identity"       // another Identity has this name, but for case
	IdentityNotReady       Code = "identity_not_ready"       // the Identity was never logged in and saved
	IdentityInUse          Code = "identity_in_use"          // a browser still uses the Identity
	IdentityNotSelected    Code = "identity_not_selected"    // the session has no Identity Binding yet
	LoginNotRunning        Code = "login_not_running"        // there is no login browser to save
	UncleanExit            Code = "unclean_exit"             // the login browser did not close cleanly; the last good snapshot stays
	SessionNotFound        Code = "session_not_found"        // no Identity is bound to this session
	BrowserNotControllable Code = "browser_not_controllable" // the browser is not proven to be ours and answering
	BrowserStopped         Code = "browser_stopped"          // the browser does not run; its next use starts it
	ViewerUnavailable      Code = "viewer_unavailable"       // this fleet runs browsers without a display
	EndpointUnsafe         Code = "endpoint_unsafe"          // an endpoint of the browser is missing, not its own, or open to others
	BrowserStartFailed     Code = "browser_start_failed"     // Runtime Start Error: the browser did not become ready
	BrowserStopUnproven    Code = "browser_stop_unproven"    // something of the browser may still be there
	ProfileBusy            Code = "profile_busy"             // another process holds the Profile
	UnsafePath             Code = "unsafe_path"              // a directory is a symlink, not ours, or open to others
	NoSpace                Code = "no_space"                 // the file system is full
	ReadOnly               Code = "read_only"                // the file system cannot be written
	ProgramMissing         Code = "program_missing"          // a program of the Stack is not installed
	UserNamespacesDenied   Code = "user_namespaces_denied"   // Chromium's sandbox cannot work here
	CgroupUnsupported      Code = "cgroup_unsupported"       // the host has no unified cgroup v2 tree
	SystemdUnavailable     Code = "systemd_unavailable"      // the systemd manager cannot be reached
	StateInUse             Code = "state_in_use"             // another service has this state open
	StateCorrupt           Code = "state_corrupt"            // the state file is damaged; it is kept aside
	StateTooNew            Code = "state_too_new"            // the state was written by a newer release
	PortTaken              Code = "port_in_use"              // another program listens on the page's port
	ServiceUnavailable     Code = "service_unavailable"      // the service cannot be reached or is stopping
	Unauthorized           Code = "unauthorized"             // not signed in
	InvalidToken           Code = "invalid_token"            // the access token is wrong
	BadOrigin              Code = "bad_origin"               // the request comes from another site
	UntrustedAuthority     Code = "untrusted_authority"      // the Host header names no host of ours
	TooManyAttempts        Code = "too_many_attempts"        // too many failed logins; wait
	NotFound               Code = "not_found"                // there is nothing at this address
	Timeout                Code = "deadline_exceeded"        // it took longer than allowed
	Canceled               Code = "canceled"                 // the caller gave up
	EffectUnknown          Code = "effect_unknown"           // the call was cut off and may have taken effect
	PageCrashed            Code = "page_crashed"             // the page crashed
	TargetNotFound         Code = "target_not_found"         // no such element or tab
	TargetAmbiguous        Code = "target_ambiguous"         // several elements match
	TargetNotActionable    Code = "target_not_actionable"    // the element cannot be acted on now
	ModalState             Code = "modal_state"              // a dialog is open, or none is
	NavigationFailed       Code = "navigation_failed"        // the page could not be loaded
	EvaluationFailed       Code = "evaluation_failed"        // the script failed
	BlockedURL             Code = "blocked_url"              // this kind of address is not opened
	FileAccessDenied       Code = "file_access_denied"       // the file is outside the allowed folder
	UnsupportedMediaType   Code = "unsupported_media_type"   // the body is not JSON
	BodyTooLarge           Code = "body_too_large"           // the body is larger than allowed
	OwnershipRefused       Code = "ownership_refused"        // evidence contradicts that this is ours
)

// Error is a failure with its code and hint. Its text is
// "cannot <Op>: <cause>"; the hint is kept apart so that each surface can
// place it.
type Error struct {
	Code Code
	// Op is the verb and its object, lower case, without a period:
	// "start session browser".
	Op string
	// Hint says what to do next, a full sentence without a period at the
	// end. It may be empty only where nothing can be done.
	Hint string
	// Err is the cause.
	Err error
}

// New makes an Error. The cause is a format string for errorf-style wrapping,
// so %w keeps the chain.
func New(code Code, op, hint, format string, args ...any) *Error {
	return &Error{Code: code, Op: op, Hint: hint, Err: fmt.Errorf(format, args...)}
}

// NotSelected is what every tool that needs a browser says before the agent has
// chosen an Identity.
func NotSelected(op string) *Error {
	return New(IdentityNotSelected, op,
		"Call agent_browser_identities to see what there is, then agent_browser_use_identity to select one; do not retry before that",
		"this session has not selected an Identity")
}

// Wrap gives err a code, an operation and a hint. A nil err stays nil.
func Wrap(err error, code Code, op, hint string) error {
	if err == nil {
		return nil
	}
	return &Error{Code: code, Op: op, Hint: hint, Err: err}
}

func (e *Error) Error() string {
	if e.Err == nil {
		return "cannot " + e.Op
	}
	return "cannot " + e.Op + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// CodeOf returns the code of the outermost Error in err's chain, and Internal
// when there is none.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return Internal
}

// HintOf returns the first non-empty hint in err's chain.
func HintOf(err error) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}

// Is reports whether any Error in err's chain carries the code.
func Is(err error, code Code) bool {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return false
		}
		if e.Code == code {
			return true
		}
		err = e.Err
	}
	return false
}
