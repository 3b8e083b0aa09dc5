package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
	"abfleet/internal/page"
)

// Call is one tool call: its arguments, the caller's view of the browser, and
// the sections of its answer.
type Call struct {
	Caller Caller

	host    *Host
	session *session
	tool    Tool
	args    json.RawMessage
	stop    context.CancelCauseFunc
	check   *time.Timer // the first pulse
	done    func()      // ends the use of the browser
	engine  *page.Browser
	client  *page.Client
	tab     *page.Tab
	results []string
	code    []string
	images  []mcp.Content

	began    bool   // something was sent that may have changed the page
	acted    bool   // what was asked for is done; only the answer is not
	header   bool   // show Open tabs and Page even if unchanged
	snapshot string // the Snapshot section, without its title
	sections pageSections
}

// Fleet is the fleet behind the call.
func (c *Call) Fleet() Fleet { return c.host.opts.Fleet }

// Forget drops the caller's tool state: its current tab and what it was shown.
func (c *Call) Forget(ctx context.Context) error { return c.session.forget(ctx, c.Caller.Client) }

// Rebound says that the session may have another browser now, or need one: the
// next call asks the fleet, even while the connection to this one is open.
func (c *Call) Rebound() { c.session.doubted.Store(true) }

// Bound fails with fault.IdentityNotSelected while the session has no Identity.
// Unlike Client it starts nothing.
func (c *Call) Bound(ctx context.Context) error {
	list, err := c.Fleet().Identities(ctx, c.Caller.Session)
	if err == nil && list.Current == "" {
		err = fault.NotSelected("run " + c.tool.Name)
	}
	return err
}

// Client is the caller's view of its Session Browser.
func (c *Call) Client(ctx context.Context) (*page.Client, error) {
	if c.client == nil {
		done, err := c.Fleet().Operate(ctx, c.Caller.Session)
		if err != nil {
			return nil, err
		}
		engine, err := c.host.engine(ctx, c.session, c.Caller)
		if err != nil {
			done()
			return nil, err
		}
		c.done = done
		c.engine, c.client = engine, engine.Client(c.Caller.Client)
		c.check = time.AfterFunc(pulseEvery, func() { pulse(ctx, engine, c.stop) })
	}
	c.began = !c.tool.ReadOnly
	return c.client, nil
}

// pulse ends a call when its browser no longer answers anything: what waits
// for a page would wait as long as it may wait for a slow one.
func pulse(ctx context.Context, engine *page.Browser, end context.CancelCauseFunc) {
	for ctx.Err() == nil {
		pctx, cancel := context.WithTimeout(ctx, pulseWait)
		err := engine.Ping(pctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			end(errHung)
			return
		}
		select {
		case <-time.After(pulseEvery):
		case <-ctx.Done():
		}
	}
}

// Tab is the caller's current tab.
func (c *Call) Tab(ctx context.Context) (*page.Tab, error) {
	client, err := c.Client(ctx)
	if err != nil {
		return nil, err
	}
	c.tab, err = client.Current(ctx)
	return c.tab, err
}

// Result adds a paragraph to the Result section.
func (c *Call) Result(text string) { c.results = append(c.results, text) }

// Code adds a line of equivalent Playwright code.
func (c *Call) Code(format string, args ...any) {
	c.code = append(c.code, clip(fmt.Sprintf(format, args...), maxCode))
}

// Image adds a picture.
func (c *Call) Image(img page.Image) {
	c.images = append(c.images, &mcp.ImageContent{Data: img.Data, MIMEType: img.MIME})
}

// ShowSnapshot takes a snapshot of the page that the action has led to into the
// answer, inline or as a link, as the host is configured. A page that cannot be
// read now is no failure of the action.
func (c *Call) ShowSnapshot(ctx context.Context) error {
	c.acted, c.header = true, true
	if c.tab == nil {
		return nil
	}
	text, err := c.tab.Snapshot(ctx, page.SnapshotOptions{MaxBytes: c.host.opts.SnapshotBytes})
	switch {
	case err == nil:
	case fault.Is(err, fault.ModalState):
		return nil // the Modal state section says it
	case ctx.Err() != nil, errors.Is(err, cdp.ErrClosed), ended(c.engine):
		return err
	default:
		c.snapshot = "Not taken: " + err.Error()
		return nil
	}
	if c.host.opts.Snapshot == SnapshotInline {
		c.snapshot = fence(text)
		return nil
	}
	path, err := c.Save("page", "yml", []byte(text))
	if err != nil {
		c.snapshot = "Not written: " + err.Error()
		return nil
	}
	c.LinkSnapshot(path)
	return nil
}

