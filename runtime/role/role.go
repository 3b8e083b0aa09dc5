// Package role knows the programs of a Stack: for each Role its command line,
// its environment and how it shows that it is ready. It starts nothing.
package role

// The names of the roles, as they appear in unit names, pidfiles, journal
// fields and audit records.
const (
	NameDisplay  = "display"
	NameVNC      = "vnc"
	NameChromium = "chromium"
)
