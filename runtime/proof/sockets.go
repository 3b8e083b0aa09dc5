package proof

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// unixTable is where the kernel lists the unix sockets of this network
// namespace.
const unixTable = "/proc/net/unix"

// listeners returns the unix sockets that listen under a path, as the links in
// /proc/PID/fd name them. Reading the table reaches no listener, so that asking
// leaves no trace with it and a stopped one answers too.
func listeners() (map[string][]string, error) {
	data, err := os.ReadFile(unixTable)
	if err != nil {
		return nil, err
	}
	return parseUnixTable(string(data)), nil
}

// parseUnixTable reads lines such as
//
//	0000000000000000: 00000002 00000000 00010000 0001 01 15896270 /run/x.sock
//
// whose fourth column has the bit __SO_ACCEPTCON of a socket that listens. The
// path is the rest of the line and may have spaces.
func parseUnixTable(table string) map[string][]string {
	const flags, inode, columns = 3, 6, 8
	all := make(map[string][]string)
	for line := range strings.Lines(table) {
		rest := strings.TrimSuffix(line, "\n")
		var f [columns]string
		for i := range columns - 1 {
			rest = strings.TrimLeft(rest, " ")
			f[i], rest, _ = strings.Cut(rest, " ")
		}
		if f[flags] == "00010000" && rest != "" {
			all[rest] = append(all[rest], "socket:["+f[inode]+"]")
		}
	}
	return all
}

// listenerEvidence checks that what listens on the socket of a Role is its
// leader. Nobody is no contradiction: a Role that starts or ends does not
// listen. bound reports whether the leader does.
func listenerEvidence(pid int, sockets []string) (bound bool, err error) {
	if len(sockets) == 0 {
		return false, nil
	}
	table, err := listeners()
	if err != nil {
		return false, refuse(Unreadable, "unix sockets: %w", err)
	}
	files, err := openFiles(pid)
	if err != nil {
		return false, unreadable(pid, err)
	}
	open := make(map[string]bool, len(files))
	for _, target := range files {
		open[target] = true
	}
	bound = true
	for _, path := range sockets {
		for _, s := range table[path] {
			if !open[s] {
				return false, refuse(ListenerDiffers, "another process than %d listens on %s", pid, path)
			}
		}
		bound = bound && len(table[path]) > 0
	}
	return bound, nil
}

// servesAlone checks that the process is who answers on a unix socket, by what
// the kernel recorded when it began to listen.
func servesAlone(pid int, path string) error {
	p, err := knock(path)
	switch {
	case err != nil:
		return fmt.Errorf("nobody answers on %s: %w", path, err)
	case p.pid != pid:
		return fmt.Errorf("process %d answers on %s", p.pid, path)
	case p.uid != os.Geteuid():
		return errors.New("its listener is another user's")
	}
	return nil
}
