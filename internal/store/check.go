package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// CheckerCommand is the first argument of the helper process; the file is the
// second.
const CheckerCommand = "check-state"

// Exit codes of the helper. What another end says about the file is for
// crashed to tell.
const (
	exitSound     = 0
	exitDamaged   = 3
	exitUndecided = 4
	exitFaulted   = 5
	// exitGo is how the Go runtime ends a program, for any of its reasons.
	exitGo = 2
)

// maxReport caps what is read of the helper's words.
const maxReport = 4096

// crashes is how often in a row the helper has to crash on a file before the
// file is to blame: a bad page crashes every reader, a bad moment one.
const crashes = 2

// goCrashes are the words of the Go runtime when it is what a program read that
// ended it. Its other reasons, no memory and no thread, are the host's.
var goCrashes = []string{"panic: ", "unexpected fault address", "[signal SIG", "goroutine stack exceeds"}

// Damaged is a file that must not be opened.
type Damaged struct{ Reason string }

func (d *Damaged) Error() string { return "the state file is damaged: " + d.Reason }

// checkerReady guards CheckFile: without MaybeRunChecker in its main, the
// program would start itself instead of the helper.
var checkerReady atomic.Bool

// MaybeRunChecker turns this process into the helper that walks a state file,
// if it was started as one, and then does not return. Every program that opens
// a store calls it first thing in main, tests in TestMain.
func MaybeRunChecker() {
	checkerReady.Store(true)
	if len(os.Args) != 3 || os.Args[1] != CheckerCommand {
		return
	}
	err := walk(os.Args[2])
	code := exitSound
	var damaged *Damaged
	var faulted *memoryFault
	switch {
	case errors.As(err, &damaged):
		fmt.Fprintln(os.Stderr, damaged.Reason)
		code = exitDamaged
	case errors.As(err, &faulted):
		fmt.Fprintln(os.Stderr, faulted)
		code = exitFaulted
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		code = exitUndecided
	}
	// Not os.Exit: under the race detector that pauses for a second, and a
	// service waits for this answer.
	syscall.Exit(code)
}

// CheckFile walks a state file in a helper process. It returns nil for a sound
// file, a *Damaged for one that must not be opened, and another error when it
// cannot tell: when the helper ended for a reason of its own or of the host's.
func CheckFile(ctx context.Context, path string) error {
	if !checkerReady.Load() {
		return fault.New(fault.Internal, opCheck, "", "this program does not call store.MaybeRunChecker")
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	var crash string
	for range crashes {
		var err error
		if crash, err = runChecker(ctx, path); crash == "" {
			return err
		}
	}
	return &Damaged{Reason: "reading it crashes: " + crash}
}

const opCheck = "check fleet state"

// undecided is the error of a check that says nothing about the file.
func undecided(format string, args ...any) error {
	return fault.New(fault.Internal, opCheck, "The state file is where it was: start the service again; if this stays, free memory and processes of this user", format, args...)
}

// runChecker runs the helper once. A helper that crashed on the file is told by
// what it said of that, never empty.
func runChecker(ctx context.Context, path string) (crash string, err error) {
	// /proc/self/exe is this very program even after an upgrade replaced its
	// file.
	cmd := exec.CommandContext(ctx, "/proc/self/exe", CheckerCommand, path)
	cmd.Args[0] = "abfleetd"
	cmd.Env = []string{}
	// A terminal's Ctrl-C is for the service.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var report bytes.Buffer
	cmd.Stderr = &capped{w: &report, left: maxReport}
	if err = cmd.Run(); err == nil {
		return "", nil
	}
	first, _, _ := strings.Cut(strings.TrimSpace(report.String()), "\n")
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", fault.New(fault.Timeout, opCheck, "Start the service again when the machine is less busy", "the helper did not finish: %w", context.Cause(ctx))
	case !errors.As(err, &exit):
		return "", undecided("start the helper: %w", err)
	case exit.ExitCode() == exitDamaged:
		return "", &Damaged{Reason: first}
	case exit.ExitCode() == exitUndecided:
		return "", undecided("%s", first)
	}
	status, _ := exit.Sys().(syscall.WaitStatus)
	if crashed(status, report.String()) {
		return fmt.Sprintf("%v: %s", exit, first), nil
	}
	return "", undecided("the helper ended before it was done: %w: %s", exit, first)
}

// crashed reports whether it can be the file that ended the helper.
func crashed(status syscall.WaitStatus, report string) bool {
	switch {
	case status.Signaled():
		return status.Signal() == syscall.SIGSEGV || status.Signal() == syscall.SIGBUS
	case status.ExitStatus() == exitGo:
		return slices.ContainsFunc(goCrashes, func(words string) bool { return strings.Contains(report, words) })
	}
	return status.ExitStatus() == exitFaulted
}

