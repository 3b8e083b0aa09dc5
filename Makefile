# Everything here works on a fresh Debian 12 as root; see README.md.
SHELL := /bin/bash
export CGO_ENABLED := 0
export GOFLAGS := -trimpath
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X abfleet/internal/api.Version=$(VERSION)
WEB := internal/server/web
FUZZTIME ?= 30s
TESTFLAGS ?=
BENCHFLAGS ?=

.PHONY: build run test check bench faults soak fuzz experiment fresh clean root deps web binaries peers

build: web binaries

binaries:
	@mkdir -p bin
	go build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

# The page and noVNC, bundled from npm packages into one folder that the
# service embeds. Rebuilt only when a source or the lock file changed.
web: $(WEB)/dist/index.html
$(WEB)/dist/index.html: $(WEB)/package-lock.json $(wildcard $(WEB)/src/*) $(wildcard $(WEB)/*.mjs) $(wildcard $(WEB)/*.json) $(wildcard $(WEB)/*.html) $(WEB)/.npmrc
	cd $(WEB) && npm ci --no-audit --no-fund --loglevel=error && npm run --silent build
	@touch $@

# Debian packages that running and testing need; prints what it installs.
deps:
	go run ./tests/rig/cmd deps

# The npm packages that only tests use: real MCP clients and peers.
peers: tests/peers/node_modules/.package-lock.json
tests/peers/node_modules/.package-lock.json: tests/peers/package-lock.json
	cd tests/peers && npm ci --no-audit --no-fund --loglevel=error --ignore-scripts
	@touch $@

# Not "go run": it would call an end by Ctrl-C a failure.
run: deps build
	@mkdir -p .cache
	go build -o .cache/rig ./tests/rig/cmd
	@.cache/rig run

check: web
	@out=$$(gofmt -l cmd internal runtime tests units); test -z "$$out" || { echo "gofmt: $$out"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	CGO_ENABLED=1 go test -p 1 -race -short -timeout 10m $$(go list ./internal/... ./runtime/... ./tests/conformance/...)

# One package at a time: real browsers on two cores disturb each other's deadlines.
test: root deps build peers
	go test -p 1 -timeout 20m $(TESTFLAGS) ./...

# Without it, every test that boots a systemd would be skipped, and all be green.
root:
	@test "$$(id -u)" = 0 || { echo "make test boots a private systemd, for which it needs root: sudo make test" >&2; exit 1; }

# The Profile experiment on real browsers: .experiment/latest/experiment-report.json
experiment: deps build
	go run ./tests/experiment

# make run and make test in a new Debian 12, from a clone of HEAD.
fresh:
	tests/fresh/fresh.sh

# Every fault that can be made on purpose; every test that has rounds, with many.
faults: deps build
	tests/long.sh faults
soak: deps build
	tests/long.sh soak

# Every fuzz target of the tree, FUZZTIME each.
fuzz: web
	tests/long.sh fuzz $(FUZZTIME)

# What building and testing made; never logins or state, which are not here.
clean:
	rm -rf bin .cache .experiment $(WEB)/node_modules tests/peers/node_modules
	find $(WEB)/dist -mindepth 1 ! -name .gitkeep -delete

# Ratios against floors and peers of the same run, in a rig; BENCHFLAGS='-only tools -n 50'.
bench: deps build peers
	go run ./tests/bench -n 20 $(BENCHFLAGS)
