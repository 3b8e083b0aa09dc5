package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// CookieLife is how long a login lasts.
const CookieLife = 24 * time.Hour

const (
	// cookieVersion starts every value, so that a later form can be told.
	cookieVersion = "1"
	nonceBytes    = 16
	// clockSlack is how far in the future beyond CookieLife an expiry may
	// lie, for a clock that was set back since the cookie was made.
	clockSlack = time.Hour
)

var encoding = base64.RawURLEncoding.Strict()

// CookieName returns the name of the cookie for an authority. A browser sends a
// cookie to every port of a host, so the port is part of the name: two fleets
// on one host then keep their own.
func CookieName(authority string) string {
	sum := sha256.Sum256([]byte(strings.ToLower(authority)))
	return "abfleet_" + hex.EncodeToString(sum[:8])
}

func (a *Auth) newCookie(r *http.Request) *http.Cookie {
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce)
	claim := strings.Join([]string{
		cookieVersion,
		strconv.FormatInt(a.now().Add(CookieLife).Unix(), 10),
		encoding.EncodeToString(nonce),
	}, ".")
	return &http.Cookie{
		Name:     CookieName(r.Host),
		Value:    claim + "." + encoding.EncodeToString(a.sign(r.Host, claim)),
		Path:     "/",
		MaxAge:   int(CookieLife / time.Second),
		Secure:   r.TLS != nil,
		HttpOnly: true,
		SameSite: http.SameSiteStrictMode,
	}
}

// sign binds a claim to the authority it was made for. An authority holds no
// line feed, so the two cannot be confused.
func (a *Auth) sign(authority, claim string) []byte {
	mac := hmac.New(sha256.New, a.key)
	mac.Write([]byte(strings.ToLower(authority) + "\n" + claim))
	return mac.Sum(nil)
}

// hasCookie reports whether the request carries a cookie of ours for its
// authority. A second one of the same name, which a page on another port could
// have set, does not spoil the first.
func (a *Auth) hasCookie(r *http.Request) bool {
	for _, cookie := range r.CookiesNamed(CookieName(r.Host)) {
		if a.valid(r.Host, cookie.Value) {
			return true
		}
	}
	return false
}

func (a *Auth) valid(authority, value string) bool {
	cut := strings.LastIndexByte(value, '.')
	if cut < 0 {
		return false
	}
	claim := value[:cut]
	// Compared as text: decoding would let line ends pass.
	if mac := encoding.EncodeToString(a.sign(authority, claim)); !hmac.Equal([]byte(value[cut+1:]), []byte(mac)) {
		return false
	}
	// From here on the claim is one that we made.
	parts := strings.Split(claim, ".")
	if len(parts) != 3 || parts[0] != cookieVersion {
		return false
	}
	expiry, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil {
		return false
	}
	left := time.Unix(expiry, 0).Sub(a.now())
	return left > 0 && left <= CookieLife+clockSlack
}
