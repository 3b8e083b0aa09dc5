package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"abfleet/internal/api"
	"abfleet/tests/agent"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

const (
	siteAddr = "127.0.0.1:8800"
	siteURL  = "http://" + siteAddr
	identity = "experiment"
	// loginWait bounds the login, which the site does by itself.
	loginWait = time.Minute
)

// subject is the rig with the product in it.
type subject struct {
	*rig.Rig
	identityID string
}

// run does the experiment and fills in the report as it goes.
func run(ctx context.Context, report *Report) (err error) {
	bin, err := filepath.Abs("bin")
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(bin, "abfleetd")); err != nil {
		return errors.New("cannot start the experiment: no programs in bin/\nhint: make build")
	}
	r, err := rig.Boot(ctx, rig.Options{Name: "experiment", Binds: map[string]string{bin: rig.BinDir}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	s := &subject{Rig: r}

	logins := make(chan site.Login, 1)
	listener, err := r.Listen(ctx, "tcp", siteAddr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: site.SelfLogin(site.Handler(site.Options{}), func(l site.Login) {
		select {
		case logins <- l:
		default:
		}
	})}
	go server.Serve(listener)
	defer server.Close()

	if _, err := s.abfleet(ctx, "setup", "--bin-dir", rig.BinDir, "--now"); err != nil {
		return err
	}
	doctor, err := s.abfleet(ctx, "doctor")
	report.Doctor = doctor.Doctor
	if err != nil {
		return err
	}
	if err := s.logIn(ctx, report, logins); err != nil {
		return err
	}
	before, err := s.snapshot(report)
	if err != nil {
		return err
	}
	if err := s.sessions(ctx, report); err != nil {
		return err
	}
	after, err := stamp(s.tree("snapshot"))
	if err != nil {
		return err
	}
	report.Snapshot.Unchanged = after == before
	if !report.Snapshot.ReadOnly || !report.Snapshot.Unchanged {
		return fmt.Errorf("the Template Snapshot did not hold: %+v", *report.Snapshot)
	}
	return nil
}

// abfleet runs a command as the user.
func (s *subject) abfleet(ctx context.Context, args ...string) (api.Answer, error) {
	cmd := s.User(ctx, "abfleet", append(args, "--json")...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var answer api.Answer
	if jerr := json.Unmarshal(out, &answer); jerr != nil {
		return answer, fmt.Errorf("abfleet %s: %w: %s%s", strings.Join(args, " "), errors.Join(err, jerr), out, stderr.Bytes())
	}
	if answer.Error != nil {
		return answer, answer.Error.Fault()
	}
	return answer, err
}

// logIn makes the Identity: a login browser that logs in, and save.
func (s *subject) logIn(ctx context.Context, report *Report, logins <-chan site.Login) error {
	created, err := s.abfleet(ctx, "identity", "create", identity)
	if err != nil {
		return err
	}
	s.identityID = created.Identity.ID
	if _, err := s.abfleet(ctx, "identity", "login", identity, "--url", siteURL+site.SelfLoginPath); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, loginWait)
	defer cancel()
	select {
	case login := <-logins:
		report.TemplateLoginState = &login
		if !whole(login) {
			return fmt.Errorf("the login left only %+v", login)
		}
	case <-wait.Done():
		return errors.New("the login browser never logged in")
	}
	_, err = s.abfleet(ctx, "identity", "save", identity)
	return err
}

// whole says whether every kind of storage holds the one value of a login.
func whole(l site.Login) bool {
	return strings.HasPrefix(l.PersistentCookie, site.DefaultUser+".") && l == site.Login{
		PersistentCookie: l.PersistentCookie, SessionCookie: l.PersistentCookie, LocalStorage: l.PersistentCookie, IndexedDB: l.PersistentCookie,
	}
}

// sessions does everything that two Profiles are needed for.
func (s *subject) sessions(ctx context.Context, report *Report) error {
	started, err := s.start(ctx)
	if err != nil {
		return err
	}
	report.Clones = &started
	if report.Concurrent.Initial, err = s.atOnce(ctx, ""); err != nil {
		return err
	}
	if err := inherited(report.Concurrent.Initial, *report.TemplateLoginState, nil); err != nil {
		return err
	}
	if report.Concurrent.AfterIndependentMutation, err = s.atOnce(ctx, change); err != nil {
		return err
	}
	if err := inherited(report.Concurrent.AfterIndependentMutation, *report.TemplateLoginState, changed); err != nil {
		return err
	}
	if report.Endpoints, err = s.endpoints(ctx); err != nil {
		return err
	}
	if report.Cost, err = s.cost(ctx); err != nil {
		return err
	}
	if err := s.stop(ctx); err != nil {
		return err
	}
	if _, err := s.start(ctx); err != nil {
		return err
	}
	if report.RestartPersistence, err = s.atOnce(ctx, ""); err != nil {
		return err
	}
	if err := inherited(report.RestartPersistence, *report.TemplateLoginState, changed); err != nil {
		return err
	}
	if err := s.stop(ctx); err != nil {
		return err
	}
	if !report.Endpoints.AllPrivate {
		return errors.New("not every endpoint is private")
	}
	return nil
}

// inherited checks that both Profiles hold the login and their own change only;
// want nil: no change.
func inherited(seen []Storage, login site.Login, want func(string) Change) error {
	for _, storage := range seen {
		var c Change
		if want != nil {
			c = want(storage.Profile)
		}
		if storage.Login != login || storage.Change != c {
			return fmt.Errorf("the Profile %s holds %+v and the change %+v, want %+v and %+v", storage.Profile, storage.Login, storage.Change, login, c)
		}
	}
	return nil
}

// both does something for the two Profiles at once.
func both(do func(i int, name string) error) error {
	var errs [2]error
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { errs[i] = do(i, name) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// start brings both Session Browsers up at once.
func (s *subject) start(ctx context.Context) (Clones, error) {
	var from, to [2]time.Time
	err := both(func(i int, name string) error {
		from[i] = time.Now()
		answer, err := s.abfleet(ctx, "session", "use", name, identity)
		to[i] = time.Now()
		if err == nil && answer.Session.State != "controllable" {
			err = fmt.Errorf("session %s is %s after its start", name, answer.Session.State)
		}
		return err
	})
	first, last := to[0], from[0] // the first to end, the last to begin
	if to[1].Before(first) {
		first = to[1]
	}
	if from[1].After(last) {
		last = from[1]
	}
	return Clones{
		Seconds: map[string]float64{names[0]: to[0].Sub(from[0]).Seconds(), names[1]: to[1].Sub(from[1]).Seconds()},
		Overlap: max(first.Sub(last).Seconds(), 0),
	}, err
}

// stop ends both at once and checks that each ended cleanly.
func (s *subject) stop(ctx context.Context) error {
	return both(func(_ int, name string) error {
		if _, err := s.abfleet(ctx, "session", "stop", name); err != nil {
			return err
		}
		answer, err := s.abfleet(ctx, "session", "show", name)
		if err != nil {
			return err
		}
		if exit := answer.Session.LastExit; exit == nil || !exit.Clean {
			return fmt.Errorf("session %s did not end cleanly: %+v", name, exit)
		}
		return nil
	})
}

// change is JavaScript that writes %q into each kind of storage.
const change = `async () => {
	document.cookie = "profile=" + %[1]q + "; max-age=86400; path=/";
	document.cookie = "profile_session=" + %[1]q + "; path=/";
	localStorage.setItem("profile", %[1]q);
	const done = (request) => new Promise((resolve, reject) => { request.onsuccess = () => resolve(request.result); request.onerror = () => reject(request.error); });
	const database = await done(indexedDB.open(%[2]q));
	const writing = database.transaction("login", "readwrite", { durability: "strict" });
	writing.objectStore("login").put(%[1]q, "profile");
	await new Promise((resolve, reject) => { writing.oncomplete = resolve; writing.onerror = () => reject(writing.error); });
	database.close();
}`

// read is JavaScript that returns a Storage of the account page.
const read = `async () => {
	const login = await %[1]s(document);
	const cookies = Object.fromEntries(document.cookie.split("; ").map((cookie) => cookie.split("=")));
	const done = (request) => new Promise((resolve, reject) => { request.onsuccess = () => resolve(request.result); request.onerror = () => reject(request.error); });
	const database = await done(indexedDB.open(%[2]q));
	const stored = await done(database.transaction("login").objectStore("login").get("profile"));
	database.close();
	return { login, change: {
		persistentCookie: cookies.profile ?? "", sessionCookie: cookies.profile_session ?? "",
		localStorage: localStorage.getItem("profile") ?? "", indexedDB: stored ?? "",
	} };
}`

// atOnce has an agent in each session run script, if there is one, at the
// account page; then, when both have, load the page again and tell what it holds.
func (s *subject) atOnce(ctx context.Context, script string) ([]Storage, error) {
	var agents [2]*agent.Agent
	seen := make([]Storage, 2)
	account := map[string]any{"url": siteURL + "/account"}
	defer func() {
		for _, a := range agents {
			if a != nil {
				a.Close()
			}
		}
	}()
	for _, step := range []func(i int, name string) error{
		func(i int, name string) (err error) {
			if agents[i], err = agent.Connect(ctx, s.User(ctx, "abfleet", "mcp", "--session", name)); err != nil {
				return err
			}
			_, err = agents[i].Call(ctx, "browser_navigate", account)
			return err
		},
		func(i int, name string) error {
			if script == "" {
				return nil
			}
			return agents[i].Evaluate(ctx, fmt.Sprintf(script, name, site.DatabaseName), nil)
		},
		func(i int, name string) error {
			if _, err := agents[i].Call(ctx, "browser_navigate", account); err != nil {
				return err
			}
			seen[i].Profile = name
			return agents[i].Evaluate(ctx, fmt.Sprintf(read, site.ReadLogin, site.DatabaseName), &seen[i])
		},
	} {
		if err := both(step); err != nil {
			return nil, err
		}
	}
	return seen, nil
}
