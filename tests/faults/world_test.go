package faults

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/fault"
	"abfleet/tests/rig"
	"abfleet/tests/site"
)

const (
	siteAddr = "127.0.0.1:8800"
	loginURL = "http://" + siteAddr + site.SelfLoginPath
	// faultDir is where the service is told when to die.
	faultDir = ".faults"
	// settleTimeout bounds how long one start of the service may take to repair
	// everything, browsers included.
	settleTimeout = 90 * time.Second
)

// world is a machine whose service dies when it is told to.
type world struct {
	*rig.Rig
	t       *testing.T
	bus     *bus
	logins  chan site.Login
	foreign map[string]string // who must never be touched: when each pid was started
}

// boot starts a machine with the given display, and on it Identities that are
// logged in, a session "by" that stands by, and processes of strangers.
func boot(t *testing.T, name, display string) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("boots a rig and real browsers; run without -short")
	}
	bin := t.TempDir()
	for _, build := range [][]string{{"abfleet/cmd/abfleet"}, {"abfleet/cmd/abfleet-role"}, {"-tags", "faults", "abfleet/cmd/abfleetd"}} {
		cmd := exec.Command("go", append([]string{"build", "-o", bin}, build...)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	w := &world{t: t, logins: make(chan site.Login, 16), foreign: map[string]string{}}
	w.Rig = rig.BootTest(t, rig.Options{Name: name, Binds: map[string]string{bin: rig.BinDir}})
	l, err := w.Listen(t.Context(), "tcp", siteAddr)
	w.check(err)
	server := &http.Server{Handler: site.SelfLogin(site.Handler(site.Options{}), func(login site.Login) { w.logins <- login })}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })

	busPath := w.RuntimeDir() + "/faulty-bus"
	bl, err := w.Listen(t.Context(), "unix", busPath)
	w.check(err)
	t.Cleanup(func() { bl.Close() })
	w.bus = newBus(bl, func() (net.Conn, error) {
		return w.Dial(context.WithoutCancel(t.Context()), "unix", w.RuntimeDir()+"/bus")
	})
	w.sh(fmt.Sprintf(`mkdir -p ~/%s ~/.config/abfleet ~/.config/systemd/user/abfleetd.service.d
		printf 'display = "%s"\n' >~/.config/abfleet/config.toml
		printf '[Service]\nEnvironment=ABF_FAULTS=%%%%h/%[1]s\nRestartSec=50ms\nEnvironment=DBUS_SESSION_BUS_ADDRESS=unix:path=%[3]s\n' >~/.config/systemd/user/abfleetd.service.d/faults.conf
		abfleet setup --bin-dir %[4]s --now`, faultDir, display, busPath, rig.BinDir))
	w.strangers()
	for _, identity := range []string{"work", "other"} {
		w.login(identity)
		w.must("POST", api.SavePath, api.IdentityRequest{Identity: identity})
	}
	w.use("by", "work")
	// What is looked at for faults can be seen.
	if p := w.find("browser", w.must("GET", api.SessionPath+"?session=by", nil).Session.Instance); p == 0 || len(w.trees("*/profiles/*")) != 1 || len(w.trees("*/snapshot")) != 2 {
		t.Fatalf("browser %d, trees %v %v", p, w.trees("*/profiles/*"), w.trees("*/snapshot"))
	}
	return w
}

// strangers starts what no fault may ever reach: a browser of the same user on a
// profile of its own, and an X server.
func (w *world) strangers() {
	w.t.Helper()
	w.sh(`systemd-run --user -q --unit=foreign-chromium -E DBUS_SESSION_BUS_ADDRESS=disabled: /usr/lib/chromium/chromium --headless=new --user-data-dir="$HOME/foreign" --password-store=basic --remote-debugging-port=9333 about:blank
		systemd-run --user -q --unit=foreign-xvnc /usr/bin/Xvnc :150 -rfbport -1 -rfbunixpath "$HOME/foreign.sock" -SecurityTypes None -nolisten tcp
		until test -S /tmp/.X11-unix/X150 && test -L "$HOME/foreign/SingletonLock"; do sleep 0.1; done`)
	clear(w.foreign)
	for _, unit := range []string{"foreign-chromium", "foreign-xvnc"} {
		pid := w.sh("systemctl --user show -P MainPID " + unit + ".service")
		if w.foreign[pid] = w.started(pid); w.foreign[pid] == "" {
			w.t.Fatalf("%s did not start", unit)
		}
	}
}

