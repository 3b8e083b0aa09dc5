// Package faults kills the service at every store write and at every call of
// systemd, takes roles away at every phase, and has systemd and D-Bus misbehave,
// on a real systemd with real browsers. After each fault one start of the service
// has to repair everything. A tally says how it went: make faults.
package faults
