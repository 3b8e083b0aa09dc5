package vnc

import (
	"bytes"
	"crypto/des"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"strings"
)

// protocolVersion is the only version spoken, to both sides.
const protocolVersion = "RFB 003.008\n"

// Security types of RFC 6143, 7.2.
const (
	securityNone    = 1
	securityVNCAuth = 2
)

const (
	// challengeSize is the length of a VncAuth challenge and of its answer.
	challengeSize = 16
	// maxReason caps how much of a peer's failure reason is read: the length
	// in front of it is the peer's claim, up to 4 GiB.
	maxReason = 512
)

var (
	errNoPassword    = errors.New("no password for the display")
	errNoVNCAuth     = errors.New("the display does not ask for a password")
	errDisplayDenied = errors.New("the display refused the service")
)

// authenticateDisplay performs the client's half of the RFB handshake up to
// and including SecurityResult. It reads exactly the handshake's bytes, so
// what follows is still in conn. A display that asks for no password is
// refused: it would be open to every local user.
func authenticateDisplay(conn io.ReadWriter, password []byte) error {
	if len(password) == 0 {
		return errNoPassword
	}
	if err := readVersion(conn); err != nil {
		return fmt.Errorf("display version: %w", err)
	}
	if _, err := io.WriteString(conn, protocolVersion); err != nil {
		return fmt.Errorf("send version: %w", err)
	}
	var count [1]byte
	if _, err := io.ReadFull(conn, count[:]); err != nil {
		return fmt.Errorf("display security types: %w", err)
	}
	if count[0] == 0 {
		return refusal(conn)
	}
	types := make([]byte, count[0])
	if _, err := io.ReadFull(conn, types); err != nil {
		return fmt.Errorf("display security types: %w", err)
	}
	if !bytes.Contains(types, []byte{securityVNCAuth}) {
		return fmt.Errorf("%w: it offers types %v", errNoVNCAuth, types)
	}
	if _, err := conn.Write([]byte{securityVNCAuth}); err != nil {
		return fmt.Errorf("choose security type: %w", err)
	}
	var challenge [challengeSize]byte
	if _, err := io.ReadFull(conn, challenge[:]); err != nil {
		return fmt.Errorf("display challenge: %w", err)
	}
	answer, err := answerChallenge(password, challenge)
	if err != nil {
		return err
	}
	if _, err := conn.Write(answer[:]); err != nil {
		return fmt.Errorf("answer challenge: %w", err)
	}
	var result [4]byte
	if _, err := io.ReadFull(conn, result[:]); err != nil {
		return fmt.Errorf("display security result: %w", err)
	}
	if binary.BigEndian.Uint32(result[:]) != 0 {
		return refusal(conn)
	}
	return nil
}

// refusal reads the reason that follows a refusal. A reason that does not
// arrive does not change the outcome.
func refusal(r io.Reader) error {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return errDisplayDenied
	}
	n := min(int64(binary.BigEndian.Uint32(length[:])), maxReason)
	reason, _ := io.ReadAll(io.LimitReader(r, n))
	if text := printable(reason); text != "" {
		return fmt.Errorf("%w: %s", errDisplayDenied, text)
	}
	return errDisplayDenied
}

// printable makes a peer's text fit for one line of a log.
func printable(text []byte) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(text), " ")))
}

// readVersion reads a ProtocolVersion message and refuses anything older than
// 3.8, whose handshake differs.
func readVersion(r io.Reader) error {
	var buf [len(protocolVersion)]byte
	if _, err := io.ReadFull(r, buf[:]); err != nil {
		return err
	}
	major, minor, ok := parseVersion(buf)
	if !ok {
		return fmt.Errorf("not RFB: %q", buf[:])
	}
	if major < 3 || major == 3 && minor < 8 {
		return fmt.Errorf("RFB %d.%d is too old, 3.8 is needed", major, minor)
	}
	return nil
}

func parseVersion(v [len(protocolVersion)]byte) (major, minor int, ok bool) {
	if string(v[:4]) != "RFB " || v[7] != '.' || v[11] != '\n' {
		return 0, 0, false
	}
	number := func(digits []byte) (n int) {
		for _, d := range digits {
			if d < '0' || d > '9' {
				ok = false
			}
			n = 10*n + int(d-'0')
		}
		return n
	}
	ok = true
	major, minor = number(v[4:7]), number(v[8:11])
	return major, minor, ok
}

// answerChallenge encrypts a VncAuth challenge with the password. VNC takes the
// first eight bytes, pads them with zeros and uses each byte with its bits
// reversed as the DES key. That is weak; the mode of the display's socket is
// what keeps others out.
func answerChallenge(password []byte, challenge [challengeSize]byte) (answer [challengeSize]byte, err error) {
	var key [des.BlockSize]byte
	copy(key[:], password)
	for i := range key {
		key[i] = bits.Reverse8(key[i])
	}
	block, err := des.NewCipher(key[:])
	if err != nil {
		return answer, fmt.Errorf("password key: %w", err)
	}
	for i := 0; i < challengeSize; i += des.BlockSize {
		block.Encrypt(answer[i:], challenge[i:])
	}
	return answer, nil
}

// greetViewer performs the server's half of the RFB handshake up to the
// viewer's choice of the only type offered. The SecurityResult is the caller's
// to send, once the display has accepted the service.
func greetViewer(conn io.ReadWriter) error {
	if _, err := io.WriteString(conn, protocolVersion); err != nil {
		return fmt.Errorf("send version: %w", err)
	}
	if err := readVersion(conn); err != nil {
		return fmt.Errorf("viewer version: %w", err)
	}
	if _, err := conn.Write([]byte{1, securityNone}); err != nil {
		return fmt.Errorf("offer security type: %w", err)
	}
	var choice [1]byte
	if _, err := io.ReadFull(conn, choice[:]); err != nil {
		return fmt.Errorf("viewer security type: %w", err)
	}
	if choice[0] != securityNone {
		return fmt.Errorf("viewer chose security type %d, which was not offered", choice[0])
	}
	return nil
}

// acceptViewer sends SecurityResult OK.
func acceptViewer(w io.Writer) error {
	_, err := w.Write([]byte{0, 0, 0, 0})
	return err
}
