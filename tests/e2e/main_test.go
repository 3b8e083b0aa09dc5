package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"abfleet/internal/fault"
	"abfleet/internal/tools/toolstest"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

// signedIn is what a snapshot of /account shows of a login that is whole: no
// kind of storage says "none".
func signedIn(t *testing.T, a *agent) string {
	t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/account"})
	a.must("browser_wait_for", map[string]any{"text": "Storage was read"})
	text := a.mustContain("browser_snapshot", nil, "Signed in as "+site.DefaultUser)
	for _, kind := range []string{"persistent cookie", "session cookie", "localStorage", "IndexedDB"} {
		if !strings.Contains(text, kind+": "+site.DefaultUser+".") {
			t.Errorf("no %s in the browser:\n%s", kind, text)
		}
	}
	return text
}

// TestMainJob protects what the product is for: a person logs in once through
// the viewer page, and agents and the person share browsers that are logged in.
func TestMainJob(t *testing.T) {
	w := boot(t, rig.Options{Name: "main"})
	w.setup()

	a := w.agent("alpha")
	if text, err := a.call("browser_snapshot", nil); err == nil || !strings.Contains(text, string(fault.IdentityNotSelected)) || !strings.Contains(text, "agent_browser_use_identity") {
		t.Errorf("before an Identity is selected: %s", text)
	}
	w.loginByHand("work")
	a.mustContain("agent_browser_identities", nil, "work")
	a.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	signedIn(t, a)

	// The same session over the official JavaScript client and the bridge.
	b := w.bridge("alpha")
	b.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	snap := b.must("browser_snapshot", nil)
	b.must("browser_type", map[string]any{"target": ref(t, snap, `textbox "Name"`), "text": "Grace"})
	b.must("browser_click", map[string]any{"target": ref(t, snap, `button "Send"`)})
	if text := b.must("browser_snapshot", nil); !strings.Contains(text, "Grace") {
		t.Errorf("the form was not sent:\n%s", text)
	}

	w.popup(a)
	w.samePicture(a, "alpha")
	w.isolation(a)
	for _, answer := range append(a.answers, b.answers...) {
		w.leaks(answer)
	}
}

// samePicture checks that the viewer shows the very page that the agent drives.
func (w *world) samePicture(a *agent, session string) {
	w.t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/elements?n=500"})
	shot := a.picture()
	p := w.newPerson()
	view := w.must("view", "--session", session).View.URL
	p.open(strings.Replace(view, "#", "&scale=1#", 1))
	p.live()
	if err := p.eval(`document.body.innerText.includes("Shared Control") || Promise.reject(new Error(document.body.innerText))`, nil); err != nil {
		w.t.Errorf("the viewer does not say Shared Control: %v", err)
	}
	best := 0.0
	var last image.Image
	for range 20 {
		var data string
		w.check(p.eval(`new Promise(requestAnimationFrame).then(() => document.querySelector("canvas").toDataURL("image/png").slice(22))`, &data))
		raw, err := base64.StdEncoding.DecodeString(data)
		w.check(err)
		canvas, err := png.Decode(bytes.NewReader(raw))
		w.check(err)
		last = canvas
		for y := 60; y < 140; y++ {
			best = max(best, similarity(canvas, shot, image.Pt(0, y)))
		}
		if best >= 0.99 {
			return
		}
		shot = a.picture()
	}
	w.keep("agent.png", shot)
	w.keep("viewer.png", last)
	w.t.Errorf("the viewer shows %.1f %% of the pixels of the agent's screenshot, want 99 %%", best*100)
}

// keep saves a picture for whoever looks into the failure, where the
// environment names a directory.
func (w *world) keep(name string, img image.Image) {
	dir := os.Getenv("ABF_KEEP")
	if dir == "" || img == nil {
		return
	}
	var data bytes.Buffer
	w.check(png.Encode(&data, img))
	w.check(os.WriteFile(filepath.Join(dir, name), data.Bytes(), 0o600))
}

// picture is the agent's screenshot.
func (a *agent) picture() image.Image {
	a.w.t.Helper()
	result, err := a.session.CallTool(a.w.t.Context(), &mcp.CallToolParams{Name: "browser_take_screenshot", Arguments: map[string]any{}})
	a.w.check(err)
	for _, c := range result.Content {
		if img, ok := c.(*mcp.ImageContent); ok {
			picture, err := png.Decode(bytes.NewReader(img.Data))
			a.w.check(err)
			return picture
		}
	}
	a.w.fail(fmt.Errorf("no image in the answer: %+v", result.Content))
	return nil
}

// similarity is the share of b's pixels that a has at the offset, within 8 of
// 255 in every channel. It looks at every third row and column.
func similarity(a, b image.Image, at image.Point) float64 {
	same, all := 0, 0
	size := b.Bounds().Size()
	for y := 0; y < size.Y; y += 3 {
		for x := 0; x < size.X; x += 3 {
			all++
			q := image.Pt(x, y).Add(at)
			if !q.In(a.Bounds()) {
				continue
			}
			r1, g1, b1, _ := a.At(q.X, q.Y).RGBA()
			r2, g2, b2, _ := b.At(x, y).RGBA()
			if near(r1, r2) && near(g1, g2) && near(b1, b2) {
				same++
			}
		}
	}
	return float64(same) / float64(all)
}

