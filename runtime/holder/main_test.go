package holder

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// chromium is the program itself: Debian's wrapper adds flags of its own.
	chromium = "/usr/lib/chromium/chromium"
	// testUID is what these tests run as when root starts them: Chromium has
	// no sandbox as root, and it needs no entry in /etc/passwd.
	testUID = 64017
	testKey = "0123456789abcdef0123456789abcdef"
	// testTimeout bounds everything that talks to a Chromium; two cores that
	// others use as well need a generous one.
	testTimeout = 60 * time.Second

	envRole   = "ABFLEET_TEST_ROLE"   // the built abfleet-role
	envHelper = "ABFLEET_TEST_HELPER" // makes the test binary something else
)

// TestMain runs everything as a normal user. Root builds the role helper,
// gives a copy of this test binary to a uid of its own, and then runs only the
// tests that are about two users.
func TestMain(m *testing.M) {
	if kind := os.Getenv(envHelper); kind != "" {
		os.Exit(runHelper(kind))
	}
	for _, a := range os.Args[1:] {
		if strings.HasPrefix(a, "-test.fuzz") && !strings.HasPrefix(a, "-test.fuzzcachedir") || strings.HasPrefix(a, "-test.list") {
			os.Exit(m.Run())
		}
	}
	if os.Getenv(envRole) != "" {
		os.Exit(m.Run())
	}
	os.Exit(runAll(m))
}

func runAll(m *testing.M) int {
	// Chromium adds 45 characters to TMPDIR for a socket of its own.
	dir, err := os.MkdirTemp("/tmp", "abh")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	role := filepath.Join(dir, "abfleet-role")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", role, "abfleet/cmd/abfleet-role")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	os.Setenv(envRole, role)
	if os.Geteuid() != 0 {
		os.Setenv("TMPDIR", dir)
		return m.Run()
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "holder.test"), self, 0o755)
	}
	if err == nil {
		err = os.Chown(dir, testUID, testUID)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd := asUser(dir, filepath.Join(dir, "holder.test"))
	for _, a := range os.Args[1:] {
		// The go command's own files belong to root.
		if !strings.HasPrefix(a, "-test.testlogfile") && !strings.HasPrefix(a, "-test.coverprofile") && !strings.HasPrefix(a, "-test.gocoverdir") {
			cmd.Args = append(cmd.Args, a)
		}
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// The sources may be below a directory that only root may enter.
	cmd.Dir = dir
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "as a normal user:", err)
		return 1
	}
	if flag.Lookup("test.run").Value.String() == "" {
		if err := flag.Set("test.run", "^TestTwoUsers"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	userDir = dir
	return m.Run()
}

// userDir is the normal user's directory, for the tests that root runs.
var userDir string

// asUser is a command of the normal user with nothing of root's environment.
func asUser(dir, program string, env ...string) *exec.Cmd {
	cmd := exec.Command(program)
	cmd.Env = append([]string{
		"PATH=/usr/local/bin:/usr/bin:/bin",
		"HOME=" + dir,
		"TMPDIR=" + dir,
		envRole + "=" + filepath.Join(dir, "abfleet-role"),
	}, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testUID, Gid: testUID}}
	return cmd
}

// normal skips the root pass of TestMain, which the other pass has covered.
func normal(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		t.Skip("ran as a normal user before")
	}
}

// helpers are what the test binary can be instead of a test.
var helpers = map[string]func() int{}

func runHelper(kind string) int {
	os.Unsetenv(envHelper)
	f, ok := helpers[kind]
	if !ok {
		fmt.Fprintln(os.Stderr, "no helper", kind)
		return 2
	}
	return f()
}

// stage is the directory of one role under test.
type stage struct {
	t       testing.TB
	dir     string
	spec    Spec
	spawned *Spawned
}

