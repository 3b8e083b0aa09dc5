package proof

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"abfleet/runtime/unit"
)

// Lost is a Stack whose ownership is to be examined, because its records are
// missing or refused. What proves a process to be of it is found with the process
// itself; a record or a pidfile only corroborates or contradicts that.
type Lost struct {
	// Claim names everything of the Stack, with all records of it.
	Claim Claim
	// Roles are those that the Stack may have, in the order in which they are
	// started: the record of each, or as much of one as Capture takes. A Display
	// of 0 is taken from the process found.
	Roles []Generation
	// Temp is the TMPDIR of its browser.
	Temp string
}

// Verdict is what an examination makes of a Role.
type Verdict string

const (
	// Gone: no process of the Role is left.
	Gone Verdict = "gone"
	// Proven: the recorded Proof holds, or the scope is the recorded invocation,
	// in which systemd can end what is left.
	Proven Verdict = "proven"
	// Reconstructible: exactly one process proves to lead the Role.
	Reconstructible Verdict = "reconstructible"
	// Doubtful: anything else.
	Doubtful Verdict = "ambiguous"
)

// Finding is the evidence about one Role. For and Against are phrases for an
// operator; they may name units, processes and paths.
type Finding struct {
	Role    string
	Verdict Verdict
	// PID is the process that the verdict is about, 0 for none.
	PID          int
	For, Against []string

	heir   heir  // of Reconstructible
	doubts []int // the processes that stand in the way
}

// heir is a process that may lead a Role, as a Generation without its unit.
type heir struct {
	g            Generation
	pro, contra  []string
	group        []int // the live processes in its group and its browser's
	undetermined error // systemd could not be asked
}

func (h *heir) weigh(what string, err error) {
	var r *Refusal
	switch {
	case err == nil:
		h.pro = append(h.pro, what)
	case errors.As(err, &r):
		h.contra = append(h.contra, r.Detail)
	default:
		h.contra = append(h.contra, err.Error())
	}
}

// groups are the process groups that are the heir's if it is one.
func (h *heir) groups() []int {
	all := []int{h.g.Leader.PGID}
	if h.g.Browser != nil {
		all = append(all, h.g.Browser.PGID)
	}
	return all
}

// seen is a live process.
type seen struct {
	Member
	ppid   int
	exe    string
	args   []string
	root   bool     // holds the root file open
	traces []string // why it may be of the Stack
}

// Examine looks through all processes for what is left of a Stack and says of
// each Role what proves whose it is. It changes nothing and signals nobody. The
// error is a *Refusal: the evidence, or systemd, could not be read.
func (v *Verifier) Examine(ctx context.Context, lost Lost) ([]Finding, error) {
	if v.Units == nil {
		return nil, refuse(UnitUnknown, "no connection to systemd")
	}
	lost, witnesses := corroborate(lost)
	all, err := v.sweep(lost, witnesses)
	if err != nil {
		return nil, err
	}
	var found []Finding
	explained := func(seen) bool { return false }
	for i, g := range lost.Roles {
		f, covers, err := v.examine(ctx, lost, g, witnesses[i], all)
		if err != nil {
			return nil, err
		}
		found = append(found, f)
		before := explained
		explained = func(p seen) bool { return before(p) || covers(p) }
	}
	// A process that has only some of the evidence is tolerated in the group of
	// a proven leader and nowhere else.
	for _, p := range all {
		if len(p.traces) == 0 || explained(p) {
			continue
		}
		f := v.findingOf(found, p)
		f.Verdict, f.doubts = Doubtful, append(f.doubts, p.PID)
		f.Against = append(f.Against, fmt.Sprintf("process %d (%s) %s, in no proven process group", p.PID, p.exe, strings.Join(p.traces, " and ")))
	}
	return found, nil
}

// settleTime is how long Settled waits for processes to end that stand in the
// way: parts of a browser outlive it for some 100 ms, and a process that exits
// shows less and less of its evidence.
const settleTime = time.Second

