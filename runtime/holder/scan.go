package holder

// message is what the broker needs to know about a CDP message: the members of
// the top-level object that it routes by, and where they are.
type message struct {
	// id is the token of the integer "id", "" without one; it lies at
	// idStart..idEnd.
	id             string
	idStart, idEnd int
	// method is the raw content of the string "method".
	method string
	// session is the raw content of the string "sessionId", "" without one.
	session string
	// sessionStart..sessionEnd is the whole member with the comma that goes
	// when the member goes.
	sessionStart, sessionEnd int
	// open is the offset just behind the opening brace.
	open int
	// inner is the raw content of the string "sessionId" directly inside
	// "params" or "result".
	inner string
	// bad says why this is not a message that can be routed, "" if it is one.
	bad string
}

// scanner finds a message's parts in one pass over its bytes, which may come
// in any pieces. It is deliberately stricter than JSON needs where a lenient
// reading could differ from Chromium's: no comments, no escapes in top-level
// keys, no member twice.
type scanner struct {
	m     message
	state scanState
	off   int // offset of the next byte in the message

	key     capture // the top-level key being read
	member  memberKind
	seen    [memberKinds]bool
	keyFrom int // offset of the current key's opening quote
	comma   int // offset of the comma before the current member, -1 for the first
	escaped bool

	value capture // the top-level value being read, when it matters

	// Inside a top-level value that is an object or array. The fields after
	// depth are about its direct members only.
	depth    int
	isObject bool
	last     byte // the last structural byte seen at depth 1
	nestKey  capture
	nestWant bool // the key before was "sessionId"
	inner    capture
	innerSet bool

	// cutBehind: the "sessionId" member came first, so the comma behind it
	// goes with it.
	cutBehind bool
}

type scanState uint8

const (
	atStart       scanState = iota // before the opening brace
	atFirstKey                     // behind the opening brace
	atKey                          // behind a comma
	inKey                          // inside a top-level key
	atColon                        // behind a top-level key
	atValue                        // behind its colon
	inString                       // inside a top-level string
	inLiteral                      // inside a top-level number, true, false or null
	inNest                         // inside an object or array
	inNestString                   // inside a string there that does not matter
	inNestKey                      // inside a key of the direct members
	inNestSession                  // inside the value of a direct "sessionId"
	atComma                        // behind a top-level value
	atEnd                          // behind the closing brace
	isBad
)

type memberKind uint8

const (
	memberOther memberKind = iota
	memberID
	memberMethod
	memberSession
	memberPayload
	memberKinds
)

// capture keeps the first bytes of a token.
type capture struct {
	buf  [maxToken]byte
	n    int
	over bool
}

// maxToken bounds a key, id, method or session id that matters. Chromium's
// session ids have 32 characters, its longest method names about 60.
const maxToken = 128

func (c *capture) reset() { c.n, c.over = 0, false }

func (c *capture) add(b byte) {
	if c.n == len(c.buf) {
		c.over = true
		return
	}
	c.buf[c.n] = b
	c.n++
}

func (c *capture) is(s string) bool   { return !c.over && string(c.buf[:c.n]) == s }
func (c *capture) String() string     { return string(c.buf[:c.n]) }
func (s *scanner) reset()             { *s = scanner{comma: -1} }
func (s *scanner) fail(reason string) { s.state, s.m.bad = isBad, reason }

// plain marks the bytes of a string that need no attention.
var plain = func() (t [256]bool) {
	for i := range t {
		t[i] = i >= 0x20 && i != '"' && i != '\\'
	}
	return t
}()

// literal marks the bytes that numbers and the three names are made of.
var literal = func() (t [256]bool) {
	for _, c := range []byte("0123456789+-.eEtrufalsn") {
		t[c] = true
	}
	return t
}()

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

// write takes the next bytes of the message.
func (s *scanner) write(p []byte) {
	base := s.off
	s.off += len(p)
	for i := 0; i < len(p) && s.state != isBad; i++ {
		// Long strings are most of a large message.
		if s.state == inNestString && !s.escaped {
			for i < len(p) && plain[p[i]] {
				i++
			}
			if i == len(p) {
				return
			}
		}
		s.step(p[i], base+i)
	}
}

