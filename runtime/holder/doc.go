// Package holder is both ends of one role process.
//
// The service side spawns abfleet-role blocked on a pipe ([Spawn]), puts it
// into its scope, and only then tells it what to become ([Spawned.Release]).
// If the service dies in between, the pipe ends and the trampoline exits
// without having run anything.
//
// The role side ([Main]) applies the Spec and then either replaces itself by
// the role's program (a display) or stays as the holder of Chromium: it owns
// the socketpair that Chromium takes for its debugging pipe, serves CDP to
// several clients on a unix socket, turns stop signals into a clean
// Browser.close, relays Chromium's output to the journal, keeps its windows as
// large as the screen, and leaves exit.json.
//
// The memory of a holder is paid once per browser, so this package uses the
// standard library, golang.org/x/sys and an X protocol library only, and not
// much of the first.
package holder
