package e2e

import (
	"strings"
	"testing"

	"abfleet/tests/rig"
)

// configure writes the user's configuration; the service reads it when it starts
// next.
func (w *world) configure(text string) {
	w.t.Helper()
	w.sh("mkdir -p ~/.config/abfleet && cat > ~/.config/abfleet/config.toml <<'END'\n" + text + "\nEND")
}

// TestOtherDisplays protects the displays beside Xvnc by what they are for: a
// person logs in and sees what the agent drives on an Xvfb, and the same login
// serves agents without any display, where a person is told that there is nothing
// to see.
func TestOtherDisplays(t *testing.T) {
	w := boot(t, rig.Options{Name: "displays"})
	w.configure("display = \"xvfb\"\ncdp = \"port\"")
	w.setup()
	w.loginByHand("work")
	a := w.agent("alpha")
	a.use("work")
	w.samePicture(a, "alpha")

	// Beside the page, one loopback port of the browser is all that listens.
	page := strings.TrimPrefix(w.must("view").View.URL, "http://")
	page, _, _ = strings.Cut(page, "/")
	listeners := w.rootSh("ss -ltnupH | grep -v -e :8800 | awk '{print $5, $7}'")
	browser := 0
	for line := range strings.SplitSeq(listeners, "\n") {
		if strings.HasPrefix(line, "127.0.0.1:") && strings.Contains(line, `"chromium"`) {
			browser++
		} else if !strings.HasPrefix(line, page+" ") {
			t.Errorf("somebody listens: %s", line)
		}
	}
	if browser != 1 {
		t.Errorf("%d ports of the browser among the listeners:\n%s", browser, listeners)
	}
	w.must("doctor")
	if out := w.sh("pgrep -a -u $(id -u) Xvnc || true"); out != "" {
		t.Errorf("an Xvnc runs: %s", out)
	}

	w.must("session", "stop", "alpha")
	w.configure(`display = "none"`)
	w.sh("systemctl --user restart abfleetd.service")
	a.signedIn()
	if out := w.sh(`pgrep -a -u $(id -u) '^(X|x11vnc)' || true`); out != "" {
		t.Errorf("a server runs beside a headless browser: %s", out)
	}
	p := w.newPerson()
	p.open(w.must("view", "--session", "alpha").View.URL)
	p.until(`document.body.dataset.status === "no-display" && document.body.innerText.includes("without a display")`)
	if err := p.eval(`document.querySelector("#cover button") === null && !document.body.innerText.includes("Reconnecting") || Promise.reject(new Error(document.body.innerText))`, nil); err != nil {
		t.Errorf("the page does not take that as final: %v", err)
	}
	a.signedIn()
}
