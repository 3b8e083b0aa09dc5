package page

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"abfleet/internal/fault"
)

// isDevTools reports whether a page is Chromium's own developer tools.
func isDevTools(u string) bool { return strings.HasPrefix(u, "devtools:") }

// NormalizeURL turns what a caller calls a URL into one that a page may be sent
// to. Without a scheme it becomes https, for localhost http; schemes that lead
// out of the web are refused.
func NormalizeURL(raw string) (string, error) {
	op := "navigate to " + quote(raw)
	s := strings.TrimSpace(raw)
	if s == "" {
		return "", fault.New(fault.InvalidArgument, op, "give a URL such as https://example.com/", "the URL is empty")
	}
	scheme, rest := splitScheme(s)
	switch scheme {
	case "http", "https":
		u, err := url.Parse(s)
		if err != nil || u.Host == "" {
			return "", fault.New(fault.InvalidArgument, op, "give a URL such as https://example.com/", "the URL has no host")
		}
		return s, nil
	case "data", "blob":
		return s, nil
	case "about": // the others are Chromium's own pages
		if page, _, _ := strings.Cut(strings.ToLower(rest), "#"); page == "blank" {
			return s, nil
		}
	case "":
		if isLocalhost(s) {
			return "http://" + s, nil
		}
		return NormalizeURL("https://" + s)
	default:
		// "localhost:8080/x" and "example.com:8080" look like schemes.
		if isLocalhost(s) {
			return "http://" + s, nil
		}
		if looksLikePort(rest) && strings.Contains(scheme, ".") {
			return "https://" + s, nil
		}
	}
	return "", fault.New(fault.BlockedURL, op, "use an http or https URL",
		"Access to %q protocol is blocked. Attempted URL: %q", scheme+":", s)
}

// splitScheme splits "scheme:rest"; the scheme is lower case, and "" when there
// is none.
func splitScheme(s string) (string, string) {
	// Browsers drop these wherever they are in a URL: "java\nscript:" is one.
	s = strings.NewReplacer("\n", "", "\r", "", "\t", "").Replace(s)
	i := strings.IndexByte(s, ':')
	if i <= 0 {
		return "", s
	}
	for j, r := range s[:i] {
		letter := 'a' <= r|0x20 && r|0x20 <= 'z'
		if !letter && (j == 0 || !strings.ContainsRune("0123456789+-.", r)) {
			return "", s
		}
	}
	return strings.ToLower(s[:i]), s[i+1:]
}

func isLocalhost(s string) bool {
	rest, ok := strings.CutPrefix(strings.ToLower(s), "localhost")
	return ok && (rest == "" || strings.ContainsRune(":/?#", rune(rest[0])))
}

func looksLikePort(s string) bool {
	n := 0
	for n < len(s) && '0' <= s[n] && s[n] <= '9' {
		n++
	}
	return n > 0 && (n == len(s) || strings.ContainsRune("/?#", rune(s[n])))
}

// Navigate sends the tab to a URL and waits for DOMContentLoaded, then for the
// load event for a few seconds. An answer that becomes a download is no error.
func (t *Tab) Navigate(ctx context.Context, raw string) error {
	u, err := NormalizeURL(raw)
	if err != nil {
		return err
	}
	op := "navigate to " + quote(u)
	if err := t.take(ctx); err != nil {
		return t.b.explain(op, err)
	}
	defer t.release()
	ctx, end, err := t.interruptible(ctx, true)
	if err != nil {
		return t.b.explain(op, err)
	}
	defer end()
	limited, cancel := context.WithTimeout(ctx, t.b.opts.NavigationTimeout)
	defer cancel()
	base := t.baseline()
	var r struct {
		LoaderID   string `json:"loaderId"`
		ErrorText  string `json:"errorText"`
		IsDownload bool   `json:"isDownload"`
	}
	t.leave(limited)
	err = t.target.session.Call(limited, "Page.navigate", map[string]any{"url": u}, &r)
	switch {
	case err != nil:
		return t.stopLoading(ctx, op, u, err)
	case r.IsDownload:
		return nil
	case r.ErrorText != "":
		if r.ErrorText != errAborted { // Chromium shows a page of its own
			err := t.until(limited, answerWait, func() bool {
				return t.closed || t.documents > base.documents && t.main != nil && t.main.ready
			})
			if err != nil {
				return t.b.explain(op, err)
			}
		}
		return fault.New(fault.NavigationFailed, op, navigationHint(r.ErrorText), "%s at %s", r.ErrorText, u)
	case r.LoaderID == "": // within the document
		return nil
	}
	if err := t.arrive(limited, base); err != nil {
		return t.stopLoading(ctx, op, u, err)
	}
	return nil
}

// busyWait is how long a page that is being left may be too busy to answer.
const busyWait = time.Second

