package stack

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"abfleet/internal/fault"
	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/proof"
	"abfleet/runtime/unit"
)

// holderAnswerWait is how long the holder may take to agree to a clean close.
const holderAnswerWait = 5 * time.Second

// holderRest is how much of the stop timeout the holder needs when the clean close
// has not ended the browser: for the closing of the debugging socket, TERM, KILL
// and its record of the end.
const holderRest = 12 * time.Second

// closeTimeout is how long the browser may take for the clean close itself.
func (r *Runtime) closeTimeout() time.Duration { return r.cfg.StopTimeout - holderRest }

// holderCloseWait is how long the holder's own escalation may take. systemd, which
// stops it too when its scope is stopped, gives it a little more.
func (r *Runtime) holderCloseWait() time.Duration { return r.cfg.StopTimeout - 2*time.Second }

// Stop ends the Stack and proves it: Browser.close first, TERM and KILL only
// by pidfd and only against fresh proof, and success only once nothing of the
// Stack is left. reason is recorded with the browser's end.
func (r *Runtime) Stop(ctx context.Context, ev fleet.Evidence, reason string) (fleet.StopReport, error) {
	e, err := decode(ev)
	if err != nil {
		return fleet.StopReport{}, err
	}
	report := fleet.StopReport{Clean: true}
	var errs []error
	if e.Chromium != nil {
		r.wakeDisplay(ctx, e)
		err := r.stopBrowser(ctx, e, reason)
		// The display has to outlive the browser: one that loses its X server
		// ends at once, and its last cookies with it.
		left := r.awaitBrowser(ctx, e, err)
		report.Clean, report.Detail = r.ending(e)
		if left != nil {
			return report, r.unproven(e, errors.Join(err, left))
		}
		errs = append(errs, err)
	}
	for _, g := range slices.Backward(e.generations()) {
		if g.Role != proof.RoleChromium {
			errs = append(errs, r.stopRole(ctx, *g, killOrder))
		}
	}
	if err := r.vacate(ctx, e); err != nil {
		return report, r.unproven(e, err, errs...)
	}
	// The empty slice would stay loaded for as long as the manager runs.
	if err := r.units.StopSlice(ctx, r.cfg.Slice(e.Instance)); err != nil {
		r.log.Warn("an empty slice stays", "unit", r.cfg.Slice(e.Instance), "error", err)
	}
	// What stays of its files is removed by the next start: nothing of it runs.
	if err := r.clearInstance(ctx, e); err != nil {
		r.log.Warn("files of a browser stay", "instance", e.Instance, "error", err)
	}
	return report, nil
}

// unproven is the error of a stop that cannot say that the Stack is gone. A
// manager that cannot be asked decides nothing, which is told apart.
func (r *Runtime) unproven(e evidence, err error, more ...error) error {
	cause := errors.Join(append(more, err)...)
	if unasked(err) {
		cause = fmt.Errorf("%w: %w", fleet.ErrUndecided, cause)
	}
	return fault.Wrap(cause, fault.BrowserStopUnproven, "stop browser",
		"look at `systemctl --user status "+r.cfg.Slice(e.Instance)+"`; end what it shows, then stop again")
}

// unasked reports whether err says that systemd could not be asked.
func unasked(err error) bool {
	return errors.Is(err, &proof.Refusal{Reason: proof.UnitUnknown}) || errors.Is(err, unit.ErrClosed)
}

// wakeDisplay continues a stopped X server: a browser that waits for its answer
// closes nothing either.
func (r *Runtime) wakeDisplay(ctx context.Context, e evidence) {
	if e.Display == nil {
		return
	}
	live, err := r.verifier.Live(ctx, *e.Display)
	if err != nil {
		return // it is stopped, and judged, after the browser
	}
	defer live.Close()
	if err := proof.IgnoreEnded(live.Signal(ctx, syscall.SIGCONT)); err != nil {
		r.log.Warn("cannot wake display before the stop", "error", err)
	}
}

// stopBrowser closes the browser cleanly through its holder and escalates by
// pidfd if that does not end it. That the holder has ended is no error; whether
// its browser has, awaitBrowser finds out.
func (r *Runtime) stopBrowser(ctx context.Context, e evidence, reason string) error {
	live, err := r.verifier.Live(ctx, *e.Chromium)
	switch {
	case proof.Ended(err):
		return nil
	case err != nil:
		return r.stopRefused(ctx, e, reason, err)
	}
	defer live.Close()
	r.wakeBrowser(ctx, live)
	actx, cancel := context.WithTimeout(ctx, holderAnswerWait)
	cerr := holder.Close(actx, r.files(e.Instance).cdp(), e.Key, reason)
	cancel()
	if cerr != nil {
		// The socket may be gone while the holder lives, or the holder was
		// stopped after it was woken: the signal asks for the same. What is asked
		// of systemd gets time of its own: running out of it would read as a
		// systemd that cannot be asked.
		r.wakeBrowser(ctx, live)
		if serr := live.Signal(ctx, syscall.SIGWINCH); serr != nil && !proof.Ended(serr) {
			err = errors.Join(cerr, serr)
		}
	}
	wctx, cancel := context.WithTimeout(ctx, r.holderCloseWait())
	defer cancel()
	if live.Wait(wctx) != nil {
		err = errors.Join(err, r.escalate(ctx, live))
	}
	return err
}

