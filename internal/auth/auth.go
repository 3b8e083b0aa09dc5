package auth

import (
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"

	"abfleet/internal/audit"
	"abfleet/internal/fault"
)

// ModeToken is the only way to get a cookie so far: by the token of the
// machine's state directory. Status answers carry it.
const ModeToken = "token"

// maxLoginBody caps the body of a login request, in bytes.
const maxLoginBody = 4 << 10

// DenyFunc answers a request that is refused; the server writes its error
// envelope there.
type DenyFunc func(http.ResponseWriter, *http.Request, error)

// Options describes an Auth.
type Options struct {
	// Token is the secret of LoadToken.
	Token string
	// Trusted lists authorities beside localhost, 127.0.0.0/8 and ::1 under
	// which the service may be addressed: "host" for any port, "host:port"
	// for one.
	Trusted []string
	// Deny is required.
	Deny DenyFunc
	// Now is the clock. Nil means time.Now.
	Now func() time.Time
}

// Auth guards the TCP listener. Its three doors are complete by themselves:
// Page for what everybody may see, API and WebSocket for what needs the cookie.
type Auth struct {
	tokenSum [sha256.Size]byte
	key      []byte
	trusted  map[string]bool
	deny     DenyFunc
	now      func() time.Time
	failures *bucket
}

// New returns an Auth for the token.
func New(opts Options) (*Auth, error) {
	const op = "set up authentication"
	if !tokenForm.MatchString(opts.Token) {
		return nil, fault.New(fault.InvalidToken, op, "Remove the access-token file and restart the service", "the token is malformed")
	}
	key, err := hkdf.Key(sha256.New, []byte(opts.Token), nil, "abfleet viewer cookie v1", sha256.Size)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, op, "")
	}
	trusted := make(map[string]bool)
	for _, entry := range opts.Trusted {
		host, port, ok := splitAuthority(entry)
		if !ok {
			return nil, fault.New(fault.InvalidConfig, op, "Give each trusted host as NAME or NAME:PORT, without a scheme", "%q is not an authority", entry)
		}
		trusted[joinAuthority(host, port)] = true
	}
	now := opts.Now
	if now == nil {
		now = time.Now
	}
	return &Auth{
		tokenSum: sha256.Sum256([]byte(opts.Token)),
		key:      key,
		trusted:  trusted,
		deny:     opts.Deny,
		now:      now,
		failures: newBucket(now),
	}, nil
}

// Page lets requests for public, static content pass: the page and its files.
// It may be linked to from anywhere.
func (a *Auth) Page(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := a.checkAuthority(r); err != nil {
			a.deny(w, r, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// API lets requests with a cookie from our own page pass, and puts the Actor
// into their context.
func (a *Auth) API(next http.Handler) http.Handler {
	return a.guard(false, func(w http.ResponseWriter, r *http.Request) {
		actor, err := a.authenticate(r)
		if err != nil {
			a.deny(w, r, err)
			return
		}
		next.ServeHTTP(w, r.WithContext(WithActor(r.Context(), actor)))
	})
}

// WebSocket is API for websocket upgrades, where a missing Origin is refused
// too: browsers apply no same-origin rule to websockets, and always send one.
func (a *Auth) WebSocket(next http.Handler) http.Handler {
	return a.guard(true, a.API(next).ServeHTTP)
}

// guard checks authority and origin.
func (a *Auth) guard(needOrigin bool, next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := a.checkAuthority(r)
		if err == nil {
			err = checkSite(r, needOrigin)
		}
		if err != nil {
			a.deny(w, r, err)
			return
		}
		next(w, r)
	})
}

// authenticate returns who holds the request's cookie.
func (a *Auth) authenticate(r *http.Request) (audit.Actor, error) {
	if !a.hasCookie(r) {
		return audit.Actor{}, fault.New(fault.Unauthorized, "answer "+r.URL.Path,
			"Open the URL that `abfleet view` prints", "no valid cookie")
	}
	return audit.Actor{Kind: audit.KindUser, Name: "viewer", How: "http"}, nil
}

// StatusHandler answers GET with whether the request carries a valid cookie.
func (a *Auth) StatusHandler() http.Handler {
	return a.guard(false, func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, map[string]any{"ok": true, "authenticated": a.hasCookie(r), "mode": ModeToken})
	})
}

// LoginHandler answers POST {"token": "..."} with the cookie.
func (a *Auth) LoginHandler() http.Handler {
	return a.guard(false, func(w http.ResponseWriter, r *http.Request) {
		token, err := readLogin(w, r)
		if err == nil {
			err = a.login(w, r, token)
		}
		if err != nil {
			a.deny(w, r, err)
			return
		}
		writeJSON(w, map[string]any{"ok": true})
	})
}

// login exchanges the token for a cookie. Wrong tokens are limited over all
// callers: on a loopback socket there is nothing to tell them apart by. The
// right one always gets in, or any user of the host could keep people out; it
// is far too long to be guessed at any rate.
func (a *Auth) login(w http.ResponseWriter, r *http.Request, token string) error {
	const op = "log in"
	sum := sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(sum[:], a.tokenSum[:]) != 1 {
		if wait := a.failures.wait(); wait > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int((wait+time.Second-1)/time.Second)))
			return fault.New(fault.TooManyAttempts, op, "Open the URL that `abfleet view` prints", "too many wrong tokens")
		}
		a.failures.take()
		return fault.New(fault.InvalidToken, op, "Open the URL that `abfleet view` prints", "the token is wrong")
	}
	http.SetCookie(w, a.newCookie(r))
	return nil
}

func readLogin(w http.ResponseWriter, r *http.Request) (string, error) {
	const op = "log in"
	const hint = `Send POST with content type application/json and the body {"token": "..."}`
	if r.Method != http.MethodPost {
		return "", fault.New(fault.InvalidArgument, op, hint, "the method is %s", r.Method)
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return "", fault.New(fault.UnsupportedMediaType, op, hint, "the content type is not application/json")
	}
	var body struct {
		Token string `json:"token"`
	}
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxLoginBody))
	err := decoder.Decode(&body)
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			return body.Token, nil
		}
		if err == nil {
			err = errors.New("more than one value")
		}
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return "", fault.New(fault.BodyTooLarge, op, hint, "the body has more than %d bytes", maxLoginBody)
	}
	return "", fault.New(fault.InvalidArgument, op, hint, "the body is not one JSON object")
}

func writeJSON(w http.ResponseWriter, answer any) {
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'")
	_ = json.NewEncoder(w).Encode(answer)
}

// HTTPStatus returns the status that goes with a code of this package, and
// false for any other code.
func HTTPStatus(code fault.Code) (int, bool) {
	status, ok := statuses[code]
	return status, ok
}

var statuses = map[fault.Code]int{
	fault.Unauthorized:         http.StatusUnauthorized,
	fault.InvalidToken:         http.StatusUnauthorized,
	fault.BadOrigin:            http.StatusForbidden,
	fault.UntrustedAuthority:   http.StatusForbidden,
	fault.TooManyAttempts:      http.StatusTooManyRequests,
	fault.UnsupportedMediaType: http.StatusUnsupportedMediaType,
	fault.BodyTooLarge:         http.StatusRequestEntityTooLarge,
	fault.InvalidArgument:      http.StatusBadRequest,
}
