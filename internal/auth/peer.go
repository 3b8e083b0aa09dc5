package auth

import (
	"context"
	"net"
	"net/http"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
)

// Peer is the process at the other end of a unix socket, as the kernel saw it
// when it connected. The pid may since have ended; it serves the audit record,
// not decisions.
type Peer struct {
	PID, UID, GID int
}

type peerKey struct{}

// PeerContext puts the Peer of a unix socket connection into ctx. It is meant
// for http.Server.ConnContext; any other connection leaves ctx without one.
func PeerContext(ctx context.Context, conn net.Conn) context.Context {
	peer, err := PeerOf(conn)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, peer)
}

// PeerOf asks the kernel who is at the other end of a unix socket.
func PeerOf(conn net.Conn) (Peer, error) {
	const op = "identify peer"
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return Peer{}, fault.New(fault.Unauthorized, op, "", "not a unix socket")
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return Peer{}, fault.Wrap(err, fault.Unauthorized, op, "")
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, fault.Wrap(err, fault.Unauthorized, op, "")
	}
	if credErr != nil {
		return Peer{}, fault.Wrap(credErr, fault.Unauthorized, op, "")
	}
	return Peer{PID: int(cred.Pid), UID: int(cred.Uid), GID: int(cred.Gid)}, nil
}

// PeerFrom returns the Peer that PeerContext found.
func PeerFrom(ctx context.Context) (Peer, bool) {
	peer, ok := ctx.Value(peerKey{}).(Peer)
	return peer, ok
}

// RequirePeer lets requests of our own user's processes pass, as operator; a
// route for agents replaces the Actor with what its channel says. The socket's
// mode keeps others out already; root is not let in by it, because what it does
// as another user it should do as that user.
func RequirePeer(next http.Handler, deny DenyFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer, ok := PeerFrom(r.Context())
		if !ok || peer.UID != os.Geteuid() {
			deny(w, r, fault.New(fault.Unauthorized, "answer this request", "Run the command as the user whose fleet this is", "the peer is not the service's own user"))
			return
		}
		actor := audit.Actor{Kind: audit.KindOperator, Name: "uid " + strconv.Itoa(peer.UID), How: "cli", PID: peer.PID}
		next.ServeHTTP(w, r.WithContext(WithActor(r.Context(), actor)))
	})
}
