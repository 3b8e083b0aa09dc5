package vnc

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math/bits"
	"strings"
	"testing"
)

// script is a peer that has already said everything it will ever say.
type script struct {
	io.Reader
	heard bytes.Buffer
}

func (s *script) Write(p []byte) (int, error) { return s.heard.Write(p) }

func scripted(parts ...string) *script {
	return &script{Reader: strings.NewReader(strings.Join(parts, ""))}
}

func be32(n uint32) string { return string(binary.BigEndian.AppendUint32(nil, n)) }

const (
	banner    = "RFB 003.008\n"
	challenge = "0123456789abcdef"
	success   = "\x00\x00\x00\x00"
)

func TestAnswerChallengeVector(t *testing.T) {
	key, _ := hex.DecodeString("133457799bbcdff1")
	plain, _ := hex.DecodeString("0123456789abcdef")
	const want = "85e813540f0ab405"
	// VNC reverses the bits of the password to get the key.
	password := make([]byte, len(key))
	for i, b := range key {
		password[i] = bits.Reverse8(b)
	}
	var block [challengeSize]byte
	copy(block[:], plain)
	copy(block[8:], plain)
	for name, pass := range map[string][]byte{
		"exactly eight bytes":      password,
		"the ninth byte is unused": append(bytes.Clone(password), 'x'),
	} {
		answer, err := answerChallenge(pass, block)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(answer[:]); got != want+want {
			t.Errorf("%s: got %s, want %s twice", name, got, want)
		}
	}
	short, _ := answerChallenge([]byte("abc"), block)
	padded, _ := answerChallenge([]byte("abc\x00\x00\x00\x00\x00"), block)
	if short != padded {
		t.Error("a short password is not padded with zeros")
	}
}

func TestAuthenticateDisplay(t *testing.T) {
	password := []byte("secret78")
	const rest = "ServerInit comes later"
	peer := scripted(banner, "\x03\x01\x02\x10", challenge, success, rest)
	if err := authenticateDisplay(peer, password); err != nil {
		t.Fatal(err)
	}
	answer, _ := answerChallenge(password, [challengeSize]byte([]byte(challenge)))
	if want := banner + "\x02" + string(answer[:]); peer.heard.String() != want {
		t.Errorf("sent %q, want %q", peer.heard.String(), want)
	}
	if left, _ := io.ReadAll(peer); string(left) != rest {
		t.Errorf("left %q of what follows the handshake, want %q", left, rest)
	}
}

func TestAuthenticateDisplayRefuses(t *testing.T) {
	endless := io.MultiReader(strings.NewReader(banner+"\x00"+be32(1<<32-1)), zeros{})
	for name, c := range map[string]struct {
		peer io.Reader
		want error
		text string
	}{
		"no password asked":        {strings.NewReader(banner + "\x01\x01" + success), errNoVNCAuth, "[1]"},
		"unknown types only":       {strings.NewReader(banner + "\x02\x05\x06"), errNoVNCAuth, "[5 6]"},
		"not RFB":                  {strings.NewReader("HTTP/1.1 400 Bad Request\r\n"), nil, "not RFB"},
		"digits missing":           {strings.NewReader("RFB 0a3.008\n"), nil, "not RFB"},
		"too old":                  {strings.NewReader("RFB 003.007\n" + "\x01\x02"), nil, "too old"},
		"no types, with a reason":  {strings.NewReader(banner + "\x00" + be32(13) + "Too many \x1b[2m"), errDisplayDenied, "Too many  [2m"},
		"no types, endless reason": {endless, errDisplayDenied, ""},
		"wrong password":           {strings.NewReader(banner + "\x01\x02" + challenge + be32(1) + be32(6) + "denied"), errDisplayDenied, "denied"},
		"too many tries":           {strings.NewReader(banner + "\x01\x02" + challenge + be32(2)), errDisplayDenied, ""},
		"reason that never comes":  {strings.NewReader(banner + "\x01\x02" + challenge + be32(1) + be32(1<<31)), errDisplayDenied, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := authenticateDisplay(&script{Reader: c.peer}, []byte("secret78"))
			if err == nil {
				t.Fatal("accepted")
			}
			if c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %q, want it to contain %q", err, c.text)
			}
			if len(err.Error()) > 2*maxReason {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
	if err := authenticateDisplay(scripted(banner, "\x01\x02", challenge, success), nil); !errors.Is(err, errNoPassword) {
		t.Errorf("without a password: got %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A display that goes away in the middle must not look like one that agreed.
func TestAuthenticateDisplayCutShort(t *testing.T) {
	whole := banner + "\x01\x02" + challenge + success
	for n := range len(whole) {
		if err := authenticateDisplay(scripted(whole[:n]), []byte("p")); err == nil {
			t.Errorf("accepted after %d of %d bytes", n, len(whole))
		}
	}
}

func TestGreetViewer(t *testing.T) {
	viewer := scripted(banner, "\x01", "ClientInit")
	if err := greetViewer(viewer); err != nil {
		t.Fatal(err)
	}
	if want := banner + "\x01\x01"; viewer.heard.String() != want {
		t.Errorf("sent %q, want %q", viewer.heard.String(), want)
	}
	if left, _ := io.ReadAll(viewer); string(left) != "ClientInit" {
		t.Errorf("left %q", left)
	}
	for _, bad := range []string{
		"", "RFB 003", "GET / HTTP/1.1\r\n", "RFB 003.003\n\x01", banner, banner + "\x02", banner + "\x00",
	} {
		if err := greetViewer(scripted(bad)); err == nil {
			t.Errorf("accepted a viewer that says %q", bad)
		}
	}
}

func FuzzAuthenticateDisplay(f *testing.F) {
	f.Add([]byte(banner + "\x01\x02" + challenge + success))
	f.Add([]byte(banner + "\x01\x01" + success))
	f.Add([]byte(banner + "\x00" + be32(1<<31) + "no"))
	f.Add([]byte(banner + "\x01\x02" + challenge + be32(1) + be32(2) + "no"))
	f.Fuzz(func(t *testing.T, data []byte) {
		peer := &script{Reader: bytes.NewReader(data)}
		err := authenticateDisplay(peer, []byte("secret78"))
		if err != nil {
			return
		}
		// Success means that it was asked for the password, and that the
		// result said so.
		sent := peer.heard.Bytes()
		if len(sent) != len(banner)+1+challengeSize || sent[len(banner)] != securityVNCAuth {
			t.Fatalf("agreed without authenticating: sent %q", sent)
		}
		used := data[:len(data)-peer.Reader.(*bytes.Reader).Len()]
		if !bytes.HasSuffix(used, []byte(success)) {
			t.Fatalf("agreed on a refusal: %q", used)
		}
	})
}

func FuzzGreetViewer(f *testing.F) {
	f.Add([]byte(banner + "\x01"))
	f.Add([]byte("RFB 999.999\n\x02"))
	f.Fuzz(func(t *testing.T, data []byte) {
		viewer := &script{Reader: bytes.NewReader(data)}
		if err := greetViewer(viewer); err == nil && data[len(banner)] != securityNone {
			t.Fatalf("agreed on type %d", data[len(banner)])
		}
	})
}
