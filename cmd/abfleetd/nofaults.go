//go:build !faults

package main

import "abfleet/internal/store"

// withFaults is for tests/faults alone, which builds its own service.
func withFaults(db store.DB) store.DB { return db }
