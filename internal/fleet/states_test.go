package fleet

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write docs/states.md")

// TestDiagram keeps the diagram that people read equal to the table.
func TestDiagram(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "states.md")
	if *update {
		if err := os.WriteFile(path, []byte(diagram()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != diagram() {
		t.Error("docs/states.md is not what the table says: run go test ./internal/fleet -run TestDiagram -update")
	}
}

func allFacts() []facts {
	var all []facts
	for i := range 16 {
		all = append(all, facts{proof: i&1 != 0, vacant: i&2 != 0, user: i&4 != 0, whole: i&8 != 0})
	}
	return all
}

// TestTableIsSound protects the one-row-per-case reading of the table: no
// state and trigger has two rows for the same facts, every state can be
// reached, and every state of a runtime can be left.
func TestTableIsSound(t *testing.T) {
	type key struct {
		m    machine
		from State
		on   trigger
	}
	reached := map[machine]map[State]bool{machineRuntime: {Stopped: true}}
	left := map[State]bool{}
	for _, tr := range transitions {
		if reached[tr.machine] == nil {
			reached[tr.machine] = map[State]bool{}
		}
		reached[tr.machine][tr.to] = true
		if tr.machine == machineRuntime && tr.to != tr.from {
			left[tr.from] = true
		}
		if guards[tr.guard] == nil {
			t.Errorf("%+v has an unknown guard", tr)
		}
	}
	for _, f := range allFacts() {
		rows := map[key]int{}
		for _, tr := range transitions {
			if guards[tr.guard](f) {
				rows[key{tr.machine, tr.from, tr.on}]++
			}
		}
		for k, n := range rows {
			if n > 1 {
				t.Errorf("%+v with %+v has %d rows", k, f, n)
			}
		}
	}
	for _, tr := range transitions {
		if tr.from != stateNone && !reached[tr.machine][tr.from] {
			t.Errorf("%s %s is never reached", tr.machine, tr.from)
		}
	}
	for _, s := range []State{Stopped, Starting, Controllable, Stopping, Unverified, Broken, Quarantined} {
		if !reached[machineRuntime][s] || !left[s] {
			t.Errorf("runtime state %s: reached %v, left %v", s, reached[machineRuntime][s], left[s])
		}
	}
}

// TestNoHope protects rule 5 of the design on every path through the table:
// a runtime gets controllable by proof only, gets stopped by proven absence
// only, and leaves BROKEN by a person's action only. A Profile that is not
// proven free is never READY again without a person, and neither an Identity
// with a snapshot nor a Profile that was usable goes without one.
func TestNoHope(t *testing.T) {
	triggers := map[machine][]trigger{}
	for _, tr := range transitions {
		triggers[tr.machine] = append(triggers[tr.machine], tr.on)
	}
	rapid.Check(t, func(t *rapid.T) {
		state := map[machine]State{machineRuntime: Stopped, machineProfile: stateNone, machineIdentity: stateNone}
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			m := rapid.SampledFrom([]machine{machineRuntime, machineProfile, machineIdentity}).Draw(t, "machine")
			on := rapid.SampledFrom(triggers[m]).Draw(t, "trigger")
			f := rapid.SampledFrom(allFacts()).Draw(t, "facts")
			from := state[m]
			to, err := next(m, from, on, f)
			if err != nil {
				if to != from {
					t.Fatalf("%s: refused trigger moved %s to %s", m, from, to)
				}
				continue
			}
			state[m] = to
			switch {
			case m == machineRuntime && to == Controllable && !f.proof:
				t.Fatalf("%s -> %s on %q without proof", from, to, on)
			case m == machineRuntime && to == Stopped && !f.vacant:
				t.Fatalf("%s -> %s on %q without vacancy", from, to, on)
			case m == machineRuntime && from == Broken && to != Broken && !(f.vacant && f.user):
				t.Fatalf("%s -> %s on %q without a person and a proof", from, to, on)
			case m == machineProfile && from == Broken && to != Broken && !(f.vacant && f.user):
				t.Fatalf("Profile %s -> %s on %q without a person and a proof", from, to, on)
			case m == machineProfile && to == Ready && from == Creating && !f.proof && !(on == onRestored && f.user):
				t.Fatalf("Profile %s -> %s on %q without proof", from, to, on)
			case m == machineIdentity && from == Ready && to != Ready && !(on == onDelete && f.user && f.vacant):
				t.Fatalf("Identity %s -> %s on %q with %+v", from, to, on, f)
			case m == machineProfile && (from == Ready || from == NeedsLogin) && to == stateNone && !(on == onDelete && f.user && f.vacant):
				t.Fatalf("Profile %s is lost on %q with %+v", from, on, f)
			case m == machineProfile && from == Ready && to == NeedsLogin && !f.user:
				t.Fatalf("Profile %s -> %s on %q without a person", from, to, on)
			}
		}
	})
}
