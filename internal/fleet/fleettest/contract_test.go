package fleettest_test

import (
	"testing"

	"abfleet/internal/fleet/fleettest"
)

// TestContract protects the tests that use the Runtime in memory: it keeps
// what they rely on.
func TestContract(t *testing.T) {
	for name, headless := range map[string]bool{"display": false, "headless": true} {
		t.Run(name, func(t *testing.T) {
			rt := fleettest.NewRuntime()
			rt.Headless = headless
			fleettest.Contract(t, fleettest.Subject{Runtime: rt, Dir: "/state/identities/identity-contract", Headless: headless})
		})
	}
}
