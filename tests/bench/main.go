// Command bench measures the fleet against a floor or a peer in the same run,
// interleaved, inside a rig on a persistent home, and fails when a ratio is
// missed. Absolute values are printed only.
//
//	go run ./tests/bench [-n 20] [-only stack,tools,...] [-json FILE]
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"abfleet/tests/rig"
)

// Where this program and its npm peers are seen inside the rig.
const (
	insideDir = "/opt/abfleet/bench"
	peersDir  = "/opt/abfleet/peers"
)

// suiteWait bounds one suite, per sample.
const suiteWait = time.Minute

// row is one comparison: ours against other, in the unit that the name says.
type row struct {
	Name  string    `json:"name"`
	Ours  []float64 `json:"ours"`
	Other []float64 `json:"other"`
	Peer  string    `json:"peer"`  // what Other is
	Limit float64   `json:"limit"` // greatest allowed ratio of medians; 0: printed only
	Unit  string    `json:"unit"`
	// Ceiling bounds Ours alone; it is for sizes, never for times.
	Ceiling float64 `json:"ceiling,omitempty"`
}

// suites are the groups of rows that run inside the rig, by name and in order.
var suites = []struct {
	name string
	run  func(b *bencher) error
}{
	{"scope", benchScope},
	{"clone", benchClone},
	{"stack", benchStack},
	{"holder", benchHolder},
	{"activation", benchActivation},
	{"service", benchService},
	{"tools", benchTools},
	{"reaction", benchReaction},
	{"idle", benchIdle},
}

func main() {
	n := flag.Int("n", 20, "samples of each side")
	only := flag.String("only", "", "comma-separated suites")
	file := flag.String("json", "", "write all samples to `FILE`, too")
	inner := flag.String("inner", "", "run one suite here (used inside the rig)")
	noop := flag.Bool(noopFlag, false, "be a service that does nothing (used inside the rig)")
	flag.Parse()
	if *noop { // and ends by SIGTERM, which is caught below
		fmt.Fprintln(os.Stderr, "bench:", serveNoop())
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *inner != "" {
		err = runInner(ctx, *inner, *n)
	} else {
		err = runOuter(ctx, *n, *only, *file)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bencher collects rows of one suite.
type bencher struct {
	context.Context
	n   int
	out *json.Encoder
}

func (b *bencher) emit(r row) error { return b.out.Encode(r) }

func runInner(ctx context.Context, name string, n int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(n)*suiteWait)
	defer cancel()
	for _, s := range suites {
		if s.name == name {
			return s.run(&bencher{Context: ctx, n: n, out: json.NewEncoder(os.Stdout)})
		}
	}
	return fmt.Errorf("no suite %q", name)
}

func runOuter(ctx context.Context, n int, only, file string) (err error) {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	bin, err := filepath.Abs("bin")
	if err != nil {
		return err
	}
	peers, err := filepath.Abs("tests/peers")
	if err != nil {
		return err
	}
	for _, need := range []string{bin + "/abfleet-role", peers + "/node_modules/@playwright/mcp"} {
		if _, err := os.Stat(need); err != nil {
			return errors.New("run make build peers first")
		}
	}
	r, err := rig.Boot(ctx, rig.Options{Name: "bench", Binds: map[string]string{bin: rig.BinDir, peers: peersDir, exe: insideDir + "/bench"}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()

	fmt.Printf("%-34s %28s  %-44s %6s %8s\n", "", "ours", "against", "ratio", "limit")
	var missed []string
	var all []row
	for _, s := range suites {
		if only != "" && !slices.Contains(strings.Split(only, ","), s.name) {
			continue
		}
		cmd := r.User(ctx, insideDir+"/bench", "-inner", s.name, "-n", fmt.Sprint(n))
		cmd.Stderr = os.Stderr
		rows, err := readRows(cmd)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		all = append(all, rows...)
		for _, r := range rows {
			if !r.print() {
				missed = append(missed, r.Name)
			}
		}
	}
	if file != "" {
		text, err := json.Marshal(all)
		if err := errors.Join(err, os.WriteFile(file, text, 0o644)); err != nil {
			return err
		}
	}
	if missed != nil {
		return fmt.Errorf("missed: %s", strings.Join(missed, ", "))
	}
	return nil
}

func readRows(cmd *exec.Cmd) ([]row, error) {
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var rows []row
	dec := json.NewDecoder(pipe)
	for dec.More() {
		var r row
		if err := dec.Decode(&r); err != nil {
			return nil, errors.Join(err, cmd.Wait())
		}
		rows = append(rows, r)
	}
	return rows, cmd.Wait()
}

// print shows the row and reports whether its limits hold.
func (r row) print() bool {
	ours, other := median(r.Ours), median(r.Other)
	ok := true
	ratio, limit := "", ""
	if len(r.Other) > 0 && other > 0 {
		ratio = fmt.Sprintf("%.2f", ours/other)
		if r.Limit > 0 {
			limit = fmt.Sprintf("%.2f", r.Limit)
			ok = ours/other <= r.Limit
		}
	}
	if r.Ceiling > 0 {
		limit = fmt.Sprintf("%.0f %s", r.Ceiling, r.Unit)
		ok = ok && ours <= r.Ceiling
	}
	mark := ""
	if !ok {
		mark = "  MISSED"
	}
	against := ""
	if len(r.Other) > 0 {
		against = fmt.Sprintf("%s %s", spread(r.Other, r.Unit), r.Peer)
	}
	fmt.Printf("%-34s %28s  %-44s %6s %8s%s\n", r.Name, spread(r.Ours, r.Unit), against, ratio, limit, mark)
	return ok
}

func spread(v []float64, unit string) string {
	if len(v) == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f (%.1f-%.1f) %s", median(v), slices.Min(v), slices.Max(v), unit)
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	if len(v)%2 == 1 {
		return v[len(v)/2]
	}
	return (v[len(v)/2-1] + v[len(v)/2]) / 2
}
