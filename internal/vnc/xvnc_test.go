package vnc

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

const (
	firstTestDisplay = 600
	lastTestDisplay  = 700
	screenWidth      = 320
	screenHeight     = 200
	// nobody is who Xvnc runs as when the tests run as root.
	nobody = 65534
)

// xvnc is a real Xvnc with the options the product uses.
type xvnc struct {
	display int
	socket  string
	auth    string
	dir     string
	cmd     *exec.Cmd
	ended   chan struct{}
}

func startXvnc(t *testing.T) *xvnc {
	t.Helper()
	program, err := exec.LookPath("Xvnc")
	if err != nil {
		t.Skip("Xvnc is not installed (apt-get install tigervnc-standalone-server)")
	}
	// Not t.TempDir: its name may be too long for a unix socket.
	dir, err := os.MkdirTemp("", "abfvnc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	x := &xvnc{dir: dir, socket: filepath.Join(dir, "rfb"), auth: filepath.Join(dir, "xauth")}
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("passwd", passwordFile(t))
	for x.display = firstTestDisplay; x.display < lastTestDisplay; x.display++ {
		write("xauth", xauthEntry(x.display))
		if x.launch(t, program) {
			return x
		}
	}
	t.Fatal("no free display")
	return nil
}

// launch reports whether Xvnc serves the display; false means that the number
// was taken.
func (x *xvnc) launch(t *testing.T, program string) bool {
	t.Helper()
	x.cmd = exec.Command(program, ":"+strconv.Itoa(x.display),
		"-geometry", fmt.Sprintf("%dx%d", screenWidth, screenHeight), "-depth", "24",
		"-rfbport", "-1", "-rfbunixpath", x.socket, "-rfbunixmode", "0600",
		"-SecurityTypes", "VncAuth", "-PasswordFile", filepath.Join(x.dir, "passwd"), "-UseBlacklist=0",
		"-auth", x.auth, "-nolisten", "local", "-nolisten", "tcp", "-AlwaysShared", "-FrameRate", "30")
	x.cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + x.dir}
	x.cmd.Dir = x.dir
	if os.Geteuid() == 0 {
		for _, name := range []string{x.dir, x.auth, filepath.Join(x.dir, "passwd")} {
			if err := os.Chown(name, nobody, nobody); err != nil {
				t.Fatal(err)
			}
		}
		x.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	var log bytes.Buffer
	x.cmd.Stderr = &log
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	x.ended = ended
	go func() {
		_ = x.cmd.Wait()
		close(ended)
	}()
	t.Cleanup(x.stop)
	deadline := time.After(patience)
	for {
		if conn, err := net.Dial("unix", x.socket); err == nil {
			conn.Close()
			return true
		}
		select {
		case <-ended:
			if bytes.Contains(log.Bytes(), []byte("already active")) {
				return false
			}
			t.Fatalf("Xvnc ended:\n%s", log.String())
		case <-deadline:
			t.Fatal("Xvnc does not listen")
		case <-time.After(5 * time.Millisecond): // Xvnc tells nobody when its socket is there.
		}
	}
}

func (x *xvnc) stop() {
	_ = x.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-x.ended:
	case <-time.After(patience):
		_ = x.cmd.Process.Kill()
		<-x.ended
	}
}

func (x *xvnc) dial() (net.Conn, error) { return net.Dial("unix", x.socket) }

// passwordFile makes what vncpasswd makes: the password under a key that every
// VNC server knows.
func passwordFile(t *testing.T) []byte {
	t.Helper()
	var padded [challengeSize]byte
	copy(padded[:], password)
	hidden, err := answerChallenge([]byte{23, 82, 107, 6, 35, 78, 88, 7}, padded)
	if err != nil {
		t.Fatal(err)
	}
	return hidden[:8]
}

// xauthEntry makes an authority file for one display: family "any host".
func xauthEntry(display int) []byte {
	b := []byte{0xff, 0xff}
	for _, field := range []string{"", strconv.Itoa(display), "MIT-MAGIC-COOKIE-1", "0123456789abcdef"} {
		b = binary.BigEndian.AppendUint16(b, uint16(len(field)))
		b = append(b, field...)
	}
	return b
}

// client is as much of an RFB client as the tests need: it takes raw
// rectangles, and it types and points.
type client struct {
	net.Conn
	width, height int
}

