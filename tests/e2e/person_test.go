package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	"image/png"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/internal/cdp"
	"abfleet/tests/site"
)

// person is somebody at a desk: a Chromium of their own inside the rig, in
// which the viewer page is opened and used with mouse and keyboard.
type person struct {
	t    *testing.T
	ctx  context.Context
	page *cdp.Session
}

// newPerson starts the person's browser. It is headless, sandboxed, and has
// nothing to do with the fleet.
func (w *world) newPerson() *person {
	w.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	w.check(err)
	theirs, ours := os.NewFile(uintptr(fds[0]), "cdp"), os.NewFile(uintptr(fds[1]), "cdp")
	cmd := w.User(w.t.Context(), "/usr/lib/chromium/chromium", "--headless=new", "--remote-debugging-pipe",
		"--user-data-dir="+w.UserHome()+"/desk-"+rand.Text()[:8], "--no-first-run", "--password-store=basic", "--disable-gpu",
		"--window-size=1400,1000", "--disable-background-networking", "about:blank")
	cmd.Env = append(cmd.Env, "DBUS_SESSION_BUS_ADDRESS=disabled:", "DBUS_SYSTEM_BUS_ADDRESS=disabled:")
	cmd.ExtraFiles = []*os.File{theirs, theirs}
	w.check(cmd.Start())
	theirs.Close()
	conn, err := net.FileConn(ours)
	w.check(err)
	ours.Close()
	c := cdp.New(conn)
	w.t.Cleanup(func() {
		c.Close()
		cmd.Wait()
	})

	p := &person{t: w.t, ctx: w.t.Context()}
	var created struct{ TargetID string }
	w.check(c.Root().Call(p.ctx, "Target.createTarget", map[string]any{"url": "about:blank"}, &created))
	var attached struct{ SessionID string }
	w.check(c.Root().Call(p.ctx, "Target.attachToTarget", map[string]any{"targetId": created.TargetID, "flatten": true}, &attached))
	p.page = c.Session(attached.SessionID)
	p.call("Page.enable", nil, nil)
	p.call("Emulation.setFocusEmulationEnabled", map[string]any{"enabled": true}, nil)
	p.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 1400, "height": 1000, "deviceScaleFactor": 1, "mobile": false}, nil)
	return p
}

func (p *person) call(method string, params, result any) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 30*time.Second)
	defer cancel()
	if err := p.page.Call(ctx, method, params, result); err != nil {
		p.t.Fatalf("person: %s: %v", method, err)
	}
}

func (p *person) open(url string) { p.call("Page.navigate", map[string]any{"url": url}, nil) }

// eval runs an expression in the person's page, awaiting a promise.
func (p *person) eval(expression string, result any) error {
	ctx, cancel := context.WithTimeout(p.ctx, 60*time.Second)
	defer cancel()
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	err := p.page.Call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &out)
	if err != nil {
		return err
	}
	if out.ExceptionDetails != nil {
		return fmt.Errorf("%s", out.ExceptionDetails)
	}
	if result == nil || out.Result.Value == nil {
		return nil
	}
	return json.Unmarshal(out.Result.Value, result)
}

// until waits for an expression to become true in the page, frame by frame.
func (p *person) until(expression string) {
	p.t.Helper()
	err := p.eval(`new Promise((done, fail) => {
		const end = performance.now() + 45000;
		const look = () => {
			try { if (`+expression+`) return done(true); } catch {}
			if (performance.now() > end) return fail(new Error(document.body.innerText.slice(0, 300)));
			requestAnimationFrame(look);
		};
		look();
	})`, nil)
	if err != nil {
		if dir := os.Getenv("ABF_KEEP"); dir != "" {
			os.WriteFile(filepath.Join(dir, "person.png"), p.screenshotPNG(), 0o600)
		}
		p.t.Fatalf("person waits for %s: %v", expression, err)
	}
}

func (p *person) click(x, y float64) {
	for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
		params := map[string]any{"type": kind, "x": x, "y": y}
		if kind != "mouseMoved" {
			params["button"], params["clickCount"] = "left", 1
		}
		p.call("Input.dispatchMouseEvent", params, nil)
	}
}

