package sd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// journalSocket is where journald takes entries in its native protocol.
const journalSocket = "/run/systemd/journal/socket"

// journalTimeout is how long one line waits for a journald that does not read.
const journalTimeout = time.Second

// maxValue caps one field of an entry, in bytes.
const maxValue = 64 << 10

// field is one field of a journal entry.
type field struct{ name, value string }

// journal sends entries to journald. It is written out here instead of taken
// from go-systemd because that library binds its socket to an abstract address,
// which every process of the host can see and write to.
type journal struct {
	path string

	mu   sync.Mutex
	conn *net.UnixConn
}

// send delivers one entry.
func (j *journal) send(fields []field) error {
	entry := encode(fields)
	j.mu.Lock()
	defer j.mu.Unlock()
	err := j.write(entry)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.EPIPE) || errors.Is(err, net.ErrClosed) {
		// journald was restarted: its socket is another one now.
		j.close()
		err = j.write(entry)
	}
	return err
}

func (j *journal) write(entry []byte) error {
	if j.conn == nil {
		conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: j.path, Net: "unixgram"})
		if err != nil {
			return err
		}
		j.conn = conn
	}
	if err := j.conn.SetWriteDeadline(time.Now().Add(journalTimeout)); err != nil {
		return err
	}
	_, err := j.conn.Write(entry)
	if errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOBUFS) {
		return j.writeFile(entry)
	}
	return err
}

// writeFile passes an entry that is too large for a datagram as a sealed memory
// file, as the protocol wants it.
func (j *journal) writeFile(entry []byte) error {
	fd, err := unix.MemfdCreate("journal-entry", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for rest := entry; len(rest) > 0; {
		n, err := unix.Write(fd, rest)
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
		return err
	}
	// The net package sends no descriptors over a connected datagram socket.
	raw, err := j.conn.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := raw.Write(func(socket uintptr) bool {
		sendErr = unix.Sendmsg(int(socket), nil, unix.UnixRights(fd), nil, 0)
		return !errors.Is(sendErr, unix.EAGAIN)
	}); err != nil {
		return err
	}
	return sendErr
}

func (j *journal) close() {
	if j.conn != nil {
		_ = j.conn.Close()
		j.conn = nil
	}
}

// encode writes fields in journald's export form: NAME=value, or for a value
// with line feeds the name, the length as 64 bits little-endian, and the value.
func encode(fields []field) []byte {
	var out bytes.Buffer
	for _, f := range fields {
		value := f.value
		if len(value) > maxValue {
			value = value[:maxValue] + " [cut]"
		}
		out.WriteString(f.name)
		if !strings.Contains(value, "\n") {
			out.WriteByte('=')
		} else {
			out.WriteByte('\n')
			var length [8]byte
			binary.LittleEndian.PutUint64(length[:], uint64(len(value)))
			out.Write(length[:])
		}
		out.WriteString(value)
		out.WriteByte('\n')
	}
	return out.Bytes()
}

// fieldName makes a journal field name of an attribute key: upper case letters,
// digits and underscores, at most 64 bytes, under our prefix.
func fieldName(key string) string {
	name := []byte("ABF_")
	for _, c := range []byte(strings.ToUpper(key)) {
		if (c < 'A' || c > 'Z') && (c < '0' || c > '9') {
			c = '_'
		}
		name = append(name, c)
	}
	return string(name[:min(len(name), 64)])
}
