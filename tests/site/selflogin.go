package site

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// SelfLoginPath is the page of SelfLogin.
const SelfLoginPath = "/self-login"

// Login is what the browser holds of a login, as the account page shows it;
// "none" is what it does not hold.
type Login struct {
	PersistentCookie string `json:"persistentCookie"`
	SessionCookie    string `json:"sessionCookie"`
	LocalStorage     string `json:"localStorage"`
	IndexedDB        string `json:"indexedDB"`
}

// ReadLogin is JavaScript: an expression of a function that takes the document
// of the account page and returns, when the page has read its storage, a
// promise of a Login.
const ReadLogin = `(async (page) => {
	while (page.getElementById("status")?.textContent === "Storage is being read") await new Promise(requestAnimationFrame);
	const shown = Object.fromEntries([...page.querySelectorAll("li")].map((item) => item.textContent.split(": ")));
	return { persistentCookie: shown["persistent cookie"], sessionCookie: shown["session cookie"], localStorage: shown["localStorage"], indexedDB: shown["IndexedDB"] };
})`

// SelfLogin adds to the application a page that logs in as the default user
// without a person. When the browser holds all of the login, done is called;
// then the browser is at the account page. A login may be done several times.
func SelfLogin(application http.Handler, done func(Login)) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", application)
	mux.HandleFunc("GET "+SelfLoginPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprintf(w, `<!doctype html><title>Logging in</title><p>This page logs in by itself.<iframe id="account" hidden></iframe><script>
(async () => {
	const answer = await fetch("/login", { method: "POST", body: new URLSearchParams({ user: %q, pass: %q }) });
	const frame = document.getElementById("account");
	await new Promise((resolve) => { frame.onload = resolve; frame.src = answer.url; });
	const login = await %s(frame.contentDocument);
	await fetch(%q, { method: "POST", body: JSON.stringify(login) });
	location = "/account";
})();
</script>`, DefaultUser, DefaultPassword, ReadLogin, SelfLoginPath)
	})
	mux.HandleFunc("POST "+SelfLoginPath, func(w http.ResponseWriter, r *http.Request) {
		var login Login
		if err := json.NewDecoder(io.LimitReader(r.Body, maxForm)).Decode(&login); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		done(login)
	})
	return mux
}
