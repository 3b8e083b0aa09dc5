package proof

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

// listener is a TCP socket that accepts connections.
type listener struct {
	addr  netip.AddrPort
	uid   int
	inode uint64
}

// on reports whether connections to addr reach the listener.
func (l listener) on(addr netip.AddrPort) bool {
	return l.addr.Port() == addr.Port() && (l.addr.Addr() == addr.Addr() || l.addr.Addr().IsUnspecified())
}

// tcpListeners returns the listeners of the network namespace that a process is
// in. They come first in the kernel's tables, so that the cap on what is read of
// one costs none of them.
func tcpListeners(pid int) ([]listener, error) {
	var all []listener
	for _, table := range []string{"net/tcp", "net/tcp6"} {
		data, err := readProc(pid, table)
		if table == "net/tcp6" && errors.Is(err, errGone) {
			break // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		found, err := parseTCP(string(data))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// parseTCP reads the listening sockets out of a table with lines such as
//
//	0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 12345 1 ...
//
// whose first line is the header.
func parseTCP(table string) ([]listener, error) {
	const state, uid, inode, listening = 3, 7, 9, "0A"
	var all []listener
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) <= inode || f[state] != listening {
			continue
		}
		var l listener
		var err [3]error
		l.addr, err[0] = parseTCPAddr(f[1])
		l.uid, err[1] = strconv.Atoi(f[uid])
		l.inode, err[2] = strconv.ParseUint(f[inode], 10, 64)
		if e := errors.Join(err[:]...); e != nil {
			return nil, fmt.Errorf("malformed line %q: %w", strings.TrimSpace(line), e)
		}
		all = append(all, l)
	}
	return all, nil
}

// parseTCPAddr reads "0100007F:1F90": the address as hexadecimal numbers of four
// bytes in the machine's own order, and the port.
func parseTCPAddr(s string) (netip.AddrPort, error) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if len(b)%4 != 0 {
		return netip.AddrPort{}, errors.New("an address of unknown length")
	}
	for word := range slices.Chunk(b, 4) {
		binary.NativeEndian.PutUint32(word, binary.BigEndian.Uint32(word))
	}
	addr, ok := netip.AddrFromSlice(b)
	if !ok {
		return netip.AddrPort{}, errors.New("an address of unknown length")
	}
	n, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), err
}

// ownSockets returns the inodes of the sockets that a process has open.
func ownSockets(pid int) (map[uint64]bool, error) {
	files, err := openFiles(pid)
	if err != nil {
		return nil, err
	}
	own := make(map[uint64]bool)
	for _, target := range files {
		name, ok := strings.CutPrefix(target, "socket:[")
		if !ok {
			continue
		}
		if inode, err := strconv.ParseUint(strings.TrimSuffix(name, "]"), 10, 64); err == nil {
			own[inode] = true
		}
	}
	return own, nil
}

// Listening returns the TCP addresses that the Generation's proven processes
// listen on now. The error is a *Refusal.
func (l *Live) Listening(ctx context.Context) ([]netip.AddrPort, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.verify(ctx); err != nil {
		return nil, err
	}
	fds := map[int]int{l.g.Leader.PID: l.leader}
	if l.g.Browser != nil {
		if err := l.verifyBrowser(); err != nil {
			return nil, err
		}
		fds[l.g.Browser.PID] = l.browser
	}
	var addrs []netip.AddrPort
	for pid, fd := range fds {
		own, err := ownSockets(pid)
		if err != nil {
			return nil, unreadable(pid, err)
		}
		table, err := tcpListeners(pid)
		if err != nil {
			return nil, unreadable(pid, err)
		}
		for _, found := range table {
			if own[found.inode] {
				addrs = append(addrs, found.addr)
			}
		}
		if err := running(fd, pid); err != nil {
			return nil, err
		}
	}
	return addrs, nil
}

// listenerUncontradicted checks that the recorded TCP address of a browser is
// nobody else's. That nobody listens there contradicts nothing: a browser that is
// exiting closes it early.
func listenerUncontradicted(pid int, recorded string) error {
	if recorded == "" {
		return nil
	}
	addr, err := netip.ParseAddrPort(recorded)
	if err != nil {
		return refuse(RecordIncomplete, "listener: %w", err)
	}
	own, err := ownSockets(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	table, err := tcpListeners(pid)
	if err != nil {
		return unreadable(pid, err)
	}
	for _, l := range table {
		if l.on(addr) && !own[l.inode] {
			return refuse(ListenerDiffers, "process %d does not own the listener on %s", pid, l.addr)
		}
	}
	return nil
}

// listeners gathers the TCP addresses that Generations of this boot name.
func (c Claim) listeners() []string {
	boot, err := bootID()
	var all []string
	for _, g := range c.Generations {
		if g.Listener != "" && (err != nil || g.BootID == boot) {
			all = append(all, g.Listener)
		}
	}
	return all
}

// notServed checks that no process that may be the Claim's listens on a TCP
// address. A port is anybody's once it is free: who is proven to be a stranger,
// or another user, is no obstacle.
func notServed(address string, c Claim) error {
	addr, err := netip.ParseAddrPort(address)
	if err != nil {
		return refuse(Unreadable, "listener: %w", err)
	}
	find := func() ([]listener, error) {
		table, err := tcpListeners(os.Getpid())
		if err != nil {
			return nil, refuse(Unreadable, "TCP listeners: %w", err)
		}
		return slices.DeleteFunc(table, func(l listener) bool { return !l.on(addr) || l.uid != os.Geteuid() }), nil
	}
	found, err := find()
	if err != nil || len(found) == 0 {
		return err
	}
	all, err := pids()
	if err != nil {
		return refuse(Unreadable, "process table: %w", err)
	}
	known := make(map[uint64]bool)
	for _, pid := range all {
		own, err := ownSockets(pid)
		if err != nil {
			continue // of others, which the kernel does not show
		}
		for _, l := range found {
			if !own[l.inode] {
				continue
			}
			if !stranger(c, pid) && alive(pid) {
				return refuse(ListenerLive, "process %d listens on %s", pid, address)
			}
			known[l.inode] = true
		}
	}
	// One that ended while the process table was read has no owner and is no
	// listener any more.
	if found, err = find(); err != nil {
		return err
	}
	for _, l := range found {
		if !known[l.inode] {
			return refuse(ListenerLive, "a process that cannot be looked at listens on %s", address)
		}
	}
	return nil
}