// started is when a process of the machine was started, "" once it has ended.
func (w *world) started(pid string) string {
	stat, err := os.ReadFile(w.Path("/proc/" + pid + "/stat"))
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return ""
	}
	return fields[19]
}

func (w *world) check(err error) {
	if err != nil {
		w.t.Helper()
		w.t.Fatal(err)
	}
}

// sh runs a script as the user.
func (w *world) sh(script string) string {
	w.t.Helper()
	out, err := w.Sh(w.t.Context(), script)
	if err != nil {
		w.t.Fatalf("%s: %v: %s", script, err, out)
	}
	return strings.TrimSpace(out)
}

// client reaches the control socket.
func (w *world) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return w.Dial(ctx, "unix", w.RuntimeDir()+"/abfleet/control.sock")
	}}}
}

// ask sends a request to the control socket. A service that dies in the middle of
// it is an error without a code.
func (w *world) ask(method, path string, body any) (api.Answer, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 3*time.Minute)
	defer cancel()
	data, err := json.Marshal(body)
	if err != nil {
		return api.Answer{}, err
	}
	r, err := http.NewRequestWithContext(ctx, method, api.Base+path, bytes.NewReader(data))
	if err != nil {
		return api.Answer{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := w.client().Do(r)
	if err != nil {
		return api.Answer{}, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return api.Answer{}, err
	}
	var answer api.Answer
	if err := json.Unmarshal(raw, &answer); err != nil {
		return answer, fmt.Errorf("%s %s: %w: %s", method, path, err, raw)
	}
	if answer.Error != nil {
		return answer, answer.Error.Fault()
	}
	return answer, nil
}

// died reports whether a request ended with the service.
func died(err error) bool { return err != nil && !api.Answered(err) }

func (w *world) must(method, path string, body any) api.Answer {
	w.t.Helper()
	answer, err := w.ask(method, path, body)
	if err != nil {
		w.t.Fatalf("%s %s %+v: %v", method, path, body, err)
	}
	return answer
}

func (w *world) use(session, identity string) api.Session {
	w.t.Helper()
	return *w.must("POST", api.UsePath, api.SessionRequest{Session: session, Identity: identity}).Session
}

// login starts a login on an Identity, made if need be, and waits until the
// browser holds it.
func (w *world) login(identity string) {
	w.t.Helper()
	if _, err := w.ask("POST", api.IdentitiesPath, api.CreateIdentity{Name: identity}); err != nil && fault.CodeOf(err) != fault.DuplicateIdentity {
		w.t.Fatal(err)
	}
	w.must("POST", api.LoginPath, api.IdentityRequest{Identity: identity, URL: loginURL})
	select {
	case <-w.logins:
	case <-time.After(time.Minute):
		w.t.Fatalf("Identity %s does not log in", identity)
	}
}

// session shows one, nil for one that is not bound.
func (w *world) session(name string) *api.Session {
	w.t.Helper()
	answer, err := w.ask("GET", api.SessionPath+"?session="+name, nil)
	if fault.Is(err, fault.SessionNotFound) {
		return nil
	}
	w.check(err)
	return answer.Session
}

// identity shows one, nil for one that there is not.
func (w *world) identity(name string) *api.Identity {
	w.t.Helper()
	answer, err := w.ask("GET", api.IdentityPath+"?identity="+name, nil)
	if fault.Is(err, fault.IdentityNotFound) {
		return nil
	}
	w.check(err)
	return answer.Identity
}

// service is the pid of the service inside the machine.
func (w *world) service() int {
	w.t.Helper()
	return w.must("GET", api.VersionPath, nil).Version.PID
}

// kill ends a process inside the machine at once.
func (w *world) kill(signal string, pid int) {
	if pid <= 1 {
		w.t.Errorf("nobody to kill: process %d", pid) // 0 would be a whole group
		return
	}
	if out, err := w.RootSh(w.t.Context(), fmt.Sprintf("kill -%s %d", signal, pid)); err != nil {
		w.t.Errorf("kill -%s %d: %v: %s", signal, pid, err, out)
	}
}

// process is one that a role may be.
type process struct {
	pid      int
	exe      string
	profile  string // --user-data-dir of a browser process, "" for its children
	slice    string // abfleet-<instance>.slice
	instance string
}

// roleProgram are the programs of roles.
var roleProgram = regexp.MustCompile(`^(chromium|Xvnc|Xtigervnc|Xvfb|x11vnc|abfleet-role)$`)

// ours and strange find in a cgroup's path whose it is.
var (
	ours    = regexp.MustCompile(`abfleet-[a-z0-9]+\.slice`)
	strange = regexp.MustCompile(`foreign-[a-z]+`)
	stolen  = regexp.MustCompile(`thief[0-9]+\.scope`)
)

// processes lists every process of the machine that runs a program of a role,
// but for those of the strangers.
func (w *world) processes() []process {
	w.t.Helper()
	entries, err := os.ReadDir(w.Path("/proc"))
	w.check(err)
	var all []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := w.Path("/proc/" + e.Name())
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || !roleProgram.MatchString(filepath.Base(exe)) {
			continue // ended, or of no interest
		}
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		cgroup, err := os.ReadFile(filepath.Join(dir, "cgroup"))
		if err != nil || strange.Match(cgroup) {
			continue
		}
		p := process{pid: pid, exe: filepath.Base(exe), slice: cmp.Or(string(ours.Find(cgroup)), string(stolen.Find(cgroup)), "-")}
		if p.exe == "Xtigervnc" {
			p.exe = "Xvnc"
		}
		line := strings.ReplaceAll(string(args), "\x00", " ")
		if strings.HasSuffix(strings.TrimSpace(string(cgroup)), "/abfleetd.service") && strings.HasSuffix(strings.TrimSpace(line), " --version") {
			continue // the service's own doctor asks a program what it is
		}
		if _, profile, ok := strings.Cut(line, "--user-data-dir="); ok && !strings.Contains(line, "--type=") {
			p.profile, _, _ = strings.Cut(profile, " ")
		}
		p.instance = strings.TrimSuffix(strings.TrimPrefix(p.slice, "abfleet-"), ".slice")
		all = append(all, p)
	}
	return all
}

