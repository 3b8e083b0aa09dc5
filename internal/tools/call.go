package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page"
)

// Call is one tool call: its arguments, the caller's view of the browser, and
// the sections of its answer.
type Call struct {
	Caller Caller
	Args   json.RawMessage

	host    *Host
	tool    Tool
	client  *page.Client
	tab     *page.Tab
	results []string
	code    []string
	images  []mcp.Content

	header   bool   // show Open tabs and Page even if unchanged
	snapshot string // the Snapshot section, without its title
	sections pageSections
	began    bool // something was sent that may have changed the page
}

// Fleet is the fleet behind the call.
func (c *Call) Fleet() Fleet { return c.host.opts.Fleet }

// Forget drops the caller's tool state.
func (c *Call) Forget() { c.host.Forget(c.Caller) }

// Client is the caller's view of its Session Browser.
func (c *Call) Client(ctx context.Context) (*page.Client, error) {
	if c.client == nil {
		engine, err := c.host.engine(ctx, c.Caller)
		if err != nil {
			return nil, err
		}
		c.client = engine.Client(c.Caller.Client)
	}
	return c.client, nil
}

// Tab is the caller's current tab.
func (c *Call) Tab(ctx context.Context) (*page.Tab, error) {
	client, err := c.Client(ctx)
	if err != nil {
		return nil, err
	}
	c.tab, err = client.Current(ctx)
	c.began = !c.tool.ReadOnly
	return c.tab, err
}

// Result adds a paragraph to the Result section.
func (c *Call) Result(text string) { c.results = append(c.results, text) }

// Code adds a line of equivalent Playwright code.
func (c *Call) Code(format string, args ...any) {
	c.code = append(c.code, fmt.Sprintf(format, args...))
}

// Image adds a picture.
func (c *Call) Image(img page.Image) {
	c.images = append(c.images, &mcp.ImageContent{Data: img.Data, MIMEType: img.MIME})
}

// Stamp is the time as it stands in names of files that answers link to.
func (c *Call) Stamp() string { return c.host.stamp() }

// Save writes a file with that name into the session's output directory and
// returns its path.
func (c *Call) Save(name string, data []byte) (string, error) {
	return c.host.save(c.Caller, name, data)
}

// File resolves a file name the caller gave; SaveAs writes to it.
func (c *Call) File(name string) (string, error) { return c.host.file(c.Caller, name) }

// SaveAs writes data to a path that File returned.
func (c *Call) SaveAs(path string, data []byte) error {
	return c.host.saveAs(c.Caller, path, data)
}

// ShowSnapshot takes a snapshot of the page into the answer, inline or as a
// link, as the fleet is configured.
func (c *Call) ShowSnapshot(ctx context.Context) error {
	c.header = true
	if c.tab == nil {
		return nil
	}
	text, err := c.tab.Snapshot(ctx, page.SnapshotOptions{MaxBytes: max(c.host.opts.SnapshotBytes, 0)})
	if err != nil {
		// The action is done; a page that cannot be read now (a dialog is
		// open, it is navigating away) is said by the other sections.
		if ctx.Err() != nil {
			return err
		}
		return nil
	}
	if c.host.opts.Snapshot == SnapshotInline {
		c.snapshot = fence(text)
		return nil
	}
	path, err := c.Save("page-"+c.Stamp()+".yml", []byte(text))
	if err != nil {
		return err
	}
	c.snapshot = fmt.Sprintf("- [Snapshot](%s)", path)
	return nil
}

// Snapshot takes a snapshot into the answer, always inline.
func (c *Call) Snapshot(ctx context.Context, o page.SnapshotOptions) error {
	if o.MaxBytes == 0 {
		o.MaxBytes = max(c.host.opts.SnapshotBytes, 0)
	}
	text, err := c.tab.Snapshot(ctx, o)
	if err != nil {
		return err
	}
	c.header = true
	c.snapshot = fence(text)
	return nil
}

// SnapshotText takes a snapshot for a file.
func (c *Call) SnapshotText(ctx context.Context, o page.SnapshotOptions) (string, error) {
	c.header = true
	return c.tab.Snapshot(ctx, o)
}

// LinkSnapshot shows a snapshot that was saved.
func (c *Call) LinkSnapshot(path string) { c.snapshot = fmt.Sprintf("- [Snapshot](%s)", path) }

func fence(text string) string { return "```yaml\n" + text + "\n```" }

// sections of the page, made by finish.
type pageSections struct{ tabs, page, modal string }

// finish adds the Open tabs, Page and Modal state sections where they are due.
func (c *Call) finish(ctx context.Context) error {
	if c.client == nil {
		return nil
	}
	s, err := c.pageSections(ctx)
	if err != nil {
		return err
	}
	sess := c.host.session(c.Caller.Session)
	sess.shownMu.Lock()
	header := s.tabs + "\n" + s.page
	changed := sess.shown[c.Caller.Client] != header
	sess.shown[c.Caller.Client] = header
	sess.shownMu.Unlock()
	if !c.header && !changed {
		s.tabs, s.page = "", ""
	}
	c.sections = s
	return nil
}

