package proof

import (
	"context"
	"errors"

	"abfleet/runtime/unit"
)

// AwaitLoss returns nil once something that is recorded of the Generations is
// not so any more: a leader or a browser has ended, a cgroup has emptied, or
// systemd does not have a unit active in the recorded invocation. That a stop has
// begun is no loss yet; its end is. It waits for events only. An error is that of
// ctx, or says why the kernel cannot be asked; while systemd cannot be, the
// kernel's events are waited for alone.
func (v *Verifier) AwaitLoss(ctx context.Context, generations []Generation) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, err := unit.NewEvents()
	if err != nil {
		return err
	}
	defer events.Close()
	names := make([]string, 0, len(generations))
	for _, g := range generations {
		if SameBoot(g) != nil {
			return nil
		}
		names = append(names, g.Unit)
		if lost, err := awaitGeneration(events, g); lost || err != nil {
			return err
		}
	}
	// What the kernel tells does not wait for a systemd that is silent.
	asking, stopAsking := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- events.Wait(ctx)
		stopAsking()
	}()
	// The descriptors are closed only when nobody waits for them any more.
	received := false
	defer func() {
		cancel()
		if !received {
			<-ended
		}
	}()
	// Its error leaves a channel that tells when systemd can be asked again.
	changed, _ := v.Units.Changes(asking, names...)
	for {
		select {
		case err := <-ended:
			received = true
			return err
		case <-changed:
		}
		for _, g := range generations {
			if err := v.checkUnit(asking, g); err != nil && ReasonOf(err) != UnitUnknown && asking.Err() == nil {
				return nil
			}
		}
	}
}

// awaitGeneration adds a Generation's processes and cgroup. lost says that one of
// them is gone already.
func awaitGeneration(events *unit.Events, g Generation) (lost bool, err error) {
	for _, m := range g.members() {
		fd, err := pidfdOpen(m.PID)
		if Ended(err) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		if err := events.AddProcess(fd); err != nil {
			return false, err
		}
		// The pidfd came first: what is read now is of the process it means, or
		// that has ended.
		if s, err := readStat(m.PID); err != nil || s.StartTime != m.StartTime {
			return true, nil
		}
	}
	err = events.AddCgroup(unit.Cgroup{Path: g.Cgroup})
	if errors.Is(err, unit.ErrEmpty) {
		return true, nil
	}
	return false, err
}
