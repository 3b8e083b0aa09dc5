// Package api is what the service and its own clients share: the paths and
// headers of the control socket and of the page, the JSON on them, and the
// client that the CLI and the stdio bridge use. The control socket is a unix
// socket that belongs to the user alone.
package api

import (
	"errors"
	"strings"
	"time"

	"abfleet/internal/fault"
)

// Version of the build, set by the linker.
var Version = "unknown"

// Headers of requests to MCPPath.
const (
	// HeaderSession names the DSH session that the caller acts for. It is
	// required: the session never comes from a tool argument.
	HeaderSession = "Abfleet-Session"
	// HeaderClient tells several MCP clients of one session apart: tabs, refs
	// and request ids are theirs alone. Optional.
	HeaderClient = "Abfleet-Client"
)

// Paths on the control socket.
const (
	MCPPath         = "/mcp"
	VersionPath     = "/v1/version"
	DoctorPath      = "/v1/doctor"
	IdentitiesPath  = "/v1/identities"
	IdentityPath    = "/v1/identity"
	LoginPath       = "/v1/identity/login"
	StopLoginPath   = "/v1/identity/stop-login"
	SavePath        = "/v1/identity/save"
	RenamePath      = "/v1/identity/rename"
	DeletePath      = "/v1/identity/delete"
	LimitsPath      = "/v1/identity/limits"
	SessionsPath    = "/v1/sessions"
	SessionPath     = "/v1/session"
	UsePath         = "/v1/session/use"
	StopSessionPath = "/v1/session/stop"
	RestartPath     = "/v1/session/restart"
	ReleasePath     = "/v1/session/release"
	RecoveryPath    = "/v1/session/recovery"
	ViewPath        = "/v1/view"
	CopyStatePath   = "/v1/store/copy"
)

// WebPrefix is where the web listener serves its API, below it SocketPath the
// one websocket.
const (
	WebPrefix  = "/api/agent-browser-fleet"
	StatusPath = WebPrefix + "/auth/status"
	SignInPath = WebPrefix + "/auth/login"
	StatePath  = WebPrefix + "/state"
	SocketPath = WebPrefix + "/novnc/ws"
)

// MaxBody caps the body of a control or web request, in bytes. MaxMCPBody caps
// one MCP message.
const (
	MaxBody    = 64 << 10
	MaxMCPBody = 4 << 20
)

// Error is the failure in an answer.
type Error struct {
	Code    fault.Code `json:"code"`
	Message string     `json:"message"`
	Hint    string     `json:"hint,omitempty"`
}

// ErrorOf returns err as it is shown to a caller.
func ErrorOf(err error) *Error {
	return &Error{Code: fault.CodeOf(err), Message: err.Error(), Hint: fault.HintOf(err)}
}

// Fault returns the error as the service had it.
func (e *Error) Fault() *fault.Error {
	op, cause, found := strings.Cut(strings.TrimPrefix(e.Message, "cannot "), ": ")
	f := &fault.Error{Code: e.Code, Op: op, Hint: e.Hint}
	if found {
		f.Err = text(cause)
	}
	return f
}

// Answered reports whether err came in an answer: whoever sent it knows more of
// its cause than can be seen from here.
func Answered(err error) bool {
	var cause text
	return errors.As(err, &cause)
}

type text string

func (t text) Error() string { return string(t) }

// Answer is the envelope of every answer: OK, and one of the others. An empty
// list is there, as [].
type Answer struct {
	OK         bool       `json:"ok"`
	Error      *Error     `json:"error,omitempty"`
	Version    *Build     `json:"version,omitempty"`
	Doctor     *Doctor    `json:"doctor,omitempty"`
	Identity   *Identity  `json:"identity,omitempty"`
	Identities []Identity `json:"identities,omitzero"`
	Session    *Session   `json:"session,omitempty"`
	Sessions   []Session  `json:"sessions,omitzero"`
	View       *View      `json:"view,omitempty"`
	// Examination is what RecoveryPath answers, beside Session.
	Examination *Examination `json:"examination,omitempty"`
}

// Build says what runs.
type Build struct {
	Version     string    `json:"version"`
	PID         int       `json:"pid"`
	StartedAt   time.Time `json:"started_at"`
	Running     int       `json:"running"`
	Quarantined int       `json:"quarantined"`
}

// Doctor is the outcome of the checks, as one of the two sides sees it.
type Doctor struct {
	OK       bool      `json:"ok"`
	Findings []Finding `json:"findings"`
}

