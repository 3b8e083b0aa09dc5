package web

import (
	"io/fs"
	"net/http"
	"path"
	"strings"
)

// policy lets the page load its own files and connect to its own origin, and
// nothing else. noVNC needs images from data: and blob:.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; " +
	"connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"

// assetsDir is where the build puts files whose names carry a hash of their
// content, which therefore never change.
const assetsDir = "assets/"

// missing is served in place of a page that has not been built. It stays
// within the policy: no inline style, no script.
const missing = `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Agent Browser Fleet</title>
<h1>The viewer page is not built</h1>
<p>This service was built without it. In the source tree, run: <code>make build</code></p>
`

// Handler serves the page at "/" and its files below it, to GET and HEAD. It
// sets the security headers of its answers. It reads only what is embedded, so
// no path leads out of it.
func Handler() http.Handler { return handler(Assets()) }

func handler(assets fs.FS) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", policy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("X-Frame-Options", "SAMEORIGIN")
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			header.Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
			return
		}
		name := strings.TrimPrefix(path.Clean("/"+r.URL.Path), "/")
		if name == "" {
			name = "index.html"
		}
		if _, err := fs.Stat(assets, "index.html"); err != nil && name == "index.html" {
			header.Set("Content-Type", "text/html; charset=utf-8")
			header.Set("Cache-Control", "no-store")
			w.WriteHeader(http.StatusServiceUnavailable)
			if r.Method != http.MethodHead {
				_, _ = w.Write([]byte(missing))
			}
			return
		}
		info, err := fs.Stat(assets, name)
		if err != nil || !info.Mode().IsRegular() || strings.HasPrefix(path.Base(name), ".") {
			http.Error(w, "not found", http.StatusNotFound)
			return
		}
		if strings.HasPrefix(name, assetsDir) {
			header.Set("Cache-Control", "public, max-age=31536000, immutable")
		} else {
			header.Set("Cache-Control", "no-cache")
		}
		if contentType := types[path.Ext(name)]; contentType != "" {
			header.Set("Content-Type", contentType)
		}
		http.ServeFileFS(w, r, assets, name)
	})
}

// types is fixed here because the system's table of MIME types may lack or
// redefine any of them, and nosniff then blocks the file.
var types = map[string]string{
	".html": "text/html; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".svg":  "image/svg+xml",
	".txt":  "text/plain; charset=utf-8",
}
