package holder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// The versions of the holder's protocol that this build speaks, on either side.
// The service speaks to holders of the last two releases, so the lower bound
// moves one release after the upper one.
const (
	minVersion = 1
	maxVersion = 1
)

// maxHandshake bounds the first frame in each direction.
const maxHandshake = 4 << 10

// greeting is the first frame of a client.
type greeting struct {
	Versions *versions `json:"abfleet-cdp"`
	Key      string    `json:"key"`
	// Control asks for a connection that reaches the holder only, and so
	// needs no browser that answers.
	Control bool `json:"control,omitempty"`
}

type versions struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

// welcome is the holder's answer to a greeting.
type welcome struct {
	Version    int    `json:"abfleet-cdp"`
	Error      string `json:"error,omitempty"`
	Min        int    `json:"min,omitempty"`
	Max        int    `json:"max,omitempty"`
	BrowserPID int    `json:"browserPid,omitempty"`
	Generation uint64 `json:"generation,omitempty"`
	Product    string `json:"product,omitempty"`
}

// Errors of a welcome. They are part of the protocol.
const (
	refusedVersion = "version"
	refusedPeer    = "refused"
	refusedBusy    = "busy"
	refusedEnded   = "ended"
)

var (
	// ErrRefused means that the holder did not accept this peer: wrong key,
	// wrong user or wrong cgroup. Trying again cannot help.
	ErrRefused = errors.New("the holder refused this peer")
	// ErrVersion means that holder and client share no protocol version.
	ErrVersion = errors.New("the holder speaks another protocol version")
	// ErrBusy means that the holder has as many clients as it serves.
	ErrBusy = errors.New("the holder has too many clients")
	// ErrEnded means that the browser ended or is being closed.
	ErrEnded = errors.New("the browser has ended or is closing")
)

// Hello is what a holder says about itself.
type Hello struct {
	Version    int    // of the protocol that was agreed on
	BrowserPID int    // the browser process, child of the holder
	Generation uint64 // of the role
	Product    string // Browser.getVersion's product, such as "Chrome/156.0.8078.114"
}

// Dial connects to a holder and waits until its browser answers CDP. The
// connection then carries NUL-delimited CDP messages whose root is a browser
// session of its own.
func Dial(ctx context.Context, socket, key string) (net.Conn, Hello, error) {
	conn, hello, err := dial(ctx, socket, key, false)
	if err != nil {
		return nil, Hello{}, fmt.Errorf("cannot connect to holder: %w", err)
	}
	return conn, hello, nil
}

func dial(ctx context.Context, socket, key string, control bool) (_ net.Conn, _ Hello, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, Hello{}, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		// A context that ended during the handshake has touched the
		// deadline, or is about to: the connection is of no use then.
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			conn.Close()
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
		}
	}()
	data, err := json.Marshal(greeting{Versions: &versions{Min: minVersion, Max: maxVersion}, Key: key, Control: control})
	if err != nil {
		return nil, Hello{}, err
	}
	// A holder may refuse a peer before it listens to it, and then the write
	// fails while the answer is there to be read.
	_, writeErr := conn.Write(append(data, 0))
	frame, err := readSmallFrame(conn, maxHandshake)
	if err != nil {
		return nil, Hello{}, errors.Join(writeErr, err)
	}
	var w welcome
	if err := json.Unmarshal(frame, &w); err != nil {
		return nil, Hello{}, fmt.Errorf("its answer is damaged: %w", err)
	}
	switch w.Error {
	case "":
	case refusedVersion:
		return nil, Hello{}, fmt.Errorf("%w: %d to %d, this program %d to %d", ErrVersion, w.Min, w.Max, minVersion, maxVersion)
	case refusedPeer:
		return nil, Hello{}, ErrRefused
	case refusedBusy:
		return nil, Hello{}, ErrBusy
	case refusedEnded:
		return nil, Hello{}, ErrEnded
	default:
		return nil, Hello{}, fmt.Errorf("it answered %q", w.Error)
	}
	if w.Version < minVersion || w.Version > maxVersion {
		return nil, Hello{}, fmt.Errorf("%w: it chose %d", ErrVersion, w.Version)
	}
	return conn, Hello{Version: w.Version, BrowserPID: w.BrowserPID, Generation: w.Generation, Product: w.Product}, nil
}

// Close asks the holder for the clean stop and returns when the holder has
// agreed, before the browser has ended. The reason is recorded in exit.json.
func Close(ctx context.Context, socket, key, reason string) error {
	conn, _, err := dial(ctx, socket, key, true)
	if err != nil {
		return fmt.Errorf("cannot ask holder to close: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := askClose(conn, reason); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("cannot ask holder to close: %w", err)
	}
	return nil
}

func askClose(conn net.Conn, reason string) error {
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	data, err := json.Marshal(map[string]any{"id": 1, "method": methodClose, "params": map[string]string{"reason": reason}})
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(data, 0)); err != nil {
		return err
	}
	frame, err := readSmallFrame(conn, maxHandshake)
	if err != nil {
		return err
	}
	var answer struct {
		Error *struct{ Message string }
	}
	if err := json.Unmarshal(frame, &answer); err != nil {
		return err
	}
	if answer.Error != nil {
		return errors.New(answer.Error.Message)
	}
	return nil
}

// readSmallFrame reads up to the next NUL, byte by byte, so that nothing of
// the next frame is taken.
func readSmallFrame(conn net.Conn, limit int) ([]byte, error) {
	var b [1]byte
	var frame []byte
	for len(frame) < limit {
		if _, err := conn.Read(b[:]); err != nil {
			return nil, err
		}
		if b[0] == 0 {
			return bytes.TrimSpace(frame), nil
		}
		frame = append(frame, b[0])
	}
	return nil, fmt.Errorf("its first message has more than %d bytes", limit)
}
