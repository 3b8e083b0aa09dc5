package page

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// keyDef is one key of a US keyboard, as pages see it.
type keyDef struct {
	code     string
	key      string
	vk       int    // Windows virtual key code
	text     string // what it types, "" for nothing
	location int    // 1 left, 2 right, 3 numeric keypad
	shifted  *keyDef
}

// Modifier bits of CDP's Input domain.
const (
	modAlt     = 1
	modControl = 2
	modMeta    = 4
	modShift   = 8
)

func (k keyDef) modifier() int {
	switch k.key {
	case "Alt":
		return modAlt
	case "Control":
		return modControl
	case "Meta":
		return modMeta
	case "Shift":
		return modShift
	}
	return 0
}

// event is one key event; held are the modifiers during it.
func (k keyDef) event(kind string, held int) input {
	p := map[string]any{
		"type": kind, "modifiers": held, "windowsVirtualKeyCode": k.vk, "code": k.code, "key": k.key,
		"location": k.location, "isKeypad": k.location == 3,
	}
	if kind == "keyDown" {
		p["text"], p["unmodifiedText"] = k.text, k.text
	}
	return input{"Input.dispatchKeyEvent", p}
}

// stroke is a key pressed and released while modifiers are held. With Control,
// Alt or Meta it types nothing: it is a command.
func stroke(k keyDef, held int) []input {
	if held&modShift != 0 && k.shifted != nil {
		k = *k.shifted
	}
	down := "keyDown"
	if k.text == "" || held&^modShift != 0 {
		down = "rawKeyDown"
	}
	return []input{k.event(down, held|k.modifier()), k.event("keyUp", held)}
}

// chord presses the last key while the others, which are modifiers, are held.
func chord(keys []keyDef) []input {
	var batch []input
	held := 0
	last := len(keys) - 1
	for _, k := range keys[:last] {
		held |= k.modifier()
		batch = append(batch, k.event("rawKeyDown", held))
	}
	batch = append(batch, stroke(keys[last], held)...)
	for i := last - 1; i >= 0; i-- {
		held &^= keys[i].modifier()
		batch = append(batch, keys[i].event("keyUp", held))
	}
	return batch
}

// parseChord reads a key with the modifiers before it: "Enter", "Control+A",
// "Shift+Tab", "Control++".
func parseChord(s string) ([]keyDef, error) {
	var names []string
	name := ""
	for _, r := range s {
		if r == '+' && name != "" {
			names = append(names, name)
			name = ""
			continue
		}
		name += string(r)
	}
	if name == "" {
		return nil, errors.New("no key is named")
	}
	names = append(names, name)
	keys := make([]keyDef, len(names))
	for i, n := range names {
		k, ok := keyTable[n]
		if !ok {
			r, size := utf8.DecodeRuneInString(n)
			if size != len(n) || r == utf8.RuneError {
				return nil, fmt.Errorf("unknown key %s", quote(n))
			}
			// A character of another keyboard layout, typed as it is.
			k = keyDef{key: n, text: n}
		}
		if i < len(names)-1 && k.modifier() == 0 {
			return nil, fmt.Errorf("%s is not a modifier key", quote(n))
		}
		keys[i] = k
	}
	return keys, nil
}

// modifierKeys turns the names of modifiers into keys and their bits.
func modifierKeys(names []string) ([]keyDef, int, error) {
	var keys []keyDef
	mask := 0
	for _, n := range names {
		k, ok := keyTable[n]
		if !ok || k.modifier() == 0 {
			return nil, 0, fmt.Errorf("unknown modifier %s", quote(n))
		}
		if mask&k.modifier() == 0 {
			mask |= k.modifier()
			keys = append(keys, k)
		}
	}
	return keys, mask, nil
}

// keyForRune is the key that types a character.
func keyForRune(r rune) (keyDef, bool) {
	if r == '\n' || r == '\r' {
		return keyTable["Enter"], true
	}
	if r == '\t' {
		return keyTable["Tab"], true
	}
	k, ok := keyTable[string(r)]
	return k, ok && k.text != ""
}

// keyTable has every key by its code ("KeyA", "ShiftLeft"), by what it types
// ("a", "A", "%") and by its name ("Enter", "Shift", "ControlOrMeta").
var keyTable = makeKeyTable()

