package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"abfleet/internal/cdp"
)

// side is one of those that are compared: it runs a tool and returns the text
// of its answer and how long its client waited, in milliseconds.
type side interface {
	call(ctx context.Context, tool string, args map[string]any) (string, float64, error)
	close(ctx context.Context) error
}

// task is one measured tool call.
type task struct {
	name string
	page string // where it happens; "" stays where the last one was
	tool string
	args map[string]any
	// target is the line of a snapshot whose element the call is for.
	target string
}

var tasks = []task{
	{name: "navigate", tool: "browser_navigate", args: map[string]any{"url": siteURL + "/form"}},
	{name: "click", page: "/form", tool: "browser_click", target: `checkbox "I agree"`},
	{name: "type", page: "/form", tool: "browser_type", target: `textbox "Name"`, args: map[string]any{"text": "Grace Hopper"}},
	{name: "evaluate", page: "/form", tool: "browser_evaluate", args: map[string]any{"function": "() => 1 + 1"}},
	{name: "snapshot of 100 elements", page: "/elements?n=100", tool: "browser_snapshot"},
	{name: "snapshot of 1,000", page: "/elements?n=1000", tool: "browser_snapshot"},
	{name: "screenshot of 1,000", page: "/elements?n=1000", tool: "browser_take_screenshot"},
	{name: "snapshot of 10,000", page: "/elements?n=10000", tool: "browser_snapshot"},
	{name: "snapshot of 10,000, to a file", page: "/elements?n=10000", tool: "browser_snapshot", args: map[string]any{"filename": "all.yml"}},
}

