package api

import (
	"context"
	"errors"
	"strings"

	"abfleet/internal/fault"
)

// Interrupted is the error of a tool call that was ended from outside before it
// answered. It says whether the call may have had an effect, which it cannot
// have had when the tool only reads.
func Interrupted(tool string, readOnly bool, cause error) error {
	op := "finish " + tool
	if readOnly {
		code := fault.Canceled
		if errors.Is(cause, context.DeadlineExceeded) {
			code = fault.Timeout
		}
		return fault.New(code, op, "It had no effect; repeat it when needed", "%w", cause)
	}
	look := "look at the page with browser_snapshot"
	if strings.HasPrefix(tool, "agent_browser_") {
		look = "look at the state with agent_browser_identities"
	}
	return fault.New(fault.EffectUnknown, op, "It may have taken effect: "+look+" before repeating it", "%w", cause)
}
