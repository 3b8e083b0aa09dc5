package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/sd"
	"abfleet/runtime/proof"
)

// reactionCeiling is how soon the end of a browser has to be told, in
// milliseconds.
const reactionCeiling = 200

// benchReaction measures how long it takes from the death of a browser that
// nobody uses to the event that tells of it with its cause.
func benchReaction(b *bencher) error {
	if err := install(b, "reaction"); err != nil {
		return err
	}
	follow := exec.CommandContext(b, "journalctl", "--user", "-f", "-n", "0", "-o", "json", "MESSAGE_ID="+sd.MessageID(string(audit.SessionEnded)))
	pipe, err := follow.StdoutPipe()
	if err == nil {
		err = follow.Start()
	}
	if err != nil {
		return err
	}
	defer func() {
		follow.Process.Kill()
		follow.Wait()
	}()
	lines := bufio.NewScanner(pipe)
	lines.Buffer(nil, 1<<20)
	r := row{Name: "SIGKILL of a browser to its event", Unit: "ms", Ceiling: reactionCeiling}
	for range b.n {
		if err := abfleet(b, "session", "use", "reaction", "reaction"); err != nil {
			return err
		}
		s, err := show(b, "reaction")
		if err != nil {
			return err
		}
		g, err := recorded(s)
		if err != nil {
			return err
		}
		begin := time.Now()
		if err := syscall.Kill(g.Browser.PID, syscall.SIGKILL); err != nil {
			return err
		}
		if !lines.Scan() {
			return errors.Join(errors.New("the journal ended"), lines.Err())
		}
		var line struct {
			At      string `json:"__REALTIME_TIMESTAMP"`
			Message string `json:"MESSAGE"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return err
		}
		at, err := strconv.ParseInt(line.At, 10, 64)
		if err != nil || !strings.Contains(line.Message, "SIGKILL") {
			return fmt.Errorf("the end of the browser is told as %q at %q", line.Message, line.At)
		}
		r.Ours = append(r.Ours, float64(at-begin.UnixMicro())/1000)
	}
	return errors.Join(b.emit(r), abfleet(b, "session", "stop", "reaction"))
}

// show is abfleet session show.
func show(ctx context.Context, session string) (*api.Session, error) {
	out, err := exec.CommandContext(ctx, "abfleet", "session", "show", session, "--json").Output()
	var answer api.Answer
	if jerr := json.Unmarshal(out, &answer); err != nil || jerr != nil || answer.Session == nil {
		return nil, fmt.Errorf("session show %s: %w: %s", session, errors.Join(err, jerr), out)
	}
	return answer.Session, nil
}

// recorded is the evidence of a session's running browser.
func recorded(s *api.Session) (proof.Generation, error) {
	return proof.ReadPidfile(filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "abfleet", s.Instance, proof.RoleChromium+".pid"))
}

const (
	// idleStacks run without a client for idleWindows times idleFor; idleAfter is
	// what the start of a browser keeps the Go runtimes busy for: memory is given
	// back little by little. Every second minute has a garbage collection.
	idleStacks  = 5
	idleFor     = time.Minute
	idleWindows = 3
	idleAfter   = 90 * time.Second
	// idleCeiling is how often they may wake up together in a minute without a
	// collection and without a word from Chromium; those with one are printed.
	idleCeiling = 30
)

// benchIdle counts the wake-ups of the service and of all holders while nothing
// is asked of them, and prints what they were.
func benchIdle(b *bencher) error {
	if _, err := exec.LookPath("strace"); err != nil {
		return errors.New("strace is missing: make deps installs it")
	}
	if err := install(b, "idle"); err != nil {
		return err
	}
	names := map[int]string{}
	for i := range idleStacks {
		session := fmt.Sprintf("idle-%d", i)
		if err := abfleet(b, "session", "use", session, "idle"); err != nil {
			return err
		}
		s, err := show(b, session)
		if err != nil {
			return err
		}
		g, err := recorded(s)
		if err != nil {
			return err
		}
		names[g.Leader.PID] = roles[1]
	}
	out, err := exec.CommandContext(b, "systemctl", "--user", "show", "-P", "MainPID", serviceUnit).Output()
	if err != nil {
		return err
	}
	service, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		return err
	}
	names[service] = roles[0]
	if err := pause(b, idleAfter); err != nil {
		return err
	}
	every := row{Name: fmt.Sprintf("wake-ups of %d Stacks, every minute", idleStacks)}
	before, err := slept(names)
	if err != nil {
		return err
	}
	for range idleWindows {
		if err := pause(b, idleFor); err != nil {
			return err
		}
		after, err := slept(names)
		if err != nil {
			return err
		}
		all := 0
		for _, name := range roles {
			all += after[name] - before[name]
			fmt.Fprintf(os.Stderr, "wake-ups of every %s: %d\n", name, after[name]-before[name])
		}
		every.Ours = append(every.Ours, float64(all))
		before = after
	}
	summary, err := trace(b, names)
	if err != nil {
		return err
	}
	fmt.Fprint(os.Stderr, summary)
	for i := range idleStacks {
		err = errors.Join(err, abfleet(b, "session", "stop", fmt.Sprintf("idle-%d", i)))
	}
	quiet := row{Name: fmt.Sprintf("wake-ups of %d Stacks, a quiet minute", idleStacks), Ours: []float64{slices.Min(every.Ours)}, Ceiling: idleCeiling}
	return errors.Join(err, b.emit(quiet), b.emit(every))
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// roles are the kinds of processes that are counted.
var roles = []string{"service", "holder"}

// slept is how often threads of the processes have gone to sleep so far: so often
// they wake up.
func slept(names map[int]string) (map[string]int, error) {
	total := map[string]int{}
	for pid, name := range names {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			status, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			_, count, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
			n, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(count, "\n", 2)[0]))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			total[name] += n
		}
	}
	return total, nil
}

// trace returns strace's summary of what the processes do in as long again. Under
// it they sleep more often: it says what they wake up for, not how often.
func trace(ctx context.Context, names map[int]string) (string, error) {
	var all strings.Builder
	for _, name := range roles {
		args := []string{"-f", "-c", "-S", "calls"}
		for pid, of := range names {
			if of == name {
				args = append(args, "-p", strconv.Itoa(pid))
			}
		}
		tctx, cancel := context.WithTimeout(ctx, idleFor)
		cmd := exec.CommandContext(tctx, "strace", args...)
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
		text, err := cmd.CombinedOutput()
		ended := tctx.Err()
		cancel()
		if err != nil && ended == nil {
			return "", fmt.Errorf("strace: %w: %s", err, text)
		}
		fmt.Fprintf(&all, "system calls of every %s:\n", name)
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "strace: ") {
				all.WriteString(line)
			}
		}
	}
	return all.String(), nil
}