func (c *Call) pageSections(ctx context.Context) (pageSections, error) {
	var s pageSections
	tabs, err := c.client.Tabs(ctx)
	if err != nil {
		return s, err
	}
	if len(tabs) != 1 {
		s.tabs = TabLines(tabs)
	}
	if len(tabs) == 0 {
		return s, nil
	}
	tab, err := c.client.Current(ctx)
	if err != nil {
		return s, err
	}
	st, err := tab.State(ctx)
	if err != nil {
		return s, err
	}
	lines := []string{"- Page URL: " + st.URL}
	if st.Title != "" {
		lines = append(lines, "- Page Title: "+st.Title)
	}
	if st.Crashed {
		lines = append(lines, "- Page status: crashed")
	}
	if st.HTTPStatus != "" {
		lines = append(lines, "- HTTP status: "+st.HTTPStatus)
	}
	if st.ConsoleErrors+st.ConsoleWarnings > 0 {
		lines = append(lines, fmt.Sprintf("- Console: %d errors, %d warnings", st.ConsoleErrors, st.ConsoleWarnings))
	}
	s.page = strings.Join(lines, "\n")
	if d := st.Dialog; d != nil {
		s.modal = fmt.Sprintf("- [%q dialog with message %q]: can be handled by browser_handle_dialog", d.Type, d.Message)
	}
	return s, nil
}

// TabLines is the list of tabs as it is shown.
func TabLines(tabs []page.TabInfo) string {
	if len(tabs) == 0 {
		return "No open tabs. Navigate to a URL to create one."
	}
	var lines []string
	for _, t := range tabs {
		line := fmt.Sprintf("- %d: ", t.Index)
		if t.Current {
			line += "(current) "
		}
		line += fmt.Sprintf("[%s](%s)", oneLine(t.Title), t.URL)
		if t.Crashed {
			line += " [crashed]"
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// interrupted says of a call that lost its browser whether it may have taken
// effect, which decides whether trying again is safe.
func (c *Call) interrupted(ctx context.Context, err error) error {
	if err == nil || !(errors.Is(err, cdp.ErrClosed) || connectionLost(c)) || ctx.Err() != nil {
		return err
	}
	if fault.Is(err, fault.EffectUnknown) {
		return err
	}
	if c.tool.ReadOnly || !c.began {
		return fault.New(fault.BrowserNotControllable, "finish "+c.tool.Name, "call it again: it had no effect, and the Session Browser is started again if it ended",
			"the connection to the browser was lost: %w", err)
	}
	return fault.New(fault.EffectUnknown, "finish "+c.tool.Name, "look with browser_snapshot before doing it again: it may have taken effect",
		"the connection to the browser was lost: %w", err)
}

func connectionLost(c *Call) bool {
	if c.client == nil {
		return false
	}
	s := c.host.session(c.Caller.Session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engine == nil {
		return true
	}
	select {
	case <-s.engine.Done():
		return true
	default:
		return false
	}
}

// errorText is an error as models read it: the sentence, then its code and what
// to do next.
func errorText(err error) string {
	var invalid *InvalidArguments
	if errors.As(err, &invalid) {
		return invalid.Error()
	}
	text := err.Error()
	if !strings.HasPrefix(text, "Error") {
		text = "Error: " + text
	}
	if code := fault.CodeOf(err); code != fault.Internal {
		text += "\nCode: " + string(code)
	}
	if hint := fault.HintOf(err); hint != "" {
		text += "\nHint: " + hint
	}
	return text
}

// result puts the sections together in their fixed order.
func (c *Call) result(err error) *mcp.CallToolResult {
	var text []string
	section := func(title, body string) {
		if body != "" {
			text = append(text, "### "+title+"\n"+body)
		}
	}
	if err != nil {
		section("Error", errorText(err))
	} else {
		section("Result", strings.Join(c.results, "\n"))
		if len(c.code) > 0 {
			section("Ran Playwright code", "```js\n"+strings.Join(c.code, "\n")+"\n```")
		}
	}
	section("Open tabs", c.sections.tabs)
	section("Page", c.sections.page)
	section("Modal state", c.sections.modal)
	if err == nil {
		section("Snapshot", c.snapshot)
	}
	content := []mcp.Content{&mcp.TextContent{Text: strings.ToValidUTF8(strings.Join(text, "\n"), "\uFFFD")}}
	if err == nil {
		content = append(content, c.images...)
	}
	return &mcp.CallToolResult{Content: content, IsError: err != nil}
}
