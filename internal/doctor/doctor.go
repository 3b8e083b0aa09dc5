// Package doctor holds the checks that say why the fleet cannot work on this
// host, or cannot work well, and what to do about it. The same registry answers
// `abfleet doctor`, fills the service's status line and decides whether the
// service refuses to start.
//
// A check tries the real thing wherever that leaves nothing behind: it makes a
// user namespace and a scope, it does not compare version numbers.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
)

// The severities of a failed check: with an error nothing works, with a warning
// something does not, or not for long.
const (
	SeverityError   = "error"
	SeverityWarning = "warning"
)

// The outcomes of a check.
const (
	StatusOK      = "ok"
	StatusFailed  = "failed"
	StatusSkipped = "skipped"
)

// checkTimeout bounds one check.
var checkTimeout = 10 * time.Second

// Env is the host as the checks see it.
type Env struct {
	Config *config.Config
	// ConfigError is why Config is not what the fleet was told, nil when it is.
	ConfigError error
	// Getenv looks up environment variables.
	Getenv func(string) string
	// UID is whose fleet is checked.
	UID int
	// Socket is the control socket to ask, "" inside the service itself.
	Socket string
	// Explain, where there is one, adds to why the service does not answer.
	Explain func(error) error
}

// NewEnv returns the Env of this process. In a CLI, socket is the control
// socket that it uses.
func NewEnv(cfg *config.Config, socket string) *Env {
	return &Env{Config: cfg, Getenv: os.Getenv, UID: os.Geteuid(), Socket: socket}
}

// Check is one entry of the registry.
type Check struct {
	// Code names the check for programs: "user_namespaces".
	Code string
	// Title names it for people.
	Title    string
	Severity string
	// Required checks make the service refuse to start; the others are told
	// in its status, since a person can repair them while it runs.
	Required bool
	// Needs lists the checks that this one says nothing without.
	Needs []string
	// Run returns what is worth knowing when all is well. An error is a
	// *fault.Error with a hint; it may also be a skip.
	Run func(context.Context, *Env) (string, error)
}

// skip is the error of a check that does not apply, with the reason.
type skip string

func (s skip) Error() string { return string(s) }

// failed makes the error of a failed check.
func failed(code fault.Code, op, hint, format string, args ...any) error {
	return fault.New(code, op, hint, format, args...)
}

// Run runs the checks in order and returns a finding for each.
func Run(ctx context.Context, env *Env, checks []Check) []api.Finding {
	findings := make([]api.Finding, 0, len(checks))
	bad := make(map[string]bool)
	for _, check := range checks {
		finding := run(ctx, env, check, bad)
		bad[check.Code] = finding.Status != StatusOK
		findings = append(findings, finding)
	}
	return findings
}

func run(ctx context.Context, env *Env, check Check, bad map[string]bool) api.Finding {
	finding := api.Finding{Code: check.Code, Title: check.Title, Severity: check.Severity, Status: StatusSkipped}
	for _, need := range check.Needs {
		if bad[need] {
			finding.Text = "not checked without: " + need
			return finding
		}
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	text, err := check.Run(ctx, env)
	var skipped skip
	switch {
	case errors.As(err, &skipped):
		finding.Text = skipped.Error()
	case err != nil:
		finding.Status, finding.Text, finding.Hint = StatusFailed, err.Error(), fault.HintOf(err)
	default:
		finding.Status, finding.Text = StatusOK, text
	}
	return finding
}

// OK reports whether no check of severity error failed.
func OK(findings []api.Finding) bool {
	return !slices.ContainsFunc(findings, func(f api.Finding) bool {
		return f.Status == StatusFailed && f.Severity == SeverityError
	})
}

// Refusal returns the error for which the service must not start, nil for none.
// It runs the required checks only.
func Refusal(ctx context.Context, env *Env) error {
	for _, check := range Checks() {
		if !check.Required {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		_, err := check.Run(ctx, env)
		cancel()
		var skipped skip
		if err != nil && !errors.As(err, &skipped) {
			return err
		}
	}
	return nil
}

// Summary is what the service's status line says about failed checks, "" when
// there are none.
func Summary(findings []api.Finding) string {
	var names []string
	for _, finding := range findings {
		if finding.Status == StatusFailed && finding.Severity == SeverityError {
			names = append(names, finding.Code)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("not ready: %s (run: abfleet doctor)", strings.Join(names, ", "))
}