// wakeBrowser continues holder and browser: somebody may have stopped either, and
// a stopped one closes nothing. To a running one the signal means nothing.
func (r *Runtime) wakeBrowser(ctx context.Context, live *proof.Live) {
	err := live.SignalBrowser(ctx, syscall.SIGCONT)
	if proof.ReasonOf(err) == proof.NoBrowser {
		err = nil // a start that was broken off before it had one
	}
	if err = errors.Join(proof.IgnoreEnded(live.Signal(ctx, syscall.SIGCONT)), proof.IgnoreEnded(err)); err != nil {
		r.log.Warn("cannot wake browser before its stop", "error", err)
	}
}

// awaitBrowser returns when nothing of the browser is left. One whose holder
// died sees its debugging socket close and ends by itself, which takes it some
// seconds if there is much to write. What does not end is stopped by systemd,
// which asks first too. asked is what came of asking it to end.
func (r *Runtime) awaitBrowser(ctx context.Context, e evidence, asked error) error {
	g := *e.Chromium
	now, cancel := context.WithTimeout(ctx, 0)
	defer cancel()
	left := r.verifier.AwaitEnd(now, g)
	if left == nil || unasked(asked) {
		// Where systemd cannot be asked nothing was asked to end either.
		return left
	}
	if err := r.verifier.Wake(ctx, g); err != nil && r.verifier.AwaitEnd(now, g) != nil {
		r.log.Warn("cannot wake browser before its end", "error", err)
	}
	wait := r.holderCloseWait()
	if deadline, ok := ctx.Deadline(); ok {
		// systemd needs its time too, if it comes to that.
		wait = min(wait, max(termWait, time.Until(deadline)-r.cfg.StopTimeout-2*termWait))
	}
	return r.emptied(ctx, g, wait)
}

// emptied returns when nothing of a generation is left. What is still in its
// scope after the wait is stopped through the manager: StopUnit is the last
// resort, and only for the very invocation that was recorded.
func (r *Runtime) emptied(ctx context.Context, g proof.Generation, wait time.Duration) error {
	end := func(d time.Duration) error {
		wctx, cancel := context.WithTimeout(ctx, d)
		defer cancel()
		return r.verifier.AwaitEnd(wctx, g)
	}
	left := end(wait)
	if left == nil {
		return nil
	}
	if err := r.verifier.StopUnit(ctx, g); err != nil {
		return errors.Join(left, err)
	}
	return end(termWait)
}

// ending says how the recorded browser ended.
func (r *Runtime) ending(e evidence) (clean bool, detail string) {
	exit, ok := r.lastWord(e)
	if !ok {
		return false, "the browser left no exit record"
	}
	return exit.Clean, describe(exit)
}

// stopRefused ends a browser whose proof was refused, without a signal of ours.
// The key opens that generation's own holder and nothing else, so asking it
// needs no more proof. Where the refusal is only that systemd could not be
// asked, the browser may be as good as ever and is left alone.
func (r *Runtime) stopRefused(ctx context.Context, e evidence, reason string, refusal error) error {
	if unasked(refusal) {
		return refusal
	}
	actx, cancel := context.WithTimeout(ctx, holderAnswerWait)
	defer cancel()
	return errors.Join(refusal, holder.Close(actx, r.files(e.Instance).cdp(), e.Key, reason))
}

// escalate ends a browser that the clean close did not end.
func (r *Runtime) escalate(ctx context.Context, live *proof.Live) error {
	for _, sig := range killOrder {
		if err := live.SignalBrowser(ctx, sig); err != nil && !proof.Ended(err) {
			return err
		}
		wctx, cancel := context.WithTimeout(ctx, termWait)
		err := live.Wait(wctx)
		cancel()
		if err == nil {
			return nil
		}
	}
	// The holder itself does not end: it is the leader, so proof still holds.
	return live.Signal(ctx, syscall.SIGKILL)
}

// stopRole ends a role that has no clean close of its own.
func (r *Runtime) stopRole(ctx context.Context, g proof.Generation, signals []syscall.Signal) error {
	live, err := r.verifier.Live(ctx, g)
	if err != nil {
		return proof.IgnoreEnded(err)
	}
	defer live.Close()
	for _, sig := range signals {
		if err := live.Signal(ctx, sig); err != nil {
			if proof.Ended(err) {
				return nil
			}
			return err
		}
		wctx, cancel := context.WithTimeout(ctx, termWait)
		err = live.Wait(wctx)
		cancel()
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s survives SIGKILL", g.Role)
}

// vacate proves the Stack gone.
func (r *Runtime) vacate(ctx context.Context, e evidence) error {
	for _, g := range slices.Backward(e.generations()) {
		if err := r.emptied(ctx, *g, termWait); err != nil {
			return err
		}
	}
	for _, g := range e.Former {
		if g.Cgroup == "" {
			continue
		}
		if err := r.emptied(ctx, g, termWait); err != nil {
			return err
		}
	}
	if len(e.generations()) > 0 {
		r.sliceEmptied(ctx, e.Instance)
	}
	_, err := r.verifier.Vacant(ctx, r.claim(e))
	return err
}

// sliceEmptied gives the last children of a browser time to end that no record
// names, such as those that a recovery left where they were forked. Whether
// something is left is for Vacant to say.
func (r *Runtime) sliceEmptied(ctx context.Context, instance string) {
	ctx, cancel := context.WithTimeout(ctx, termWait)
	defer cancel()
	info, err := r.units.Info(ctx, r.cfg.Slice(instance))
	if err != nil || info.ControlGroup == "" {
		return
	}
	if err := info.Cgroup().WaitEmpty(ctx); err != nil {
		r.log.Warn("something is left of a browser", "instance", instance, "error", err)
	}
}
