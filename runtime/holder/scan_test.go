package holder

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// scanPieces scans a message in pieces of the size given.
func scanPieces(data []byte, size int) message {
	var s scanner
	s.reset()
	for len(data) > size {
		s.write(data[:size])
		data = data[size:]
	}
	s.write(data)
	return s.finish()
}

func TestScanner(t *testing.T) {
	for _, c := range []struct {
		text                       string
		id, method, session, inner string
		stripped                   string // the text without the session
	}{
		{text: `{"id":1,"method":"A.b"}`, id: "1", method: "A.b"},
		{text: ` { "id" : -12 , "method" : "A.b" , "params" : { } } `, id: "-12", method: "A.b"},
		{text: `{"id":7,"result":{},"sessionId":"S"}`, id: "7", session: "S", stripped: `{"id":7,"result":{}}`},
		{text: `{"sessionId":"S","id":7}`, id: "7", session: "S", stripped: `{"id":7}`},
		{text: `{"sessionId":"S"}`, session: "S", stripped: `{}`},
		{text: `{ "sessionId" : "S" , "id" : 7 }`, id: "7", session: "S", stripped: `{  "id" : 7 }`},
		{text: `{"id":7,"sessionId":"S","method":"m"}`, id: "7", session: "S", method: "m", stripped: `{"id":7,"method":"m"}`},
		{text: `{"method":"m","params":{"sessionId":"I","targetInfo":{"sessionId":"X"}}}`, method: "m", inner: "I"},
		{text: `{"method":"m","params":{"a":{"sessionId":"X"},"b":["sessionId","Y"],"c":"sessionId","sessionId":"I"}}`, method: "m", inner: "I"},
		{text: `{"method":"m","params":{"sessionId":5,"x":"I"}}`, method: "m"},
		{text: `{"method":"m","params":{"sessionId":{"a":1},"x":"I"}}`, method: "m"},
		{text: `{"method":"m","params":["sessionId","I"]}`, method: "m"},
		{text: `{"method":"m","other":{"sessionId":"I"}}`, method: "m"},
		{text: `{"id":1,"result":{"sessionId":"I"}}`, id: "1", inner: "I"},
		{text: `{"id":1,"method":"m","params":{"s":"\"sessionId\":\"X\",\\"},"sessionId":"S"}`, id: "1", method: "m", session: "S",
			stripped: `{"id":1,"method":"m","params":{"s":"\"sessionId\":\"X\",\\"}}`},
		{text: `{"error":{"code":-1.5e+3},"id":3,"x":null,"y":true,"z":"é"}`, id: "3"},
	} {
		for size := 1; size <= len(c.text); size++ {
			m := scanPieces([]byte(c.text), size)
			if m.bad != "" || m.id != c.id || m.method != c.method || m.session != c.session || m.inner != c.inner {
				t.Fatalf("%s in pieces of %d: %+v", c.text, size, m)
			}
			if c.session != "" {
				if got := c.text[:m.sessionStart] + c.text[m.sessionEnd:]; got != c.stripped {
					t.Fatalf("%s without its session is %s, want %s", c.text, got, c.stripped)
				}
			}
			if c.id != "" && c.text[m.idStart:m.idEnd] != c.id {
				t.Fatalf("%s: the id is at %d to %d", c.text, m.idStart, m.idEnd)
			}
			if c.text[m.open-1] != '{' {
				t.Fatalf("%s: open is %d", c.text, m.open)
			}
		}
	}
}

