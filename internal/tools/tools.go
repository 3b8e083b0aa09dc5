// Package tools is what all MCP catalogs share: who is calling, which browser
// the call drives, how arguments are checked, and how an answer is put
// together out of sections. The catalogs themselves are the packages below it.
package tools

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Caller is who made a call, taken from the authenticated channel and never
// from a tool argument.
type Caller struct {
	// Session is the DSH session whose Session Browser is driven.
	Session string
	// Client keys tab selection, refs and page-header state: an agent id or
	// one bridge connection. Empty means the session as a whole.
	Client string
	// PID is the peer process where the channel knows it, else 0; it goes
	// into audit records only.
	PID int
}

// Fleet is the part of the fleet that tools use. The session comes from the
// Caller in the context as well as in the argument; implementations use the
// context for the actor of their audit records.
type Fleet interface {
	// Identities lists the Identities and what the session has now.
	Identities(ctx context.Context, session string) (IdentityList, error)
	// UseIdentity binds the Identity (id or exact name) to the session and
	// returns when the Session Browser is controllable.
	UseIdentity(ctx context.Context, session, ref string) (Binding, error)
	// Browser returns the Session Browser, started again when it died. Without
	// a Binding it fails with fault.IdentityNotSelected.
	Browser(ctx context.Context, session string) (Browser, error)
	// Operate says that a call uses the Session Browser until it calls done. A
	// person's release waits for that, and the call for a release.
	Operate(ctx context.Context, session string) (done func(), err error)
}

// IdentityList is the answer of Fleet.Identities.
type IdentityList struct {
	// Current is the id of the Identity bound to the session, or "".
	Current string
	// Running says whether the Session Browser runs now.
	Running    bool
	Identities []Identity
}

// Identity is one Identity as agents see it.
type Identity struct {
	ID    string
	Name  string
	State string // state of the login template, such as "READY"
}

// Binding is the answer of Fleet.UseIdentity.
type Binding struct {
	Identity string // id
}

// Browser is one generation of a Session Browser.
type Browser interface {
	// Key changes with every generation; cached engines are kept under it.
	Key() string
	// OpenCDP connects to the browser: raw NUL-delimited CDP frames.
	OpenCDP(ctx context.Context) (net.Conn, error)
}

// SnapshotMode says where the page snapshot after an action goes.
type SnapshotMode string

const (
	// SnapshotFile writes it to the session's output directory and answers a
	// link, as @playwright/mcp does.
	SnapshotFile SnapshotMode = "file"
	// SnapshotInline puts it into the answer, for clients that cannot read
	// files.
	SnapshotInline SnapshotMode = "inline"
)

// Options configure a Host.
type Options struct {
	Fleet Fleet
	// OutputDir is the directory that a session's tools write files to. It
	// need not exist.
	OutputDir func(session string) string
	// Caller tells who makes a call. Nil means CallerFrom(ctx).
	Caller func(ctx context.Context, req *mcp.CallToolRequest) (Caller, error)
	// Snapshot is the default SnapshotFile when empty.
	Snapshot SnapshotMode
	// SnapshotBytes caps one snapshot; 0 means DefaultSnapshotBytes, negative
	// means no cap.
	SnapshotBytes int
	// Now is the clock for file names and deadlines' texts; nil is time.Now.
	Now func() time.Time
}

type progressKey struct{}

// Progress returns how a call under ctx tells its client what it waits for, nil
// for a client that did not ask for that.
func Progress(ctx context.Context) func(text string) {
	tell, _ := ctx.Value(progressKey{}).(func(string))
	return tell
}

// withProgress is ctx for a call whose client may have asked for progress.
func withProgress(ctx context.Context, req *mcp.CallToolRequest) context.Context {
	token := req.Params.GetProgressToken()
	if token == nil || req.Session == nil {
		return ctx
	}
	var mu sync.Mutex
	told := 0.0
	return context.WithValue(ctx, progressKey{}, func(text string) {
		mu.Lock()
		defer mu.Unlock()
		told++
		// A client that hangs up ends the call; there is nobody else to tell.
		_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: told, Message: text})
	})
}

type callerKey struct{}

// WithCaller returns a context that carries the caller.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerFrom returns the caller that WithCaller put into the context.
func CallerFrom(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok && c.Session != ""
}