// benchTools compares tool calls as an agent makes them with bare CDP and with
// @playwright/mcp, with and without its pause after actions. Each side has a
// display and a browser of its own, of the same size and program.
func benchTools(b *bencher) (err error) {
	if err := install(b, "tools"); err != nil {
		return err
	}
	stopSite, err := serveSite()
	if err != nil {
		return err
	}
	defer stopSite.Close()
	ours, err := newAgent(b, "tools", "tools")
	if err != nil {
		return err
	}
	sides, names := []side{ours}, []string{"", "bare CDP", peerName, "same, settle 0"}
	defer func() {
		for _, s := range sides {
			err = errors.Join(err, s.close(b))
		}
	}()
	for i, start := range []func(*bencher, *display) (side, error){startBare, startPeer, startQuickPeer} {
		s, err := onDisplay(b, 701+i, start)
		if err != nil {
			return fmt.Errorf("start %s: %w", names[i+1], err)
		}
		sides = append(sides, s)
	}
	for _, t := range tasks {
		times, err := t.measure(b, sides)
		if err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		for i := range sides[1:] {
			r := row{Name: t.name, Ours: times[0], Other: times[i+1], Peer: names[i+1], Unit: "ms"}
			if r.Peer == peerName {
				r.Limit = 1 // the others are floors, and for comparison
			}
			if err := b.emit(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure runs the task on one side after the other, again and again, each
// round beginning with another one: what a side leaves to its browser to do
// falls on all others alike.
func (t task) measure(b *bencher, sides []side) ([][]float64, error) {
	args := make([]map[string]any, len(sides))
	for i, s := range sides {
		args[i] = map[string]any{}
		for k, v := range t.args {
			args[i][k] = v
		}
		if t.page != "" {
			if _, _, err := s.call(b, "browser_navigate", map[string]any{"url": siteURL + t.page}); err != nil {
				return nil, err
			}
		}
		if t.target != "" {
			text, _, err := s.call(b, "browser_snapshot", nil)
			if err != nil {
				return nil, err
			}
			if args[i]["target"], err = reference(text, t.target); err != nil {
				return nil, err
			}
			args[i]["element"] = t.target
		}
	}
	times := make([][]float64, len(sides))
	for round := range b.n {
		for i := range sides {
			i = (i + round) % len(sides)
			_, took, err := sides[i].call(b, t.tool, args[i])
			if err != nil {
				return nil, err
			}
			times[i] = append(times[i], took)
		}
	}
	return times, nil
}

// reference finds the ref of the first line of a snapshot that contains text.
func reference(snapshot, text string) (string, error) {
	for line := range strings.Lines(snapshot) {
		if !strings.Contains(line, text) {
			continue
		}
		if _, rest, ok := strings.Cut(line, "[ref="); ok {
			ref, _, _ := strings.Cut(rest, "]")
			return ref, nil
		}
	}
	return "", fmt.Errorf("no %q with a ref in:\n%s", text, snapshot)
}

// onDisplay starts a side on an Xvnc of its own.
func onDisplay(b *bencher, number int, start func(*bencher, *display) (side, error)) (side, error) {
	cfg, err := load("tools")
	if err != nil {
		return nil, err
	}
	d, err := newDisplay(cfg, number)
	if err != nil {
		return nil, err
	}
	s := side(nil)
	if err = d.start(b); err == nil {
		s, err = start(b, d)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return seated{s, d}, nil
}

// seated is a side with its display.
type seated struct {
	side
	display *display
}

func (s seated) close(ctx context.Context) error {
	defer s.display.close()
	return s.side.close(ctx)
}

// bare is the floor: for each tool the fewest CDP calls that do what it is for.
type bare struct {
	browser *chromium
	page    *cdp.Session
}

func startBare(b *bencher, d *display) (side, error) {
	browser, err := d.browser(b, filepath.Join(d.cfg.Home, "bare"))
	if err != nil {
		return nil, err
	}
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	err = browser.Root().Call(b, "Target.attachToTarget", map[string]any{"targetId": browser.page, "flatten": true}, &attached)
	page := browser.Session(attached.SessionID)
	if err == nil {
		err = page.Call(b, "Page.enable", nil, nil)
	}
	if err != nil {
		return nil, errors.Join(err, browser.kill())
	}
	return &bare{browser, page}, nil
}

func (f *bare) close(ctx context.Context) error { return f.browser.close(ctx) }

// walk is a snapshot at its cheapest: what is visible, with a role and a name.
const walk = `(() => {
	const refs = window.refs = [], lines = [];
	const roles = { A: "link", BUTTON: "button", INPUT: "textbox" };
	const visit = (el, indent) => {
		const style = getComputedStyle(el);
		if (style.display === "none" || style.visibility !== "visible") return;
		const role = el.type === "checkbox" ? "checkbox" : roles[el.tagName] ?? el.localName;
		const name = el.getAttribute("aria-label") ?? (el.labels?.[0] ?? el).textContent.trim().slice(0, 100);
		lines.push(indent + "- " + role + ' "' + name + '" [ref=' + (refs.push(el) - 1) + "]");
		for (const child of el.children) visit(child, indent + "  ");
	};
	visit(document.body, "");
	return lines.join("\n");
})()`

func (f *bare) call(ctx context.Context, tool string, args map[string]any) (string, float64, error) {
	ctx, cancel := context.WithTimeout(ctx, callWait)
	defer cancel()
	t := time.Now()
	text, err := f.run(ctx, tool, args)
	return text, since(t), err
}

func (f *bare) run(ctx context.Context, tool string, args map[string]any) (string, error) {
	element := fmt.Sprintf("window.refs[%v]", args["target"])
	switch tool {
	case "browser_navigate":
		loaded := f.browser.Subscribe(cdp.Filter{Session: f.page, Methods: []string{"Page.loadEventFired"}})
		defer loaded.Close()
		if err := f.page.Call(ctx, "Page.navigate", map[string]any{"url": args["url"]}, nil); err != nil {
			return "", err
		}
		_, err := loaded.Next(ctx)
		return "", err
	case "browser_snapshot":
		return f.evaluate(ctx, walk)
	case "browser_evaluate":
		return f.evaluate(ctx, "("+args["function"].(string)+")()")
	case "browser_click":
		text, err := f.evaluate(ctx, `(() => { const r = `+element+`.getBoundingClientRect(); return JSON.stringify({ x: r.x + r.width / 2, y: r.y + r.height / 2 }) })()`)
		if err != nil {
			return "", err
		}
		var at struct{ X, Y float64 }
		if err := json.Unmarshal([]byte(text), &at); err != nil {
			return "", err
		}
		var sent []*cdp.Pending
		for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
			sent = append(sent, f.page.Start(ctx, "Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at.X, "y": at.Y, "button": "left", "clickCount": 1}))
		}
		for _, p := range sent {
			err = errors.Join(err, p.Wait(ctx, nil))
		}
		return "", err
	case "browser_type":
		focused := f.page.Start(ctx, "Runtime.evaluate", map[string]any{"expression": element + ".focus(), " + element + ".select()"})
		typed := f.page.Start(ctx, "Input.insertText", map[string]any{"text": args["text"]})
		return "", errors.Join(focused.Wait(ctx, nil), typed.Wait(ctx, nil))
	case "browser_take_screenshot":
		var shot struct{ Data []byte }
		return "", f.page.Call(ctx, "Page.captureScreenshot", map[string]any{"format": "png", "optimizeForSpeed": true}, &shot)
	}
	return "", fmt.Errorf("no floor for %s", tool)
}

// evaluate returns the value of an expression as text.
func (f *bare) evaluate(ctx context.Context, expression string) (string, error) {
	var r struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	err := f.page.Call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &r)
	if err == nil && r.ExceptionDetails != nil {
		err = fmt.Errorf("%s", r.ExceptionDetails)
	}
	return fmt.Sprint(r.Result.Value), err
}

// peerName is the peer that every tool has to be faster than.
const peerName = "@playwright/mcp"

// peer is @playwright/mcp behind the official JavaScript client, whose clock
// counts.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func startPeer(b *bencher, d *display) (side, error) { return launchPeer(b, d) }

func startQuickPeer(b *bencher, d *display) (side, error) {
	return launchPeer(b, d, "--timeout-settle=0")
}

func launchPeer(b *bencher, d *display, flags ...string) (side, error) {
	profile := filepath.Join(d.cfg.Home, fmt.Sprintf("peer%d", d.Number))
	config, err := json.Marshal(map[string]any{"browser": map[string]any{
		"userDataDir": profile,
		"launchOptions": map[string]any{
			"executablePath": d.cfg.Chromium, "chromiumSandbox": true,
			"args": []string{"--window-position=0,0", fmt.Sprintf("--window-size=%d,%d", d.Width, d.Height)},
		},
	}})
	file := filepath.Join(d.dir, "peer.json")
	if err := errors.Join(err, os.WriteFile(file, config, 0o600)); err != nil {
		return nil, err
	}
	// Without --sandbox this release passes --no-sandbox, whatever the file says.
	args := []string{peersDir + "/client.mjs", "node", peersDir + "/node_modules/@playwright/mcp/cli.js", "--sandbox", "--config", file, "--output-dir", filepath.Join(d.cfg.Home, "peer-output")}
	p := &peer{cmd: exec.CommandContext(b, "node", append(args, flags...)...)}
	p.cmd.Stderr = os.Stderr
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("DISPLAY=:%d", d.Number), "XAUTHORITY="+d.Authority, "TMPDIR="+d.dir, "DBUS_SESSION_BUS_ADDRESS=disabled:")
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(out)
	var hello struct{ Ready bool }
	if err := p.out.Decode(&hello); err != nil || !hello.Ready {
		return nil, errors.Join(fmt.Errorf("no greeting: %v", err), p.close(b))
	}
	// The first call starts the browser.
	if _, _, err := p.call(b, "browser_navigate", map[string]any{"url": siteURL + "/form"}); err != nil {
		return nil, errors.Join(err, p.close(b))
	}
	if err := sandboxed(profile); err != nil {
		return nil, errors.Join(err, p.close(b))
	}
	return p, nil
}

// sandboxed fails unless the browser on the profile runs as ours does.
func sandboxed(profile string) error {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	found := false
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(text), "--user-data-dir="+profile) {
			continue // ended, or another's
		}
		found = true
		if strings.Contains(string(text), "--no-sandbox") {
			return errors.New("its browser runs without a sandbox")
		}
	}
	if !found {
		return errors.New("its browser does not run")
	}
	return nil
}

func (p *peer) call(_ context.Context, tool string, args map[string]any) (string, float64, error) {
	line, err := json.Marshal(map[string]any{"name": tool, "arguments": args})
	if err != nil {
		return "", 0, err
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		return "", 0, err
	}
	var answer struct {
		Ms     float64
		Error  json.RawMessage
		Result struct {
			IsError bool
			Content []struct{ Text string }
		}
	}
	if err := p.out.Decode(&answer); err != nil {
		return "", 0, err
	}
	var text strings.Builder
	for _, c := range answer.Result.Content {
		text.WriteString(c.Text)
	}
	if answer.Error != nil || answer.Result.IsError {
		return "", 0, fmt.Errorf("%s: %s%s", tool, answer.Error, text.String())
	}
	return text.String(), answer.Ms, nil
}

// close ends the client, the server and its browser by the end of the input.
func (p *peer) close(context.Context) error {
	return errors.Join(p.in.Close(), p.cmd.Wait())
}
