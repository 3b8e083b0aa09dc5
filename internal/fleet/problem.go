package fleet

import (
	"errors"
	"regexp"
	"strings"
	"time"

	"abfleet/internal/fault"
)

// redacted is an error whose text leaves out what no answer may contain; the
// chain below it stays for errors.Is and errors.As.
type redacted struct {
	text string
	err  error
	// What text and the hint of the error around this one were before.
	cause error
	hint  string
}

func (r *redacted) Error() string { return r.text }
func (r *redacted) Unwrap() error { return r.err }

// Unredacted is an error of the fleet as its operator may see it, who has to find
// what it speaks of.
func Unredacted(err error) error {
	switch e := err.(type) {
	case *fault.Error:
		if r, ok := e.Err.(*redacted); ok {
			return &fault.Error{Code: e.Code, Op: e.Op, Hint: r.hint, Err: r.cause}
		}
	case interface{ Unwrap() []error }:
		var all []error
		for _, one := range e.Unwrap() {
			all = append(all, Unredacted(one))
		}
		return errors.Join(all...)
	}
	return err
}

var address = regexp.MustCompile(`(?i)(\b127\.\d+\.\d+\.\d+|\b0\.0\.0\.0|\blocalhost|\[::1?\]):\d+`)

// redact removes what belongs to the inside of the fleet from a text: paths of
// its directories, instances, unit names, Profile ids, addresses of this host.
func (f *Fleet) redact(text string, r *runtime) string {
	secret := []string{f.cfg.Home, f.cfg.RuntimeDir, f.cfg.TmpRoot, f.cfg.UnitPrefix + ".slice", profilePrefix}
	if r != nil {
		secret = append(secret, r.Key)
		if r.Value.Profile != "" {
			secret = append(secret, r.Value.Profile)
		}
	}
	for i, s := range secret {
		secret[i] = regexp.QuoteMeta(s)
	}
	const word = "[^\\s\"'`(),;]*"
	token := regexp.MustCompile(word + `(?:` + strings.Join(secret, "|") + `)` + word)
	text = token.ReplaceAllStringFunc(text, func(s string) string {
		name := strings.TrimRight(s, ":.")
		return "(internal)" + s[len(name):]
	})
	return strings.ReplaceAll(address.ReplaceAllString(text, "(internal)"), "\n", "; ")
}

// failure turns the error of a Runtime into the one that callers see. The
// cause's own code is kept where it says more than fallback. The full text
// goes to the log.
func (f *Fleet) failure(err error, fallback fault.Code, op, hint string, r *runtime) error {
	code := fallback
	switch c := fault.CodeOf(err); c {
	case fault.Internal, fault.NotFound, fault.Timeout, fault.Canceled:
	default:
		code = c
	}
	attrs := []any{"code", string(code), "error", err}
	if r != nil {
		attrs = append(attrs, "instance", r.Key, "session", r.Value.Session, "identity", r.Value.Identity)
	}
	f.log.Warn("cannot "+op, attrs...)
	if h := fault.HintOf(err); h != "" && code != fallback {
		hint = h
	}
	cause := err
	// "cannot start X: cannot start X: no space" says it twice.
	var inner *fault.Error
	if errors.As(err, &inner) && inner.Op == op && inner.Err != nil && inner.Error() == err.Error() {
		cause = inner.Err
	}
	return &fault.Error{Code: code, Op: op, Hint: f.redact(hint, r), Err: &redacted{f.redact(cause.Error(), r), err, cause, hint}}
}

// problem is what is stored and shown of a failure that failure made.
func problem(err error, now time.Time) *Problem {
	return &Problem{Code: fault.CodeOf(err), Message: err.Error(), Hint: fault.HintOf(err), At: now}
}
