// Package site is the small web application that tests and the demo use as the
// outside world: a login that keeps its state in every place a browser has, and
// pages with each thing the page engine has to cope with. It keeps nothing on the
// server, so that it can be stopped and started between the boots of a test.
package site

import (
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// The account that exists when Options name none.
const (
	DefaultUser     = "ada"
	DefaultPassword = "lovelace"
)

// Names of what a login leaves in the browser.
const (
	PersistentCookie = "site_user"    // one year, HttpOnly
	SessionCookie    = "site_session" // no expiry: ends with the browser's session
	StorageKey       = "site_storage" // localStorage
	DatabaseName     = "site_database"
)

const (
	// maxDelay caps /slow: a test that is killed must not pin a connection.
	maxDelay = 60 * time.Second
	// maxElements caps the generated pages.
	maxElements = 200_000
	// maxForm caps a posted form, uploads included.
	maxForm = 8 << 20
)

// Rect is a place on the login page, in CSS pixels from the top left corner of
// the page's view, with the colour that fills it there and nowhere else.
type Rect struct {
	X, Y, Width, Height int
	Color               string // #rrggbb
}

// Center is where to click.
func (r Rect) Center() (x, y int) { return r.X + r.Width/2, r.Y + r.Height/2 }

// Where the login form's controls are: fixed and large, because a person's test
// finds them on a screen, by position or by colour.
var (
	UserField     = Rect{40, 100, 600, 80, "#ffe0a0"}
	PasswordField = Rect{40, 220, 600, 80, "#a0e0ff"}
	SubmitButton  = Rect{40, 340, 600, 80, "#209040"}
)

// Options configure the application. The zero value is usable.
type Options struct {
	// Users maps names to passwords (default: DefaultUser and DefaultPassword).
	Users map[string]string
}

type site struct{ users map[string]string }

// Handler serves the application; / links to all its pages.
func Handler(opts Options) http.Handler {
	s := &site{users: opts.Users}
	if len(s.users) == 0 {
		s.users = map[string]string{DefaultUser: DefaultPassword}
	}
	mux := http.NewServeMux()
	for _, p := range pages {
		mux.HandleFunc("GET "+p.path, func(w http.ResponseWriter, r *http.Request) { render(w, p.name, p.title, newView(r)) })
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) { render(w, "index", "Test site", view{}) })
	mux.HandleFunc("GET /login", func(w http.ResponseWriter, r *http.Request) { renderLogin(w, http.StatusOK, "") })
	mux.HandleFunc("POST /login", s.login)
	mux.HandleFunc("POST /logout", logout)
	mux.HandleFunc("GET /account", account)
	mux.HandleFunc("POST /form", formPosted)
	mux.HandleFunc("GET /download/file", download)
	mux.HandleFunc("GET /slow", slow)
	mux.HandleFunc("GET /broken", broken)
	mux.HandleFunc("GET /redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/form", http.StatusFound) })
	return mux
}

// view is what the templates of the plain pages see.
type view struct {
	N     []int  // one element per row to generate
	Host  string // this site
	Other string // the same server under another site's name, for frames
	Frame string
}

func newView(r *http.Request) view {
	rows := 0
	if n, err := strconv.Atoi(r.FormValue("n")); err == nil {
		rows = n
	} else if r.URL.Path == "/elements" {
		rows = 100
	} else if r.URL.Path == "/long" {
		rows = 200
	}
	rows = min(max(rows, 0), maxElements)
	if r.URL.Path == "/elements" {
		rows /= elementsPerRow
	}
	v := view{N: make([]int, rows), Host: r.Host, Frame: r.FormValue("name")}
	for i := range v.N {
		v.N[i] = i + 1
	}
	if host, port, err := net.SplitHostPort(r.Host); err == nil {
		other := "localhost"
		if host == "localhost" {
			other = "127.0.0.1"
		}
		v.Other = net.JoinHostPort(other, port)
	}
	return v
}

