package stack

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/proof"
	"abfleet/runtime/unit"
)

// scopeTries is how often a role is put into a new scope: a process of it that
// ends at that moment makes systemd refuse the call.
const scopeTries = 3

// recorded is the evidence that a recovery begins with. What cannot be read, or
// is of another Stack than the fleet asks about, counts for nothing.
func (r *Runtime) recorded(req fleet.RecoverRequest) evidence {
	e, err := decode(req.Evidence)
	if err != nil || e.Instance != req.Instance || e.Profile != req.Profile {
		if len(req.Evidence) > 0 {
			r.log.Warn("the record of a browser is of no use", "instance", req.Instance, "error", err)
		}
		return evidence{Instance: req.Instance, Profile: req.Profile}
	}
	return e
}

// lost describes a Stack to an examination.
func (r *Runtime) lost(e evidence) proof.Lost {
	f := r.files(e.Instance)
	base := proof.Generation{Instance: e.Instance, Number: e.Generation, Root: f.root()}
	display, vnc, chromium := base, base, base
	display.Role, display.Sockets = proof.RoleDisplay, []string{f.rfb()}
	vnc.Role, vnc.Sockets = proof.RoleVNC, []string{f.rfb()}
	chromium.Role, chromium.Sockets = proof.RoleChromium, []string{f.cdp()}
	chromium.Profile, chromium.LockFile = e.Profile, e.Profile+".lock"
	lost := proof.Lost{Claim: r.claim(e), Roles: []proof.Generation{display, vnc, chromium}, Temp: r.tempDir(e.Instance)}
	for i := range lost.Roles {
		for _, g := range e.generations() {
			if g.Role == lost.Roles[i].Role {
				lost.Roles[i] = *g
			}
		}
	}
	return lost
}

// verdicts are the fleet's words for those of an examination.
var verdicts = map[proof.Verdict]string{
	proof.Gone: fleet.VerdictGone, proof.Proven: fleet.VerdictProven,
	proof.Reconstructible: fleet.VerdictReconstructible, proof.Doubtful: fleet.VerdictAmbiguous,
}

// Examine implements fleet.Runtime.
func (r *Runtime) Examine(ctx context.Context, req fleet.RecoverRequest) (fleet.Examination, error) {
	e := r.recorded(req)
	_, notVacant := r.verifier.Vacant(ctx, r.claim(e))
	if notVacant == nil {
		return fleet.Examination{Vacant: true, Recoverable: true}, nil
	}
	found, err := r.verifier.Examine(ctx, r.lost(e))
	if err != nil {
		return fleet.Examination{}, undecided(err)
	}
	x := fleet.Examination{Reason: notVacant.Error()}
	left, doubt := false, false
	for _, f := range found {
		left = left || f.Verdict != proof.Gone
		doubt = doubt || f.Verdict == proof.Doubtful
		x.Roles = append(x.Roles, fleet.RoleExamination{Role: f.Role, Verdict: verdicts[f.Verdict], PID: f.PID, For: f.For, Against: f.Against})
	}
	x.Recoverable = left && !doubt
	return x, nil
}

// undecided marks an error that only says that systemd could not be asked.
func undecided(err error) error {
	if unasked(err) {
		return fmt.Errorf("%w: %w", fleet.ErrUndecided, err)
	}
	return err
}

// Recover implements fleet.Runtime. The ordinary stop comes first, and last; in
// between, roles whose processes it could not prove are given a new Generation,
// each out of the one process that proves to lead it.
func (r *Runtime) Recover(ctx context.Context, req fleet.RecoverRequest) (report fleet.StopReport, err error) {
	const reason = "recovery"
	e := r.recorded(req)
	unrecorded := len(e.generations()) == 0
	defer func() {
		if unrecorded && e.Chromium == nil {
			report.Clean, report.Detail = false, "how its browser ended is not known: no record of it is left"
		}
	}()
	report, err = r.Stop(ctx, e.encode(), reason)
	if !fault.Is(err, fault.BrowserStopUnproven) || errors.Is(err, fleet.ErrUndecided) {
		return report, err
	}
	r.log.Warn("an ordinary stop proves nothing, ownership is examined", "instance", e.Instance, "error", err)
	found, err := r.verifier.Settled(ctx, r.lost(e))
	if err != nil {
		return report, r.unproven(e, err)
	}
	for _, f := range slices.Backward(found) { // in the order in which they are stopped
		switch f.Verdict {
		case proof.Doubtful:
			return report, r.unproven(e, &proof.Refusal{Reason: proof.Ambiguous, Detail: f.Role + ": " + strings.Join(f.Against, "; ")})
		case proof.Reconstructible:
			if err := r.reconstruct(ctx, &e, f.Role); err != nil && !proof.Ended(err) {
				return report, r.unproven(e, err)
			}
		case proof.Gone:
			// Nothing can be waited for by a record without a cgroup. What else
			// it names has to be vacant.
			if g := e.role(f.Role); *g != nil && (*g).Cgroup == "" {
				e.Former, *g = append(e.Former, **g), nil
			}
		}
	}
	if len(e.generations()) == 0 {
		r.sliceEmptied(ctx, e.Instance)
	}
	last, err := r.Stop(ctx, e.encode(), reason)
	if e.Chromium == nil {
		last = report // the browser had ended before
	}
	return last, err
}

// reconstruct gives a role of the Stack a new Generation. The one it had stays
// in the evidence: nothing may be left of it either.
func (r *Runtime) reconstruct(ctx context.Context, e *evidence, role string) error {
	scope := unit.Scope{
		Slice: r.cfg.Slice(e.Instance), Description: "recovered " + role + " of " + e.Instance,
		KillSignal: syscall.SIGTERM, TimeoutStop: r.cfg.StopTimeout,
	}
	if role == proof.RoleChromium {
		scope.KillSignal = syscall.SIGWINCH // the holder's word for a clean close
	}
	var g proof.Generation
	var err error
	for range scopeTries {
		scope.Name = fmt.Sprintf("%s-%s-%s-%dx%s.scope", r.cfg.UnitPrefix, e.Instance, role, e.Generation, nonce())
		g, err = r.verifier.Reconstruct(ctx, r.lost(*e), role, scope)
		if !errors.Is(err, unit.ErrNoProcess) && !errors.Is(err, unit.ErrNotMember) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("reconstruct %s: %w", role, err)
	}
	r.log.Warn("ownership of a role was reconstructed", "instance", e.Instance, "role", role, "unit", g.Unit, "pid", g.Leader.PID)
	if e.Generation == 0 {
		e.Generation = g.Number
	}
	had := e.role(role)
	if *had != nil {
		e.Former = append(e.Former, **had)
	}
	*had = &g
	return nil
}

// role is the place of a role's Generation.
func (e *evidence) role(name string) **proof.Generation {
	switch name {
	case proof.RoleDisplay:
		return &e.Display
	case proof.RoleVNC:
		return &e.VNC
	}
	return &e.Chromium
}

// nonce keeps the name of a scope from ever having been used.
func nonce() string {
	b := make([]byte, 4)
	rand.Read(b)
	return hex.EncodeToString(b)
}
