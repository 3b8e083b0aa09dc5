package e2e

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"abfleet/internal/fault"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

// signedIn is what a snapshot of /account shows of a login that is whole: no
// kind of storage says "none".
func (c *client) signedIn() {
	c.w.t.Helper()
	c.must("browser_navigate", map[string]any{"url": siteURL + "/account"})
	c.must("browser_wait_for", map[string]any{"text": "Storage was read"})
	text := c.mustContain("browser_snapshot", nil, "Signed in as "+site.DefaultUser)
	for _, kind := range []string{"persistent cookie", "session cookie", "localStorage", "IndexedDB"} {
		if !strings.Contains(text, kind+": "+site.DefaultUser+".") {
			c.w.t.Errorf("no %s in the browser:\n%s", kind, text)
		}
	}
}

// use is what an agent does with an Identity: take it, find itself logged in,
// fill in a form and look at the outcome.
func (c *client) use(identity string) {
	c.w.t.Helper()
	c.refused("browser_snapshot", nil, string(fault.IdentityNotSelected), "agent_browser_use_identity")
	c.mustContain("agent_browser_identities", nil, identity)
	c.must("agent_browser_use_identity", map[string]any{"identity_id": identity})
	c.signedIn()
	c.must("browser_navigate", map[string]any{"url": siteURL + "/form"})
	snap := c.must("browser_snapshot", nil)
	c.must("browser_type", map[string]any{"target": ref(c.w.t, snap, `textbox "Name"`), "text": "Grace"})
	before := c.picture()
	c.must("browser_click", map[string]any{"target": ref(c.w.t, snap, `button "Send"`)})
	c.mustContain("browser_snapshot", nil, "Grace")
	if after := c.picture(); after.Bounds() != before.Bounds() || similarity(after, before, image.Point{}) == 1 {
		c.w.t.Errorf("the screenshots of two pages, %v and %v, show the same", before.Bounds(), after.Bounds())
	}
}

// TestMainJob protects what the product is for: a person logs in once through
// the viewer page, and agents and the person share browsers that are logged in.
func TestMainJob(t *testing.T) {
	w := boot(t, rig.Options{Name: "main"})
	w.setup()

	w.loginByHand("work")
	a := w.agent("alpha")
	a.use("work")
	// The official JavaScript client over the bridge, in a session of its own.
	w.bridge("gamma").use("work")
	w.must("session", "stop", "gamma")

	w.popup(a)
	w.samePicture(a, "alpha")
	w.isolation(a)
}

// samePicture checks that the viewer shows the very page that the agent drives.
func (w *world) samePicture(a *agent, session string) {
	w.t.Helper()
	a.must("browser_navigate", map[string]any{"url": siteURL + "/elements?n=500"})
	a.paint("#d0e8d0")
	shot := a.picture()
	p := w.newPerson()
	view := w.must("view", "--session", session).View.URL
	p.open(strings.Replace(view, "#", "&scale=1#", 1))
	p.live()
	if err := p.eval(`document.body.innerText.includes("Shared Control") || Promise.reject(new Error(document.body.innerText))`, nil); err != nil {
		w.t.Errorf("the viewer does not say Shared Control: %v", err)
	}
	p.sees("#d0e8d0")
	canvas := p.still()
	best := 0.0
	for y := 60; y < 140; y++ {
		at := image.Pt(0, y)
		if sampled(canvas, shot, at) > 0.9 {
			best = max(best, similarity(canvas, shot, at))
		}
	}
	if best < 0.99 {
		w.keep("agent.png", shot)
		w.keep("viewer.png", canvas)
		w.t.Errorf("the viewer shows %.1f %% of the pixels of the agent's screenshot, want 99 %%", best*100)
	}
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

// similarity is the share of b's pixels that a has at the offset, within 8 of
// 255 in every channel.
func similarity(a, b image.Image, at image.Point) float64 { return share(a, b, at, 1) }

// sampled is similarity of some pixels: enough to tell an offset that is wrong.
func sampled(a, b image.Image, at image.Point) float64 { return share(a, b, at, 17) }

func share(a, b image.Image, at image.Point, step int) float64 {
	same, all := 0, 0
	size := b.Bounds().Size()
	for y := 0; y < size.Y; y += step {
		for x := 0; x < size.X; x += step {
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
	b.signedIn()
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
			c.signedIn()
		}
	}
}
