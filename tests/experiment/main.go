// Command experiment tries on real browsers what Profiles promise, and writes
// down what it saw: one Identity is logged in and saved, two sessions get a
// Profile of it each at the same time, both are logged in, each changes its own
// at the same time, neither sees the other's change, and both survive a clean
// stop and a start. It boots a rig, needs root and the programs in bin/, and
// writes its report also when something does not hold.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// rootVariable names the directory that reports go below.
	rootVariable = "AGENT_BROWSER_FLEET_EXPERIMENT_ROOT"
	defaultRoot  = ".experiment"
	reportFile   = "latest/experiment-report.json"
	// timeLimit bounds the whole experiment. It takes about half a minute on an
	// idle machine.
	timeLimit = 10 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()

	report := &Report{StartedAt: time.Now().UTC()}
	err := run(ctx, report)
	report.OK = err == nil
	if err != nil {
		report.Error = err.Error()
	}
	report.FinishedAt = time.Now().UTC()

	path, werr := write(report)
	if err := errors.Join(err, werr); err != nil {
		fmt.Fprintln(os.Stderr, "experiment:", err)
	}
	if path != "" {
		fmt.Printf("ok: %t, %.1f s, report: %s\n", report.OK, report.FinishedAt.Sub(report.StartedAt).Seconds(), path)
	}
	if err != nil || werr != nil {
		os.Exit(1)
	}
}

// write replaces the latest report.
func write(report *Report) (string, error) {
	root := os.Getenv(rootVariable)
	if root == "" {
		root = defaultRoot
	}
	path := filepath.Join(root, reportFile)
	data, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o644); err != nil {
		return "", err
	}
	return path, os.Rename(path+".new", path)
}
