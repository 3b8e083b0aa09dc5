package auth

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"abfleet/internal/fault"
)

// checkAuthority refuses a Host header that does not name this machine. A page
// whose name an attacker's DNS points at 127.0.0.1 is same-origin with us for
// its browser; its Host header gives it away.
func (a *Auth) checkAuthority(r *http.Request) error {
	host, port, ok := splitAuthority(r.Host)
	if ok && (isLoopback(host) || a.trusted[host] || a.trusted[joinAuthority(host, port)]) {
		return nil
	}
	return fault.New(fault.UntrustedAuthority, "answer this request",
		"Use the address that `abfleet view` prints",
		"the Host header does not name this service")
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	// The canonical form only: 127.0.0.1 inside IPv6 or with a zone is never
	// what a browser was told to open.
	return err == nil && ip.IsLoopback() && ip.Zone() == "" && !ip.Is4In6()
}

// splitAuthority takes "host", "host:port", "[v6]" or "[v6]:port" apart, lower
// case and without brackets.
func splitAuthority(authority string) (host, port string, ok bool) {
	u, err := url.Parse("http://" + authority + "/")
	if err != nil || u.Host != authority || u.User != nil || u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return "", "", false
	}
	host, port = strings.ToLower(u.Hostname()), u.Port()
	if host == "" || strings.HasSuffix(authority, ":") {
		return "", "", false
	}
	if port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", "", false
		}
	}
	return host, port, true
}

func joinAuthority(host, port string) string {
	if port == "" {
		return host
	}
	return net.JoinHostPort(host, port)
}

// checkSite refuses requests that a page of another origin made. An absent
// Origin passes only where browsers omit it: on requests that change nothing
// and are no websocket.
func checkSite(r *http.Request, needOrigin bool) error {
	safe := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch origins := r.Header.Values("Origin"); len(origins) {
	case 0:
		if needOrigin || !safe {
			return badOrigin("there is no Origin header")
		}
	case 1:
		if !sameOrigin(origins[0], r.Host) {
			return badOrigin("the Origin header names another site")
		}
	default:
		return badOrigin("there is more than one Origin header")
	}
	// Absent on plain HTTP to a name other than localhost; Origin decides
	// then.
	switch sites := r.Header.Values("Sec-Fetch-Site"); {
	case len(sites) == 0:
	case len(sites) == 1 && sites[0] == "same-origin":
	case len(sites) == 1 && sites[0] == "none" && safe:
		// Typed into the address bar, or from a bookmark.
	default:
		return badOrigin("another site made the request")
	}
	return nil
}

func sameOrigin(origin, host string) bool {
	u, err := url.Parse(origin)
	if err != nil || u.Scheme+"://"+u.Host != origin {
		return false
	}
	var defaultPort string
	switch u.Scheme {
	case "http":
		defaultPort = "80"
	case "https":
		defaultPort = "443"
	default:
		return false
	}
	originHost, originPort, ok := splitAuthority(u.Host)
	ownHost, ownPort, ok2 := splitAuthority(host)
	if !ok || !ok2 {
		return false
	}
	port := func(p string) string {
		if p == "" {
			return defaultPort
		}
		return p
	}
	return originHost == ownHost && port(originPort) == port(ownPort)
}

func badOrigin(cause string) error {
	return fault.New(fault.BadOrigin, "answer this request",
		"Open the viewer page itself, with the URL that `abfleet view` prints", "%s", cause)
}