func (p *person) press(key string, code int, text string) {
	down := map[string]any{"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
	if len(key) == 1 {
		c := key[0]
		switch {
		case c >= 'a' && c <= 'z':
			down["code"] = "Key" + string(c-32)
		case c >= '0' && c <= '9':
			down["code"] = "Digit" + key
		}
	} else {
		down["code"] = key
	}
	if text != "" {
		down["text"] = text
	}
	p.call("Input.dispatchKeyEvent", down, nil)
	delete(down, "text")
	down["type"] = "keyUp"
	p.call("Input.dispatchKeyEvent", down, nil)
}

func (p *person) typeText(text string) {
	for _, c := range text {
		code := int(c)
		if c >= 'a' && c <= 'z' {
			code -= 32
		}
		p.press(string(c), code, string(c))
	}
}

func (p *person) screenshotPNG() []byte {
	var shot struct{ Data string }
	p.call("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	data, err := base64.StdEncoding.DecodeString(shot.Data)
	if err != nil {
		p.t.Fatal(err)
	}
	return data
}

// live waits until the viewer page shows the browser.
func (p *person) live() {
	p.t.Helper()
	p.until(`document.body.dataset.status === "live" && document.querySelector("canvas")?.width > 0`)
}

// still reads the canvas until two reads, a frame apart, are equal.
func (p *person) still() image.Image {
	p.t.Helper()
	var data string
	if err := p.eval(`new Promise((done, fail) => {
		const end = performance.now() + 45000;
		let last;
		const look = () => {
			const now = document.querySelector("canvas").toDataURL("image/png");
			if (now === last) return done(now.slice(22));
			if (performance.now() > end) return fail(new Error("the canvas does not come to rest"));
			last = now;
			requestAnimationFrame(look);
		};
		look();
	})`, &data); err != nil {
		p.t.Fatal(err)
	}
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil {
		p.t.Fatal(err)
	}
	canvas, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		p.t.Fatal(err)
	}
	return canvas
}

// findColor looks for a colour on the viewer's canvas and returns the middle of
// what has it, in CSS pixels of the page; ok is false where nothing has.
const findColor = `(color => {
	const canvas = document.querySelector("canvas");
	const { width, height } = canvas;
	const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
	const [r, g, b] = [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16));
	let x0 = width, y0 = height, x1 = -1, y1 = -1;
	for (let y = 0; y < height; y += 2) for (let x = 0; x < width; x += 2) {
		const i = (y * width + x) * 4;
		if (Math.abs(data[i] - r) > 3 || Math.abs(data[i + 1] - g) > 3 || Math.abs(data[i + 2] - b) > 3) continue;
		if (x < x0) x0 = x; if (x > x1) x1 = x; if (y < y0) y0 = y; if (y > y1) y1 = y;
	}
	if (x1 - x0 < 100 || y1 - y0 < 20) return null;
	const box = canvas.getBoundingClientRect();
	return [box.left + (x0 + x1) / 2 * box.width / width, box.top + (y0 + y1) / 2 * box.height / height];
})`

// screen waits until the colour of a control is seen on the canvas.
func (p *person) screen(r site.Rect) {
	p.t.Helper()
	p.sees(r.Color)
}

// sees waits until a colour is seen on the canvas.
func (p *person) sees(color string) {
	p.t.Helper()
	p.until(findColor + `("` + color + `") !== null`)
}

// gone waits until it is not.
func (p *person) gone(r site.Rect) {
	p.t.Helper()
	p.until(findColor + `("` + r.Color + `") === null`)
}

// clickScreen clicks a control where it is seen.
func (p *person) clickScreen(r site.Rect) {
	p.t.Helper()
	p.screen(r)
	var at []float64
	if err := p.eval(findColor+`("`+r.Color+`")`, &at); err != nil {
		p.t.Fatal(err)
	}
	p.click(at[0], at[1])
}
