// Package vnc joins a person's browser to the display of a Session Browser: it
// speaks RFB to both, and passes the bytes between them.
//
// The display (Xvnc on a unix socket) only answers to a password. The person's
// browser never sees it: the gateway authenticates to the display itself, and
// offers the browser security type None, because by then the browser has been
// authenticated by other means (see package auth; Gateway must stand behind
// it). After both handshakes, from ClientInit on, nothing is interpreted.
//
// A relay holds one bounded buffer per direction and reads no further while
// the other side does not take what was read, so that a slow viewer slows its
// own display connection down and costs no memory. One that takes nothing at
// all for Options.StallTimeout is cut.
//
// The two directions are separate on purpose: what a viewer sends passes
// through relay.up alone, where a filter of its messages can stand.
package vnc
