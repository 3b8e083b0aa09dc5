// Package web holds the page on which a person sees and operates a browser of
// the fleet. Its sources are TypeScript (src/), built by npm into dist/ and
// embedded from there; dist/ is empty in a fresh checkout, and the handler then
// says how to build it.
package web

import (
	"embed"
	"io/fs"
)

//go:embed all:dist
var dist embed.FS

// Assets returns the built page. It holds no index.html when the page has not
// been built.
func Assets() fs.FS {
	sub, err := fs.Sub(dist, "dist")
	if err != nil {
		// Sub fails on an invalid path only, and this one is a constant.
		panic(err)
	}
	return sub
}
