package main

import (
	"iter"
	"strings"
)

func lines(s string) iter.Seq[string] { return strings.SplitSeq(s, "\n") }