// Finding is the outcome of one check.
type Finding struct {
	Code     string `json:"code"`
	Title    string `json:"title"`
	Severity string `json:"severity"` // of a failure: "error" or "warning"
	Status   string `json:"status"`   // "ok", "failed", "skipped"
	Text     string `json:"text"`
	Hint     string `json:"hint"` // "" unless it failed
}

// Identity is a reusable login.
type Identity struct {
	ID               string    `json:"id"`
	Name             string    `json:"name"`
	State            string    `json:"state"`
	Login            Login     `json:"login"`
	Sessions         int       `json:"sessions"`
	PreparedProfiles int       `json:"prepared_profiles"`
	Limits           Limits    `json:"limits,omitzero"`
	SnapshotAt       time.Time `json:"snapshot_at,omitzero"`
	CreatedAt        time.Time `json:"created_at"`
	UpdatedAt        time.Time `json:"updated_at"`
	Problem          *Problem  `json:"problem,omitempty"`
}

// Login is the login browser of an Identity.
type Login struct {
	State     string    `json:"state"`
	StartedAt time.Time `json:"started_at,omitzero"`
	Unsaved   bool      `json:"unsaved,omitempty"`
	Problem   *Problem  `json:"problem,omitempty"`
}

// Session is a session that is bound to an Identity.
type Session struct {
	Session      string    `json:"session"`
	IdentityID   string    `json:"identity_id"`
	IdentityName string    `json:"identity_name"`
	Wanted       string    `json:"wanted"`
	State        string    `json:"state"`
	Queued       int       `json:"queued,omitempty"`
	StartedAt    time.Time `json:"started_at,omitzero"`
	BoundAt      time.Time `json:"bound_at"`
	UpdatedAt    time.Time `json:"updated_at"`
	Problem      *Problem  `json:"problem,omitempty"`
	LastExit     *Exit     `json:"last_exit,omitempty"`
	// Instance and Slice are for operators: SessionPath alone has them.
	Instance string `json:"instance,omitempty"`
	Slice    string `json:"slice,omitempty"`
}

// Examination is the evidence about what is left of a Session Browser. It is for
// operators.
type Examination struct {
	Vacant      bool              `json:"vacant"`
	Recoverable bool              `json:"recoverable"`
	Reason      string            `json:"reason,omitempty"`
	Roles       []RoleExamination `json:"roles,omitempty"`
}

// RoleExamination is the evidence about one role.
type RoleExamination struct {
	Role    string   `json:"role"`
	Verdict string   `json:"verdict"`
	PID     int      `json:"pid,omitempty"`
	For     []string `json:"for,omitempty"`
	Against []string `json:"against,omitempty"`
}

// Problem is the last failure of something.
type Problem struct {
	Error
	At time.Time `json:"at"`
}

// Exit is how a browser ended.
type Exit struct {
	Clean    bool      `json:"clean"`
	Trigger  string    `json:"trigger,omitempty"`
	Signal   string    `json:"signal,omitempty"`
	Detail   string    `json:"detail,omitempty"`
	OOMKills int       `json:"oom_kills,omitempty"`
	At       time.Time `json:"at"`
}

// View is a link to the page that shows a browser.
type View struct {
	URL string `json:"url"`
}

// CreateIdentity is the body of POST IdentitiesPath.
type CreateIdentity struct {
	Name string `json:"name"`
}

// Limits are what the browsers of an Identity may take, as systemd writes it; an
// empty one is the configured limit.
type Limits struct {
	MemoryHigh string `json:"memory_high,omitempty"`
	MemoryMax  string `json:"memory_max,omitempty"`
	TasksMax   string `json:"tasks_max,omitempty"`
	CPUWeight  string `json:"cpu_weight,omitempty"`
}

// LimitsRequest is the body of POST LimitsPath.
type LimitsRequest struct {
	Identity string `json:"identity"`
	Limits   Limits `json:"limits"`
}

// IdentityRequest is the body of the requests about one Identity. Identity is
// its id or its name.
type IdentityRequest struct {
	Identity string `json:"identity"`
	URL      string `json:"url,omitempty"`  // LoginPath only: what to open
	Name     string `json:"name,omitempty"` // RenamePath only
}

// SessionRequest is the body of the requests about one session.
type SessionRequest struct {
	Session  string `json:"session"`
	Identity string `json:"identity,omitempty"` // UsePath only
	// LoggedOut, ReleasePath only, says that the login is lost.
	LoggedOut bool `json:"logged_out,omitempty"`
}

// CopyState is the body of POST CopyStatePath.
type CopyState struct {
	Path string `json:"path"` // absolute, where nothing is yet
}
