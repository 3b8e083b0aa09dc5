package sd

import (
	"context"
	"encoding/binary"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain lets the test binary stand in for a socket-activated service: with
// SD_TEST_CHILD set it reports what Listeners says and exits.
func TestMain(m *testing.M) {
	if os.Getenv("SD_TEST_CHILD") == "" {
		os.Exit(m.Run())
	}
	// systemd sets LISTEN_PID after the fork; exec keeps the pid.
	_ = os.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
	found, err := Listeners(ControlSocket, WebSocket)
	if err != nil {
		_, _ = os.Stdout.WriteString("error: " + err.Error() + "\n")
		os.Exit(0)
	}
	for _, name := range []string{ControlSocket, WebSocket} {
		for _, l := range found[name] {
			_, _ = os.Stdout.WriteString(name + " " + l.Addr().Network() + "\n")
		}
	}
	if os.Getenv("LISTEN_FDS") != "" {
		_, _ = os.Stdout.WriteString("LISTEN_FDS is still set\n")
	}
	os.Exit(0)
}

func child(t *testing.T, names string, files ...*os.File) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"SD_TEST_CHILD=1", "LISTEN_FDS=" + strconv.Itoa(len(files)), "LISTEN_FDNAMES=" + names}
	cmd.ExtraFiles = files
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("child: %v\n%s", err, out)
	}
	return string(out)
}

func TestListenersFailClosed(t *testing.T) {
	unixListener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer unixListener.Close()
	loopback, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer loopback.Close()
	everywhere, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer everywhere.Close()
	abstract, err := net.Listen("unix", "@sd-test-"+strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	file := func(l interface{ File() (*os.File, error) }) *os.File {
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	u, tcp := file(unixListener.(*net.UnixListener)), file(loopback.(*net.TCPListener))
	all, abs := file(everywhere.(*net.TCPListener)), file(abstract.(*net.UnixListener))
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()

	for _, test := range []struct {
		what, names string
		files       []*os.File
		want        string
	}{
		{"both", "control:web", []*os.File{u, tcp}, "control unix\nweb tcp\n"},
		{"both, other order", "web:control", []*os.File{tcp, u}, "control unix\nweb tcp\n"},
		{"two web sockets", "web:control:web", []*os.File{tcp, u, tcp}, "control unix\nweb tcp\nweb tcp\n"},
		{"none", "", nil, ""},
		{"missing", "control", []*os.File{u}, `no socket named web`},
		{"unknown", "control:web:metrics", []*os.File{u, tcp, tcp}, `a socket named "metrics"`},
		{"names of one unit with two names", "control:control", []*os.File{u, tcp}, `"control" is not a unix socket`},
		{"swapped", "web:control", []*os.File{u, tcp}, `"web" is not a TCP socket`},
		{"beyond loopback", "control:web", []*os.File{u, all}, `listens beyond the loopback interface`},
		{"abstract", "control:web", []*os.File{abs, tcp}, `has no path`},
		{"not a socket", "control:web", []*os.File{u, null}, `cannot be listened on`},
	} {
		got := child(t, test.names, test.files...)
		if strings.HasPrefix(test.want, "control ") || test.want == "" {
			if got != test.want {
				t.Errorf("%s: got %q, want %q", test.what, got, test.want)
			}
		} else if !strings.HasPrefix(got, "error: cannot take over the sockets") || !strings.Contains(got, test.want) {
			t.Errorf("%s: got %q, want an error with %q", test.what, got, test.want)
		}
	}
}

func TestListenWebRefusesOtherInterfaces(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", ":0", "[::]:0", "192.0.2.1:0", "nonsense"} {
		if l, err := ListenWeb(address); err == nil {
			_ = l.Close()
			t.Errorf("ListenWeb(%q) listens", address)
		}
	}
}

func TestListenControlReplacesOnlyDeadSockets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	first, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if second, err := ListenControl(path); err == nil {
		_ = second.Close()
		t.Fatal("took the socket of a live service")
	}
	first.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = first.Close()
	third, err := ListenControl(path)
	if err != nil {
		t.Fatalf("a dead socket is in the way: %v", err)
	}
	_ = third.Close()
}

// notifySocket stands in for the manager and returns what it is told.
func notifySocket(t *testing.T) func() string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return func() string {
		buf := make([]byte, 4096)
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
}