// identitiesDir is where the fleet has the trees of its Identities, as this
// machine sees it.
func (w *world) identitiesDir() string {
	return filepath.Join(w.Home(), filepath.Base(w.UserHome()), ".local/state/abfleet/identities")
}

// trees lists the directories of a pattern below the Identities.
func (w *world) trees(pattern string) []string {
	w.t.Helper()
	found, err := filepath.Glob(filepath.Join(w.identitiesDir(), pattern))
	w.check(err)
	return slices.DeleteFunc(found, func(path string) bool {
		info, err := os.Lstat(path)
		return err != nil || !info.IsDir()
	})
}

// settled waits until what one start of the service has to repair is repaired:
// every session is what is wanted of it, or, only where that is the case already,
// waits for a person.
func (w *world) settled(broken string) ([]api.Session, error) {
	w.t.Helper()
	deadline := time.Now().Add(settleTimeout)
	for {
		answer, err := w.ask("GET", api.SessionsPath, nil)
		busy := ""
		for _, s := range answer.Sessions {
			switch {
			case s.State == "BROKEN" && s.Session == broken, s.Wanted == "stopped" && s.State == "stopped", s.Wanted == "running" && s.State == "controllable":
			default:
				busy = fmt.Sprintf("session %s is %s and wanted %s", s.Session, s.State, s.Wanted)
			}
		}
		if err == nil && busy == "" {
			return answer.Sessions, nil
		}
		if time.Now().After(deadline) {
			return answer.Sessions, errors.Join(err, fmt.Errorf("not repaired within %s: %s", settleTimeout, busy))
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-w.t.Context().Done():
			return nil, w.t.Context().Err()
		}
	}
}

