// Package proof decides whether a process, a unit or a Profile is ours. It hands
// out the only two values that allow acting on them: Live, which can signal, and
// Vacant, which says that nothing is left.
//
// Both rest on several independent pieces of evidence, because each alone can be
// wrong by accident: a pid is recycled, a pidfile survives a reboot, a process
// is moved to another scope, a port or display is taken over by a stranger. Any
// piece that is missing, partial or contradicts the others yields a Refusal with
// a typed Reason, and then nothing is signalled, adopted or deleted.
//
// The evidence proves against accidents. A hostile process of the same user can
// move processes between scopes and write our files; against it only the system
// variant under its own user helps.
package proof
