package web

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

var built = fstest.MapFS{
	"index.html":          {Data: []byte("<!doctype html><title>page</title>")},
	"licences.txt":        {Data: []byte("MPL")},
	"assets/index-1a.js":  {Data: []byte("script()")},
	"assets/index-1a.css": {Data: []byte("body{}")},
	"assets/icon-1a.svg":  {Data: []byte("<svg/>")},
	".gitkeep":            {},
}

func get(h http.Handler, method, target string) *http.Response {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, "http://localhost/", nil)
	// Not by way of URL parsing, which would clean some of what is tried.
	r.URL.Path, r.RequestURI = target, target
	h.ServeHTTP(w, r)
	return w.Result()
}

func text(t *testing.T, answer *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestPage(t *testing.T) {
	h := handler(built)
	for path, want := range map[string][3]string{
		"/":                    {"text/html; charset=utf-8", "no-cache", "<title>page"},
		"/assets/index-1a.js":  {"text/javascript; charset=utf-8", "public, max-age=31536000, immutable", "script()"},
		"/assets/index-1a.css": {"text/css; charset=utf-8", "public, max-age=31536000, immutable", "body{}"},
		"/assets/icon-1a.svg":  {"image/svg+xml", "public, max-age=31536000, immutable", "<svg/>"},
		"/licences.txt":        {"text/plain; charset=utf-8", "no-cache", "MPL"},
	} {
		answer := get(h, http.MethodGet, path)
		if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != want[0] ||
			answer.Header.Get("Cache-Control") != want[1] || !strings.Contains(text(t, answer), want[2]) {
			t.Errorf("%s: %s %v", path, answer.Status, answer.Header)
		}
		head := get(h, http.MethodHead, path)
		if body := text(t, head); head.StatusCode != http.StatusOK || body != "" {
			t.Errorf("HEAD %s: %s", path, body)
		}
	}
}

func TestEveryAnswerIsGuarded(t *testing.T) {
	for name, assets := range map[string]fstest.MapFS{"built": built, "not built": {".gitkeep": {}}} {
		for _, path := range []string{"/", "/assets/index-1a.js", "/missing", "/assets"} {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				header := get(handler(assets), method, path).Header
				for key, want := range map[string]string{
					"Content-Security-Policy": policy,
					"X-Content-Type-Options":  "nosniff",
					"Referrer-Policy":         "no-referrer",
				} {
					if header.Get(key) != want {
						t.Errorf("%s, %s %s: %s is %q", name, method, path, key, header.Get(key))
					}
				}
			}
		}
	}
	for _, loose := range []string{"unsafe", "*", "http:", "https:"} {
		if strings.Contains(policy, loose) {
			t.Errorf("the policy allows %s", loose)
		}
	}
}

func TestNothingElseIsServed(t *testing.T) {
	h := handler(built)
	for _, path := range []string{
		"/missing", "/assets", "/assets/", "/.gitkeep", "/../web.go", "/assets/../../web.go", "/..%2fweb.go", "//etc/passwd", "/assets/missing.js",
		"/assets/index-1a.js/x", "/\x00", "/dist/index.html",
	} {
		if answer := get(h, http.MethodGet, path); answer.StatusCode != http.StatusNotFound {
			t.Errorf("%q answered %s", path, answer.Status)
		}
	}
	if answer := get(h, http.MethodPost, "/"); answer.StatusCode != http.StatusMethodNotAllowed || answer.Header.Get("Allow") == "" {
		t.Errorf("POST answered %s", answer.Status)
	}
}

func TestPageThatIsNotBuilt(t *testing.T) {
	answer := get(handler(fstest.MapFS{".gitkeep": {}}), http.MethodGet, "/")
	if body := text(t, answer); answer.StatusCode != http.StatusServiceUnavailable || !strings.Contains(body, "make build") {
		t.Errorf("answered %s", body)
	}
	if answer := get(handler(fstest.MapFS{}), http.MethodGet, "/assets/x.js"); answer.StatusCode != http.StatusNotFound {
		t.Errorf("a file answered %s", answer.Status)
	}
}

// The lockfile must install from whatever registry a machine uses.
func TestLockfileNamesNoRegistry(t *testing.T) {
	lock, err := os.ReadFile("package-lock.json")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(lock), `"resolved"`) {
		t.Error(`package-lock.json has "resolved" entries: run npm install in this folder, whose .npmrc leaves them out`)
	}
}

// What was built is what the policy lets run: no inline script or style, and
// only relative addresses, since the page is served under more than one path.
func TestBuiltPageFitsThePolicy(t *testing.T) {
	data, err := os.ReadFile("dist/index.html")
	if os.IsNotExist(err) {
		t.Skip("the page is not built: run make build")
	}
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	for _, bad := range []string{"<style", "style=", "onload=", `src="/`, `href="/`, "<script>", "http://", "https://"} {
		if strings.Contains(page, bad) {
			t.Errorf("index.html contains %s", bad)
		}
	}
	if !strings.Contains(page, `src="./assets/`) {
		t.Error("index.html loads no script")
	}
}
