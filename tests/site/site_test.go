package site

import (
	"errors"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"
)

func get(t *testing.T, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func TestEveryLinkedPageRenders(t *testing.T) {
	server := httptest.NewServer(Handler(Options{}))
	defer server.Close()
	_, index := get(t, server.Client(), server.URL+"/")
	links := regexp.MustCompile(`href="(/[^"]*)"`).FindAllStringSubmatch(index, -1)
	if len(links) < len(pages) {
		t.Errorf("the index has %d links for %d pages", len(links), len(pages))
	}
	for _, link := range links {
		resp, body := get(t, server.Client(), server.URL+link[1])
		want := http.StatusOK
		if link[1] == "/broken" {
			want = http.StatusInternalServerError
		}
		if resp.StatusCode != want || !strings.HasSuffix(body, "</body></html>\n") {
			t.Errorf("%s: %s, ends %q", link[1], resp.Status, body[max(0, len(body)-40):])
		}
	}
	if resp, _ := get(t, server.Client(), server.URL+"/nowhere"); resp.StatusCode != http.StatusNotFound {
		t.Errorf("/nowhere: %s", resp.Status)
	}
}

func TestLoginSetsBothCookies(t *testing.T) {
	server := httptest.NewServer(Handler(Options{Users: map[string]string{"grace": "hopper"}}))
	defer server.Close()
	jar, _ := cookiejar.New(nil)
	client := server.Client()
	client.Jar = jar
	if _, body := get(t, client, server.URL+"/account"); !strings.Contains(body, "Not signed in") || strings.Count(body, ": none") != 2 {
		t.Errorf("account before a login: %s", body)
	}
	for _, wrong := range []url.Values{{"user": {"grace"}, "pass": {"x"}}, {"user": {"ada"}, "pass": {DefaultPassword}}, {}} {
		resp, err := client.PostForm(server.URL+"/login", wrong)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden || len(resp.Cookies()) > 0 {
			t.Errorf("login with %v: %s, cookies %v", wrong, resp.Status, resp.Cookies())
		}
	}

	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.PostForm(server.URL+"/login", url.Values{"user": {"grace"}, "pass": {"hopper"}})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	ages := map[string]int{}
	for _, c := range resp.Cookies() {
		ages[c.Name] = c.MaxAge
	}
	if ages[PersistentCookie] < 3600 || ages[SessionCookie] != 0 || len(ages) != 2 {
		t.Errorf("cookies and their ages: %v", ages)
	}
	value := resp.Cookies()[0].Value
	if want := "/account?store=" + value; resp.Header.Get("Location") != want {
		t.Errorf("redirected to %s, want %s", resp.Header.Get("Location"), want)
	}
	_, body := get(t, client, server.URL+"/account")
	for _, want := range []string{"Signed in as grace", "persistent cookie: " + value, "session cookie: " + value} {
		if !strings.Contains(body, want) {
			t.Errorf("account lacks %q:\n%s", want, body)
		}
	}
}

func TestElementsCountsElements(t *testing.T) {
	server := httptest.NewServer(Handler(Options{}))
	defer server.Close()
	_, body := get(t, server.Client(), server.URL+"/elements?n=1000")
	n := len(regexp.MustCompile(`<(div|span|a|button|input)\b`).FindAllString(body, -1))
	if n != 1000 {
		t.Errorf("/elements?n=1000 has %d elements", n)
	}
}

func TestSlowAndBrokenDoWhatTheySay(t *testing.T) {
	server := httptest.NewServer(Handler(Options{}))
	defer server.Close()
	start := time.Now()
	if _, body := get(t, server.Client(), server.URL+"/slow?ms=50"); !strings.Contains(body, "Waited 50 ms") || time.Since(start) < 50*time.Millisecond {
		t.Errorf("after %v: %s", time.Since(start), body)
	}
	if _, err := server.Client().Get(server.URL + "/broken?how=reset"); err == nil {
		t.Error("a reset connection gave an answer")
	}
	resp, err := server.Client().Get(server.URL + "/broken?how=short")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a cut answer reads as %v", err)
	}
}
