package page

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// framesAtOnce is how many child frames are asked for their snapshot at the
// same time.
const framesAtOnce = 8

// frameWait bounds the wait for the snapshot of one child frame; a frame that
// hangs shows as an empty one.
const frameWait = 2 * time.Second

// snapshotWait bounds a snapshot as a whole, on pages of any size.
const snapshotWait = 30 * time.Second

// snapshotAnswer is what the walker's snapshot() answers.
type snapshotAnswer struct {
	Text   string `json:"text"`
	Frames []struct {
		Line   int    `json:"line"`
		Handle string `json:"handle"`
		Indent int    `json:"indent"`
		Depth  int    `json:"depth"`
	} `json:"frames"`
}

// Snapshot prints the page, or one element of it, as lines of roles, names and
// refs, with the contents of its frames in their places. A page that replaces
// its document meanwhile is printed anew.
func (t *Tab) Snapshot(ctx context.Context, o SnapshotOptions) (string, error) {
	op := "take snapshot"
	if o.Target != "" {
		op = "take snapshot of " + quote(o.Target)
	}
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		return "", t.b.explain(op, err)
	}
	defer end()
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	var text string
	err = t.onMain(ctx, func(ctx context.Context, f *frame) error {
		if err := t.learnPrefixes(ctx); err != nil {
			return err
		}
		p := place{frame: f}
		if o.Target != "" {
			var err error
			if p, err = t.place(ctx, o.Target); err != nil {
				return err
			}
		}
		var err error
		text, err = t.snapshotFrame(ctx, p.frame, p.target, o.Depth, o.Boxes, o.MaxBytes)
		return err
	})
	if err != nil {
		return "", t.explain(op, o.Target, err)
	}
	return text, nil
}

func (t *Tab) snapshotFrame(ctx context.Context, f *frame, target string, depth *int, boxes bool, maxBytes int) (string, error) {
	t.b.mu.Lock()
	seq := f.seq
	t.b.mu.Unlock()
	opts := map[string]any{"prefix": refPrefix(seq)}
	if target != "" {
		opts["target"] = target
	}
	if depth != nil {
		opts["depth"] = *depth
	}
	if boxes {
		opts["boxes"] = true
	}
	if maxBytes > 0 {
		opts["maxBytes"] = maxBytes
	}
	expr, err := callExpression("snapshot", []any{opts})
	if err != nil {
		return "", err
	}
	var r snapshotAnswer
	if err := t.script(ctx, f, &r, fmt.Sprintf("(%s??=%d,%s)", seqVariable, seq, expr)); err != nil {
		return "", err
	}
	if len(r.Frames) == 0 {
		return r.Text, nil
	}
	children, err := t.snapshotChildren(ctx, f, r, depth, boxes, maxBytes)
	if err != nil {
		return "", err
	}
	return splice(r, children), nil
}

// snapshotChildren takes the snapshots of the frames in an answer, "" where
// there is nothing to read. The bytes left are given out in document order, so
// frames are asked in turns when there is a cap.
func (t *Tab) snapshotChildren(ctx context.Context, f *frame, r snapshotAnswer, depth *int, boxes bool, maxBytes int) ([]string, error) {
	children := make([]string, len(r.Frames))
	left := maxBytes - len(r.Text)
	var (
		wg   sync.WaitGroup
		gone sync.Once
		lost error
	)
	slots := make(chan struct{}, framesAtOnce)
	for i, fr := range r.Frames {
		var childDepth *int
		if depth != nil {
			d := *depth - fr.Depth - 1
			if d < 0 {
				continue
			}
			childDepth = &d
		}
		budget := 0
		if maxBytes > 0 {
			if budget = left; budget <= 0 {
				break
			}
		}
		take := func() {
			fctx, cancel := context.WithTimeout(ctx, frameWait)
			defer cancel()
			child, err := t.contentFrame(fctx, f, fr.Handle)
			if err == nil && child != nil {
				children[i], err = t.snapshotFrame(fctx, child, "", childDepth, boxes, budget)
			}
			// A child that is replaced or hangs is left out; when this
			// frame's own document went away the whole is taken anew.
			if errors.Is(err, errContextGone) && t.replaced(f) {
				gone.Do(func() { lost = err })
			}
		}
		if maxBytes > 0 {
			take()
			left -= len(children[i]) + strings.Count(children[i], "\n")*(fr.Indent+2)
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			take()
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return children, lost
}

// replaced reports whether the walker of a frame's document is no more.
func (t *Tab) replaced(f *frame) bool {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return f.gone || f.world == 0
}

// splice puts the lines of child frames below the lines of their iframes.
func splice(r snapshotAnswer, children []string) string {
	lines := strings.Split(r.Text, "\n")
	var sb strings.Builder
	sb.Grow(len(r.Text) * 2)
	next := 0
	for i, line := range lines {
		if i > 0 {
			sb.WriteByte('\n')
		}
		sb.WriteString(line)
		for next < len(r.Frames) && r.Frames[next].Line < i {
			next++
		}
		if next == len(r.Frames) || r.Frames[next].Line != i {
			continue
		}
		child, indent := children[next], strings.Repeat(" ", r.Frames[next].Indent+2)
		if child == "" {
			continue
		}
		sb.WriteByte(':')
		for cl := range strings.SplitSeq(child, "\n") {
			sb.WriteString("\n" + indent + cl)
		}
	}
	return sb.String()
}