// Settled is Examine for somebody who will act: what is ambiguous is looked at
// again whenever a process of the doubt ends, for a second at most.
func (v *Verifier) Settled(ctx context.Context, lost Lost) ([]Finding, error) {
	wait, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for {
		found, err := v.Examine(ctx, lost)
		if err != nil {
			return nil, err
		}
		var doubts []int
		for _, f := range found {
			doubts = append(doubts, f.doubts...)
		}
		if len(doubts) == 0 || !oneEnds(wait, doubts) {
			return found, nil
		}
	}
}

// oneEnds reports whether one of the processes ends before ctx does.
func oneEnds(ctx context.Context, pids []int) bool {
	var fds []unix.PollFd
	for _, pid := range pids {
		fd, err := pidfdOpen(pid)
		if err != nil {
			return Ended(err) && ctx.Err() == nil
		}
		defer unix.Close(fd)
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	return unit.Poll(ctx, fds, 0) == nil
}

// corroborate replaces a Role without a complete record by what its pidfile adds
// to it, and returns the record or pidfile that says where the Role was started.
// A pidfile that is legacy, partial, of another boot or of another Stack says
// nothing at all.
func corroborate(lost Lost) (Lost, []*Generation) {
	lost.Roles = slices.Clone(lost.Roles)
	witnesses := make([]*Generation, len(lost.Roles))
	for i, g := range lost.Roles {
		if g.incomplete() != "" {
			file, err := ReadPidfile(PidfilePath(g))
			if err != nil || file.Instance != g.Instance || file.Role != g.Role || file.Root != g.Root ||
				file.Profile != g.Profile || file.LockFile != g.LockFile {
				lost.Roles[i].Number = max(g.Number, 1)
				continue
			}
			g = file
		}
		// What is recorded of another boot says where nothing is any more.
		lost.Roles[i] = Generation{
			Instance: g.Instance, Role: g.Role, Number: g.Number, Root: g.Root,
			Profile: g.Profile, LockFile: g.LockFile, Display: g.Display, Sockets: g.Sockets, Listener: g.Listener,
		}
		if SameBoot(g) == nil {
			witnesses[i] = &g
		}
	}
	return lost, witnesses
}

// sweep reads the process table.
func (v *Verifier) sweep(lost Lost, witnesses []*Generation) ([]seen, error) {
	numbers, err := pids()
	if err != nil {
		return nil, refuse(Unreadable, "process table: %w", err)
	}
	table, err := listeners()
	if err != nil {
		return nil, refuse(Unreadable, "unix sockets: %w", err)
	}
	sockets, roots, _ := lost.Claim.evidence()
	singleton, err := readSingleton(lost.Claim.Profile)
	named := err == nil && v.liveSingleton(singleton, lost.Claim.Profile)
	var all []seen
	for _, pid := range numbers {
		m, st, err := observe(pid)
		if ReasonOf(err) == PIDGone {
			continue
		}
		p := seen{Member: m, ppid: st.PPID}
		if err != nil {
			p.Member = Member{PID: pid, UID: -1}
		}
		var guessed bool
		p.exe, p.args, guessed = program(pid)
		if p.args == nil {
			p.args, _ = readArgs(pid)
		}
		role := v.hasRole(pid, sockets, roots)
		for _, why := range []string{v.usesProfile(pid, lost.Claim.Profile), role} {
			if why != "" {
				p.traces = append(p.traces, why)
			}
		}
		if named && singleton.pid == pid {
			p.traces = append(p.traces, "is named by the SingletonLock of "+lost.Claim.Profile)
		}
		// We open lock files ourselves. What cannot be read may not be dumped: a
		// sandboxed child of a browser, which holds none of these files.
		if m.UID == os.Geteuid() && pid != os.Getpid() && !guessed {
			files, _ := openFiles(pid)
			if name := rootAmong(files, roots); name != "" {
				p.root = true
				if role == "" {
					p.traces = append(p.traces, "holds "+name+" open")
				}
			}
			if opens(files, lost.Claim.LockFile) {
				p.traces = append(p.traces, "has "+lost.Claim.LockFile+" open")
			}
			for _, s := range sockets {
				if slices.ContainsFunc(table[s], func(link string) bool { return rootAmong(files, []string{link}) != "" }) {
					p.traces = append(p.traces, "listens on "+s)
				}
			}
		}
		for _, g := range witnesses {
			if g != nil && slices.ContainsFunc(g.members(), func(r Member) bool { return r.PID == pid && r.StartTime == m.StartTime }) {
				p.traces = append(p.traces, "is recorded as "+g.String())
			}
		}
		all = append(all, p)
	}
	return all, nil
}

// opens reports whether one of the open files is the file at a path, or was. The
// kernel tells paths without the symbolic links that ours may have.
func opens(files map[string]string, path string) bool {
	var want unix.Stat_t
	known := unix.Lstat(path, &want) == nil
	for link, target := range files {
		target = strings.TrimSuffix(target, " (deleted)")
		if path != "" && target == path {
			return true
		}
		var got unix.Stat_t
		if known && filepath.Base(target) == filepath.Base(path) && unix.Stat(link, &got) == nil && got.Dev == want.Dev && got.Ino == want.Ino {
			return true
		}
	}
	return false
}

// findingOf picks the Role that an unexplained process is most likely of.
func (v *Verifier) findingOf(found []Finding, p seen) *Finding {
	role := RoleChromium
	for _, r := range []string{RoleDisplay, RoleVNC} {
		if v.serves(r, p.exe) {
			role = r
		}
	}
	for i := range found {
		if found[i].Role == role {
			return &found[i]
		}
	}
	return &found[len(found)-1]
}

// examine judges one Role. covers tells which processes the verdict is about.
func (v *Verifier) examine(ctx context.Context, lost Lost, g Generation, witness *Generation, all []seen) (f Finding, covers func(seen) bool, err error) {
	f = Finding{Role: g.Role, Verdict: Gone}
	var heirs []heir
	var groups []int
	for _, p := range all {
		base, ok := v.mayLead(p, g, all)
		if !ok {
			continue
		}
		h := v.examineHeir(ctx, lost, base, witness, p, all)
		if h.undetermined != nil {
			return f, nil, h.undetermined
		}
		heirs = append(heirs, h)
		groups = append(groups, h.groups()...)
	}
	covers = func(p seen) bool { return slices.Contains(groups, p.PGID) }

	if i := slices.IndexFunc(lost.Claim.Generations, func(r Generation) bool { return r.Role == g.Role && r.incomplete() == "" && SameBoot(r) == nil }); i >= 0 {
		record := lost.Claim.Generations[i]
		switch err := v.checkUnit(ctx, record); ReasonOf(err) {
		case "":
			inside := func(pid int) bool { cg, err := unit.OfPID(pid); return err == nil && cg.Path == record.Cgroup }
			populated, err := unit.Cgroup{Path: record.Cgroup}.Populated()
			if err != nil {
				return f, nil, refuse(Unreadable, "cgroup %s: %w", record.Cgroup, err)
			}
			if populated && !slices.ContainsFunc(heirs, func(h heir) bool { return !inside(h.g.Leader.PID) }) {
				f.Verdict = Proven
				f.For = []string{record.Unit + " is the recorded invocation " + record.InvocationID}
				groups = nil
				if live, err := v.Live(ctx, record); err == nil {
					live.Close()
					f.PID = record.Leader.PID
					// Children of before a recovery may be where they were.
					for _, m := range record.members() {
						groups = append(groups, m.PGID)
					}
					f.For = append(f.For, fmt.Sprintf("process %d is its recorded leader, and all its evidence holds", f.PID))
				} else {
					f.Against = []string{"its leader: " + err.Error()}
				}
				return f, func(p seen) bool { return inside(p.PID) || slices.Contains(groups, p.PGID) }, nil
			}
		case UnitUnknown:
			return f, nil, err
		}
	}
	switch {
	case len(heirs) == 1 && len(heirs[0].contra) == 0:
		f.Verdict, f.heir = Reconstructible, heirs[0]
	case len(heirs) > 0:
		f.Verdict = Doubtful
		for _, h := range heirs {
			for _, m := range h.g.members() {
				f.doubts = append(f.doubts, m.PID)
			}
		}
	}
	if len(heirs) > 0 {
		f.PID, f.For, f.Against = heirs[0].g.Leader.PID, heirs[0].pro, heirs[0].contra
	}
	if len(heirs) > 1 {
		f.PID, f.For = 0, nil
		for _, h := range heirs {
			f.Against = append(f.Against, fmt.Sprintf("process %d may be the %s, and is not the only one", h.g.Leader.PID, g.Role))
		}
	}
	return f, covers, nil
}

// mayLead reports whether a process has the program, the exact tokens and the
// root file of the leader of a Role, and returns what it would lead. Of a browser
// that is its holder, or the browser itself once its holder has died.
func (v *Verifier) mayLead(p seen, g Generation, all []seen) (Generation, bool) {
	if !p.root || p.UID != os.Geteuid() {
		return g, false
	}
	helper := isProgram(p.exe, helperPrograms, v.Helper)
	g.Leader = p.Member
	if g.Role == RoleChromium {
		orphan := isProgram(p.exe, browserPrograms, v.Chromium) && !slices.ContainsFunc(all, func(h seen) bool {
			return h.PID == p.ppid && h.root && isProgram(h.exe, helperPrograms, v.Helper)
		})
		if orphan {
			m := p.Member
			g.Browser = &m
		}
		return g, helper || orphan
	}
	if g.Display == 0 {
		g.Display = displayToken(p.args)
	}
	if g.Role == RoleDisplay && rfbPath(p.args) == "" {
		g.Sockets = nil // it has a VNC server beside it
	}
	// A trampoline that did not become its Role says nothing about which it is.
	return g, !helper && v.leaderSignature(g) == nil
}

// displayToken returns the display number among exact tokens such as ":100", or 0.
func displayToken(args []string) int {
	for _, arg := range args {
		if digits, ok := strings.CutPrefix(arg, ":"); ok {
			if n, err := strconv.ParseUint(digits, 10, 31); err == nil && strconv.FormatUint(n, 10) == digits {
				return int(n)
			}
		}
	}
	return 0
}

// examineHeir weighs everything that is known about a process that may lead a
// Role. Nothing is left out after the first contradiction: an operator reads all.
func (v *Verifier) examineHeir(ctx context.Context, lost Lost, g Generation, witness *Generation, p seen, all []seen) heir {
	h := heir{g: g}
	pid := p.PID
	h.weigh(fmt.Sprintf("process %d runs %s as this user and leads its own process group", pid, p.exe), leadsGroup(p.Member))
	h.weigh("it holds "+g.Root+" open", rootEvidence(pid, g.Root))
	if g.Role == RoleChromium {
		h.weigh("it holds the lock "+g.LockFile, lockEvidence(pid, g.LockFile))
		v.examineBrowser(&h, p, all)
	} else {
		h.weigh(fmt.Sprintf("its command line names display :%d and a path of this instance", g.Display), instanceToken(p, g))
	}
	if g.Role == RoleDisplay {
		h.weigh("the lock and the socket of the display are its own", servesDisplay(pid, g.Display))
	}
	for _, s := range g.Sockets {
		if g.orphaned() {
			break // its holder listened
		}
		h.weigh("it listens on "+s, listensAlone(pid, s))
	}
	members := []Member{g.Leader}
	if h.g.Browser != nil && *h.g.Browser != g.Leader {
		members = append(members, *h.g.Browser)
	}
	for _, q := range all {
		if slices.Contains(h.groups(), q.PGID) {
			h.group = append(h.group, q.PID)
		}
	}
	for _, m := range members {
		if err := speaksOfAnother(m.PID, lost, g); err != nil {
			h.weigh("", err)
		}
		where, err := v.scopeEvidence(ctx, lost, g.Role, witness, m.PID, h.groups())
		if ReasonOf(err) == UnitUnknown {
			h.undetermined = err
		}
		h.weigh(fmt.Sprintf("process %d %s", m.PID, where), err)
	}
	return h
}

// examineBrowser finds the browser of a holder, or checks that the heir is one.
func (v *Verifier) examineBrowser(h *heir, p seen, all []seen) {
	browser := func(q seen) error {
		if err := leadsGroup(q.Member); err != nil {
			return err
		}
		if err := profileSignature(q.PID, h.g.Profile, false); err != nil {
			return err
		}
		return rootEvidence(q.PID, h.g.Root)
	}
	if h.g.orphaned() {
		h.weigh("it is the browser of "+h.g.Profile+", and its holder has ended", browser(p))
		return
	}
	var children []seen
	for _, q := range all {
		if q.ppid == p.PID && q.UID == p.UID && isProgram(q.exe, browserPrograms, v.Chromium) {
			children = append(children, q)
		}
	}
	switch len(children) {
	case 0:
		h.weigh("it has no browser process any more", nil)
	case 1:
		q := children[0]
		h.g.Browser = &q.Member
		h.weigh(fmt.Sprintf("its child %d is the browser of %s, with a process group of its own", q.PID, h.g.Profile), browser(q))
	default:
		h.weigh("", refuse(Ambiguous, "process %d has %d browser processes", p.PID, len(children)))
	}
}

func leadsGroup(m Member) error {
	if !m.complete() {
		return refuse(PGIDDiffers, "process %d does not lead its group %d", m.PID, m.PGID)
	}
	return nil
}

func instanceToken(p seen, g Generation) error {
	if ofInstance(p.args, g.Sockets, []string{g.Root}) == "" {
		return refuse(SignatureDiffers, "the command line of process %d names no path of this instance", p.PID)
	}
	return nil
}

// servesDisplay checks that a process has the lock of a display and is who
// answers on its socket.
func servesDisplay(pid, n int) error {
	lock, err := readXLock(n)
	switch {
	case err != nil:
		return refuse(Unreadable, "display :%d: %w", n, err)
	case !lock.exists || lock.pid != pid || lock.uid != os.Geteuid():
		return refuse(DisplayLockDiffers, "%s does not name process %d", xLock(n), pid)
	}
	return servesAlone(pid, xSocket(n))
}

// listensAlone checks that a process, and no other, listens on a socket of its
// Role.
func listensAlone(pid int, socket string) error {
	bound, err := listenerEvidence(pid, []string{socket})
	if err == nil && !bound {
		err = refuse(ListenerDiffers, "process %d does not listen on %s", pid, socket)
	}
	if err != nil {
		return err
	}
	return servesAlone(pid, socket)
}

// speaksOfAnother looks for what still can be read of environment and command
// line and contradicts that a process is the Instance's: the X display, authority
// or temporary directory of something else, or a path of another Instance.
// Programs may rewrite both, so that their silence says nothing.
func speaksOfAnother(pid int, lost Lost, g Generation) error {
	dir := filepath.Dir(g.Root)
	want := map[string]string{"XAUTHORITY": filepath.Join(dir, "xauth"), "TMPDIR": lost.Temp}
	if g.Display > 0 {
		want["DISPLAY"] = ":" + strconv.Itoa(g.Display)
	}
	var values []string
	if env, err := readProc(pid, "environ"); err == nil {
		for _, kv := range parseArgs(env) {
			name, value, _ := strings.Cut(kv, "=")
			if w := want[name]; w != "" && value != w {
				return refuse(ScopeContradicts, "process %d has %s in its environment, not %s", pid, kv, w)
			}
			values = append(values, value)
		}
	}
	if args, err := readArgs(pid); err == nil {
		for _, arg := range args {
			_, value, _ := strings.Cut(arg, "=")
			values = append(values, arg, value)
		}
	}
	for _, value := range values {
		if rel, ok := strings.CutPrefix(value, filepath.Dir(dir)+"/"); ok {
			if first, _, _ := strings.Cut(rel, "/"); first != filepath.Base(dir) {
				return refuse(ScopeContradicts, "process %d names %s, of another instance", pid, value)
			}
		}
	}
	return nil
}

// scopeEvidence says where systemd has a process, or why no process of this Role
// can be there. Membership is no identity: any process of the user can ask systemd
// to move another (systemd#26925), and a scope can be given up while its processes
// live (systemd#36781). So neither keeps a Role from being proven by the rest; what
// contradicts is a place that says that the process is something else:
//
//   - the recorded scope lives, in the recorded invocation, and it is elsewhere;
//   - the name of its scope was started anew by somebody;
//   - a scope or slice of another Stack, or of another Role of this one;
//   - a scope that holds other processes too: then it is some program's. One that
//     holds nothing but the Role was made around it;
//   - any other unit, above all a service: no Role was ever released there.
func (v *Verifier) scopeEvidence(ctx context.Context, lost Lost, role string, witness *Generation, pid int, groups []int) (string, error) {
	cg, err := unit.OfPID(pid)
	if err != nil {
		return "", refuse(ScopeContradicts, "cgroup of process %d: %w", pid, err)
	}
	if witness != nil {
		info, err := v.Units.Info(ctx, witness.Unit)
		switch {
		case errors.Is(err, unit.ErrNotLoaded):
		case err != nil:
			return "", refuse(UnitUnknown, "%w", err)
		case info.Active() && info.InvocationID == witness.InvocationID && info.ControlGroup != cg.Path:
			return "", refuse(ScopeContradicts, "process %d is in %s while its recorded scope %s lives", pid, cg.Path, witness.Unit)
		case info.Active() && info.InvocationID == witness.InvocationID:
			return "is in its recorded scope " + witness.Unit, nil
		case info.Active() && info.ControlGroup == cg.Path:
			return "", refuse(ScopeContradicts, "process %d is in %s, which somebody started anew", pid, witness.Unit)
		}
		if cg.Path == witness.Cgroup {
			if id, err := cg.ID(); err != nil || id != witness.CgroupID {
				return "", refuse(ScopeContradicts, "cgroup %s of process %d was made anew", cg.Path, pid)
			}
			return "is in the cgroup of its recorded scope, which systemd has given up", nil
		}
	}
	own := strings.TrimSuffix(lost.Claim.Slice, ".slice") + "-"
	fleet := strings.TrimSuffix(own, lost.Claim.Instance+"-")
	for _, name := range strings.Split(cg.Path, "/") {
		if strings.HasPrefix(name, fleet) && name != lost.Claim.Slice && !strings.HasPrefix(name, own) {
			return "", refuse(ScopeContradicts, "process %d is in %s, of another Stack", pid, cg.Path)
		}
	}
	name := path.Base(cg.Path)
	switch {
	case strings.HasPrefix(name, own+role+"-"):
		return "is in " + name + ", named for this role", nil
	case strings.HasPrefix(name, own):
		return "", refuse(ScopeContradicts, "process %d is in %s, of another role", pid, name)
	case !strings.HasSuffix(name, ".scope"):
		return "", refuse(ScopeContradicts, "process %d is in %s, where no role was ever released", pid, cg.Path)
	}
	if err := within(cg, groups); err != nil {
		return "", err
	}
	return "was moved to " + name + ", which holds nothing else", nil
}

// within checks that all processes of a cgroup are in the process groups.
func within(cg unit.Cgroup, groups []int) error {
	tree, err := cg.Subtree()
	if err != nil {
		return refuse(Unreadable, "cgroup %s: %w", cg.Path, err)
	}
	for _, c := range tree {
		procs, err := c.Procs()
		if err != nil {
			return refuse(Unreadable, "cgroup %s: %w", c.Path, err)
		}
		for _, pid := range procs {
			m, _, err := observe(pid)
			switch {
			case ReasonOf(err) == PIDGone:
			case err != nil:
				return err
			case !slices.Contains(groups, m.PGID):
				return refuse(ScopeContradicts, "%s holds process %d too, of another process group", c.Path, pid)
			}
		}
	}
	return nil
}

// Reconstruct makes a new Generation of a Role out of the one process that proves
// to lead it, puts it and the processes of its group into the scope, and writes
// its pidfile. It signals nobody; the new Generation is verified by Live before
// anybody does, as any other. scope names a unit that never existed; its PID and
// Others are filled in.
//
// Any doubt about any Role of the Stack is a *Refusal and changes nothing; that the
// Role has ended meanwhile is one too, as Ended tells. The processes are examined
// twice, the second time while pidfds hold them.
func (v *Verifier) Reconstruct(ctx context.Context, lost Lost, role string, scope unit.Scope) (Generation, error) {
	first, err := v.heirOf(ctx, lost, role)
	if err != nil {
		return Generation{}, err
	}
	for _, m := range first.g.members() {
		fd, err := pidfdOpen(m.PID)
		if err != nil {
			return Generation{}, err
		}
		defer unix.Close(fd)
	}
	h, err := v.heirOf(ctx, lost, role)
	switch {
	case err != nil:
		return Generation{}, err
	case slices.ContainsFunc(h.g.members(), func(m Member) bool { return !slices.Contains(first.g.members(), m) }):
		return Generation{}, refuse(Ambiguous, "the %s changed while it was looked at", role)
	}
	others, release, err := h.holdOthers()
	defer release()
	if err != nil {
		return Generation{}, err
	}
	scope.PID, scope.Others = h.g.Leader.PID, others
	info, err := v.Units.StartScope(ctx, scope)
	if err != nil {
		return Generation{}, fmt.Errorf("scope for %s: %w", role, err)
	}
	// systemd is told numbers, not pidfds: what ended since it was last seen to run
	// may have left its number to a stranger.
	if err := within(info.Cgroup(), h.groups()); err != nil {
		return Generation{}, err
	}
	base := h.g
	base.Browser = nil
	g, err := Capture(info, h.g.Leader.PID, base)
	if err != nil {
		return Generation{}, err
	}
	g.Browser = h.g.Browser
	for _, m := range g.members() {
		got, _, err := observe(m.PID)
		if err == nil {
			err = m.same(got)
		}
		if err == nil {
			err = inCgroup(m.PID, g)
		}
		if err != nil {
			return Generation{}, err
		}
	}
	if g.Leader != h.g.Leader {
		return Generation{}, refuse(StartTimeDiffers, "process %d is another one now", g.Leader.PID)
	}
	return g, WritePidfile(PidfilePath(g), g)
}

// holdOthers returns the live processes of the heir's groups without the leader,
// each held by a pidfd from before its group was read to the call of release, and
// seen to run after all of them were read. One that ended since the heir was
// examined is left out; a number that is a stranger's now is a *Refusal.
func (h heir) holdOthers() (pids []int, release func(), err error) {
	var fds, held []int
	release = func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	for _, pid := range h.group {
		if pid == h.g.Leader.PID {
			continue
		}
		fd, err := pidfdOpen(pid)
		if Ended(err) {
			continue
		}
		if err != nil {
			return nil, release, err
		}
		fds, held = append(fds, fd), append(held, pid)
		m, _, err := observe(pid)
		switch {
		case Ended(err):
		case err != nil:
			return nil, release, err
		case !slices.Contains(h.groups(), m.PGID):
			return nil, release, refuse(PGIDDiffers, "process %d is in group %d, which is not the browser's", pid, m.PGID)
		}
	}
	for i, pid := range held {
		if err := running(fds[i], pid); err == nil {
			pids = append(pids, pid)
		} else if !Ended(err) {
			return nil, release, err
		}
	}
	return pids, release, nil
}

// heirOf returns the process that a Role can be reconstructed from.
func (v *Verifier) heirOf(ctx context.Context, lost Lost, role string) (heir, error) {
	found, err := v.Settled(ctx, lost)
	if err != nil {
		return heir{}, err
	}
	for _, f := range found {
		if f.Verdict == Doubtful {
			return heir{}, refuse(Ambiguous, "%s: %s", f.Role, strings.Join(f.Against, "; "))
		}
	}
	for _, f := range found {
		switch {
		case f.Role != role:
		case f.Verdict == Gone:
			return heir{}, refuse(PIDGone, "no process of the %s is left", role)
		case f.Verdict == Reconstructible:
			return f.heir, nil
		}
	}
	return heir{}, refuse(Ambiguous, "nothing of the %s has to be proven", role)
}
