// Package units holds the unit files of the fleet as they are shipped, for the
// user manager, and renders them for one installation: its prefix, the
// directory of its programs, its configuration.
package units

import (
	"embed"
	"fmt"
	"net/netip"
	"strings"
	"text/template"
)

//go:embed *.service *.socket *.slice
var sources embed.FS

// Params is what an installation chooses.
type Params struct {
	// Prefix starts the names of all units, and is the name of the directory
	// of the control socket: "abfleet".
	Prefix string
	// BinDir is the directory of abfleetd, absolute.
	BinDir string
	// Config is the configuration file to name, absolute, or "" for the
	// user's own.
	Config string
	// Socket is the control socket, absolute, or "" for the one in the
	// prefix's runtime directory.
	Socket string
	// Environment is set in the service, each NAME=VALUE.
	Environment []string
}

// File is one rendered unit file.
type File struct {
	// Name is the unit's name, or for a drop-in its path below the unit
	// directory.
	Name, Content string
}

// The units that exist, under the prefix "abfleet".
var names = []string{"abfleetd-control.socket", "abfleetd-web.socket", "abfleetd.service", "abfleet.slice"}

// Name returns the name of a unit, given as under the prefix "abfleet", under
// another one.
func Name(prefix, unit string) string { return prefix + strings.TrimPrefix(unit, "abfleet") }

// Render returns the unit files of an installation.
func Render(p Params) ([]File, error) {
	escaped := Params{Prefix: p.Prefix, BinDir: escapePath(p.BinDir)}
	if p.Config != "" {
		escaped.Config = escapePath(p.Config)
	}
	if p.Socket != "" {
		escaped.Socket = strings.ReplaceAll(p.Socket, "%", "%%")
	}
	for _, assignment := range p.Environment {
		escaped.Environment = append(escaped.Environment, quote(assignment))
	}
	var files []File
	for _, name := range names {
		source, err := sources.ReadFile(name)
		if err != nil {
			return nil, err
		}
		parsed, err := template.New(name).Option("missingkey=error").Parse(string(source))
		if err != nil {
			return nil, err
		}
		var out strings.Builder
		if err := parsed.Execute(&out, escaped); err != nil {
			return nil, err
		}
		files = append(files, File{Name(p.Prefix, name), out.String()})
	}
	return files, nil
}

// WebPort returns the drop-in that gives the web socket its address.
func WebPort(prefix string, address netip.AddrPort) File {
	return File{
		Name:    Name(prefix, "abfleetd-web.socket") + ".d/port.conf",
		Content: fmt.Sprintf("[Socket]\nListenStream=\nListenStream=%s\n", address),
	}
}

// escapePath makes a path one word of a unit file, with no specifiers in it.
func escapePath(path string) string {
	return strings.NewReplacer(`%`, `%%`, ` `, `\x20`, "\t", `\x09`, `"`, `\x22`, `'`, `\x27`, `\`, `\x5c`, `$`, `$$`).Replace(path)
}

// UnescapePath is the path that escapePath made a word of.
func UnescapePath(word string) string {
	return strings.NewReplacer(`%%`, `%`, `\x20`, ` `, `\x09`, "\t", `\x22`, `"`, `\x27`, `'`, `\x5c`, `\`, `$$`, `$`).Replace(word)
}

// Unquote is the text that quote put between its quotation marks.
func Unquote(word string) string {
	return strings.NewReplacer(`%%`, `%`, `\x22`, `"`, `\x5c`, `\`).Replace(word)
}

// quote makes text one quoted word of a unit file.
func quote(text string) string {
	return `"` + strings.NewReplacer(`%`, `%%`, `"`, `\x22`, `\`, `\x5c`).Replace(text) + `"`
}