func TestNotify(t *testing.T) {
	read := notifySocket(t)
	Ready("2 browsers,\n0 quarantined")
	if got, want := read(), "READY=1\nSTATUS=2 browsers, 0 quarantined"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	Stopping("stopping", 3*time.Second)
	if got, want := read(), "STOPPING=1\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC=3000000"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWatchdogIsSilentWhileACheckFails(t *testing.T) {
	read := notifySocket(t)
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	runs := 0
	go func() {
		defer close(done)
		Watchdog(ctx, slog.New(slog.DiscardHandler), Check{"store", func(context.Context) error {
			runs++
			switch {
			case runs <= 3:
				return errors.New("stuck")
			case runs == 5:
				cancel()
			}
			Status("run " + strconv.Itoa(runs))
			return nil
		}})
	}()
	// The first message of all is from the fourth run: no WATCHDOG=1 before it.
	if got := read(); got != "STATUS=run 4" {
		t.Errorf("first message %q", got)
	}
	if got := read(); got != "WATCHDOG=1" {
		t.Errorf("second message %q", got)
	}
	<-done
}

func TestWatchdogBoundsChecks(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch(ctx, time.Millisecond, slog.New(slog.DiscardHandler), func() { t.Error("alive") },
		[]Check{{"hangs", func(check context.Context) error {
			<-check.Done()
			cancel()
			return check.Err()
		}}})
}

// journalSocketFor stands in for journald.
func journalSocketFor(t *testing.T, path string) *net.UnixConn {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func readEntry(t *testing.T, conn *net.UnixConn) map[string]string {
	t.Helper()
	buf, oob := make([]byte, 1<<20), make([]byte, 128)
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	data := buf[:n]
	if oobn > 0 {
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			t.Fatal(err)
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			t.Fatal(err)
		}
		seals, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GET_SEALS, 0)
		if err != nil || seals&unix.F_SEAL_WRITE == 0 {
			t.Errorf("entry file is not sealed: %x %v", seals, err)
		}
		data, err = os.ReadFile("/proc/self/fd/" + strconv.Itoa(fds[0]))
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fds[0])
	}
	fields := map[string]string{}
	for len(data) > 0 {
		line, rest, _ := strings.Cut(string(data), "\n")
		if name, value, ok := strings.Cut(line, "="); ok {
			fields[name] = value
			data = []byte(rest)
			continue
		}
		length := binary.LittleEndian.Uint64([]byte(rest))
		fields[line] = rest[8 : 8+length]
		data = []byte(rest[8+length+1:])
	}
	return fields
}

func TestJournalHandler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	conn := journalSocketFor(t, path)
	log := slog.New(&handler{out: &journal{path: path}, fallback: os.Stderr, level: slog.LevelInfo, unitField: "USER_UNIT"})
	log.Debug("not sent")
	log.With("session", "s 1").WithGroup("http").Error("cannot start",
		"path", "/x",
		slog.Group("a", "b-c", 1))
	got := readEntry(t, conn)
	for name, want := range map[string]string{
		"MESSAGE": "cannot start", "PRIORITY": "3", "ABF_SESSION": "s 1", "ABF_HTTP_PATH": "/x", "ABF_HTTP_A_B_C": "1",
		"SYSLOG_IDENTIFIER": "abfleetd", "CODE_FUNC": "abfleet/internal/sd.TestJournalHandler",
	} {
		if got[name] != want {
			t.Errorf("%s = %q, want %q", name, got[name], want)
		}
	}
	log.Info("a\nb", "event", "identity.created", "unit", "x.scope", "error", errors.New("lost"))
	got = readEntry(t, conn)
	for name, want := range map[string]string{
		"MESSAGE": "a\nb: lost", "PRIORITY": "6", "USER_UNIT": "x.scope", "ABF_EVENT": "identity.created", "ABF_ERROR": "lost",
		"MESSAGE_ID": MessageID("identity.created"),
	} {
		if got[name] != want || want == "" {
			t.Errorf("%s = %q, want %q", name, got[name], want)
		}
	}

	// Too large for a datagram.
	attrs := []any{}
	for i := range 10 {
		attrs = append(attrs, "k"+strconv.Itoa(i), strings.Repeat("x", 60<<10))
	}
	log.Info("large", attrs...)
	if got = readEntry(t, conn); len(got["ABF_K9"]) != 60<<10 {
		t.Errorf("large entry: %d bytes of its last field", len(got["ABF_K9"]))
	}
	log.Info("cut", "k", strings.Repeat("y", maxValue+1))
	if got = readEntry(t, conn); !strings.HasSuffix(got["ABF_K"], " [cut]") || len(got["ABF_K"]) > maxValue+10 {
		t.Errorf("field of %d bytes was not cut", len(got["ABF_K"]))
	}

	// journald restarts: a new socket takes the old one's path.
	_ = conn.Close()
	_ = os.Remove(path)
	conn = journalSocketFor(t, path)
	log.Info("after the restart")
	if got = readEntry(t, conn); got["MESSAGE"] != "after the restart" {
		t.Errorf("after a restart of journald: %v", got)
	}
}

func TestEveryEventHasItsOwnMessageID(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../audit/audit.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	events := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); !ok || kind.Name != "Type" {
			return true
		}
		name, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		events++
		if name != "gap" && MessageID(name) == "" {
			t.Errorf("event %s has no message id", name)
		}
		return true
	})
	if events < 20 {
		t.Errorf("only %d events found in package audit", events)
	}
	seen := map[string]bool{}
	for event, id := range messageIDs {
		if len(id) != 32 || seen[id] || strings.Trim(id, "0123456789abcdef") != "" {
			t.Errorf("message id %q of %s is taken or malformed", id, event)
		}
		seen[id] = true
	}
}
