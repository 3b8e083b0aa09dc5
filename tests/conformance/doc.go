// Package conformance holds the tests that bind the whole tree: which package
// may import which, and that every package says what it is for.
package conformance