// Snapshot takes a snapshot into the answer, always inline.
func (c *Call) Snapshot(ctx context.Context, o page.SnapshotOptions) error {
	o.MaxBytes = c.host.opts.SnapshotBytes
	text, err := c.SnapshotText(ctx, o)
	if err == nil {
		c.snapshot = fence(text)
	}
	return err
}

// SnapshotText takes a snapshot of any size, for a file.
func (c *Call) SnapshotText(ctx context.Context, o page.SnapshotOptions) (string, error) {
	text, err := c.tab.Snapshot(ctx, o)
	c.header = err == nil
	return text, err
}

// LinkSnapshot shows a snapshot that was saved.
func (c *Call) LinkSnapshot(path string) { c.snapshot = fmt.Sprintf("- [Snapshot](%s)", path) }

func fence(text string) string { return "```yaml\n" + text + "\n```" }

// pageSections are the sections about the browser as it is at the end of a call.
type pageSections struct{ tabs, page, modal string }

// finish adds the Open tabs, Page and Modal state sections where they are due.
// A call that failed shows the dialog that may be why.
func (c *Call) finish(ctx context.Context, failed bool) error {
	if c.client == nil {
		return nil
	}
	s, err := c.readSections(ctx)
	if err != nil {
		return err
	}
	if failed {
		c.sections.modal = s.modal
		return nil
	}
	if !c.session.showHeader(c.Caller.Client, s.tabs+"\n"+s.page, c.host.opts.Now()) && !c.header {
		s.tabs, s.page = "", ""
	}
	c.sections = s
	return nil
}

func (c *Call) readSections(ctx context.Context) (pageSections, error) {
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
	lines := []string{"- Page URL: " + oneLine(st.URL)}
	if title := oneLine(st.Title); title != "" {
		lines = append(lines, "- Page Title: "+title)
	}
	if st.Crashed {
		lines = append(lines, "- Page status: crashed")
	}
	if st.HTTPStatus != "" {
		lines = append(lines, "- HTTP status: "+oneLine(st.HTTPStatus))
	}
	if st.ConsoleErrors+st.ConsoleWarnings > 0 {
		lines = append(lines, fmt.Sprintf("- Console: %d errors, %d warnings", st.ConsoleErrors, st.ConsoleWarnings))
	}
	s.page = strings.Join(lines, "\n")
	if d := st.Dialog; d != nil {
		by := "browser_handle_dialog"
		if !c.host.has(by) {
			by = "the person in the live view"
		}
		s.modal = fmt.Sprintf("- [\"%s\" dialog with message \"%s\"]: can be handled by %s", d.Type, oneLine(d.Message), by)
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
		line += fmt.Sprintf("[%s](%s)", oneLine(t.Title), oneLine(t.URL))
		if t.Crashed {
			line += " [crashed]"
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// maxLine caps what a page can put on one line of an answer: a title, a data:
// URL, the message of a dialog.
const maxLine = 2000

// maxCode and maxError cap what an answer repeats of a call's arguments: a data:
// URL or a pasted file would cost the model as much again. In bytes.
const (
	maxCode  = 8 << 10
	maxError = 8 << 10
)

// oneLine keeps what a page says from making lines, and so sections, of its own.
func oneLine(s string) string {
	return clip(strings.Join(strings.Fields(s), " "), maxLine)
}

func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// interrupted says of a call that lost its browser whether it may have taken
// effect, which decides whether trying again is safe.
func (c *Call) interrupted(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	why := errHung
	if !errors.Is(context.Cause(ctx), errHung) {
		lost := errors.Is(err, cdp.ErrClosed) || c.engine != nil && ended(c.engine)
		if !lost || ctx.Err() != nil || fault.Is(err, fault.EffectUnknown) {
			return err
		}
		why = fmt.Errorf("the connection to the browser was lost: %w", err)
	}
	op := "finish " + c.tool.Name
	again := "; a Session Browser that ended or hangs is started again with its login, by that or by agent_browser_use_identity"
	switch {
	case c.acted:
		return fault.New(fault.EffectUnknown, op, "do not repeat it; look with browser_snapshot"+again,
			"it took effect, but the page was not read: %w", why)
	case c.began:
		return fault.New(fault.EffectUnknown, op, "look with browser_snapshot before doing it again"+again,
			"it may have taken effect: %w", why)
	}
	return fault.New(fault.BrowserNotControllable, op, "call it again"+again, "it had no effect: %w", why)
}

// errorText is an error as models read it: the sentence, then its code and what
// to do next.
func errorText(err error) string {
	var invalid *InvalidArguments
	if errors.As(err, &invalid) {
		return clip(invalid.Error(), maxError)
	}
	text := "Error: " + clip(err.Error(), maxError)
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
