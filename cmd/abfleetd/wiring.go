package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/doctor"
	"abfleet/internal/fleet"
	"abfleet/internal/sd"
)

// closers are closed last first, within one deadline. What then fails is told
// and no more: the service ends either way.
type closers struct {
	log *slog.Logger
	all []func(context.Context) error
}

func (c *closers) add(f func(context.Context) error) { c.all = append(c.all, f) }

func (c *closers) close(timeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for i := len(c.all) - 1; i >= 0; i-- {
		if err := c.all[i](ctx); err != nil {
			c.log.Error("the stop was not complete", sd.ErrorKey, err)
		}
	}
}

// extending runs f while it asks systemd for more time.
func extending(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	ticker := time.NewTicker(startStep / 2)
	defer ticker.Stop()
	for {
		sd.Extend(startStep)
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return <-done
		case <-ticker.C:
		}
	}
}

// teller tells systemd and the journal what the fleet does.
type teller struct {
	fleet   *fleet.Fleet
	log     *slog.Logger
	trouble atomic.Pointer[string] // failed checks, for the status line
}

func newTeller(f *fleet.Fleet, log *slog.Logger) *teller {
	t := &teller{fleet: f, log: log}
	t.trouble.Store(new(string))
	return t
}

func (t *teller) status() string {
	running, quarantined := t.fleet.Counts()
	text := fmt.Sprintf("%d browsers, %d quarantined", running, quarantined)
	if trouble := *t.trouble.Load(); trouble != "" {
		text += "; " + trouble
	}
	return text
}

// tell passes events on until there are no more.
func (t *teller) tell(events <-chan audit.Event) {
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
		sd.Status(t.status())
	}
}

// examineAfter leaves the first moments to the request that the service was
// started for.
var examineAfter = 3 * time.Second

// examine runs the checks once and puts what is wrong into the status line.
func (t *teller) examine(ctx context.Context, env *doctor.Env) {
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
	sd.Status(t.status())
}
