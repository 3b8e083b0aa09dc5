package site

import (
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"abfleet/tests/rig"
)

// watcher is added to the account page: it posts the page's text once the page's
// own script is through, then loads the page again without a login's address.
const watcher = `<script>
const settled = () => { if (/was read|failed/.test(document.getElementById("status").textContent))
	fetch("/report", { method: "POST", body: document.body.innerText }).then(() => { location = "/account"; }); };
new MutationObserver(settled).observe(document.getElementById("status"), { childList: true });
settled();
</script>`

// The page's own script keeps a login in localStorage and IndexedDB, shows it, and
// finds it again on the next visit.
func TestStorageInARealBrowser(t *testing.T) {
	rig.Require(t)
	const chromium = "/usr/lib/chromium/chromium"
	if _, err := os.Stat(chromium); err != nil {
		t.Skipf("needs Chromium: %v", err)
	}
	r := rig.BootTest(t, rig.Options{})
	l, err := r.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	reports := make(chan string)
	pages := Handler(Options{})
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/account":
			pages.ServeHTTP(w, r)
			io.WriteString(w, watcher)
		case "/report":
			body, _ := io.ReadAll(r.Body)
			select {
			case reports <- r.Referer() + "\n" + string(body):
			case <-ctx.Done():
			}
		default:
			pages.ServeHTTP(w, r)
		}
	})}
	go server.Serve(l)
	defer server.Close()
	browser := r.User(ctx, chromium, "--headless=new", "--password-store=basic", "--no-first-run", "--disable-gpu", "--user-data-dir=/home/tester/p",
		"http://"+l.Addr().String()+"/account?store=ada.token")
	if err := browser.Start(); err != nil {
		t.Fatal(err)
	}
	for _, visit := range []string{"first", "second"} {
		select {
		case got := <-reports:
			for _, want := range []string{"localStorage: ada.token", "IndexedDB: ada.token", "Storage was read"} {
				if !strings.Contains(got, want) {
					t.Errorf("the %s visit lacks %q:\n%s", visit, want, got)
				}
			}
			if address, _, _ := strings.Cut(got, "\n"); strings.Contains(address, "token") {
				t.Errorf("the address still carries the login: %s", address)
			}
		case <-ctx.Done():
			t.Fatalf("no %s visit", visit)
		}
	}
	cancel()
	browser.Wait()
}