func newStage(t testing.TB) *stage {
	t.Helper()
	dir, err := os.MkdirTemp("", "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, d := range []string{"run", "tmp", "profile"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s := &stage{t: t, dir: dir}
	if err := os.WriteFile(s.path("run/root"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.spec = Spec{
		Role: "chromium", Instance: "abcdefghij", Generation: 7, Unit: "abfleet-abcdefghij-chromium-7.scope",
		Env: []string{
			"HOME=" + s.dir, "TMPDIR=" + s.path("tmp"), "PATH=/usr/bin:/bin", "LANG=C.UTF-8",
			"DBUS_SESSION_BUS_ADDRESS=disabled:", "DBUS_SYSTEM_BUS_ADDRESS=disabled:",
		},
		RootFile: s.path("run/root"),
		LockFile: s.path("profile.lock"),
		Labels:   map[string]string{"ABF_INSTANCE": "abcdefghij"},
		NoFile:   4096,
		Holder:   &HolderSpec{Socket: s.path("run/cdp.sock"), Key: testKey, ExitFile: s.path("run/exit.json")},
	}
	return s
}

func (s *stage) path(name string) string { return filepath.Join(s.dir, name) }

// browser makes the stage one of a real Chromium.
func (s *stage) browser(extra ...string) *stage {
	s.t.Helper()
	if _, err := os.Stat(chromium); err != nil {
		s.t.Skip("no Chromium here: ", err)
	}
	s.spec.Args = append([]string{
		chromium, "--headless=new", "--remote-debugging-pipe", "--user-data-dir=" + s.path("profile"),
		"--password-store=basic", "--no-default-browser-check", "--disable-background-networking", "--enable-logging=stderr",
	}, extra...)
	s.spec.Args = append(s.spec.Args, "about:blank")
	return s
}

// start spawns and releases the role and waits until it is ready.
func (s *stage) start() *stage {
	s.t.Helper()
	if err := s.tryStart(); err != nil {
		s.t.Fatal(err)
	}
	return s
}

func (s *stage) tryStart() error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	sp, err := Spawn(ctx, os.Getenv(envRole))
	if err != nil {
		return err
	}
	s.spawned = sp
	s.t.Cleanup(func() {
		sp.Abort()
		select {
		case <-sp.Done():
		default:
			sp.process.Signal(unix.SIGTERM)
			select {
			case <-sp.Done():
			case <-time.After(testTimeout):
				s.t.Error("the role did not end")
				sp.process.Kill()
			}
		}
		sp.Close()
	})
	if err := sp.Release(s.spec); err != nil {
		return err
	}
	return sp.Ready(ctx)
}

// signal signals the role's main process.
func (s *stage) signal(sig syscall.Signal) {
	s.t.Helper()
	if err := s.spawned.process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// ended waits for the end of the holder and returns its record.
func (s *stage) ended() Exit {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	if _, err := s.spawned.Wait(ctx); err != nil {
		s.t.Fatal("the holder goes on: ", err)
	}
	e, err := ReadExit(s.spec.Holder.ExitFile)
	if err != nil {
		s.t.Fatal(err)
	}
	return e
}

// peer is a CDP client over one connection.
type peer struct {
	hello Hello
	t     testing.TB
	conn  net.Conn
	in    *bufio.Reader
	id    int
	// events are the messages without an id that were read on the way.
	events []reply
}

type reply struct {
	ID      int
	Method  string
	Params  json.RawMessage
	Result  json.RawMessage
	Session string `json:"sessionId"`
	Error   *struct {
		Code    int
		Message string
	}
}

func (s *stage) dial() *peer {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	conn, hello, err := Dial(ctx, s.spec.Holder.Socket, s.spec.Holder.Key)
	if err != nil {
		s.t.Fatal(err)
	}
	if hello.Version != maxVersion || hello.Generation != s.spec.Generation || hello.BrowserPID == 0 || hello.Product == "" {
		s.t.Errorf("hello is %+v", hello)
	}
	p := newPeer(s.t, conn)
	p.hello = hello
	return p
}

func newPeer(t testing.TB, conn net.Conn) *peer {
	t.Cleanup(func() { conn.Close() })
	return &peer{t: t, conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}
}

// send writes a message and returns its id.
func (p *peer) send(session, method string, params any) int {
	p.t.Helper()
	p.id++
	m := map[string]any{"id": p.id, "method": method}
	if params != nil {
		m["params"] = params
	}
	if session != "" {
		m["sessionId"] = session
	}
	data, err := json.Marshal(m)
	if err != nil {
		p.t.Fatal(err)
	}
	p.raw(string(data) + "\x00")
	return p.id
}

func (p *peer) raw(text string) {
	p.t.Helper()
	if err := p.conn.SetDeadline(time.Now().Add(testTimeout)); err != nil {
		p.t.Fatal(err)
	}
	if _, err := io.WriteString(p.conn, text); err != nil {
		p.t.Fatal(err)
	}
}

// read returns the next message as it came.
func (p *peer) read() ([]byte, error) {
	if err := p.conn.SetReadDeadline(time.Now().Add(testTimeout)); err != nil {
		return nil, err
	}
	data, err := p.in.ReadBytes(0)
	return bytes.TrimSuffix(data, []byte{0}), err
}

// next returns the next message.
func (p *peer) next() reply {
	p.t.Helper()
	data, err := p.read()
	if err != nil {
		p.t.Fatal(err)
	}
	var r reply
	if err := json.Unmarshal(data, &r); err != nil {
		p.t.Fatalf("%v: %.200s", err, data)
	}
	return r
}

// await returns the answer to a message and keeps the events before it.
func (p *peer) await(id int) reply {
	p.t.Helper()
	for {
		r := p.next()
		if r.ID == id {
			return r
		}
		if r.Method == "" {
			p.t.Fatalf("an answer to nothing: %+v", r)
		}
		p.events = append(p.events, r)
	}
}

// call sends a message, fails on an error answer, and decodes the result.
func (p *peer) call(session, method string, params, result any) {
	p.t.Helper()
	r := p.await(p.send(session, method, params))
	if r.Error != nil {
		p.t.Fatalf("%s: %s", method, r.Error.Message)
	}
	if result != nil {
		if err := json.Unmarshal(r.Result, result); err != nil {
			p.t.Fatal(err)
		}
	}
}

// page opens a page and returns its target and session.
func (p *peer) page(url string) (target, session string) {
	p.t.Helper()
	var t struct{ TargetID string }
	p.call("", "Target.createTarget", map[string]any{"url": url}, &t)
	var s struct{ SessionID string }
	p.call("", "Target.attachToTarget", map[string]any{"targetId": t.TargetID, "flatten": true}, &s)
	return t.TargetID, s.SessionID
}

// eval evaluates an expression in a page and returns its JSON value.
func (p *peer) eval(session, expression string) json.RawMessage {
	p.t.Helper()
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	p.call(session, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &r)
	if r.ExceptionDetails != nil {
		p.t.Fatalf("%s: %s", expression, r.ExceptionDetails)
	}
	return r.Result.Value
}

// gone fails unless the holder ends the connection.
func (p *peer) gone() {
	p.t.Helper()
	for {
		_, err := p.read()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return
		}
		if err != nil {
			p.t.Fatal(err)
		}
	}
}
