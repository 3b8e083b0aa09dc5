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

// loggedInPath is where SelfLogin's page goes.
const loggedInPath = SelfLoginPath + "/done"

// SelfLogin adds to the application a page that logs in as the default user
// without a person. When the browser holds all of the login, done is called. By
// then the browser is at another page, which logs nobody in when a restored
// browser opens it again; it calls done again.
func SelfLogin(application http.Handler, done func(Login)) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", application)
	page := func(path, text string, args ...any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fmt.Fprintf(w, text, args...)
		})
	}
	page(SelfLoginPath, `<!doctype html><title>Logging in</title><p>This page logs in by itself.<iframe id="account" hidden></iframe><script>
(async () => {
	const answer = await fetch("/login", { method: "POST", body: new URLSearchParams({ user: %q, pass: %q }) });
	const frame = document.getElementById("account");
	await new Promise((resolve) => { frame.onload = resolve; frame.src = answer.url; });
	await %s(frame.contentDocument);
	location.replace(%q);
})();
</script>`, DefaultUser, DefaultPassword, ReadLogin, loggedInPath)
	page(loggedInPath, `<!doctype html><title>Logged in</title><p><a href="/account">Account</a><iframe id="account" src="/account" hidden></iframe><script>
onload = async () => {
	const login = await %s(document.getElementById("account").contentDocument);
	await fetch(%q, { method: "POST", body: JSON.stringify(login) });
};
</script>`, ReadLogin, loggedInPath)
	mux.HandleFunc("POST "+loggedInPath, func(w http.ResponseWriter, r *http.Request) {
		var login Login
		if err := json.NewDecoder(io.LimitReader(r.Body, maxForm)).Decode(&login); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		done(login)
	})
	return mux
}
