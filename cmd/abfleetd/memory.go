package main

import (
	"math"
	"runtime/debug"
	"runtime/metrics"
)

// unattendedGrowth is how much garbage a service without connections may make, in
// bytes, before it is collected.
const unattendedGrowth = 8 << 20

// collect sets when garbage is collected. Without connections it is by size alone:
// Go forces a collection every two minutes otherwise, and gives memory back little
// by little after it, all of which wakes a service that has nothing to do.
func collect(attended bool) {
	if attended {
		debug.SetGCPercent(100)
		debug.SetMemoryLimit(math.MaxInt64)
		return
	}
	debug.FreeOSMemory()
	debug.SetMemoryLimit(inUse() + unattendedGrowth)
	debug.SetGCPercent(-1)
}

// inUse is the memory that Go counts towards its limit, in bytes.
func inUse() int64 {
	sample := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64() - sample[1].Value.Uint64())
}
