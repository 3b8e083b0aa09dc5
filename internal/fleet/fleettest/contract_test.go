package fleettest_test

import (
	"testing"

	"abfleet/internal/fleet"
	"abfleet/internal/fleet/fleettest"
)

// TestContract protects the tests that use the Runtime in memory: it keeps
// what they rely on.
func TestContract(t *testing.T) {
	fleettest.Contract(t, func(t *testing.T) (fleet.Runtime, string) {
		return fleettest.NewRuntime(), "/state/identities/identity-contract"
	})
}
