package faults

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/godbus/dbus/v5"
)

// bus is a D-Bus socket in front of the real one, on which calls can be counted,
// answered with the death of the caller, cut off, and signals lost.
type bus struct {
	dial func() (net.Conn, error)

	mu sync.Mutex // guards the fields that follow
	// calls are the members of the calls that change something, since arm.
	calls []string
	// plan is what to do at the n-th of them.
	plan  plan
	armed bool
	// lost drops the signals with this member, while it is set.
	lost  string
	drops int
	conns map[net.Conn]bool
}

// plan is what happens at the n-th call: kill or cut, before the call is sent or
// after its answer came. n 0 only counts.
type plan struct {
	n     int
	after bool
	act   func()
}

// reading are the members that change nothing.
var reading = map[string]bool{
	"Hello": true, "AddMatch": true, "RemoveMatch": true, "GetNameOwner": true, "NameHasOwner": true, "Subscribe": true, "Unsubscribe": true,
	"Get": true, "GetAll": true, "GetUnit": true, "GetUnitByPID": true, "GetUnitProcesses": true, "ListUnits": true, "ListUnitsByNames": true,
	"ListUnitsByPatterns": true, "GetJob": true, "Ping": true, "Introspect": true, "GetId": true,
}

func newBus(l net.Listener, dial func() (net.Conn, error)) *bus {
	b := &bus{dial: dial, conns: map[net.Conn]bool{}}
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go b.serve(client)
		}
	}()
	return b
}

// arm begins to count calls, and to do what the plan says.
func (b *bus) arm(p plan) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls, b.plan, b.armed = nil, p, true
}

// disarm ends that and returns the calls that were counted.
func (b *bus) disarm() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed, b.plan = false, plan{}
	return b.calls
}

// lose drops signals with a member until it is called again, and returns how many
// were dropped before.
func (b *bus) lose(member string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.drops
	b.lost, b.drops = member, 0
	return n
}

// cut ends every connection.
func (b *bus) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		c.Close()
	}
}

func (b *bus) track(c net.Conn) func() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns[c] = true
	return func() {
		c.Close()
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.conns, c)
	}
}

func (b *bus) serve(client net.Conn) {
	defer b.track(client)()
	server, err := b.dial()
	if err != nil {
		return
	}
	defer b.track(server)()
	answers := &answers{waiting: map[uint32]func(){}}
	go func() {
		defer client.Close()
		defer server.Close()
		b.backward(server, client, answers)
	}()
	b.forward(client, server, answers)
}

// answers knows what to do when the answer to a call comes.
type answers struct {
	mu      sync.Mutex
	waiting map[uint32]func()
}

func (a *answers) on(serial uint32, act func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting[serial] = act
}

func (a *answers) take(serial uint32) func() {
	a.mu.Lock()
	defer a.mu.Unlock()
	act := a.waiting[serial]
	delete(a.waiting, serial)
	return act
}

// forward passes on what the service says.
func (b *bus) forward(client, server net.Conn, answers *answers) {
	if err := handshake(client, server); err != nil {
		return
	}
	for {
		raw, m, err := readMessage(client)
		if err != nil {
			return
		}
		if m.Type == dbus.TypeMethodCall {
			before, after := b.count(member(m))
			if before != nil {
				before()
				return
			}
			if after != nil {
				answers.on(m.Serial(), after)
			}
		}
		if _, err := server.Write(raw); err != nil {
			return
		}
	}
}

// count notes a call and returns what is to be done before it, or after its
// answer.
func (b *bus) count(name string) (before, after func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.armed || reading[name] {
		return nil, nil
	}
	b.calls = append(b.calls, name)
	if len(b.calls) != b.plan.n {
		return nil, nil
	}
	if b.plan.after {
		return nil, b.plan.act
	}
	return b.plan.act, nil
}

// backward passes on what the bus says.
func (b *bus) backward(server, client net.Conn, answers *answers) {
	first := make([]byte, 1)
	for {
		// Until the first message come lines of the handshake.
		if _, err := io.ReadFull(server, first); err != nil {
			return
		}
		rest := io.MultiReader(bytes.NewReader(first), server)
		if first[0] != 'l' && first[0] != 'B' {
			line, err := readLine(rest)
			if err != nil {
				return
			}
			if _, err := client.Write(line); err != nil {
				return
			}
			continue
		}
		raw, m, err := readMessage(rest)
		if err != nil {
			return
		}
		if serial, ok := m.Headers[dbus.FieldReplySerial].Value().(uint32); ok {
			if act := answers.take(serial); act != nil {
				act()
				return
			}
		}
		if m.Type == dbus.TypeSignal && b.loses(member(m)) {
			continue
		}
		if _, err := client.Write(raw); err != nil {
			return
		}
	}
}

func (b *bus) loses(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lost == "" || name != b.lost {
		return false
	}
	b.drops++
	return true
}

func member(m *dbus.Message) string {
	name, _ := m.Headers[dbus.FieldMember].Value().(string)
	return name
}

// handshake passes on the lines up to BEGIN.
func handshake(client, server net.Conn) error {
	for {
		line, err := readLine(client)
		if err != nil {
			return err
		}
		if _, err := server.Write(line); err != nil {
			return err
		}
		if strings.HasPrefix(strings.TrimLeft(string(line), "\x00"), "BEGIN") {
			return nil
		}
	}
}

// readLine reads byte by byte: what follows the last line is no line.
func readLine(r io.Reader) ([]byte, error) {
	var line []byte
	one := make([]byte, 1)
	for len(line) < 4096 {
		if _, err := io.ReadFull(r, one); err != nil {
			return nil, err
		}
		if line = append(line, one[0]); one[0] == '\n' {
			return line, nil
		}
	}
	return nil, errors.New("a line without an end")
}

// readMessage reads one message as it is on the wire, and what it says.
func readMessage(r io.Reader) ([]byte, *dbus.Message, error) {
	const fixed = 16 // up to and with the length of the header fields
	raw := make([]byte, fixed)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, nil, err
	}
	var order binary.ByteOrder = binary.LittleEndian
	if raw[0] == 'B' {
		order = binary.BigEndian
	}
	body, fields := order.Uint32(raw[4:]), order.Uint32(raw[12:])
	length := (uint64(fields)+7)/8*8 + uint64(body)
	if length > 128<<20 {
		return nil, nil, errors.New("a message beyond D-Bus's limit")
	}
	rest := make([]byte, length)
	if _, err := io.ReadFull(r, rest); err != nil {
		return nil, nil, err
	}
	raw = append(raw, rest...)
	m, err := dbus.DecodeMessage(bytes.NewReader(raw))
	return raw, m, err
}
