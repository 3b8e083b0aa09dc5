package fault

import (
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/ERRORS.md")

// TestDocs protects the published list of codes: docs/ERRORS.md has every code
// with its meaning, and each code has one.
func TestDocs(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	doc := "# Error codes\n\nMCP, HTTP and the CLI show the same code, with a sentence `cannot <verb> <object>: <cause>` and a hint. Codes are never renamed.\nThis page is made from `internal/fault` by `go test ./internal/fault -update`.\n\n| code | meaning |\n| --- | --- |\n"
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			code, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			meaning := strings.TrimSpace(v.Comment.Text())
			if meaning == "" {
				t.Errorf("%s has no meaning", code)
			}
			doc += fmt.Sprintf("| `%s` | %s |\n", code, meaning)
		}
	}
	const path = "../../docs/ERRORS.md"
	if *update {
		if err := os.WriteFile(path, []byte(doc), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(path); err != nil || string(have) != doc {
		t.Errorf("docs/ERRORS.md is out of date (%v): go test ./internal/fault -update", err)
	}
}

// TestChain protects what callers branch on: the outermost code, and the first
// hint of the chain.
func TestChain(t *testing.T) {
	inner := New(NoSpace, "clone profile", "free space", "write: %w", os.ErrClosed)
	outer := Wrap(fmt.Errorf("start: %w", inner), BrowserStartFailed, "start session browser", "")
	if CodeOf(outer) != BrowserStartFailed || HintOf(outer) != "free space" || !Is(outer, NoSpace) || Is(outer, Timeout) {
		t.Errorf("code %s, hint %q", CodeOf(outer), HintOf(outer))
	}
	if !errors.Is(outer, os.ErrClosed) {
		t.Error("the cause is lost")
	}
	if got, want := outer.Error(), "cannot start session browser: start: cannot clone profile: write: file already closed"; got != want {
		t.Errorf("text is %q, want %q", got, want)
	}
	if Wrap(nil, Internal, "x", "") != nil || CodeOf(os.ErrClosed) != Internal || HintOf(os.ErrClosed) != "" {
		t.Error("an error without a code is not told apart")
	}
}