// wrong looks at reality, and says what must not be after one start of the
// service. The session broken may still be BROKEN.
func (w *world) wrong(broken string) (wrong []string) {
	w.t.Helper()
	say := func(kind, format string, args ...any) {
		wrong = append(wrong, kind+": "+fmt.Sprintf(format, args...))
	}
	sessions, err := w.settled(broken)
	if err != nil {
		say("half state", "%v", err)
	}
	known, stuck := map[string]string{}, false
	for _, s := range sessions {
		stuck = stuck || s.State == "BROKEN"
		shown := w.session(s.Session)
		if shown != nil && shown.State != "stopped" {
			known[shown.Instance] = "session " + s.Session
		}
	}
	logins := map[string]bool{}
	for _, i := range w.must("GET", api.IdentitiesPath, nil).Identities {
		if i.Login.State == "controllable" {
			logins[i.ID] = true
		} else if i.Login.State != "stopped" {
			say("half state", "the login of %s is %s", i.Name, i.Login.State)
		}
		if i.State == "DELETING" {
			say("half state", "Identity %s is %s", i.Name, i.State)
		}
	}
	runs, profiles, unknown := map[string]bool{}, map[string]int{}, map[string]bool{}
	for _, p := range w.processes() {
		if stolen.MatchString(p.slice) && stuck {
			continue // of the browser that waits for a person
		}
		if p.slice == "-" || stolen.MatchString(p.slice) {
			say("orphan", "process %d runs %s in no slice of the fleet", p.pid, p.exe)
			continue
		}
		runs[p.instance] = true
		if known[p.instance] == "" {
			unknown[p.instance] = true
		}
		if p.profile != "" {
			profiles[p.profile]++
		}
	}
	for instance := range unknown {
		// A login's Stack says in its unit whose it is.
		of := w.sh("systemctl --user list-units --plain --no-legend 'abfleet-" + instance + "-chromium-*.scope' | grep -o 'identity-[a-z0-9]*' || true")
		if !logins[of] {
			say("orphan", "the Stack %s runs, and no session and no login has it", instance)
		}
		delete(logins, of)
	}
	for dir, n := range profiles {
		if n > 1 {
			say("double", "%d browsers run on %s", n, filepath.Base(dir))
		}
	}
	for pid, was := range w.foreign {
		if now := w.started(pid); now != was {
			say("foreign", "process %s was started at tick %s, now %q", pid, was, now)
		}
	}
	identities, profiled := w.trees("*"), w.trees("*/profiles/*")
	for _, tree := range slices.Concat(identities, profiled, w.trees("*/*")) {
		if ext := filepath.Ext(tree); ext != "" {
			say("half state", "a tree is left: %s", tree)
		}
	}
	// A profile that was whole has the login of its Identity, on the disk.
	for _, tree := range slices.Concat(profiled, w.trees("*/snapshot")) {
		if data, err := os.ReadFile(filepath.Join(tree, "Default/Cookies")); err != nil || !bytes.Contains(data, []byte(site.PersistentCookie)) {
			say("lost", "no login in %s: %v", tree, err)
		}
	}
	var store struct {
		OK   bool
		File struct{ Intents, Identities, Profiles int }
	}
	out, err := w.Sh(w.t.Context(), "abfleet store check --json")
	if jerr := json.Unmarshal([]byte(out), &store); err != nil || jerr != nil || !store.OK || store.File.Intents > 0 {
		say("half state", "store check: %v %v %s", err, jerr, out)
	}
	if len(identities) > store.File.Identities || len(profiled) > store.File.Profiles {
		say("half state", "%d Identities and %d profiles on the disk, recorded are %d and %d", len(identities), len(profiled), store.File.Identities, store.File.Profiles)
	}
	return wrong
}

// bindings is which Identity each session has, but for those of the list.
func (w *world) bindings(but ...string) map[string]string {
	w.t.Helper()
	has := map[string]string{}
	for _, s := range w.must("GET", api.SessionsPath, nil).Sessions {
		if !slices.Contains(but, s.Session) {
			has[s.Session] = s.IdentityName
		}
	}
	return has
}

