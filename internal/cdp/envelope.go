package cdp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// envelope is one message from the browser, taken apart without decoding what
// it carries: result and params are decoded once, by whoever wants them.
type envelope struct {
	hasID   bool
	id      uint64
	session []byte
	method  []byte
	result  json.RawMessage
	params  json.RawMessage
	error   json.RawMessage
}

var (
	errTruncated = errors.New("truncated message")
	errSyntax    = errors.New("malformed message")
)

// parseEnvelope finds the top-level members of a JSON object. Nested values are
// only skipped over; encoding/json judges them when they are decoded.
func parseEnvelope(b []byte) (envelope, error) {
	var env envelope
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		return env, errSyntax
	}
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		return env, nil
	}
	for {
		i = skipSpace(b, i)
		if i >= len(b) || b[i] != '"' {
			return env, errSyntax
		}
		end, err := skipString(b, i)
		if err != nil {
			return env, err
		}
		key := b[i+1 : end-1]
		i = skipSpace(b, end)
		if i >= len(b) || b[i] != ':' {
			return env, errSyntax
		}
		i = skipSpace(b, i+1)
		if end, err = skipValue(b, i); err != nil {
			return env, err
		}
		if err := env.set(key, b[i:end:end]); err != nil {
			return env, err
		}
		i = skipSpace(b, end)
		if i >= len(b) {
			return env, errTruncated
		}
		switch b[i] {
		case ',':
			i++
		case '}':
			return env, nil
		default:
			return env, errSyntax
		}
	}
}

func (e *envelope) set(key, value []byte) error {
	switch string(key) {
	case "id":
		n, err := strconv.ParseUint(string(value), 10, 64)
		if err != nil {
			return fmt.Errorf("id: %w", err)
		}
		e.id, e.hasID = n, true
	case "method":
		s, err := unquote(value)
		if err != nil {
			return err
		}
		e.method = s
	case "sessionId":
		s, err := unquote(value)
		if err != nil {
			return err
		}
		e.session = s
	case "result":
		e.result = value
	case "params":
		e.params = value
	case "error":
		e.error = value
	}
	return nil
}

func unquote(v []byte) ([]byte, error) {
	if len(v) < 2 || v[0] != '"' {
		return nil, errSyntax
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return v[1 : len(v)-1], nil
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		return nil, err
	}
	return []byte(s), nil
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipString returns the index after the string that starts at b[i].
func skipString(b []byte, i int) (int, error) {
	start := i
	i++
	for {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return 0, errTruncated
		}
		i += n
		escapes := 0
		for j := i - 1; j > start && b[j] == '\\'; j-- {
			escapes++
		}
		i++
		if escapes%2 == 0 {
			return i, nil
		}
	}
}

// skipValue returns the index after the value that starts at b[i].
func skipValue(b []byte, i int) (int, error) {
	if i >= len(b) {
		return 0, errTruncated
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		depth := 0
		for i < len(b) {
			switch b[i] {
			case '"':
				end, err := skipString(b, i)
				if err != nil {
					return 0, err
				}
				i = end
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
				if depth == 0 {
					return i + 1, nil
				}
			}
			i++
		}
		return 0, errTruncated
	case ',', '}', ']', ':':
		return 0, errSyntax
	default:
		for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] != ' ' && b[i] != '\n' && b[i] != '\r' && b[i] != '\t' {
			i++
		}
		return i, nil
	}
}

// encode writes one command.
func encode(id uint64, session, method string, params any) ([]byte, error) {
	var p []byte
	switch v := params.(type) {
	case nil:
	case json.RawMessage:
		p = v
	default:
		var err error
		if p, err = json.Marshal(params); err != nil {
			return nil, fmt.Errorf("encode parameters: %w", err)
		}
		if string(p) == "null" {
			p = nil
		}
	}
	b := make([]byte, 0, len(p)+len(method)+len(session)+64)
	b = append(b, `{"id":`...)
	b = strconv.AppendUint(b, id, 10)
	b = append(b, `,"method":`...)
	b = appendString(b, method)
	if len(p) > 0 {
		b = append(b, `,"params":`...)
		b = append(b, p...)
	}
	if session != "" {
		b = append(b, `,"sessionId":`...)
		b = appendString(b, session)
	}
	return append(b, '}'), nil
}

func appendString(b []byte, s string) []byte {
	q, err := json.Marshal(s)
	if err != nil { // cannot happen: every string has an encoding
		return append(b, `""`...)
	}
	return append(b, q...)
}