func (s *site) login(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	user, password := r.PostFormValue("user"), r.PostFormValue("pass")
	want, known := s.users[user]
	if !known || subtle.ConstantTimeCompare([]byte(want), []byte(password)) != 1 {
		renderLogin(w, http.StatusForbidden, "Wrong user or password")
		return
	}
	// The value tells two logins of one user apart.
	value := url.QueryEscape(user) + "." + strings.ToLower(rand.Text()[:10])
	http.SetCookie(w, &http.Cookie{Name: PersistentCookie, Value: value, Path: "/", MaxAge: 365 * 24 * 3600, HttpOnly: true, SameSite: http.SameSiteLaxMode})
	http.SetCookie(w, &http.Cookie{Name: SessionCookie, Value: value, Path: "/", SameSite: http.SameSiteLaxMode})
	http.Redirect(w, r, "/account?store="+url.QueryEscape(value), http.StatusSeeOther)
}

func logout(w http.ResponseWriter, r *http.Request) {
	for _, name := range []string{PersistentCookie, SessionCookie} {
		http.SetCookie(w, &http.Cookie{Name: name, Path: "/", MaxAge: -1})
	}
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// account shows who is signed in and the value in each kind of storage. It does
// not redirect when nobody is: what is missing is what a test wants to see.
func account(w http.ResponseWriter, r *http.Request) {
	v := struct{ User, Persistent, Session, StorageKey, Database string }{Persistent: "none", Session: "none", StorageKey: StorageKey, Database: DatabaseName}
	if c, err := r.Cookie(PersistentCookie); err == nil {
		v.Persistent = c.Value
		if name, _, ok := strings.Cut(c.Value, "."); ok {
			v.User, _ = url.QueryUnescape(name)
		}
	}
	if c, err := r.Cookie(SessionCookie); err == nil {
		v.Session = c.Value
	}
	render(w, "account", "Account", v)
}

func formPosted(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseMultipartForm(maxForm); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	type field struct{ Name, Value string }
	var fields []field
	for _, name := range []string{"name", "color", "size", "agree", "notes"} {
		fields = append(fields, field{name, strings.Join(r.PostForm[name], ", ")})
	}
	if file, header, err := r.FormFile("file"); err == nil {
		defer file.Close()
		n, _ := io.Copy(io.Discard, file)
		fields = append(fields, field{"file", fmt.Sprintf("%s, %d bytes", header.Filename, n)})
	}
	render(w, "posted", "Form received", fields)
}

func download(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Content-Disposition", `attachment; filename="report.txt"`)
	io.WriteString(w, "a downloaded report\n")
}

// slow answers after the given number of milliseconds: a page, or with as=json
// an answer for scripts.
func slow(w http.ResponseWriter, r *http.Request) {
	ms, err := strconv.Atoi(r.FormValue("ms"))
	if err != nil {
		ms = 1000
	}
	timer := time.NewTimer(min(time.Duration(max(ms, 0))*time.Millisecond, maxDelay))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
		return
	}
	if r.FormValue("as") == "json" {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"waited":%d}`, ms)
		return
	}
	render(w, "slow", "Slow page", ms)
}

// broken fails in the way asked for: status 500 (default), a connection that is
// reset before an answer, or one that ends in the middle of it.
func broken(w http.ResponseWriter, r *http.Request) {
	switch r.FormValue("how") {
	case "reset":
		if h, ok := w.(http.Hijacker); ok {
			if c, _, err := h.Hijack(); err == nil {
				if tcp, ok := c.(*net.TCPConn); ok {
					tcp.SetLinger(0)
				}
				c.Close()
			}
		}
	case "short":
		w.Header().Set("Content-Length", "100000")
		io.WriteString(w, "<!doctype html><title>Cut off</title><p>The rest of this page never comes")
		_ = http.NewResponseController(w).Flush() // without it nothing at all would come
		panic(http.ErrAbortHandler)
	default:
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(http.StatusInternalServerError)
		render(w, "broken", "Broken page", nil)
	}
}

func renderLogin(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	render(w, "login", "Sign in", struct {
		Message              string
		User, Password, Send Rect
	}{message, UserField, PasswordField, SubmitButton})
}

func render(w http.ResponseWriter, name, title string, data any) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	// A failed write is the browser's doing; the templates are tested.
	_ = templates.ExecuteTemplate(w, name, struct {
		Title string
		Data  any
	}{title, data})
}

var templates = template.Must(template.New("site").Funcs(template.FuncMap{
	"css": func(r Rect) template.CSS {
		return template.CSS(fmt.Sprintf("left:%dpx;top:%dpx;width:%dpx;height:%dpx;background:%s", r.X, r.Y, r.Width, r.Height, r.Color))
	},
}).Parse(markup))
