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

// The codes that exist. docs/ERRORS.md is generated from this list.
const (
	Internal                Code = "internal"
	InvalidArgument         Code = "invalid_argument"
	InvalidName             Code = "invalid_name"
	InvalidSession          Code = "invalid_session_id"
	InvalidConfig           Code = "invalid_config"
	IdentityNotFound        Code = "identity_not_found"
	DuplicateIdentity       Code = "duplicate_identity"
	IdentityNotReady        Code = "identity_not_ready"
	IdentityInUse           Code = "identity_in_use"
	IdentityNotSelected     Code = "identity_not_selected"
	LoginNotRunning         Code = "login_not_running"
	UncleanExit             Code = "unclean_exit"
	SessionNotFound         Code = "session_not_found"
	BrowserNotControllable  Code = "browser_not_controllable"
	BrowserStartFailed      Code = "browser_start_failed"
	BrowserStopUnproven     Code = "browser_stop_unproven"
	ProfileBusy             Code = "profile_busy"
	UnsafePath              Code = "unsafe_path"
	NoSpace                 Code = "no_space"
	ProgramMissing          Code = "program_missing"
	UserNamespacesDenied    Code = "user_namespaces_denied"
	CgroupUnsupported       Code = "cgroup_unsupported"
	SystemdUnavailable      Code = "systemd_unavailable"
	StateInUse              Code = "state_in_use"
	StateCorrupt            Code = "state_corrupt"
	StateTooNew             Code = "state_too_new"
	PortTaken               Code = "port_in_use"
	ServiceUnavailable      Code = "service_unavailable"
	Unauthorized            Code = "unauthorized"
	InvalidToken            Code = "invalid_token"
	BadOrigin               Code = "bad_origin"
	UntrustedAuthority      Code = "untrusted_authority"
	TooManyAttempts         Code = "too_many_attempts"
	NotFound                Code = "not_found"
	Timeout                 Code = "deadline_exceeded"
	Canceled                Code = "canceled"
	EffectUnknown           Code = "effect_unknown"
	PageCrashed             Code = "page_crashed"
	TargetNotFound          Code = "target_not_found"
	TargetAmbiguous         Code = "target_ambiguous"
	TargetNotActionable     Code = "target_not_actionable"
	ModalState              Code = "modal_state"
	NavigationFailed        Code = "navigation_failed"
	EvaluationFailed        Code = "evaluation_failed"
	BlockedURL              Code = "blocked_url"
	FileAccessDenied        Code = "file_access_denied"
	UnsupportedMediaType    Code = "unsupported_media_type"
	BodyTooLarge            Code = "body_too_large"
	OwnershipRefused        Code = "ownership_refused"
	OwnershipNotEstablished Code = "ownership_not_established"
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
