// Package sd is the service's side of systemd: the sockets it was started with,
// the notifications it owes its manager, the watchdog, and its log lines in the
// journal's native form.
//
// Nothing here talks to the manager over D-Bus; package unit does that.
package sd
