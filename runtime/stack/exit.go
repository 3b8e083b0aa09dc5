package stack

import (
	"context"
	"fmt"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/fleet"
	"abfleet/runtime/holder"
	"abfleet/runtime/proof"
	"abfleet/runtime/unit"
)

// lastWord is what the holder of the recorded generation wrote about its end.
func (r *Runtime) lastWord(e evidence) (holder.Exit, bool) {
	exit, err := holder.ReadExit(r.files(e.Instance).exit())
	return exit, err == nil && exit.Generation == e.Generation
}

// exitReport tells how the recorded browser ended, if its holder left word or the
// kernel took holder and all.
func (r *Runtime) exitReport(ctx context.Context, e evidence) *fleet.ExitReport {
	exit, ok := r.lastWord(e)
	if !ok {
		return r.outOfMemory(ctx, e)
	}
	report := &fleet.ExitReport{
		Clean: exit.Clean, Trigger: trigger(exit), Signal: exit.Signal, OOMKills: exit.OOMKills, At: exit.At, Detail: describe(exit),
	}
	if exit.UnitStopped && e.Chromium != nil {
		report.Trigger = r.whoStopped(ctx, e)
		switch report.Trigger {
		case fleet.TriggerOperator:
			report.Detail = "an operator stopped its unit, " + how(exit)
		case fleet.TriggerShutdown:
			report.Detail = "systemd went down, " + how(exit)
		}
	}
	return report
}

// outOfMemory is the report of a browser that the kernel killed together with its
// holder: systemd knows it as the unit's result while it has the unit, and the
// Stack's slice keeps count. It is nil of any other.
func (r *Runtime) outOfMemory(ctx context.Context, e evidence) *fleet.ExitReport {
	if e.Chromium == nil || proof.SameBoot(*e.Chromium) != nil {
		return nil
	}
	if populated, err := (unit.Cgroup{Path: e.Chromium.Cgroup}).Populated(); err != nil || populated {
		return nil // it has not ended
	}
	// Where neither can be read nothing is known.
	kills, _ := (unit.Cgroup{Path: path.Dir(e.Chromium.Cgroup)}).OOMKills()
	if info, err := r.units.Info(ctx, e.Chromium.Unit); err == nil && info.InvocationID == e.Chromium.InvocationID && info.Result == resultOOM {
		kills = max(kills, 1)
	}
	if kills == 0 {
		return nil
	}
	return &fleet.ExitReport{
		Trigger: fleet.TriggerSignal, Signal: unix.SignalName(unix.SIGKILL), OOMKills: kills, At: time.Now(),
		Detail: how(holder.Exit{Signal: unix.SignalName(unix.SIGKILL), OOMKills: kills}),
	}
}

// resultOOM is systemd's word for what the out-of-memory killer ended.
const resultOOM = "oom-kill"

// whoStopped says why systemd stopped the unit of a browser, which the holder
// could not see: the run of systemd that did it either goes on, and then somebody
// asked it to, or it went down itself. Where it went down later, before anybody
// asked, the two cannot be told apart and it counts as the shutdown, which
// changes nothing of what is wanted.
func (r *Runtime) whoStopped(ctx context.Context, e evidence) string {
	if proof.SameBoot(*e.Chromium) != nil || e.Manager != r.started {
		return fleet.TriggerShutdown
	}
	switch stopping, err := r.units.Stopping(ctx); {
	case err != nil:
		return fleet.TriggerSignal
	case stopping:
		return fleet.TriggerShutdown
	}
	return fleet.TriggerOperator
}

// trigger translates the holder's word for what ended a browser into the
// fleet's.
func trigger(x holder.Exit) string {
	word, _, _ := strings.Cut(x.Trigger, ":")
	switch {
	case word == holder.TriggerClose:
		return fleet.TriggerStop
	case word == holder.TriggerSignal, word == holder.TriggerBrowser && x.Signal != "":
		return fleet.TriggerSignal
	case word == holder.TriggerBrowser:
		return fleet.TriggerBrowser
	}
	return fleet.TriggerUnknown
}

// describe says in one line how a browser ended.
func describe(x holder.Exit) string {
	switch {
	case x.Trigger != holder.TriggerBrowser:
		return "asked by " + x.Trigger + ", " + how(x)
	case x.Signal != "":
		return how(x)
	}
	return "ended by itself, " + how(x)
}

// how is the part of describe that does not say why.
func how(x holder.Exit) string {
	text := fmt.Sprintf("exit code %d", x.Code)
	if x.Signal != "" {
		text = "killed by " + x.Signal
	}
	if x.OOMKills > 0 {
		text += fmt.Sprintf(", %d out-of-memory kills", x.OOMKills)
	}
	return text
}
