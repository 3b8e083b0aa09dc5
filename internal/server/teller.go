package server

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/doctor"
	"abfleet/internal/sd"
)

// Counter counts the Stacks of a fleet.
type Counter interface {
	Counts() (running, quarantined int)
}

// Teller tells systemd and the journal what the fleet does.
type Teller struct {
	fleet   Counter
	log     *slog.Logger
	trouble atomic.Pointer[string] // failed checks, for the status line
}

// NewTeller returns a Teller for a fleet.
func NewTeller(f Counter, log *slog.Logger) *Teller {
	t := &Teller{fleet: f, log: log}
	t.trouble.Store(new(string))
	return t
}

// Status is the service's status line: "2 browsers, 0 quarantined".
func (t *Teller) Status() string {
	running, quarantined := t.fleet.Counts()
	browsers := "browsers"
	if running == 1 {
		browsers = "browser"
	}
	text := fmt.Sprintf("%d %s, %d quarantined", running, browsers, quarantined)
	if trouble := *t.trouble.Load(); trouble != "" {
		text += "; " + trouble
	}
	return text
}

// Tell passes events on until there are no more.
func (t *Teller) Tell(events <-chan audit.Event) {
	for e := range events {
		attrs := []slog.Attr{slog.String(sd.EventKey, string(e.Type)), slog.String("actor", string(e.Actor.Kind)), slog.String("how", e.Actor.How)}
		for _, a := range []slog.Attr{slog.String("session", e.Session), slog.String("identity", e.Identity)} {
			if a.Value.String() != "" {
				attrs = append(attrs, a)
			}
		}
		for key, value := range e.Details {
			attrs = append(attrs, slog.String(key, value))
		}
		level := slog.LevelInfo
		if strings.HasSuffix(string(e.Type), "failed") || e.Type == audit.RuntimeBroken || e.Type == audit.RuntimeQuarantined {
			level = slog.LevelWarn
		}
		t.log.LogAttrs(context.Background(), level, e.Summary, attrs...)
		sd.Status(t.Status())
	}
}

// examineAfter leaves the first moments to the request that the service was
// started for.
var examineAfter = 3 * time.Second

// Examine runs the checks once and puts what is wrong into the status line.
func (t *Teller) Examine(ctx context.Context, env *doctor.Env) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(examineAfter):
	}
	findings := doctor.Run(ctx, env, doctor.Checks())
	if ctx.Err() != nil {
		return
	}
	for _, f := range findings {
		if f.Status == doctor.StatusFailed {
			t.log.Warn(f.Text, "check", f.Code, "hint", f.Hint)
		}
	}
	summary := doctor.Summary(findings)
	t.trouble.Store(&summary)
	sd.Status(t.Status())
}