// TestScannerRefuses has what Chromium's parser could read in another way.
func TestScannerRefuses(t *testing.T) {
	for _, text := range []string{
		``, ` `, `[]`, `1`, `"x"`, `{`, `{"id":1`, `{"id":1}}`, `{"id":1}{"id":2}`, `{"id":1,}`, `{,}`, `{"id" 1}`, `{"id":1 "method":"m"}`,
		`{"id":1,"id":2}`, `{"sessionId":"a","sessionId":"b"}`, `{"method":"a","method":"b"}`,
		`{"session\u0049d":"a"}`, `{"i\u0064":1}`,
		`{"id":"1"}`, `{"id":1.5}`, `{"id":1e3}`, `{"id":null}`, `{"id":{}}`, `{"id":01}`, `{"id":-}`, `{"id":1234567890123456789}`,
		`{"method":1}`, `{"method":null}`, `{"sessionId":null}`, `{"sessionId":1}`, `{"sessionId":{}}`, `{"sessionId":""}`,
		`{"id":1,"params":{/* " */},"sessionId":"v" /* " */}`, `{"id":1/**/}`, `// x` + "\n" + `{"id":1}`,
		"{\"id\":1,\"a\":\"x\ny\"}", "{\"a\nb\":1}", `{"id":1,"a":'x'}`, `{"id":1,"params":{'sessionId':"x"}}`,
		`{"method":"` + strings.Repeat("m", maxToken+1) + `"}`, `{"sessionId":"` + strings.Repeat("s", maxToken+1) + `"}`,
		`{"id":1,"params":{"a":1}`,
	} {
		if m := scanPieces([]byte(text), 3); m.bad == "" {
			t.Errorf("%s was accepted: %+v", text, m)
		}
	}
}

func FuzzScanner(f *testing.F) {
	for _, s := range []string{
		`{"id":1,"method":"Target.attachToTarget","params":{"targetId":"x","flatten":true},"sessionId":"S"}`,
		`{"sessionId":"S","method":"Target.attachedToTarget","params":{"sessionId":"I","targetInfo":{"url":"data:,\"{"}}}`,
		`{"id":2,"result":{"value":"\\\""},"x":[[],{}],"sessionId":"S"}`,
		`{ "sessionId" : "S" }`, `{}`, "{\"a\":\"\x7f\xff\"}",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		if bytes.IndexByte(data, 0) >= 0 {
			return
		}
		whole := scanPieces(data, len(data)+1)
		if got := scanPieces(data, int(piece)+1); got != whole {
			t.Fatalf("in pieces: %+v, whole: %+v", got, whole)
		}
		if whole.bad != "" || !json.Valid(data) {
			return
		}
		// What both take must mean the same. A top-level key in other case
		// is no match for us, but one for encoding/json.
		var keys map[string]json.RawMessage
		if err := json.Unmarshal(data, &keys); err != nil {
			t.Fatalf("not an object: %v", err)
		}
		if got := string(keys["id"]); got != whole.id {
			t.Fatalf("id is %q, want %q", whole.id, got)
		}
		for name, got := range map[string]string{"method": whole.method, "sessionId": whole.session} {
			want := string(keys[name])
			if want != "" {
				want = strings.TrimSuffix(strings.TrimPrefix(want, `"`), `"`)
			}
			if got != want {
				t.Fatalf("%s is %q, want %q", name, got, want)
			}
		}
		// The rewriting of a message changes what it should and nothing else.
		if whole.id == "" {
			return
		}
		a := assembler{limit: maxFrame}
		a.scan.reset()
		rest := append(bytes.Clone(data), 0)
		for {
			n, complete := a.feed(rest[:min(len(rest), int(piece)+1)])
			rest = rest[n:]
			if complete {
				break
			}
		}
		fr, m, _ := a.take()
		edits := []edit{{m.idStart, m.idEnd, "4711"}}
		if m.session != "" {
			edits = append(edits, edit{m.sessionStart, m.sessionEnd, ""})
			if m.sessionStart < m.idStart {
				edits[0], edits[1] = edits[1], edits[0]
			}
		}
		out := fr.splice(edits...)
		text := bytes.Join(out.parts, nil)
		if out.size != len(text) || text[len(text)-1] != 0 {
			t.Fatalf("size is %d of %d", out.size, len(text))
		}
		var after map[string]json.RawMessage
		if err := json.Unmarshal(text[:len(text)-1], &after); err != nil {
			t.Fatalf("%s became %s: %v", data, text, err)
		}
		if _, ok := after["sessionId"]; ok || string(after["id"]) != "4711" {
			t.Fatalf("%s became %s", data, text)
		}
		for k, v := range keys {
			if k != "id" && k != "sessionId" && !bytes.Equal(after[k], v) {
				t.Fatalf("%s became %s", data, text)
			}
		}
	})
}

func BenchmarkScanner(b *testing.B) {
	data := []byte(`{"id":1,"result":{"data":"` + strings.Repeat("iVBORw0KGgo", 1<<17) + `"},"sessionId":"S"}`)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if m := scanPieces(data, 64<<10); m.session != "S" {
			b.Fatal(m)
		}
	}
}
