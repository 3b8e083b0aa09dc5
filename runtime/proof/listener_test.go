package proof

import (
	"net"
	"net/netip"
	"os"
	"testing"
)

func TestParseTCP(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	const tcp = head +
		"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 12345 1 0000000000000000 100 0 0 10 0\n" +
		"   1: 00000000:170C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 22 1 0000000000000000 100 0 0 10 0\n" +
		"   2: 0100007F:1F90 0100007F:ABCD 01 00000000:00000000 00:00000000 00000000  1000        0 77 1 0000000000000000 20 0 0 10 -1\n"
	const tcp6 = head +
		"   0: 00000000000000000000000000000000:170C 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  7 0 5 1 0 100 0 0 10 0\n" +
		"   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  7 0 6 1 0 100 0 0 10 0\n" +
		"   2: B80D0120000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  7 0 8 1 0 100 0 0 10 0\n"
	for table, want := range map[string][]listener{
		tcp:  {{netip.MustParseAddrPort("127.0.0.1:8080"), 1000, 12345}, {netip.MustParseAddrPort("0.0.0.0:5900"), 0, 22}},
		tcp6: {{netip.MustParseAddrPort("[::]:5900"), 7, 5}, {netip.MustParseAddrPort("[::1]:80"), 7, 6}, {netip.MustParseAddrPort("[2001:db8::1]:80"), 7, 8}},
		head: nil, "": nil,
	} {
		got, err := parseTCP(table)
		if err != nil || len(got) != len(want) {
			t.Errorf("got %v %v, want %v", got, err, want)
			continue
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("got %v, want %v", got[i], want[i])
			}
		}
	}
	for _, line := range []string{
		"0: 0100007F 0 0A 0 0 0 1000 0 1 1", "0: 0100:1F90 0 0A 0 0 0 1000 0 1 1", "0: 0100007F:1F90 0 0A 0 0 0 x 0 1 1", "0: 0100007F:1F90 0 0A 0 0 0 1 0 -1 1", "0: ZZ00007F:1F90 0 0A 0 0 0 1 0 1 1",
	} {
		if got, err := parseTCP(line); err == nil {
			t.Errorf("%q is read as %v", line, got)
		}
	}
}

// A TCP address is told with its owner; where nobody or a stranger listens it
// keeps nothing from being vacant, and whoever may be ours does.
func TestNotServed(t *testing.T) {
	us := os.Getpid()
	self, _, err := observe(us)
	if err != nil {
		t.Fatal(err)
	}
	mine := Generation{Leader: self}
	stranger := Claim{Instance: "i", Root: "/nonexistent/root", Slice: "abftest-none.slice"}
	for _, on := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		l, err := net.Listen("tcp", on)
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().(*net.TCPAddr).AddrPort()
		table, err := tcpListeners(us)
		if err != nil {
			t.Fatal(err)
		}
		own, err := ownSockets(us)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, s := range table {
			found = found || s.addr.Port() == addr.Port() && s.uid == os.Geteuid() && own[s.inode]
		}
		if !found {
			t.Errorf("%s is not found among %v of %v", addr, table, own)
		}

		// A listener on every address has this one too.
		if addr.Addr().IsUnspecified() {
			addr = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), addr.Port())
		}
		if err := listenerUncontradicted(us, addr.String()); err != nil {
			t.Errorf("the owner of %s: %v", addr, err)
		}
		if err := listenerUncontradicted(os.Getppid(), addr.String()); ReasonOf(err) != ListenerDiffers {
			t.Errorf("another than the owner of %s: %v", addr, err)
		}
		if err := notServed(addr.String(), stranger); err != nil {
			t.Errorf("a stranger on %s: %v", addr, err)
		}
		for name, change := range map[string]func(*Claim){
			"a recorded process":        func(c *Claim) { c.Generations = []Generation{mine} },
			"a claim without its slice": func(c *Claim) { c.Slice = "" },
			"a claim without its root":  func(c *Claim) { c.Root = "" },
		} {
			c := stranger
			change(&c)
			if err := notServed(addr.String(), c); ReasonOf(err) != ListenerLive {
				t.Errorf("%s, on %s: %v", name, addr, err)
			}
		}
		l.Close()
		if err := notServed(addr.String(), Claim{}); err != nil {
			t.Errorf("nobody on %s: %v", addr, err)
		}
		if err := listenerUncontradicted(us, addr.String()); err != nil {
			t.Errorf("nobody on %s contradicts: %v", addr, err)
		}
	}
	for _, bad := range []string{"127.0.0.1", "x:1", ":80"} {
		if err := notServed(bad, stranger); ReasonOf(err) != Unreadable {
			t.Errorf("the listener %q: %v", bad, err)
		}
		if err := listenerUncontradicted(us, bad); ReasonOf(err) != RecordIncomplete {
			t.Errorf("the listener %q: %v", bad, err)
		}
	}
	if err := listenerUncontradicted(us, ""); err != nil {
		t.Errorf("no listener: %v", err)
	}

	// Only those of this boot are looked for.
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	c := Claim{Generations: []Generation{{BootID: boot, Listener: "127.0.0.1:1"}, {BootID: "before", Listener: "127.0.0.1:2"}, {BootID: boot}}}
	if got := c.listeners(); len(got) != 1 || got[0] != "127.0.0.1:1" {
		t.Errorf("the claim's listeners are %q", got)
	}
}