func newClient(conn net.Conn) (*client, error) {
	if _, err := conn.Write([]byte{1}); err != nil { // ClientInit: shared
		return nil, err
	}
	init := make([]byte, 24)
	if _, err := io.ReadFull(conn, init); err != nil {
		return nil, err
	}
	c := &client{conn, int(binary.BigEndian.Uint16(init)), int(binary.BigEndian.Uint16(init[2:]))}
	if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(init[20:]))); err != nil {
		return nil, err
	}
	// SetPixelFormat: 32 bits, little endian, blue lowest; SetEncodings: raw.
	_, err := conn.Write([]byte{
		0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0,
		2, 0, 0, 1, 0, 0, 0, 0,
	})
	return c, err
}

// frame asks for the whole screen and returns its pixels, 4 bytes each.
func (c *client) frame() ([]byte, error) {
	request := binary.BigEndian.AppendUint16([]byte{3, 0, 0, 0, 0, 0}, uint16(c.width))
	if _, err := c.Write(binary.BigEndian.AppendUint16(request, uint16(c.height))); err != nil {
		return nil, err
	}
	screen := make([]byte, c.width*c.height*4)
	for left := c.width * c.height; left > 0; {
		head := make([]byte, 4)
		if _, err := io.ReadFull(c, head); err != nil {
			return nil, err
		}
		if head[0] != 0 {
			return nil, fmt.Errorf("message of type %d", head[0])
		}
		for range binary.BigEndian.Uint16(head[2:]) {
			rect := make([]byte, 12)
			if _, err := io.ReadFull(c, rect); err != nil {
				return nil, err
			}
			at := func(i int) int { return int(binary.BigEndian.Uint16(rect[i:])) }
			x, y, w, h := at(0), at(2), at(4), at(6)
			for row := y; row < y+h; row++ {
				start := (row*c.width + x) * 4
				if _, err := io.ReadFull(c, screen[start:start+w*4]); err != nil {
					return nil, err
				}
			}
			left -= w * h
		}
	}
	return screen, nil
}

func (c *client) point(x, y int, buttons byte) error {
	event := binary.BigEndian.AppendUint16([]byte{5, buttons}, uint16(x))
	_, err := c.Write(binary.BigEndian.AppendUint16(event, uint16(y)))
	return err
}

func (x *xvnc) xdotool(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "xdotool", args...)
	cmd.Env = []string{"DISPLAY=:" + strconv.Itoa(x.display), "XAUTHORITY=" + x.auth}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("xdotool: %v: %s", err, out)
	}
	return string(out)
}

func TestRealXvnc(t *testing.T) {
	x := startXvnc(t)
	r := serve(t, x.dial, Options{})
	c, err := newClient(r.join(t))
	if err != nil {
		t.Fatal(err)
	}
	if c.width != screenWidth || c.height != screenHeight {
		t.Errorf("the screen is %d x %d", c.width, c.height)
	}
	screen, err := c.frame()
	if err != nil {
		t.Fatal(err)
	}
	if len(screen) != screenWidth*screenHeight*4 {
		t.Errorf("the frame has %d bytes", len(screen))
	}

	t.Run("two viewers at once", func(t *testing.T) {
		other, err := newClient(r.join(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := other.frame(); err != nil {
			t.Error(err)
		}
		if _, err := c.frame(); err != nil {
			t.Error(err)
		}
	})
	t.Run("pointer", func(t *testing.T) {
		if _, err := exec.LookPath("xdotool"); err != nil {
			t.Skip("xdotool is not installed: the pointer's place cannot be read")
		}
		if err := c.point(123, 45, 0); err != nil {
			t.Fatal(err)
		}
		// The answer to a request comes after the event before it was taken.
		if _, err := c.frame(); err != nil {
			t.Fatal(err)
		}
		if got := x.xdotool(t, "getmouselocation"); !bytes.HasPrefix([]byte(got), []byte("x:123 y:45 ")) {
			t.Errorf("the pointer is at %s", got)
		}
	})
	t.Run("wrong password", func(t *testing.T) {
		conn, err := x.dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := authenticateDisplay(conn, []byte("guess")); err == nil {
			t.Error("accepted")
		}
	})
	t.Run("the display is killed", func(t *testing.T) {
		ws := r.open(t, nil)
		if err := viewerHandshake(stream(t, ws)); err != nil {
			t.Fatal(err)
		}
		if err := x.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if end := closing(t, ws); end.Code != CloseDisplayGone {
			t.Errorf("closed with %v", end)
		}
		removeStale(t, x.display)
	})
}

// removeStale removes what a killed Xvnc of this test leaves in /tmp.
func removeStale(t *testing.T, display int) {
	for _, path := range []string{
		fmt.Sprintf("/tmp/.X%d-lock", display), fmt.Sprintf("/tmp/.X11-unix/X%d", display),
	} {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
	}
}
