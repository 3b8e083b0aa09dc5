package stack

import (
	"context"

	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
)

// claimOf is what has to be vacant for the Stack that a person asks about.
func (r *Runtime) claimOf(req fleet.RecoverRequest) (proof.Claim, error) {
	if len(req.Evidence) == 0 {
		return r.claim(evidence{Instance: req.Instance, Profile: req.Profile}), nil
	}
	e, err := decode(req.Evidence)
	return r.claim(e), err
}

// Examine implements fleet.Runtime.
func (r *Runtime) Examine(ctx context.Context, req fleet.RecoverRequest) (fleet.Examination, error) {
	claim, err := r.claimOf(req)
	if err != nil {
		return fleet.Examination{}, err
	}
	if _, err := r.verifier.Vacant(ctx, claim); err != nil {
		return fleet.Examination{Reason: err.Error()}, nil
	}
	return fleet.Examination{Vacant: true, Recoverable: true}, nil
}

// Recover implements fleet.Runtime.
func (r *Runtime) Recover(ctx context.Context, req fleet.RecoverRequest) (fleet.StopReport, error) {
	if len(req.Evidence) == 0 {
		claim, err := r.claimOf(req)
		if err != nil {
			return fleet.StopReport{}, err
		}
		_, err = r.verifier.Vacant(ctx, claim)
		return fleet.StopReport{}, err
	}
	return r.Stop(ctx, req.Evidence, "recovery")
}
