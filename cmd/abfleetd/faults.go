//go:build faults

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"abfleet/internal/store"
)

// withFaults makes a service that tests/faults can have die at a store write.
// The directory $ABF_FAULTS tells it when: its file "arm" holds "before N" or
// "after N", counted from the first write that sees it. Every write that sees the
// file adds a line to "writes". No build that users get has this.
func withFaults(db store.DB) store.DB {
	if dir := os.Getenv("ABF_FAULTS"); dir != "" {
		return &dying{DB: db, dir: dir}
	}
	return db
}

type dying struct {
	store.DB
	dir string

	mu    sync.Mutex // guards the fields that follow
	armed string
	n     int
}

func (d *dying) Update(ctx context.Context, fn func(*store.Tx) error) error {
	before, after := d.next()
	if before {
		d.die()
	}
	err := d.DB.Update(ctx, fn)
	if after {
		d.die()
	}
	return err
}

// next counts a write and says whether it is the one to die at.
func (d *dying) next() (before, after bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	data, err := os.ReadFile(filepath.Join(d.dir, "arm"))
	arm := strings.TrimSpace(string(data))
	if err != nil || arm == "" {
		d.armed = ""
		return false, false
	}
	if arm != d.armed {
		d.armed, d.n = arm, 0
	}
	d.n++
	if f, err := os.OpenFile(filepath.Join(d.dir, "writes"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err == nil {
		fmt.Fprintln(f, d.n)
		f.Close()
	}
	return arm == fmt.Sprint("before ", d.n), arm == fmt.Sprint("after ", d.n)
}

func (d *dying) die() {
	os.Remove(filepath.Join(d.dir, "arm"))
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
