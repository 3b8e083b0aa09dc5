package holder

import "bytes"

// maxFrame bounds one CDP message in either direction. Chromium itself ends
// the connection at 100 MiB; staying below leaves room for what the broker adds.
const maxFrame = 100 * 1000 * 1000

// largeFrame is the size from which a message counts as large: it is kept in
// several chunks, and memory is given back to the system after it.
const largeFrame = 1 << 20

// maxChunk bounds one chunk of a large message, so that growth copies nothing.
const maxChunk = 1 << 20

// joinBelow is the size up to which an outgoing message is made contiguous, to
// cost one write.
const joinBelow = 64 << 10

// frame is one message without its final NUL.
type frame struct {
	chunks [][]byte
	size   int
}

// bytes returns the first limit bytes of f at most, contiguous.
func (f frame) bytes(limit int) []byte {
	var out []byte
	f.each(0, min(limit, f.size), func(p []byte) { out = append(out, p...) })
	return out
}

// each calls fn for the pieces of f's bytes from start to end.
func (f frame) each(start, end int, fn func([]byte)) {
	pos := 0
	for _, c := range f.chunks {
		if pos >= end {
			return
		}
		from, to := max(start-pos, 0), min(end-pos, len(c))
		if from < to {
			fn(c[from:to])
		}
		pos += len(c)
	}
}

// edit replaces the bytes from start to end by text.
type edit struct {
	start, end int
	text       string
}

// outgoing is a message ready to be written, with its final NUL.
type outgoing struct {
	parts [][]byte
	size  int
}

// splice makes the outgoing form of f with edits applied, which must be in
// ascending order and must not overlap. The payload is not copied when f is large.
func (f frame) splice(edits ...edit) outgoing {
	var parts [][]byte
	size := 0
	add := func(p []byte) {
		parts = append(parts, p)
		size += len(p)
	}
	pos := 0
	for _, e := range edits {
		f.each(pos, e.start, add)
		if e.text != "" {
			add([]byte(e.text))
		}
		pos = e.end
	}
	f.each(pos, f.size, add)
	add([]byte{0})
	if size <= joinBelow {
		parts = [][]byte{bytes.Join(parts, nil)}
	}
	return outgoing{parts: parts, size: size}
}

// assembler cuts a byte stream into messages and scans them on the way.
type assembler struct {
	limit   int
	scan    scanner
	frame   frame
	tooLong bool
}

// feed takes bytes up to and including the next NUL. It returns how many it
// took and whether a message is complete; then take must be called.
func (a *assembler) feed(p []byte) (int, bool) {
	n := bytes.IndexByte(p, 0)
	if n < 0 {
		a.add(p, false)
		return len(p), false
	}
	a.add(p[:n], true)
	return n + 1, true
}

func (a *assembler) add(p []byte, last bool) {
	a.scan.write(p)
	if a.tooLong || len(p) == 0 {
		return
	}
	if a.frame.size+len(p) > a.limit {
		// What is left is scanned only, for the id that needs an answer.
		a.tooLong = true
		a.frame = frame{}
		return
	}
	f := &a.frame
	f.size += len(p)
	if n := len(f.chunks); n > 0 {
		c := f.chunks[n-1]
		room := min(cap(c)-len(c), len(p))
		f.chunks[n-1] = append(c, p[:room]...)
		p = p[room:]
	}
	if len(p) == 0 {
		return
	}
	want := len(p)
	if !last {
		want = max(want, min(max(f.size, joinBelow), maxChunk))
	}
	f.chunks = append(f.chunks, append(make([]byte, 0, want), p...))
}

// take returns the complete message and starts the next one.
func (a *assembler) take() (f frame, m message, tooLong bool) {
	f, m, tooLong = a.frame, a.scan.finish(), a.tooLong
	a.frame, a.tooLong = frame{}, false
	a.scan.reset()
	return f, m, tooLong
}
