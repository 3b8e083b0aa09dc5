// Package playwright is the browser_* catalog: names, schemas, annotations and
// answer sections are those of @playwright/mcp 0.0.79, so that what models have
// learned about it holds; descriptions and code are our own.
package playwright

import (
	"context"
	_ "embed" // the catalog
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"abfleet/internal/fault"
	"abfleet/internal/page"
	"abfleet/internal/tools"
)

//go:embed catalog-core.json
var catalogJSON []byte

// Version is the release whose catalog this is.
const Version = "0.0.79"

type entry struct {
	Name        string          `json:"name"`
	InputSchema json.RawMessage `json:"inputSchema"`
	Annotations struct {
		Title        string `json:"title"`
		ReadOnlyHint bool   `json:"readOnlyHint"`
	} `json:"annotations"`
}

// implemented holds what each tool of the catalog does; a tool without an entry
// is not offered.
var implemented = map[string]struct {
	description string
	run         func(ctx context.Context, c *tools.Call) error
}{
	"browser_navigate":        {"Open a URL in the current tab.", navigate},
	"browser_navigate_back":   {"Go back to the previous page of the current tab.", navigateBack},
	"browser_snapshot":        {"Read the current page as an accessibility tree. The refs in it (e12) are what other tools take as target. Better than a screenshot for acting.", snapshot},
	"browser_click":           {"Click an element. target is a ref from the snapshot, a selector or a Playwright locator.", click},
	"browser_type":            {"Fill an editable element with text, replacing what it holds.", typeText},
	"browser_press_key":       {"Press a key or a chord such as Control+A in the current tab.", pressKey},
	"browser_evaluate":        {"Run JavaScript in the page, or on one element, and return the result as JSON.", evaluate},
	"browser_take_screenshot": {"Take a picture of the viewport, the full page or one element. To act, use browser_snapshot.", screenshot},
	"browser_tabs":            {"List, open, close or select tabs.", tabs},
	"browser_wait_for":        {"Wait for a text to appear or to go, or for a time in seconds (at most 30).", waitFor},
	"browser_close":           {"Let go of the browser: this client's tab selection is dropped. The Session Browser and its tabs stay open.", closeBrowser},
}

// Tools returns the catalog in its own order.
func Tools() []tools.Tool {
	var catalog struct{ Tools []entry }
	if err := json.Unmarshal(catalogJSON, &catalog); err != nil {
		panic(err) // embedded
	}
	var list []tools.Tool
	for _, e := range catalog.Tools {
		impl, ok := implemented[e.Name]
		if !ok {
			continue
		}
		list = append(list, tools.Tool{
			Name: e.Name, Title: e.Annotations.Title, Description: impl.description, Schema: e.InputSchema,
			ReadOnly: e.Annotations.ReadOnlyHint, Run: impl.run,
		})
	}
	return list
}

// quote is a JavaScript string literal in single quotes.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('\'')
	for _, r := range s {
		switch r {
		case '\'', '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case '\n':
			b.WriteString("\\n")
		case '\r':
			b.WriteString("\\r")
		case '\t':
			b.WriteString("\\t")
		default:
			if r < ' ' || r == '\u2028' || r == '\u2029' || r == 0x7f {
				fmt.Fprintf(&b, "\\u%04x", r)
			} else {
				b.WriteRune(r)
			}
		}
	}
	b.WriteByte('\'')
	return b.String()
}

func navigate(ctx context.Context, c *tools.Call) error {
	var args struct{ URL string }
	if err := c.Decode(&args); err != nil {
		return err
	}
	url, err := page.NormalizeURL(args.URL)
	if err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	if err := tab.Navigate(ctx, args.URL); err != nil {
		return err
	}
	c.Code("await page.goto(%s);", quote(url))
	return c.ShowSnapshot(ctx)
}

func navigateBack(ctx context.Context, c *tools.Call) error {
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	if err := tab.Back(ctx); err != nil {
		return err
	}
	c.Code("await page.goBack();")
	return c.ShowSnapshot(ctx)
}

