package role

import (
	"bufio"
	"context"
	"crypto/des"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// FirstDisplay is the lowest X display number the fleet takes. Numbers below
// it are left to desktops and to people's own servers.
const FirstDisplay = 100

// Display describes one Xvnc: an X server and a VNC server in one process,
// which listens on path sockets only.
type Display struct {
	Program       string // path of Xvnc
	Number        int    // X display number, chosen by us and never by -displayfd, which takes no lock
	Width, Height int    // pixels
	Name          string // shown by VNC viewers as the desktop's name
	Authority     string // path of the Xauthority file
	PasswordFile  string // path of the VncAuth password file
	RFBSocket     string // path of the socket VNC is served on
	Home          string // directory given as HOME, so that no user file configures the server
}

// Args returns the command line.
//
// -nolisten local drops the abstract socket, which any uid could connect to
// from any mount namespace; -UseBlacklist=0 because every peer of a unix
// socket counts as one host, and five banner probes would lock all viewers
// out; -AcceptSetDesktopSize=0 because no window manager runs that would fit
// Chromium's window to a new size.
func (d Display) Args() []string {
	return []string{
		d.Program, XDisplay(d.Number),
		"-auth", d.Authority,
		"-geometry", fmt.Sprintf("%dx%d", d.Width, d.Height), "-depth", "24",
		"-rfbport", "-1", "-rfbunixpath", d.RFBSocket, "-rfbunixmode", "0600",
		"-SecurityTypes", "VncAuth", "-PasswordFile", d.PasswordFile,
		"-UseBlacklist=0", "-AlwaysShared", "-FrameRate", "30", "-AcceptSetDesktopSize=0",
		"-nolisten", "local", "-nolisten", "tcp",
		"-desktop", d.Name, "-Log", "*:stderr:10", "-dpms", "-s", "0", "-noreset",
	}
}

// Env returns the whole environment of the role.
func (d Display) Env() []string { return serverEnv(d.Home) }

// Xvfb describes an X server that shows its screen to nobody; an X11vnc does that
// for it.
type Xvfb struct {
	Program       string // path of Xvfb
	Number        int    // X display number, chosen as that of an Xvnc is
	Width, Height int    // pixels
	Authority     string // path of the Xauthority file
	Home          string // directory given as HOME
}

// Args returns the command line.
func (x Xvfb) Args() []string {
	return []string{
		x.Program, XDisplay(x.Number),
		"-auth", x.Authority,
		"-screen", "0", fmt.Sprintf("%dx%dx24", x.Width, x.Height),
		"-nolisten", "local", "-nolisten", "tcp",
		"-dpms", "-s", "0", "-noreset",
	}
}

// Env returns the whole environment of the role.
func (x Xvfb) Env() []string { return serverEnv(x.Home) }

// serverEnv is the environment of a server that nothing but its command line
// configures.
func serverEnv(home string) []string {
	return []string{"HOME=" + home, "PATH=/usr/bin:/bin", "LANG=C.UTF-8"}
}

// XDisplay returns the name of display n as X clients take it.
func XDisplay(n int) string { return ":" + strconv.Itoa(n) }

// XLock returns the path of the lock file of display n.
func XLock(n int) string { return fmt.Sprintf("/tmp/.X%d-lock", n) }

// XSocket returns the path of the listening socket of display n.
func XSocket(n int) string { return fmt.Sprintf("/tmp/.X11-unix/X%d", n) }

// DisplayTaken reports whether display n shows any sign of use: a lock file or
// a socket. Such a number is passed over whoever owns it, live or stale.
func DisplayTaken(n int) bool {
	for _, p := range []string{XLock(n), XSocket(n)} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			return true
		}
	}
	return false
}

// ErrNotReady is returned by the readiness checks while the role does not
// answer yet. Anything else is final.
var ErrNotReady = errors.New("not answering yet")

// cookieName is the only X authorization protocol in use.
const cookieName = "MIT-MAGIC-COOKIE-1"

// NewCookie returns a fresh X cookie of 16 random bytes.
func NewCookie() []byte {
	b := make([]byte, 16)
	rand.Read(b)
	return b
}

// Authority returns an Xauthority file with one entry that lets the cookie
// open display n from any host name, so that renaming the host locks nobody
// out (libXau's FamilyWild).
func Authority(n int, cookie []byte) []byte {
	const familyWild = 0xffff
	field := func(b, v []byte) []byte {
		return append(binary.BigEndian.AppendUint16(b, uint16(len(v))), v...)
	}
	b := binary.BigEndian.AppendUint16(nil, familyWild)
	b = field(b, nil)
	b = field(b, []byte(strconv.Itoa(n)))
	b = field(b, []byte(cookieName))
	return field(b, cookie)
}

// XListens returns nil when the process pid listens on display n, some time
// before it answers: clients that connect now are served as soon as it can. It
// returns ErrNotReady while nobody does, or another process.
func XListens(ctx context.Context, n, pid int) error {
	conn, err := dialUnix(ctx, XSocket(n))
	if err != nil {
		return err
	}
	defer conn.Close()
	peer, err := listenerOf(conn)
	if err != nil {
		return fmt.Errorf("display %d: %w", n, err)
	}
	if peer != pid {
		return fmt.Errorf("%w: process %d listens on display %d", ErrNotReady, peer, n)
	}
	return nil
}

