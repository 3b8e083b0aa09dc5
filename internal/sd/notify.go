package sd

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Notify sends one notification to the service manager. Outside systemd it does
// nothing. A lost notification is not worth failing for: the manager's own
// deadlines act on it.
func Notify(lines ...string) {
	_, _ = daemon.SdNotify(false, strings.Join(lines, "\n"))
}

// Ready tells the manager that the service serves; text is its status line.
func Ready(text string) { Notify(daemon.SdNotifyReady, status(text)) }

// Status replaces the status line that systemctl status shows.
func Status(text string) { Notify(status(text)) }

// Stopping tells the manager that the service has begun to stop, and how long
// it may still take beyond the configured deadline.
func Stopping(text string, atMost time.Duration) {
	Notify(daemon.SdNotifyStopping, status(text), "EXTEND_TIMEOUT_USEC="+strconv.FormatInt(atMost.Microseconds(), 10))
}

// Extend asks for more time to start or stop, counted from now.
func Extend(d time.Duration) {
	Notify("EXTEND_TIMEOUT_USEC=" + strconv.FormatInt(d.Microseconds(), 10))
}

func status(text string) string {
	return "STATUS=" + strings.ReplaceAll(text, "\n", " ")
}

// Check is one sign of life of the service. It returns within its context.
type Check struct {
	Name string
	Run  func(context.Context) error
}

// Watchdog tells the manager at half of the interval it asked for that the
// service lives, as long as every check passes, until ctx ends. Without a
// watchdog it returns at once. It is silent while a check fails: what the
// manager then does (restart the service; browsers stay) is the cure.
func Watchdog(ctx context.Context, log *slog.Logger, checks ...Check) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("watchdog is not understood", "error", err)
		return
	}
	if interval > 0 {
		watch(ctx, interval/2, log, func() { Notify(daemon.SdNotifyWatchdog) }, checks)
	}
}

// watch calls alive every period in which all checks pass within that period.
func watch(ctx context.Context, period time.Duration, log *slog.Logger, alive func(), checks []Check) {
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		checking, cancel := context.WithTimeout(ctx, period)
		err := runChecks(checking, checks)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			log.Error("the service is not well", "error", err)
		default:
			alive()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

type checkError struct {
	name string
	err  error
}

func (e *checkError) Error() string { return e.name + ": " + e.err.Error() }
func (e *checkError) Unwrap() error { return e.err }

// runChecks runs the checks one after the other. One that does not come back
// holds up the whole watchdog, which is then late: that is the point of it.
func runChecks(ctx context.Context, checks []Check) error {
	for _, check := range checks {
		if err := check.Run(ctx); err != nil {
			return &checkError{check.Name, err}
		}
	}
	return nil
}
