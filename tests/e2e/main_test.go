package e2e

import (
	"testing"

	"abfleet/tests/rig"
)

// TestMainJob protects what the product is for: a person logs in once through
// the viewer page, and agents and the person share browsers that are logged in.
func TestMainJob(t *testing.T) {
	w := boot(t, rig.Options{Name: "main"})
	w.setup()
	w.loginByHand("work")
	a := w.agent("alpha")
	a.must("agent_browser_identities", nil)
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	a.must("browser_navigate", map[string]any{"url": siteURL + "/account"})
}
