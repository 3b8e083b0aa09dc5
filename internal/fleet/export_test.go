package fleet

import "time"

// ShortenObserveAgain makes retries of observations quick for tests.
func ShortenObserveAgain() { observeAgain = []time.Duration{time.Millisecond, time.Millisecond} }

// Diagram is docs/states.md as the table has it.
var Diagram = diagram