// capped passes on the first bytes and swallows the rest.
type capped struct {
	w    io.Writer
	left int
}

func (c *capped) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	if _, err := c.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// memoryFault is a page of the file that could not be read. That may be a bad
// moment of the disk.
type memoryFault struct{ cause error }

func (m *memoryFault) Error() string { return m.cause.Error() }

// walk reads everything in the file. It runs in the helper: on a damaged file
// it may also panic, be killed by SIGBUS or never be asked for its opinion.
func walk(path string) (err error) {
	debug.SetPanicOnFault(true)
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			error
			Addr() uintptr
		}:
			err = &memoryFault{r}
		default:
			err = &Damaged{Reason: fmt.Sprint(r)}
		}
	}()
	if err := checkMetas(path); err != nil {
		return err
	}
	db, err := openBolt(path, true)
	if err != nil {
		return judge(err)
	}
	defer db.Close()
	return db.View(func(b *bolt.Tx) error {
		for err := range b.Check() {
			return &Damaged{Reason: err.Error()}
		}
		for _, name := range buckets {
			bucket := b.Bucket([]byte(name))
			if bucket == nil {
				return &Damaged{Reason: fmt.Sprintf("it has no bucket %s", name)}
			}
			err := bucket.ForEach(func(key, value []byte) error {
				_, err := open(name, key, value)
				return err
			})
			if err != nil {
				return &Damaged{Reason: err.Error()}
			}
		}
		return nil
	})
}

// judge says which failures to open are the file's. The others, no memory to map
// it, no lock, no descriptor, are the host's.
func judge(err error) error {
	for _, damage := range []error{bolterrors.ErrInvalid, bolterrors.ErrChecksum, bolterrors.ErrVersionMismatch} {
		if errors.Is(err, damage) {
			return &Damaged{Reason: damage.Error()}
		}
	}
	return err
}

// Where bbolt keeps what it needs to find everything else: two meta pages, in
// the byte order of the machine, each a 16 byte page header and this.
const (
	metaOffset   = 16
	metaSize     = 64
	metaMagic    = 0xED0CDAED
	metaVersion  = 2
	minPageSize  = 1 << 10
	maxPageSize  = 1 << 16
	atMagic      = 0
	atVersion    = 4
	atPageSize   = 8
	atPages      = 40
	atTxid       = 48
	atChecksum   = 56
	metaReadSize = metaOffset + metaSize
)

// checkMetas demands both meta pages. bbolt is content with one and then shows
// the transaction before the last; here that would forget a browser that runs.
func checkMetas(path string) error {
	f, err := safefs.OpenPrivate(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	type meta struct{ pageSize, pages, txid uint64 }
	read := func(n int, at int64) (meta, error) {
		var page [metaReadSize]byte
		if _, err := f.ReadAt(page[:], at); err != nil {
			if errors.Is(err, io.EOF) {
				return meta{}, &Damaged{Reason: fmt.Sprintf("it ends before meta page %d", n)}
			}
			return meta{}, err
		}
		m := page[metaOffset:]
		u32 := func(off int) uint32 { return binary.NativeEndian.Uint32(m[off:]) }
		u64 := func(off int) uint64 { return binary.NativeEndian.Uint64(m[off:]) }
		h := fnv.New64a()
		h.Write(m[:atChecksum])
		size := uint64(u32(atPageSize))
		if u32(atMagic) != metaMagic || u32(atVersion) != metaVersion || h.Sum64() != u64(atChecksum) ||
			size < minPageSize || size > maxPageSize {
			return meta{}, &Damaged{Reason: fmt.Sprintf("meta page %d is not valid", n)}
		}
		return meta{size, u64(atPages), u64(atTxid)}, nil
	}
	first, err := read(0, 0)
	if err != nil {
		return err
	}
	second, err := read(1, int64(first.pageSize))
	if err != nil {
		return err
	}
	// Commits alternate between the pages. The first commit on a restored
	// copy may overwrite the newer of its two equal pages.
	apart := max(first.txid, second.txid) - min(first.txid, second.txid)
	if first.pageSize != second.pageSize || apart < 1 || apart > 2 {
		return &Damaged{Reason: fmt.Sprintf("its meta pages do not belong together (transactions %d and %d)", first.txid, second.txid)}
	}
	newest := first
	if second.txid > first.txid {
		newest = second
	}
	if uint64(info.Size())/newest.pageSize < newest.pages {
		return &Damaged{Reason: fmt.Sprintf("it has %d bytes and should have %d", info.Size(), newest.pages*newest.pageSize)}
	}
	return nil
}
