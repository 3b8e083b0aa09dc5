// Command abfleet-role becomes one role of a Stack: a display, or the holder
// of a Chromium. abfleetd starts it; see package abfleet/runtime/holder.
package main

import (
	"os"

	"abfleet/runtime/holder"
)

func main() { os.Exit(holder.Main()) }
