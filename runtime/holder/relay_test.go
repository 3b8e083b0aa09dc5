package holder

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// journal is journald's native socket for a stage.
type journal struct {
	t    *testing.T
	conn *net.UnixConn
}

func (s *stage) journal(t *testing.T) *journal {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path("socket"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s.spec.Journal = s.path("stdout") // nobody listens there, which is no failure
	return &journal{t: t, conn: conn}
}

// next returns the fields of the next line.
func (j *journal) next() map[string]string {
	j.t.Helper()
	buf := make([]byte, 64<<10)
	j.conn.SetReadDeadline(time.Now().Add(testTimeout))
	n, err := j.conn.Read(buf)
	if err != nil {
		j.t.Fatal(err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(buf[:n])) {
		k, v, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok {
			j.t.Fatalf("not a field: %q", line)
		}
		fields[k] = v
	}
	return fields
}

// TestHolderWithAnotherProgram shows what a program under the holder gets, and
// what happens to its output; Chromium hides the former.
func TestHolderWithAnotherProgram(t *testing.T) {
	normal(t)
	s := newStage(t)
	j := s.journal(t)
	s.spec.Labels = map[string]string{"ABF_INSTANCE": "abcdefghij", "ABF_SESSION": "s 1", "MESSAGE": "x", "_PID": "1", "ABF_x": "x"}
	s.spec.Holder.CloseTimeout = 50 * time.Millisecond
	s.spec.Holder.Mute = []string{"dbus/bus.cc"}
	s.spec.Args = []string{"/bin/sh", "-c", `
		cat /proc/$$/environ >"$1/environ"; cat /proc/self/status >"$1/status"
		echo "[1:2:1201/000000.1:ERROR:dbus/bus.cc(1)] no bus"
		echo "[1:2:1201/000000.1:ERROR:x.cc(1)] bad"
		printf 'no newline' >&2
		exec cat <&3`, "sh", s.path("run")}
	s.start()
	line := j.next()
	for k, want := range map[string]string{
		"MESSAGE": "[1:2:1201/000000.1:ERROR:x.cc(1)] bad", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "abfleet-chromium",
		"ABF_INSTANCE": "abcdefghij", "ABF_SESSION": "s 1",
	} {
		if line[k] != want {
			t.Errorf("%s is %q, want %q", k, line[k], want)
		}
		delete(line, k)
	}
	if len(line) > 0 {
		t.Errorf("more fields: %v", line)
	}
	s.signal(unix.SIGWINCH)
	if e := s.ended(); e.Step != stepPair || e.Code != 0 || !e.Clean {
		t.Errorf("exit is %+v", e)
	}
	// Browser.close went to the program's descriptor 3, which cat printed.
	seen := map[string]bool{}
	for range 3 {
		seen[j.next()["MESSAGE"]] = true
	}
	for _, want := range []string{"{\"id\":1,\"method\":\"Browser.close\"}\x00", "no newline",
		"browser ended: trigger signal (SIGWINCH), last step pair closed, exit code 0"} {
		if !seen[want] {
			t.Errorf("%q is not in the journal: %v", want, seen)
		}
	}
	if got, want := read(t, s.path("run/environ")), strings.Join(s.spec.Env, "\x00")+"\x00"; got != want {
		t.Errorf("environment is %q, want %q", got, want)
	}
	for _, name := range []string{"SigBlk", "SigIgn", "NoNewPrivs"} {
		if m := regexp.MustCompile(name + `:\s+0*(\w)`).FindStringSubmatch(read(t, s.path("run/status"))); m == nil || m[1] != "0" {
			t.Errorf("%s is %v", name, m)
		}
	}
}

func TestTermIsUsedBeforeKill(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Holder.CloseTimeout = 50 * time.Millisecond
	s.spec.Args = []string{"/bin/sleep", "600"}
	s.start()
	s.signal(unix.SIGTERM)
	if e := s.ended(); e.Step != stepTerm || e.Signal != "SIGTERM" || e.Clean || e.Detail != "SIGTERM" {
		t.Errorf("exit is %+v", e)
	}
}

func TestNonZeroExitIsNotClean(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Args = []string{"/bin/sh", "-c", "exit 21"}
	s.start()
	if e := s.ended(); e.Trigger != TriggerBrowser || e.Step != stepNone || e.Code != 21 || e.Clean {
		t.Errorf("exit is %+v", e)
	}
}

// TestConnectionThatEndsAlone: a browser that closes its end and stays is
// stopped by the harsher steps.
func TestConnectionThatEndsAlone(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Args = []string{"/bin/sh", "-c", "exec 3<&- 4<&-; exec sleep 600"}
	s.start()
	if e := s.ended(); e.Trigger != TriggerEOF || e.Step != stepTerm || e.Clean {
		t.Errorf("exit is %+v", e)
	}
}

// TestOutputIsCapped: a burst passes, the flood behind it is counted, and the
// numbers add up.
func TestOutputIsCapped(t *testing.T) {
	normal(t)
	s := newStage(t)
	j := s.journal(t)
	const lines = 5000
	s.spec.Args = []string{"/bin/sh", "-c", fmt.Sprintf(`i=0; while [ $i -lt %d ]; do echo line $i; i=$((i+1)); done`, lines)}
	s.start()
	passed, dropped := 0, 0
	report := regexp.MustCompile(`^dropped (\d+) lines of output$`)
	for {
		text := j.next()["MESSAGE"]
		if m := report.FindStringSubmatch(text); m != nil {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			dropped += n
			if passed+dropped >= lines {
				break
			}
			continue
		}
		if !strings.HasPrefix(text, "browser ended") {
			passed++
		}
	}
	// The browser's end may be among the lines that were lost.
	if passed < 100 || passed > lineBurst+20*linesPerSecond || passed+dropped > lines+1 {
		t.Errorf("%d lines passed, %d were dropped", passed, dropped)
	}
	s.ended()
}

func TestRelayCutsLines(t *testing.T) {
	normal(t)
	s := newStage(t)
	j := s.journal(t)
	r := newRelay(&s.spec)
	defer r.close()
	r.copy(strings.NewReader(strings.Repeat("a", 3*maxLine+17) + "\nb\r\n\n" + strings.Repeat("c", maxLine-1) + "\n" + strings.Repeat("d", maxLine) + "\ne"))
	for _, want := range []string{strings.Repeat("a", maxLine), "b", strings.Repeat("c", maxLine-1), strings.Repeat("d", maxLine), "e"} {
		if got := j.next()["MESSAGE"]; got != want {
			t.Errorf("a line of %d bytes %.10q, want %d bytes %.10q", len(got), got, len(want), want)
		}
	}
}

func TestRelayWithoutJournal(t *testing.T) {
	normal(t)
	s := newStage(t)
	s.spec.Journal = s.path("stdout")
	r := newRelay(&s.spec)
	defer r.close()
	r.line(6, "lost")
	if r.unsaid != 1 {
		t.Errorf("%d lines lost", r.unsaid)
	}
	// A journal that comes back gets the count, then the line.
	j := s.journal(t)
	r.line(6, "found")
	if got := j.next()["MESSAGE"]; !strings.HasPrefix(got, "dropped 1 lines") {
		t.Errorf("message is %q", got)
	}
	if got := j.next()["MESSAGE"]; got != "found" {
		t.Errorf("message is %q", got)
	}
}

func TestExitRecord(t *testing.T) {
	normal(t)
	dir := newStage(t).path("run")
	path := filepath.Join(dir, "exit.json")
	want := Exit{Instance: "abcdefghij", Generation: 3, BrowserPID: 12, Trigger: "close: x", Step: stepClose, Clean: true, OOMKills: 2, At: time.Now().UTC().Round(0)}
	// A crash while writing leaves a temporary file; it is no obstacle.
	if err := os.WriteFile(filepath.Join(dir, ".exit.json.new"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := writeExit(path, want); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := ReadExit(path); err != nil || got != want {
		t.Errorf("exit is %+v, %v", got, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("left: %v, %v", entries, err)
	}
	for _, bad := range []string{"", "{", "[]"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := ReadExit(path); err == nil || e != (Exit{}) {
			t.Errorf("%q is read as %+v", bad, e)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", path); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadExit(path); err == nil {
		t.Error("a link was followed")
	}
}