func snapshot(ctx context.Context, c *tools.Call) error {
	var args struct {
		Target, Filename string
		Depth            *float64
		Boxes            bool
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	o := page.SnapshotOptions{Target: args.Target, Boxes: args.Boxes}
	if args.Depth != nil {
		depth := int(*args.Depth)
		if depth < 0 || float64(depth) != *args.Depth {
			return fault.New(fault.InvalidArgument, "take snapshot", "give a whole number from 0 on", "depth is %v", *args.Depth)
		}
		o.Depth = &depth
	}
	file, err := given(c, args.Filename)
	if err != nil {
		return err
	}
	if _, err := c.Tab(ctx); err != nil {
		return err
	}
	if file == nil {
		return c.Snapshot(ctx, o)
	}
	text, err := c.SnapshotText(ctx, o)
	if err != nil {
		return err
	}
	if err := c.SaveAs(*file, []byte(text)); err != nil {
		return err
	}
	c.LinkSnapshot(file.Path)
	return nil
}

// given is the file that a caller named, nil when it named none.
func given(c *tools.Call, name string) (*tools.File, error) {
	if name == "" {
		return nil, nil
	}
	f, err := c.File(name)
	return &f, err
}

func click(ctx context.Context, c *tools.Call) error {
	var args struct {
		Target, Button string
		DoubleClick    bool
		Modifiers      []string
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	found, err := tab.Click(ctx, args.Target, page.ClickOptions{Button: args.Button, Double: args.DoubleClick, Modifiers: args.Modifiers})
	if err != nil {
		return err
	}
	var options []string
	if args.Button != "" {
		options = append(options, "button: "+quote(args.Button))
	}
	if len(args.Modifiers) > 0 {
		quoted := make([]string, len(args.Modifiers))
		for i, m := range args.Modifiers {
			quoted[i] = quote(m)
		}
		options = append(options, "modifiers: ["+strings.Join(quoted, ", ")+"]")
	}
	text := ""
	if len(options) > 0 {
		text = "{ " + strings.Join(options, ", ") + " }"
	}
	method := "click"
	if args.DoubleClick {
		method = "dblclick"
	}
	c.Code("await page.%s.%s(%s);", found.Code, method, text)
	return c.ShowSnapshot(ctx)
}

func typeText(ctx context.Context, c *tools.Call) error {
	var args struct {
		Target, Text   string
		Submit, Slowly bool
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	write, method := tab.Fill, "fill"
	if args.Slowly {
		write, method = tab.TypeSlowly, "pressSequentially"
	}
	found, err := write(ctx, args.Target, args.Text)
	if err != nil {
		return err
	}
	c.Code("await page.%s.%s(%s);", found.Code, method, quote(args.Text))
	if args.Submit {
		if err := tab.Press(ctx, "Enter"); err != nil {
			return err
		}
		c.Code("await page.%s.press('Enter');", found.Code)
	}
	if args.Submit || args.Slowly {
		return c.ShowSnapshot(ctx)
	}
	return nil
}

func pressKey(ctx context.Context, c *tools.Call) error {
	var args struct{ Key string }
	if err := c.Decode(&args); err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	if err := tab.Press(ctx, args.Key); err != nil {
		return err
	}
	c.Code("// Press %s", strings.Join(strings.Fields(args.Key), " "))
	c.Code("await page.keyboard.press(%s);", quote(args.Key))
	if args.Key == "Enter" {
		return c.ShowSnapshot(ctx)
	}
	return nil
}

func evaluate(ctx context.Context, c *tools.Call) error {
	var args struct{ Target, Function, Filename string }
	if err := c.Decode(&args); err != nil {
		return err
	}
	file, err := given(c, args.Filename)
	if err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	value, found, err := tab.Evaluate(ctx, args.Function, args.Target)
	if err != nil {
		return err
	}
	switch {
	case file != nil:
		if err := c.SaveAs(*file, []byte(value)); err != nil {
			return err
		}
		value = fmt.Sprintf("- [Evaluation result](%s)", file.Path)
	case len(value) > maxResult:
		path, err := c.Save("result", "json", []byte(value))
		if err != nil {
			return err
		}
		value = fmt.Sprintf("%s…\n- [The whole evaluation result, %d bytes](%s)", strings.ToValidUTF8(value[:shownResult], ""), len(value), path)
	}
	c.Result(value)
	on := "page"
	if args.Target != "" {
		on = "page." + found.Code
	}
	c.Code("await %s.evaluate(%s);", on, quote(function(args.Function)))
	return nil
}

// A result of more than maxResult bytes goes to a file, and its first shownResult
// bytes into the answer.
const (
	maxResult   = 128 << 10
	shownResult = 4 << 10
)

// function shows an expression as the function it is evaluated as.
func function(text string) string {
	trimmed := strings.TrimSpace(text)
	if strings.Contains(trimmed, "=>") || strings.HasPrefix(trimmed, "function") || strings.HasPrefix(trimmed, "async ") {
		return text
	}
	return "() => (" + text + ")"
}

func screenshot(ctx context.Context, c *tools.Call) error {
	var args struct {
		Element, Target, Type, Filename, Scale string
		FullPage                               bool
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	if args.FullPage && args.Target != "" {
		return fault.New(fault.InvalidArgument, "take screenshot", "leave out fullPage or target", "fullPage cannot be used with a target")
	}
	kind := args.Type
	if kind == "" {
		kind = "png"
		for _, known := range []string{"jpeg", "webp"} {
			if strings.HasSuffix(args.Filename, "."+known) {
				kind = known
			}
		}
		if strings.HasSuffix(args.Filename, ".jpg") {
			kind = "jpeg"
		}
	}
	file, err := given(c, args.Filename)
	if err != nil {
		return err
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	img, err := tab.Screenshot(ctx, page.ScreenshotOptions{Target: args.Target, FullPage: args.FullPage, Type: kind, DeviceScale: args.Scale == "device"})
	if err != nil {
		return err
	}
	what, on := "viewport", "page"
	prefix := "page"
	switch {
	case args.Target != "":
		what, on, prefix = strings.Join(strings.Fields(args.Element), " "), "page."+img.Located.Code, "element"
		if what == "" {
			what = "element"
		}
	case args.FullPage:
		what = "full page"
	}
	path := ""
	if file != nil {
		path, err = file.Path, c.SaveAs(*file, img.Data)
	} else {
		path, err = c.Save(prefix, kind, img.Data)
	}
	if err != nil {
		return err
	}
	c.Result(fmt.Sprintf("- [Screenshot of %s](%s)", what, path))
	if img.Cut {
		c.Result("The page is longer than what one picture can hold; its end is missing.")
	}
	c.Code("// Screenshot %s and save it as %s", what, path)
	c.Code("await %s.screenshot({", on)
	if args.FullPage {
		c.Code("  fullPage: true,")
	}
	c.Code("  path: %s,", quote(path))
	if kind == "jpeg" {
		c.Code("  quality: 90,")
	}
	c.Code("  scale: %s,\n  type: %s\n});", quote(args.Scale), quote(kind))
	if file != nil {
		return nil
	}
	fitted, err := page.FitImage(img)
	if err != nil {
		return err
	}
	c.Image(fitted)
	return nil
}

func tabs(ctx context.Context, c *tools.Call) error {
	var args struct {
		Action, URL string
		Index       *float64
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	index := -1
	if args.Index != nil {
		index = int(*args.Index)
		if index < 0 || float64(index) != *args.Index {
			return fault.New(fault.InvalidArgument, args.Action+" tab", "list the tabs to see their indexes", "index is %v", *args.Index)
		}
	}
	if args.Action == "select" && args.Index == nil {
		return fault.New(fault.InvalidArgument, "select tab", "give the index that action list shows", "no index is given")
	}
	client, err := c.Client(ctx)
	if err != nil {
		return err
	}
	switch args.Action {
	case "new":
		if _, err = client.NewTab(ctx, args.URL); err == nil && args.URL != "" {
			if _, err = c.Tab(ctx); err == nil {
				err = c.ShowSnapshot(ctx)
			}
		}
	case "close":
		err = client.CloseTab(ctx, index)
	case "select":
		_, err = client.SelectTab(ctx, index)
	}
	if err != nil {
		return err
	}
	list, err := client.Tabs(ctx)
	if err != nil {
		return err
	}
	c.Result(tools.TabLines(list))
	return nil
}

// maxWait caps browser_wait_for's time.
const maxWait = 30 * time.Second

func waitFor(ctx context.Context, c *tools.Call) error {
	var args struct {
		Time           *float64
		Text, TextGone string
	}
	if err := c.Decode(&args); err != nil {
		return err
	}
	if args.Time == nil && args.Text == "" && args.TextGone == "" {
		return fault.New(fault.InvalidArgument, "wait", "give time, text or textGone", "nothing to wait for")
	}
	tab, err := c.Tab(ctx)
	if err != nil {
		return err
	}
	if args.Time != nil {
		if *args.Time < 0 {
			return fault.New(fault.InvalidArgument, "wait", "give a number of seconds from 0 to 30", "time is %v", *args.Time)
		}
		d := time.Duration(min(*args.Time, maxWait.Seconds()) * float64(time.Second))
		if err := tab.WaitTime(ctx, d); err != nil {
			return err
		}
		c.Code("await new Promise(f => setTimeout(f, %s * 1000));", strconv.FormatFloat(*args.Time, 'f', -1, 64))
	}
	if args.TextGone != "" {
		if err := tab.WaitForTextGone(ctx, args.TextGone); err != nil {
			return err
		}
		c.Code("await page.getByText(%s).first().waitFor({ state: 'hidden' });", quote(args.TextGone))
	}
	if args.Text != "" {
		if err := tab.WaitForText(ctx, args.Text); err != nil {
			return err
		}
		c.Code("await page.getByText(%s).first().waitFor({ state: 'visible' });", quote(args.Text))
	}
	waited := args.Text
	if waited == "" {
		waited = args.TextGone
	}
	if waited == "" {
		waited = strconv.FormatFloat(*args.Time, 'f', -1, 64)
	}
	c.Result("Waited for " + waited)
	return c.ShowSnapshot(ctx)
}

func closeBrowser(ctx context.Context, c *tools.Call) error {
	if err := c.Bound(ctx); err != nil {
		return err
	}
	if err := c.Forget(ctx); err != nil {
		return err
	}
	c.Result("Tool state of this client is dropped. The Session Browser and its tabs stay open.")
	return nil
}