// leave sees to it that a page whose script never ends can be left. It must come
// before the navigation: once that has an answer, Chromium passes nothing on to
// the old document.
func (t *Tab) leave(ctx context.Context) {
	t.b.mu.Lock()
	f := t.main
	ask := f != nil && f.world != 0 && !t.crashed
	var world int
	if ask {
		world = f.world
	}
	t.b.mu.Unlock()
	if ask {
		t.unblock(ctx, t.target.session, world, busyWait)
	}
}

// arrive waits until a document newer than base is ready and, for a while,
// loaded. A document that sends the page on at once is followed.
func (t *Tab) arrive(ctx context.Context, base baseline) error {
	err := t.b.await(ctx, func() bool {
		return t.closed || t.documents > base.documents && t.main != nil && t.main.ready
	})
	if err != nil {
		return err
	}
	err = t.until(ctx, loadWait, func() bool { return t.closed || t.main.loaded || !t.navigating })
	if err != nil {
		return err
	}
	t.b.mu.Lock()
	onward := t.navigating || !t.requested.IsZero()
	closed := t.closed
	base.navigations, base.documents = t.navigations, t.documents
	t.b.mu.Unlock()
	if closed {
		return errTabClosed
	}
	if onward && t.mainLoaded() {
		return t.loaded(ctx, &base)
	}
	return nil
}

func (t *Tab) mainLoaded() bool {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return t.main != nil && t.main.loaded
}

// stopLoading gives up a navigation that failed or was cancelled, so that it
// does not replace the page later.
func (t *Tab) stopLoading(ctx context.Context, op, u string, err error) error {
	if !ended(err) {
		t.target.session.Start(context.WithoutCancel(ctx), "Page.stopLoading", nil)
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fault.New(fault.Timeout, op, "try again, or take a snapshot to see what has arrived",
			"the page did not load within %v at %s", t.b.opts.NavigationTimeout, u)
	}
	return t.b.explain(op, err)
}

// errAborted is how Chromium reports an answer that replaces no document.
const errAborted = "net::ERR_ABORTED"

// navigationHint says what may help against a net:: error.
func navigationHint(text string) string {
	switch text {
	case "net::ERR_NAME_NOT_RESOLVED":
		return "check the host name"
	case "net::ERR_CONNECTION_REFUSED":
		return "check that a server listens there"
	case errAborted:
		return "the server answered without a page; the tab shows what it did before"
	default:
		return "check the URL, or try again later"
	}
}

// historyAttempts is how often a page is asked for its history, two animation
// frames apart.
const historyAttempts = 10

// Back goes one step back in the tab's history and waits until the page is
// there.
func (t *Tab) Back(ctx context.Context) error {
	const op = "navigate back"
	if err := t.take(ctx); err != nil {
		return t.b.explain(op, err)
	}
	defer t.release()
	ctx, end, err := t.interruptible(ctx, true)
	if err != nil {
		return t.b.explain(op, err)
	}
	defer end()
	limited, cancel := context.WithTimeout(ctx, t.b.opts.NavigationTimeout)
	defer cancel()
	s := t.target.session
	var h struct {
		CurrentIndex int `json:"currentIndex"`
		Entries      []struct {
			ID  int    `json:"id"`
			URL string `json:"url"`
		} `json:"entries"`
	}
	for attempt := 1; ; attempt++ {
		err := s.Call(limited, "Page.getNavigationHistory", nil, &h)
		if err == nil {
			break
		}
		// Just after a page committed, Chromium may not know it as the
		// active one yet.
		if attempt == historyAttempts || !contextGone(err) {
			return t.b.explain(op, err)
		}
		t.paint(limited)
	}
	i := h.CurrentIndex - 1
	if i < 0 || i >= len(h.Entries) {
		return fault.New(fault.NavigationFailed, op, "navigate to a URL instead", "this tab has no earlier page")
	}
	if _, err := NormalizeURL(h.Entries[i].URL); err != nil {
		return fault.Wrap(errors.Unwrap(err), fault.BlockedURL, op, "navigate to a URL instead")
	}
	t.leave(limited)
	t.b.mu.Lock()
	commits, base := t.commits, baseline{documents: t.documents}
	t.b.mu.Unlock()
	if err := s.Call(limited, "Page.navigateToHistoryEntry", map[string]any{"entryId": h.Entries[i].ID}, nil); err != nil {
		return t.b.explain(op, err)
	}
	err = t.b.await(limited, func() bool { return t.commits > commits || t.closed })
	if err == nil {
		t.b.mu.Lock()
		replaced := t.documents > base.documents
		t.b.mu.Unlock()
		if replaced {
			err = t.until(limited, loadWait, func() bool { return t.closed || t.main != nil && t.main.ready })
		}
	}
	if err != nil {
		return t.stopLoading(ctx, op, h.Entries[i].URL, fmt.Errorf("wait for page: %w", err))
	}
	return nil
}