// signedIn has a session's browser look whether it is logged in, as an agent
// would.
func (w *world) signedIn(session, identity string) []string {
	w.t.Helper()
	w.use(session, identity)
	call := func(tool string, args map[string]any) string {
		body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": tool, "arguments": args}})
		w.check(err)
		r, err := http.NewRequestWithContext(w.t.Context(), "POST", api.Base+api.MCPPath, bytes.NewReader(body))
		w.check(err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		r.Header.Set(api.HeaderSession, session)
		response, err := w.client().Do(r)
		if err != nil {
			return err.Error()
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			return err.Error()
		}
		return string(answer)
	}
	call("browser_navigate", map[string]any{"url": "http://" + siteAddr + "/account"})
	call("browser_wait_for", map[string]any{"text": "Storage was read"})
	text := call("browser_evaluate", map[string]any{"function": "() => document.body.innerText"})
	for _, want := range []string{"Signed in as " + site.DefaultUser, "persistent cookie: " + site.DefaultUser, "localStorage: " + site.DefaultUser, "IndexedDB: " + site.DefaultUser} {
		if !strings.Contains(text, want) {
			return []string{fmt.Sprintf("lost: the browser of %s says no %q: %s", session, want, text)}
		}
	}
	return nil
}

// journal is what the service said last.
func (w *world) journal() string {
	out, err := w.Journal(context.WithoutCancel(w.t.Context()), "-n", "60", "--no-pager", "-o", "short-monotonic")
	if err != nil {
		return err.Error()
	}
	return out
}

// tally counts outcomes over all runs of this process.
type tally struct {
	mu       sync.Mutex
	runs     int
	outcomes map[string]map[string]int // by what was done
}

var total = &tally{outcomes: map[string]map[string]int{}}

// Kinds of failure that the tally names although there is none.
var kinds = []string{"lost", "orphan", "double", "foreign", "half state"}

// add counts a run. One in which the fault did not come about is none.
func (t *tally) add(what string, reached bool, wrong []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !reached && len(wrong) == 0 {
		if t.outcomes[what] == nil {
			t.outcomes[what] = map[string]int{}
		}
		t.outcomes[what]["not reached"]++
		return
	}
	t.runs++
	if t.outcomes[what] == nil {
		t.outcomes[what] = map[string]int{}
	}
	t.outcomes[what]["runs"]++
	if len(wrong) == 0 {
		t.outcomes[what]["repaired"]++
	}
	seen := map[string]bool{}
	for _, w := range wrong {
		kind, _, _ := strings.Cut(w, ":")
		if !seen[kind] {
			t.outcomes[what][kind]++
		}
		seen[kind] = true
	}
}

func (t *tally) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	columns := append(append([]string{"runs", "repaired"}, kinds...), "not reached")
	fmt.Fprintf(&b, "%-44s", "fault")
	for _, c := range columns {
		fmt.Fprintf(&b, " %11s", c)
	}
	b.WriteByte('\n')
	sum := map[string]int{}
	line := func(name string, outcomes map[string]int) {
		fmt.Fprintf(&b, "%-44s", name)
		for _, c := range columns {
			fmt.Fprintf(&b, " %11d", outcomes[c])
		}
		b.WriteByte('\n')
	}
	for _, name := range slices.Sorted(maps.Keys(t.outcomes)) {
		for outcome, n := range t.outcomes[name] {
			sum[outcome] += n
		}
		line(name, t.outcomes[name])
	}
	line("all", sum)
	fmt.Fprintf(&b, "faults: %d runs, %d lost, %d orphaned, %d foreign signalled\n", t.runs, sum["lost"], sum["orphan"]+sum["double"], sum["foreign"])
	return b.String()
}

// leastRuns is how many faults have to come about in a run of the whole, 0 for one
// of a part.
func leastRuns() int {
	for _, part := range []string{"ABF_FAULT", "ABF_DEATH", "ABF_DISPLAY"} {
		if os.Getenv(part) != "" {
			return 0
		}
	}
	if f := flag.Lookup("test.run"); f != nil && f.Value.String() != "" || testing.Short() {
		return 0
	}
	if os.Getenv("ABF_FAULTS") == "all" {
		return 300
	}
	return 40
}

func TestMain(m *testing.M) {
	code := m.Run()
	if total.runs > 0 {
		fmt.Print(total)
	}
	if least := leastRuns(); code == 0 && total.runs < least {
		fmt.Printf("at least %d runs were wanted: faults do not come about any more\n", least)
		code = 1
	}
	os.Exit(code)
}
