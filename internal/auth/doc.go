// Package auth decides who may use the service, on which of its two doors.
//
// On the unix socket the kernel names the peer: PeerContext records its
// credentials and RequirePeer admits our own user only.
//
// On the loopback TCP socket anybody on the machine, and any page in any
// browser on it, can connect. There a request passes, in this order:
//
//   - the Host header must name this machine or a configured authority, so
//     that a name rebound to 127.0.0.1 gets nothing (Guard);
//   - Origin and Sec-Fetch-Site must not come from another site or port: a
//     page on another port of localhost is "same-site" and carries our
//     SameSite=Strict cookie (Guard; RequireWebSocket insists on an Origin);
//   - the cookie must be one we made for this very authority and not expired
//     (RequireCookie, RequireWebSocket).
//
// The cookie is had for the token in a file that only our user can read
// (Login). It is not that secret: it is signed with a key derived from it, so
// it outlives the service, and dies with the token or after a day.
//
// A process of the same user can read the token. Nothing here stops it; the
// system-wide variant of the service, under an UID of its own, does.
package auth