func makeKeyTable() map[string]keyDef {
	table := make(map[string]keyDef)
	put := func(name string, k keyDef) {
		if _, ok := table[name]; !ok {
			table[name] = k
		}
	}
	// printable adds a key that types plain alone and shifted with Shift.
	printable := func(code, plain, shifted string, vk, location int) {
		s := keyDef{code: code, key: shifted, vk: vk, text: shifted, location: location}
		k := keyDef{code: code, key: plain, vk: vk, text: plain, location: location, shifted: &s}
		put(code, k)
		put(plain, k)
		put(shifted, s)
	}
	for c := 'a'; c <= 'z'; c++ {
		upper := strings.ToUpper(string(c))
		printable("Key"+upper, string(c), upper, int(c-'a')+'A', 0)
	}
	for i, s := range []string{")", "!", "@", "#", "$", "%", "^", "&", "*", "("} {
		d := string(rune('0' + i))
		printable("Digit"+d, d, s, '0'+i, 0)
	}
	for _, k := range []struct {
		code, plain, shifted string
		vk                   int
	}{
		{"Space", " ", " ", 32},
		{"Backquote", "`", "~", 192}, {"Minus", "-", "_", 189}, {"Equal", "=", "+", 187},
		{"BracketLeft", "[", "{", 219}, {"BracketRight", "]", "}", 221}, {"Backslash", "\\", "|", 220},
		{"Semicolon", ";", ":", 186}, {"Quote", "'", "\"", 222},
		{"Comma", ",", "<", 188}, {"Period", ".", ">", 190}, {"Slash", "/", "?", 191},
	} {
		printable(k.code, k.plain, k.shifted, k.vk, 0)
	}
	for _, k := range []keyDef{
		{code: "Enter", key: "Enter", vk: 13, text: "\r"},
		{code: "Escape", key: "Escape", vk: 27},
		{code: "Backspace", key: "Backspace", vk: 8},
		{code: "Tab", key: "Tab", vk: 9},
		{code: "Pause", key: "Pause", vk: 19},
		{code: "CapsLock", key: "CapsLock", vk: 20},
		{code: "NumLock", key: "NumLock", vk: 144},
		{code: "ScrollLock", key: "ScrollLock", vk: 145},
		{code: "PrintScreen", key: "PrintScreen", vk: 44},
		{code: "PageUp", key: "PageUp", vk: 33},
		{code: "PageDown", key: "PageDown", vk: 34},
		{code: "End", key: "End", vk: 35},
		{code: "Home", key: "Home", vk: 36},
		{code: "ArrowLeft", key: "ArrowLeft", vk: 37},
		{code: "ArrowUp", key: "ArrowUp", vk: 38},
		{code: "ArrowRight", key: "ArrowRight", vk: 39},
		{code: "ArrowDown", key: "ArrowDown", vk: 40},
		{code: "Insert", key: "Insert", vk: 45},
		{code: "Delete", key: "Delete", vk: 46},
		{code: "ContextMenu", key: "ContextMenu", vk: 93},
		{code: "AltLeft", key: "Alt", vk: 18, location: 1},
		{code: "AltRight", key: "Alt", vk: 18, location: 2},
		{code: "ControlLeft", key: "Control", vk: 17, location: 1},
		{code: "ControlRight", key: "Control", vk: 17, location: 2},
		{code: "MetaLeft", key: "Meta", vk: 91, location: 1},
		{code: "MetaRight", key: "Meta", vk: 92, location: 2},
		{code: "ShiftLeft", key: "Shift", vk: 16, location: 1},
		{code: "ShiftRight", key: "Shift", vk: 16, location: 2},
		{code: "AltGraph", key: "AltGraph", vk: 225},
		{code: "NumpadDivide", key: "/", vk: 111, text: "/", location: 3},
		{code: "NumpadMultiply", key: "*", vk: 106, text: "*", location: 3},
		{code: "NumpadSubtract", key: "-", vk: 109, text: "-", location: 3},
		{code: "NumpadAdd", key: "+", vk: 107, text: "+", location: 3},
		{code: "NumpadEnter", key: "Enter", vk: 13, text: "\r", location: 3},
	} {
		put(k.code, k)
		put(k.key, k)
	}
	for i := 1; i <= 24; i++ {
		name := fmt.Sprintf("F%d", i)
		put(name, keyDef{code: name, key: name, vk: 111 + i})
	}
	// The keypad without NumLock; Shift makes it type digits.
	for i, k := range []struct {
		name string
		vk   int
	}{
		{"Insert", 45}, {"End", 35}, {"ArrowDown", 40}, {"PageDown", 34}, {"ArrowLeft", 37},
		{"Clear", 12}, {"ArrowRight", 39}, {"Home", 36}, {"ArrowUp", 38}, {"PageUp", 33},
	} {
		d := string(rune('0' + i))
		code := "Numpad" + d
		put(code, keyDef{code: code, key: k.name, vk: k.vk, location: 3,
			shifted: &keyDef{code: code, key: d, vk: 96 + i, text: d, location: 3}})
	}
	put("NumpadDecimal", keyDef{code: "NumpadDecimal", key: "Delete", vk: 46, location: 3,
		shifted: &keyDef{code: "NumpadDecimal", key: ".", vk: 110, text: ".", location: 3}})
	put("ControlOrMeta", table["ControlLeft"])
	return table
}