// listenerOf returns the process that accepts on the other side of a path
// socket, as the kernel recorded it when that began to listen.
func listenerOf(conn net.Conn) (pid int, err error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, fmt.Errorf("who listens: %w", err)
	}
	return int(peer.Pid), nil
}

// XReady makes an X connection with the cookie and reads the setup reply. It
// returns ErrNotReady while nobody accepts.
func XReady(ctx context.Context, n int, cookie []byte) error {
	conn, err := dialUnix(ctx, XSocket(n))
	if err != nil {
		return err
	}
	defer conn.Close()
	pad := func(v []byte) []byte { return append(v, make([]byte, (4-len(v)%4)%4)...) }
	req := []byte{'l', 0, 11, 0, 0, 0}
	req = binary.LittleEndian.AppendUint16(req, uint16(len(cookieName)))
	req = binary.LittleEndian.AppendUint16(req, uint16(len(cookie)))
	req = append(req, 0, 0)
	req = append(req, pad([]byte(cookieName))...)
	req = append(req, pad(append([]byte(nil), cookie...))...)
	if _, err := conn.Write(req); err != nil {
		return fmt.Errorf("display %d: X setup: %w", n, err)
	}
	var head [8]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return fmt.Errorf("display %d: X setup: %w", n, err)
	}
	if head[0] != 1 {
		reason := make([]byte, head[1])
		io.ReadFull(conn, reason)
		return fmt.Errorf("display %d refuses the cookie: %q", n, reason)
	}
	return nil
}

// DialRFB connects to a VNC server and returns the connection only if it is the
// process pid that listens there.
func DialRFB(ctx context.Context, socket string, pid int) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	peer, err := listenerOf(conn)
	if err == nil && peer != pid {
		err = fmt.Errorf("process %d listens on the VNC socket, not process %d", peer, pid)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// RFBReady reads the banner that a VNC server sends first. Another process than
// pid on its socket is an error.
func RFBReady(ctx context.Context, socket string, pid int) error {
	conn, err := DialRFB(ctx, socket, pid)
	if err = notReady(ctx, err); err != nil {
		return err
	}
	defer conn.Close()
	bound(ctx, conn)
	banner, err := bufio.NewReader(io.LimitReader(conn, 12)).ReadString('\n')
	if err != nil {
		return fmt.Errorf("read VNC banner: %w", err)
	}
	if !strings.HasPrefix(banner, "RFB ") {
		return fmt.Errorf("read VNC banner: got %q", banner)
	}
	return nil
}

// dialUnix connects to a path socket and bounds all reading and writing by the
// context's deadline.
func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err = notReady(ctx, err); err != nil {
		return nil, err
	}
	bound(ctx, conn)
	return conn, nil
}

// notReady makes ErrNotReady of a connection that the kernel refused.
func notReady(ctx context.Context, err error) error {
	var refused *net.OpError
	switch {
	case err != nil && ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &refused):
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return err
}

// bound ends all reading and writing with the context's deadline.
func bound(ctx context.Context, conn net.Conn) {
	t, ok := ctx.Deadline()
	if !ok {
		t = time.Now().Add(10 * time.Second)
	}
	conn.SetDeadline(t)
}

// vncKey is the fixed key of the vncpasswd format. It hides a password from a
// glance and protects nothing; the file's mode does.
var vncKey = []byte{23, 82, 107, 6, 35, 78, 88, 7}

// NewVNCPassword returns eight random printable bytes: VncAuth uses no more.
func NewVNCPassword() []byte {
	const alphabet = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
	b := make([]byte, 8)
	rand.Read(b)
	for i := range b {
		b[i] = alphabet[int(b[i])%len(alphabet)]
	}
	return b
}

// VNCPasswordFile returns the contents of a vncpasswd file.
func VNCPasswordFile(password []byte) []byte {
	out := make([]byte, 8)
	copy(out, password)
	vncCipher().Encrypt(out, out)
	return out
}

// ReadVNCPassword returns the password in a vncpasswd file.
func ReadVNCPassword(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(b) != 8 {
		return nil, fmt.Errorf("%s: %d bytes where 8 are expected", filepath.Base(path), len(b))
	}
	vncCipher().Decrypt(b, b)
	for i, c := range b {
		if c == 0 {
			return b[:i], nil
		}
	}
	return b, nil
}

type blockCipher interface {
	Encrypt(dst, src []byte)
	Decrypt(dst, src []byte)
}

// vncCipher is DES with the key's bits mirrored within each byte, as all VNC
// implementations do it.
func vncCipher() blockCipher {
	key := make([]byte, 8)
	for i, b := range vncKey {
		var r byte
		for range 8 {
			r = r<<1 | b&1
			b >>= 1
		}
		key[i] = r
	}
	c, err := des.NewCipher(key)
	if err != nil {
		panic(err) // the key is a constant of the right length
	}
	return c
}
