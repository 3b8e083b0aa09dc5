package sd

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	sdjournal "github.com/coreos/go-systemd/v22/journal"
)

// Attribute keys with a meaning of their own. Every other key becomes a field
// ABF_<KEY>: "session" is ABF_SESSION, "identity" ABF_IDENTITY, "role" ABF_ROLE.
const (
	// EventKey holds the name of an event; a known one sets MESSAGE_ID.
	EventKey = "event"
	// UnitKey names the unit that a line is about, so that journalctl -u shows
	// it among that unit's own lines.
	UnitKey = "unit"
	// ErrorKey holds an error, which is also put after the message.
	ErrorKey = "error"
)

// NewLogger returns the service's logger: journald in its native form where
// standard error goes to the journal, readable lines on standard error
// elsewhere.
func NewLogger(level slog.Leveler) *slog.Logger {
	if ok, err := sdjournal.StderrIsJournalStream(); err == nil && ok {
		unitField := "USER_UNIT"
		if os.Getppid() == 1 && os.Geteuid() == 0 {
			unitField = "UNIT"
		}
		return slog.New(&handler{
			out:       &journal{path: journalSocket},
			fallback:  os.Stderr,
			level:     level,
			unitField: unitField,
		})
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

type entrySender interface{ send([]field) error }

// handler turns records into journal entries.
type handler struct {
	out       entrySender
	fallback  io.Writer
	level     slog.Leveler
	unitField string

	prefix string // of open groups, "" or ending in "_"
	fields []field
	errs   []string // texts of error attributes, for the message
}

func (h *handler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.level.Level()
}

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	next := h.clone()
	next.prefix += name + "_"
	return next
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := h.clone()
	for _, attr := range attrs {
		next.add(next.prefix, attr)
	}
	return next
}

func (h *handler) clone() *handler {
	next := *h
	next.fields = slices.Clip(h.fields)
	next.errs = slices.Clip(h.errs)
	return &next
}

// add turns one attribute into fields.
func (h *handler) add(prefix string, attr slog.Attr) {
	value := attr.Value.Resolve()
	if attr.Equal(slog.Attr{}) {
		return
	}
	if value.Kind() == slog.KindGroup {
		if attr.Key != "" {
			prefix += attr.Key + "_"
		}
		for _, member := range value.Group() {
			h.add(prefix, member)
		}
		return
	}
	text := value.String()
	switch {
	case prefix == "" && attr.Key == UnitKey:
		h.fields = append(h.fields, field{h.unitField, text})
		return
	case prefix == "" && attr.Key == ErrorKey:
		h.errs = append(h.errs, text)
	case prefix == "" && attr.Key == EventKey:
		if id := MessageID(text); id != "" {
			h.fields = append(h.fields, field{"MESSAGE_ID", id})
		}
	}
	h.fields = append(h.fields, field{fieldName(prefix + attr.Key), text})
}

func (h *handler) Handle(_ context.Context, record slog.Record) error {
	entry := h.clone()
	record.Attrs(func(attr slog.Attr) bool {
		entry.add(entry.prefix, attr)
		return true
	})
	message := record.Message
	if len(entry.errs) > 0 {
		message += ": " + strings.Join(entry.errs, "; ")
	}
	fields := append([]field{
		{"MESSAGE", message},
		{"PRIORITY", strconv.Itoa(priority(record.Level))},
		{"SYSLOG_IDENTIFIER", "abfleetd"},
	}, entry.fields...)
	if record.PC != 0 {
		frame, _ := runtime.CallersFrames([]uintptr{record.PC}).Next()
		fields = append(fields,
			field{"CODE_FILE", frame.File},
			field{"CODE_LINE", strconv.Itoa(frame.Line)},
			field{"CODE_FUNC", frame.Function})
	}
	err := h.out.send(fields)
	if err != nil {
		// Standard error is a stream to the same journal, which may work
		// where its socket does not.
		_, _ = fmt.Fprintln(h.fallback, message)
	}
	return err
}

// priority maps slog levels to syslog's.
func priority(level slog.Level) int {
	switch {
	case level < slog.LevelInfo:
		return 7
	case level < slog.LevelWarn:
		return 6
	case level < slog.LevelError:
		return 4
	default:
		return 3
	}
}
