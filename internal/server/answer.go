package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/auth"
	"abfleet/internal/fault"
)

// statuses are the HTTP statuses of the codes that are not package auth's. A
// code in neither is the service's own trouble.
var statuses = map[fault.Code]int{
	fault.InvalidName:            http.StatusBadRequest,
	fault.InvalidSession:         http.StatusBadRequest,
	fault.BlockedURL:             http.StatusBadRequest,
	fault.IdentityNotFound:       http.StatusNotFound,
	fault.SessionNotFound:        http.StatusNotFound,
	fault.NotFound:               http.StatusNotFound,
	fault.DuplicateIdentity:      http.StatusConflict,
	fault.IdentityNotReady:       http.StatusConflict,
	fault.IdentityInUse:          http.StatusConflict,
	fault.IdentityNotSelected:    http.StatusConflict,
	fault.LoginNotRunning:        http.StatusConflict,
	fault.UncleanExit:            http.StatusConflict,
	fault.BrowserNotControllable: http.StatusConflict,
	fault.BrowserStopped:         http.StatusConflict,
	fault.ProfileBusy:            http.StatusConflict,
	fault.StateInUse:             http.StatusConflict,
	fault.OwnershipRefused:       http.StatusConflict,
	fault.NoSpace:                http.StatusInsufficientStorage,
	fault.ReadOnly:               http.StatusInsufficientStorage,
	fault.ServiceUnavailable:     http.StatusServiceUnavailable,
	fault.Timeout:                http.StatusGatewayTimeout,
	fault.Canceled:               statusClientClosed,
}

// statusClientClosed says that the client went away; nobody reads it.
const statusClientClosed = 499

func statusOf(code fault.Code) int {
	if status, ok := statuses[code]; ok {
		return status
	}
	if status, ok := auth.HTTPStatus(code); ok {
		return status
	}
	return http.StatusInternalServerError
}

// Deny answers a request with its error.
func Deny(w http.ResponseWriter, _ *http.Request, err error) {
	writeAnswer(w, statusOf(fault.CodeOf(err)), map[string]any{"ok": false, "error": api.ErrorOf(err)})
}

// writeAnswer writes JSON that no browser keeps, frames or takes for anything
// else.
func writeAnswer(w http.ResponseWriter, status int, answer any) {
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("X-Frame-Options", "SAMEORIGIN")
	header.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer)
}

// maxDiscard is how much of a body that is too large is still taken.
const maxDiscard = 256 << 20

// readAll reads a body of at most limit bytes, within bodyTimeout. net/http
// lifts the deadline when the body has ended, and then watches for the client's
// leaving, however long the answer takes.
func readAll(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	const op = "read the request"
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
	tooLarge := fault.New(fault.BodyTooLarge, op, "Send less in one request", "it has more than %d bytes", limit)
	if r.ContentLength > limit && r.Header.Get("Expect") != "" {
		return nil, tooLarge // before it is sent
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	if err == nil && int64(len(body)) <= limit {
		return body, nil
	}
	w.Header().Set("Connection", "close")
	switch {
	case err == nil:
		// A client that is cut off while it sends sees a broken pipe and not
		// the answer, so what it sends is taken, within reason.
		_, _ = io.CopyN(io.Discard, r.Body, maxDiscard)
		return nil, tooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fault.New(fault.Timeout, op, "Send the whole body at once", "it did not arrive within %s", bodyTimeout)
	}
	return nil, fault.New(fault.Canceled, op, "", "%w", err)
}

// readBody reads the JSON object of a request into into. Unknown members are
// refused: a misspelt one would otherwise be ignored silently.
func readBody(w http.ResponseWriter, r *http.Request, into any) error {
	const op = "read the request"
	const hint = "Send one JSON object with content type application/json"
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return fault.New(fault.UnsupportedMediaType, op, hint, "the content type is not application/json")
	}
	body, err := readAll(w, r, api.MaxBody)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	err = decoder.Decode(into)
	if err == nil && bytes.HasPrefix(bytes.TrimSpace(body), []byte("null")) {
		err = errors.New("it is not an object")
	}
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = errors.New("there is more than one value")
		}
	}
	return fault.New(fault.InvalidArgument, op, hint, "%w", err)
}

// methods answers a path that exists for other methods, or not at all.
func methods(byMethod map[string]http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, ok := byMethod[r.Method]
		if !ok {
			for method := range byMethod {
				w.Header().Add("Allow", method)
			}
			writeAnswer(w, http.StatusMethodNotAllowed, map[string]any{"ok": false, "error": api.ErrorOf(
				fault.New(fault.InvalidArgument, "answer "+r.URL.Path, "Use the method that the Allow header names", "the method is %s", r.Method))})
			return
		}
		handler(w, r)
	})
}

func notFound(w http.ResponseWriter, r *http.Request) {
	Deny(w, r, fault.New(fault.NotFound, "answer "+r.URL.Path, "", "there is no such path"))
}

func stack() string { return string(debug.Stack()) }
