package main

import (
	"time"

	"abfleet/internal/api"
	"abfleet/tests/site"
)

// names are the two Profiles, which are also the sessions that have them, the
// value that each one's change writes and the order of every pair below.
var names = [2]string{"A", "B"}

// Report is what the experiment saw. What it did not come to is absent.
type Report struct {
	StartedAt          time.Time   `json:"startedAt"`
	Doctor             *api.Doctor `json:"doctor,omitempty"`
	TemplateLoginState *site.Login `json:"templateLoginState,omitempty"`
	Snapshot           *Snapshot   `json:"snapshot,omitempty"`
	Clones             *Clones     `json:"clones,omitempty"`
	Concurrent         Concurrent  `json:"concurrent"`
	Cost               *Cost       `json:"cost,omitempty"`
	Endpoints          *Endpoints  `json:"endpoints,omitempty"`
	RestartPersistence []Storage   `json:"restartPersistence,omitempty"`
	OK                 bool        `json:"ok"`
	Error              string      `json:"error,omitempty"`
	FinishedAt         time.Time   `json:"finishedAt"`
}

// Storage is what a Profile holds on the test site: the login it was cloned
// with and its own change.
type Storage struct {
	Profile string     `json:"profile"` // which one: "A" or "B"
	Login   site.Login `json:"login"`
	Change  Change     `json:"change"`
}

// Change is one value in each kind of storage; "" where there is none.
type Change struct {
	PersistentCookie string `json:"persistentCookie"`
	SessionCookie    string `json:"sessionCookie"`
	LocalStorage     string `json:"localStorage"`
	IndexedDB        string `json:"indexedDB"`
}

// changed is what a Profile holds after its change was made.
func changed(name string) Change { return Change{name, name, name, name} }

// Disk is the size of a tree.
type Disk struct {
	ApparentBytes  int64 `json:"apparentBytes"`
	AllocatedBytes int64 `json:"allocatedBytes"`
}

// Snapshot describes the Template Snapshot.
type Snapshot struct {
	LocalStateBytes int64 `json:"localStateBytes"`
	Disk            Disk  `json:"disk"`
	ReadOnly        bool  `json:"readOnly"`  // no directory or file has a write bit
	Unchanged       bool  `json:"unchanged"` // both Profiles have run and it is as it was
}

// Clones says how the Profiles came to be.
type Clones struct {
	// Seconds of each from select to controllable; the two overlap.
	Seconds map[string]float64 `json:"seconds"`
	// Overlap is how long both were being started, in seconds.
	Overlap float64 `json:"overlapSeconds"`
}

// Concurrent is what the two Profiles held while both browsers ran.
type Concurrent struct {
	Initial                  []Storage `json:"initial,omitempty"`
	AfterIndependentMutation []Storage `json:"afterIndependentMutation,omitempty"`
}

// Cost is what the trees take on disk and the processes of each browser, display
// and holder included, in memory.
type Cost struct {
	Disk   map[string]Disk  `json:"disk"` // template, snapshot, profileA, profileB
	RSSKiB map[string]int64 `json:"rssKiB"`
	PSSKiB map[string]int64 `json:"pssKiB"`
}

// Endpoints is everything that listens while both browsers run, but for the
// test site.
type Endpoints struct {
	AllPrivate bool       `json:"allPrivate"`
	Listeners  []Listener `json:"listeners"`
}

// Listener is one endpoint. Private is: a loopback address, or a path that only
// its user may open.
type Listener struct {
	Kind    string `json:"kind"` // "tcp", "udp", "unix", "abstract"
	Address string `json:"address"`
	Mode    string `json:"mode,omitempty"`
	Private bool   `json:"private"`
}
