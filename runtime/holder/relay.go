package holder

import (
	"bytes"
	"encoding/binary"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lineBurst lines pass at once, then linesPerSecond; the rest is counted.
	// Chromium writes a few lines a minute, but thousands a second when a GPU
	// or a disk fails, and journald's limit would take its unit's other lines too.
	lineBurst      = 200
	linesPerSecond = 20
	// maxLine bounds one line in bytes; what is over is cut.
	maxLine = 8 << 10
	// lossReport is how long after a loss it is reported at the latest.
	lossReport = 10 * time.Second
	// sendWait is how long a line waits for a journald that is busy. A
	// socket's queue may be as short as ten datagrams.
	sendWait = 100 * time.Millisecond
)

// relay sends lines to journald's native socket under the role's labels.
type relay struct {
	prefix []byte   // the fields that every datagram has
	mute   [][]byte // lines that contain one of these are expected and not passed on

	mu       sync.Mutex // guards the fields that follow
	sock     int        // -1: there is no journal
	addr     unix.SockaddrUnix
	tokens   float64
	refilled time.Time
	stuck    bool // the last wait for journald was in vain: wait no more until it takes a line
	unsaid   int  // lines lost since the last report
	timer    *time.Timer
}

// newRelay makes a relay for the role. Without a journal it drops everything.
func newRelay(spec *Spec) *relay {
	r := &relay{sock: -1, tokens: lineBurst, refilled: time.Now()}
	if spec.Holder != nil {
		for _, text := range spec.Holder.Mute {
			r.mute = append(r.mute, []byte(text))
		}
	}
	var b bytes.Buffer
	writeField(&b, "SYSLOG_IDENTIFIER", "abfleet-"+spec.Role)
	for k, v := range spec.Labels {
		if isLabel(k) {
			writeField(&b, k, v)
		}
	}
	r.prefix = b.Bytes()
	if spec.Journal != "" {
		r.addr.Name = filepath.Join(filepath.Dir(spec.Journal), "socket")
		if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
			r.sock = fd
			wait := unix.NsecToTimeval(sendWait.Nanoseconds())
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait); err != nil {
				r.stuck = true // never wait rather than for ever
			}
		}
	}
	return r
}

// isLabel reports whether a field name is one of ours. Trusted and well-known
// fields are not for a Spec to set.
func isLabel(k string) bool {
	if !strings.HasPrefix(k, "ABF_") || len(k) > 64 {
		return false
	}
	for _, c := range k {
		if (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return true
}

// writeField appends one field of journald's native protocol.
func writeField(b *bytes.Buffer, name, value string) {
	b.WriteString(name)
	if strings.IndexByte(value, '\n') < 0 {
		b.WriteByte('=')
		b.WriteString(value)
	} else {
		b.WriteByte('\n')
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(value)))
		b.Write(n[:])
		b.WriteString(value)
	}
	b.WriteByte('\n')
}

// say sends a line of the holder's own. Priorities are those of syslog.
func (r *relay) say(priority int, text string) { r.line(priority, text) }

// line sends a line if the rate permits it.
func (r *relay) line(priority int, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.tokens = min(lineBurst, r.tokens+now.Sub(r.refilled).Seconds()*linesPerSecond)
	r.refilled = now
	if r.tokens < 1 {
		r.lose()
		return
	}
	r.tokens--
	r.report()
	if !r.send(priority, text) {
		r.lose()
	}
}

// lose counts a line. The caller holds mu.
func (r *relay) lose() {
	r.unsaid++
	if r.timer == nil {
		r.timer = time.AfterFunc(lossReport, r.reportLater)
	}
}

func (r *relay) reportLater() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = nil
	r.report()
}

// report says how many lines were lost. The caller holds mu.
func (r *relay) report() {
	if r.unsaid == 0 {
		return
	}
	if r.send(4, "dropped "+strconv.Itoa(r.unsaid)+" lines of output") {
		r.unsaid = 0
	}
}

// send reports whether journald took the line. The caller holds mu.
func (r *relay) send(priority int, text string) bool {
	if r.sock < 0 {
		return true
	}
	var b bytes.Buffer
	b.Grow(len(r.prefix) + len(text) + 32)
	b.Write(r.prefix)
	writeField(&b, "PRIORITY", strconv.Itoa(priority))
	writeField(&b, "MESSAGE", text)
	// The address is looked up each time, so a restarted journald is found.
	flags := unix.MSG_NOSIGNAL
	if r.stuck {
		flags |= unix.MSG_DONTWAIT
	}
	err := unix.Sendto(r.sock, b.Bytes(), flags, &r.addr)
	r.stuck = err != nil
	return err == nil
}

// close reports what is unsaid and ends the relay.
func (r *relay) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report()
	if r.timer != nil {
		r.timer.Stop()
	}
	if r.sock >= 0 {
		unix.Close(r.sock)
		r.sock = -1
	}
}

// copy relays the lines of one stream until its end.
func (r *relay) copy(in io.Reader) {
	buf := make([]byte, maxLine)
	n, skip := 0, false
	for {
		got, err := in.Read(buf[n:])
		n += got
		rest := buf[:n]
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			if !skip {
				r.output(rest[:i])
			}
			skip = false
			rest = rest[i+1:]
		}
		if len(rest) == len(buf) || err != nil {
			if !skip {
				r.output(rest)
			}
			skip = true
			rest = nil
		}
		n = copy(buf, rest)
		if err != nil {
			return
		}
	}
}

func (r *relay) output(line []byte) {
	for _, m := range r.mute {
		if bytes.Contains(line, m) {
			return
		}
	}
	line = bytes.TrimRight(line, "\r")
	if len(line) > 0 {
		r.line(severity(line), string(line))
	}
}

// severity reads the level of a Chromium log line,
// "[pid:tid:MMDD/HHMMSS.micros:LEVEL:file.cc:line] text". What Chromium calls
// an error is rarely one for the operator.
func severity(line []byte) int {
	const info, notice, warning, critical = 6, 5, 4, 2
	if len(line) == 0 || line[0] != '[' {
		return info
	}
	end := bytes.IndexByte(line, ']')
	if end < 0 {
		return info
	}
	head := line[:end]
	switch {
	case bytes.Contains(head, []byte(":ERROR:")):
		return warning
	case bytes.Contains(head, []byte(":WARNING:")):
		return notice
	case bytes.Contains(head, []byte(":FATAL:")):
		return critical
	}
	return info
}
