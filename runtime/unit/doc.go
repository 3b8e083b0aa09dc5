// Package unit is the fleet's client of systemd. It creates, observes and stops
// slices and transient scopes of a user or system manager over D-Bus, and reads
// the cgroups that stand behind them.
//
// What a method returns was read back, never assumed: a scope counts as started
// when its job is done, its cgroup is below the expected slice and the process
// is listed in it. A stop that systemd calls done is only that: whether anything
// is left is for package proof to say.
//
// The package matches D-Bus error names and errnos, never texts, and probes for
// features instead of comparing systemd versions, because distributions
// backport (OOMPolicy= on scopes is one such case).
package unit
