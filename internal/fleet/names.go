package fleet

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"abfleet/internal/fault"
	"abfleet/internal/store"
)

// Limits of what callers may name things.
const (
	maxName      = 80   // runes of an Identity's name
	maxSessionID = 200  // runes
	maxURL       = 8192 // bytes
)

var identityID = regexp.MustCompile(`^identity-[a-z0-9]{16}$`)

// checkName returns the name as it is stored.
func checkName(op, name string) (string, error) {
	const hint = "Use 1 to 80 visible characters"
	name = strings.TrimSpace(name)
	n := utf8.RuneCountInString(name)
	switch {
	case n == 0:
		return "", fault.New(fault.InvalidName, op, hint, "the name is empty")
	case n > maxName:
		return "", fault.New(fault.InvalidName, op, hint, "the name has %d characters", n)
	case !utf8.ValidString(name):
		return "", fault.New(fault.InvalidName, op, hint, "the name is not valid UTF-8")
	case strings.IndexFunc(name, unprintable) >= 0:
		return "", fault.New(fault.InvalidName, op, hint, "the name has a control character")
	case strings.ContainsRune(name, utf8.RuneError):
		return "", fault.New(fault.InvalidName, op, hint, "the name has a replacement character, so a part of it was lost")
	case fold(name) == "":
		return "", fault.New(fault.InvalidName, op, hint, "the name has no visible character")
	case identityID.MatchString(strings.ToLower(name)):
		return "", fault.New(fault.InvalidName, op, "Choose a name that does not look like an id", "the name has the form of an Identity's id")
	}
	return name, nil
}

// unprintable also covers what changes the direction or the line of the text
// around a name or a session id, so that none can dress up as another one.
func unprintable(r rune) bool {
	switch {
	case unicode.IsControl(r), r == '\u2028', r == '\u2029':
		return true
	case r >= '\u202a' && r <= '\u202e', r >= '\u2066' && r <= '\u2069':
		return true
	}
	return false
}

// fold returns the form in which names are compared: compatibility forms of a
// character, as full width, are the character itself; each rune is replaced by
// the least of those that differ from it in case only, and those that are not
// seen or choose between forms of the one before are left out.
func fold(name string) string {
	return norm.NFKC.String(strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
			return -1
		}
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, norm.NFKC.String(name)))
}

// CheckSession returns why a session id cannot be one, with fault.InvalidSession.
func CheckSession(op, session string) error {
	const hint = "The session id comes from the caller's channel: 1 to 200 characters, none of which controls the text around it"
	switch {
	case session == "":
		return fault.New(fault.InvalidSession, op, hint, "the session id is empty")
	case utf8.RuneCountInString(session) > maxSessionID:
		return fault.New(fault.InvalidSession, op, hint, "the session id has %d characters", utf8.RuneCountInString(session))
	case !utf8.ValidString(session):
		return fault.New(fault.InvalidSession, op, hint, "the session id is not valid UTF-8")
	case strings.IndexFunc(session, unprintable) >= 0:
		return fault.New(fault.InvalidSession, op, hint, "the session id has a control character")
	}
	return nil
}

// checkURL allows what a person may log in to. Anything else on a command line
// could be read as an option or open a local file.
func checkURL(op, url string) error {
	const hint = "Use an http or https URL"
	lower := strings.ToLower(url)
	switch {
	case url == "":
		return nil
	case len(url) > maxURL:
		return fault.New(fault.InvalidArgument, op, hint, "the URL has %d bytes", len(url))
	case strings.IndexFunc(url, func(r rune) bool { return r <= ' ' || r == 0x7f }) >= 0:
		return fault.New(fault.InvalidArgument, op, hint, "the URL has a space or control character")
	case !strings.HasPrefix(lower, "http://") && !strings.HasPrefix(lower, "https://") && lower != "about:blank":
		return fault.New(fault.BlockedURL, op, hint, "the URL is neither http nor https")
	}
	return nil
}

// find resolves an id or a name, in any case.
func find(tx *store.Tx, op, ref string) (*identity, error) {
	ref = strings.TrimSpace(ref)
	if id, err := optional(identities.Get(tx, ref)); err != nil || id != nil {
		return id, err
	}
	all, err := identities.List(tx)
	if err != nil {
		return nil, err
	}
	folded := fold(ref)
	for _, id := range all {
		if id.Value.Fold == folded {
			return id, nil
		}
	}
	return nil, noIdentity(op, ref)
}

func noIdentity(op, ref string) error {
	return fault.New(fault.IdentityNotFound, op,
		"List the Identities (agent_browser_identities, or: abfleet identity list) and use one of them", "there is no Identity %q", clip(ref))
}

// findUsable is find, and refuses an Identity that is being deleted.
func findUsable(tx *store.Tx, op, ref string) (*identity, error) {
	id, err := find(tx, op, ref)
	if err == nil && id.Value.State == Deleting {
		return nil, beingDeleted(op, id)
	}
	return id, err
}

func beingDeleted(op string, id *identity) error {
	return fault.New(fault.IdentityNotFound, op, "Use another Identity; its deletion is finished by: abfleet identity delete "+fault.Word(id.Value.Name),
		"Identity %q is being deleted", id.Value.Name)
}

// clip bounds what a message repeats of a caller's words.
func clip(s string) string {
	const most = 100
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