func near(a, b uint32) bool {
	d := int(a>>8) - int(b>>8)
	return -8 <= d && d <= 8
}

// popup checks that a window a page opens fills the screen too, whatever size
// it asks for: nobody could move it out of the way.
func (w *world) popup(a *agent) {
	w.t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/popup"})
	snap := a.must("browser_snapshot", nil)
	a.mustContain("browser_click", map[string]any{"target": ref(w.t, snap, `button "Open popup"`)}, "- 1: [Counter]")
	a.must("browser_tabs", map[string]any{"action": "select", "index": 1})
	a.mustContain("browser_evaluate", map[string]any{"function": "() => [outerWidth, outerHeight, screenX, screenY].join()"}, `"1279,799,0,0"`)
	a.must("browser_tabs", map[string]any{"action": "close", "index": 1})
}

// isolation checks that two sessions of one Identity are both logged in, share
// nothing, and keep what they have over a stop.
func (w *world) isolation(a *agent) {
	w.t.Helper()
	b := w.agent("beta")
	b.must("agent_browser_use_identity", map[string]any{"identity_id": "work"})
	signedIn(w.t, b)
	mark := func(c *agent, value string) {
		c.must("browser_navigate", map[string]any{"url": siteURL + "/account"})
		c.must("browser_evaluate", map[string]any{"function": fmt.Sprintf(
			`() => { localStorage.setItem("mark", %q); document.cookie = "mark=%s; max-age=86400; path=/"; document.cookie = "tab=%s; path=/"; }`, value, value, value)})
	}
	mark(a, "A")
	mark(b, "B")
	look := `() => [localStorage.getItem("mark"), document.cookie.match(/mark=(\w)/)?.[1], document.cookie.match(/tab=(\w)/)?.[1]].join()`
	for _, stop := range []bool{false, true} {
		for session, c := range map[string]*agent{"alpha": a, "beta": b} {
			if stop {
				w.must("session", "stop", session)
				w.must("session", "use", session, "work")
			}
			c.must("browser_navigate", map[string]any{"url": siteURL + "/account"})
			want := strings.ToUpper(session[:1])
			c.mustContain("browser_evaluate", map[string]any{"function": look}, `"`+strings.Join([]string{want, want, want}, ",")+`"`)
			signedIn(w.t, c)
		}
	}
}

// leaks fails the test when an answer holds what no agent may see: anything
// that the units, the runtime directory and the state say of running browsers.
func (w *world) leaks(answer string) {
	w.t.Helper()
	if w.secrets == nil {
		w.secrets = strings.Fields(w.sh(`systemctl --user list-units --plain --no-legend 'abfleet-*' | awk '{print $1}'
			ls "$XDG_RUNTIME_DIR/abfleet" | grep -E '^[a-z0-9]{10}$'
			ls "$HOME"/.local/state/abfleet/identities/*/profiles | grep -E '^[a-z0-9-]{8,}$'`))
	}
	if found := toolstest.LeakCheck(answer, w.secrets...); found != nil {
		w.t.Errorf("an answer to an agent contains %q:\n%s", found, answer)
	}
}

// bridge is the official JavaScript client over the stdio bridge.
type bridge struct {
	w       *world
	in      io.Writer
	out     *json.Decoder
	answers []string
}

func (w *world) bridge(session string) *bridge {
	w.t.Helper()
	cmd := w.User(context.WithoutCancel(w.t.Context()), "node", peersDir+"/client.mjs", "abfleet", "mcp", "--session", session)
	in, err := cmd.StdinPipe()
	w.check(err)
	out, err := cmd.StdoutPipe()
	w.check(err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	w.check(cmd.Start())
	w.t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil && !w.t.Failed() {
			w.t.Errorf("bridge: %v: %s", err, stderr.String())
		}
	})
	b := &bridge{w: w, in: in, out: json.NewDecoder(out)}
	var ready struct{ Ready bool }
	if err := b.out.Decode(&ready); err != nil || !ready.Ready {
		w.fail(fmt.Errorf("bridge: %w: %s", err, stderr.String()))
	}
	return b
}

func (b *bridge) call(tool string, args map[string]any) (string, error) {
	line, err := json.Marshal(map[string]any{"name": tool, "arguments": args})
	if err != nil {
		return "", err
	}
	if _, err := b.in.Write(append(line, '\n')); err != nil {
		return "", err
	}
	var answer struct {
		Error  *struct{ Message string }
		Result struct {
			IsError bool
			Content []struct{ Type, Text string }
		}
	}
	if err := b.out.Decode(&answer); err != nil {
		return "", err
	}
	if answer.Error != nil {
		return "", fmt.Errorf("%s", answer.Error.Message)
	}
	var text strings.Builder
	for _, c := range answer.Result.Content {
		text.WriteString(c.Text)
	}
	b.answers = append(b.answers, text.String())
	if answer.Result.IsError {
		return text.String(), fmt.Errorf("%s", text.String())
	}
	return text.String(), nil
}

func (b *bridge) must(tool string, args map[string]any) string {
	b.w.t.Helper()
	text, err := b.call(tool, args)
	if err != nil {
		b.w.fail(fmt.Errorf("%s: %w", tool, err))
	}
	return text
}