func (s *scanner) step(c byte, at int) {
	switch s.state {
	case atStart:
		if c == '{' {
			s.state, s.m.open = atFirstKey, at+1
		} else if !isSpace(c) {
			s.fail("not a JSON object")
		}
	case atFirstKey, atKey:
		switch {
		case c == '"':
			s.state, s.keyFrom = inKey, at
			s.key.reset()
		case c == '}' && s.state == atFirstKey:
			s.state = atEnd
		case !isSpace(c):
			s.fail("a key is missing")
		}
	case inKey:
		switch {
		case c == '"':
			s.endKey()
		case c == '\\':
			s.fail("a key has an escape")
		case c < 0x20:
			s.fail("a control character in a key")
		default:
			s.key.add(c)
		}
	case atColon:
		if c == ':' {
			s.state = atValue
		} else if !isSpace(c) {
			s.fail("a colon is missing")
		}
	case atValue:
		s.startValue(c, at)
	case inString:
		if s.stringEnds(c, &s.value) {
			s.endValue(at + 1)
		}
	case inLiteral:
		switch {
		case literal[c]:
			s.value.add(c)
		case isSpace(c), c == ',', c == '}':
			s.endValue(at)
			s.step(c, at)
		default:
			s.fail("a value is damaged")
		}
	case inNest:
		s.nest(c, at)
	case inNestString:
		if s.stringEnds(c, nil) {
			s.state = inNest
		}
	case inNestKey:
		if s.stringEnds(c, &s.nestKey) {
			s.state = inNest
			s.nestWant = s.nestKey.is("sessionId")
		}
	case inNestSession:
		if s.stringEnds(c, &s.inner) {
			s.state = inNest
			s.innerSet = true
		}
	case atComma:
		switch {
		case c == ',':
			if s.cutBehind {
				s.m.sessionEnd, s.cutBehind = at+1, false
			}
			s.state, s.comma = atKey, at
		case c == '}':
			s.state = atEnd
		case !isSpace(c):
			s.fail("a comma is missing")
		}
	case atEnd:
		if !isSpace(c) {
			s.fail("something follows the object")
		}
	}
}

// stringEnds handles one byte inside a string and reports whether it was the
// closing quote. Escapes are kept as they are.
func (s *scanner) stringEnds(c byte, into *capture) bool {
	switch {
	case c < 0x20:
		s.fail("a control character in a string")
		return false
	case s.escaped:
		s.escaped = false
	case c == '"':
		return true
	case c == '\\':
		s.escaped = true
	}
	if into != nil {
		into.add(c)
	}
	return false
}

func (s *scanner) endKey() {
	s.state = atColon
	s.member = memberOther
	switch {
	case s.key.is("id"):
		s.member = memberID
	case s.key.is("method"):
		s.member = memberMethod
	case s.key.is("sessionId"):
		s.member = memberSession
	case s.key.is("params"), s.key.is("result"):
		s.member = memberPayload
	}
	if s.member != memberOther && s.seen[s.member] {
		s.fail("a member appears twice")
		return
	}
	s.seen[s.member] = true
}

func (s *scanner) startValue(c byte, at int) {
	if isSpace(c) {
		return
	}
	s.value.reset()
	wantString := s.member == memberMethod || s.member == memberSession
	switch {
	case c == '"' && s.member != memberID:
		s.state = inString
	case (c == '{' || c == '[') && !wantString && s.member != memberID:
		s.state, s.depth, s.isObject, s.last = inNest, 1, c == '{', c
	case literal[c] && !wantString:
		s.state = inLiteral
		s.value.add(c)
		if s.member == memberID {
			s.m.idStart = at
		}
	default:
		s.fail("a value has the wrong type")
	}
}

// endValue is called for top-level strings and literals; end is the offset
// behind the value.
func (s *scanner) endValue(end int) {
	s.state = atComma
	switch s.member {
	case memberID:
		if s.value.over || !isInteger(s.value.buf[:s.value.n]) {
			s.fail("the id is not an integer")
			return
		}
		s.m.id, s.m.idEnd = s.value.String(), end
	case memberMethod:
		if s.value.over {
			s.fail("the method's name is too long")
			return
		}
		s.m.method = s.value.String()
	case memberSession:
		if s.value.over || s.value.n == 0 {
			s.fail("the session id is not one")
			return
		}
		s.m.session = s.value.String()
		s.m.sessionStart, s.m.sessionEnd = s.keyFrom, end
		if s.comma >= 0 {
			s.m.sessionStart = s.comma
		} else {
			s.cutBehind = true
		}
	}
}

func (s *scanner) nest(c byte, at int) {
	direct := s.depth == 1
	switch {
	case c == '"':
		s.state = inNestString
		if direct && s.isObject && s.member == memberPayload {
			if s.last == '{' || s.last == ',' {
				s.state = inNestKey
				s.nestKey.reset()
			} else if s.nestWant && s.last == ':' {
				s.state = inNestSession
				s.inner.reset()
			}
		}
		if direct {
			s.last = c
		}
	case c == '{' || c == '[':
		if direct {
			s.last, s.nestWant = c, false
		}
		s.depth++
	case c == '}' || c == ']':
		s.depth--
		if s.depth == 0 {
			s.state = atComma
		} else if s.depth == 1 {
			s.last = c
		}
	case c == ',' || c == ':':
		if direct {
			s.last = c
			if c == ',' {
				s.nestWant = false
			}
		}
	case literal[c]:
		if direct {
			s.last = c
		}
	case !isSpace(c):
		s.fail("an unexpected character")
	}
}

// finish returns what was found in a complete message.
func (s *scanner) finish() message {
	if s.state != atEnd && s.state != isBad {
		s.fail("it is incomplete")
	}
	if s.innerSet && !s.inner.over {
		s.m.inner = s.inner.String()
	}
	return s.m
}

// isInteger reports whether b is a JSON integer of at most 18 digits.
func isInteger(b []byte) bool {
	if len(b) > 0 && b[0] == '-' {
		b = b[1:]
	}
	if len(b) == 0 || len(b) > 18 || b[0] == '0' && len(b) > 1 {
		return false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
