package rig

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// consoleCap is how much of PID 1's console output is kept.
const consoleCap = 64 << 10

// console is the terminal that PID 1 of a rig writes to: a pty, because systemd
// treats its console as one. The end of the output is kept for error messages.
type console struct {
	path   string // of the terminal, on the machine's devpts
	master *os.File
	slave  *os.File // stays open: without any, reading the master fails

	mu  sync.Mutex
	buf []byte
}

func newConsole() (*console, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open console: %w", err)
	}
	c := &console{master: os.NewFile(uintptr(fd), "rig console")}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		c.path = fmt.Sprintf("/dev/pts/%d", n)
		c.slave, err = os.OpenFile(c.path, os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		c.master.Close()
		return nil, fmt.Errorf("cannot open console: %w", err)
	}
	go c.read()
	return c, nil
}

func (c *console) read() {
	buf := make([]byte, 4096)
	for {
		n, err := c.master.Read(buf)
		c.mu.Lock()
		c.buf = append(c.buf, buf[:n]...)
		if len(c.buf) > 2*consoleCap {
			c.buf = append([]byte(nil), c.buf[len(c.buf)-consoleCap:]...)
		}
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// tail is the last n bytes of output.
func (c *console) tail(n int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.buf[max(0, len(c.buf)-n):])
}

func (c *console) close() {
	c.slave.Close()
	c.master.Close()
}
