package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// The wire types of package api are the fleet's views, field by field: what one
// side writes the other reads, and nothing is lost on the way.
func TestWireTypesAreTheFleetsViews(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	problem := &fleet.Problem{Code: "c", Message: "m", Hint: "h", At: at}
	for _, pair := range []struct{ view, wire any }{
		{fleet.IdentityView{
			ID: "i", Name: "n", State: fleet.Ready, Sessions: 1, PreparedProfiles: 2, SnapshotAt: at, CreatedAt: at, UpdatedAt: at, Problem: problem,
			Login: fleet.LoginView{State: fleet.Controllable, StartedAt: at, Unsaved: true, Problem: problem},
		}, &api.Identity{}},
		{fleet.SessionView{
			Session: "s", IdentityID: "i", IdentityName: "n", Wanted: fleet.WantedStopped, State: fleet.Broken, StartedAt: at, BoundAt: at, UpdatedAt: at,
			Problem: problem, LastExit: &fleet.ExitReport{Clean: true, Trigger: "stop", Signal: "s", Detail: "d", OOMKills: 3, At: at},
		}, &api.Session{}},
	} {
		want, err := json.Marshal(pair.view)
		if err != nil {
			t.Fatal(err)
		}
		decoder := json.NewDecoder(bytes.NewReader(want))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(pair.wire); err != nil {
			t.Errorf("%T: %v", pair.view, err)
		}
		got, err := json.Marshal(pair.wire)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%T\nview %s\nwire %s", pair.view, want, got)
		}
	}
}

func TestControlAPI(t *testing.T) {
	r := newRig(t, func(d *Deps) { d.Doctor = nil })
	client := api.NewClient(r.socket)
	ctx := t.Context()

	created, err := client.Post(ctx, api.IdentitiesPath, api.CreateIdentity{Name: "work"})
	if err != nil || created.Identity == nil || created.Identity.Name != "work" {
		t.Fatal(created, err)
	}
	_, err = client.Post(ctx, api.IdentitiesPath, api.CreateIdentity{Name: "WORK"})
	if fault.CodeOf(err) != fault.DuplicateIdentity || err.Error() != "cannot create identity: the name is taken" || fault.HintOf(err) != "Choose another name" {
		t.Errorf("the name again: %v, code %s, hint %q", err, fault.CodeOf(err), fault.HintOf(err))
	}
	list, err := client.Get(ctx, api.IdentitiesPath, nil)
	if err != nil || len(list.Identities) != 1 {
		t.Error(list, err)
	}
	one, err := client.Get(ctx, api.IdentityPath, url.Values{"identity": {"work"}})
	if err != nil || one.Identity.ID != "id-work" {
		t.Error(one, err)
	}
	for _, path := range []string{api.LoginPath, api.StopLoginPath, api.SavePath} {
		if answer, err := client.Post(ctx, path, api.IdentityRequest{Identity: "work"}); err != nil || answer.Identity == nil {
			t.Error(path, answer, err)
		}
	}
	// A session id may hold what has a meaning in paths and queries.
	const session = "../a b?&=%2F#"
	used, err := client.Post(ctx, api.UsePath, api.SessionRequest{Session: session, Identity: "work"})
	if err != nil || used.Session.Session != session {
		t.Error(used, err)
	}
	shown, err := client.Get(ctx, api.SessionPath, url.Values{"session": {session}})
	if err != nil || shown.Session.IdentityName != "work" || shown.Session.Instance != "inst" || shown.Session.Slice != "abfleet-inst.slice" {
		t.Error(shown, err)
	}
	if all, err := client.Get(ctx, api.SessionsPath, nil); err != nil || len(all.Sessions) != 1 || all.Sessions[0].Slice != "" {
		t.Error(all, err)
	}
	if stopped, err := client.Post(ctx, api.StopSessionPath, api.SessionRequest{Session: session}); err != nil || stopped.Session == nil {
		t.Error(stopped, err)
	}
	if version, err := client.Get(ctx, api.VersionPath, nil); err != nil || version.Version.PID == 0 {
		t.Error(version, err)
	}
	if doctor, err := client.Get(ctx, api.DoctorPath, nil); err != nil || !doctor.Doctor.OK {
		t.Error(doctor, err)
	}

	view, err := client.Get(ctx, api.ViewPath, url.Values{"session": {session}})
	if err != nil {
		t.Fatal(err)
	}
	link, err := url.Parse(view.View.URL)
	if err != nil || "http://"+link.Host != r.web || link.Fragment != "token="+testToken || link.Query().Get("session") != session {
		t.Errorf("view link %s: %v", view.View.URL, err)
	}
	if view, err = client.Get(ctx, api.ViewPath, url.Values{"identity": {"work"}}); err != nil || !strings.Contains(view.View.URL, "?identity=id-work#") {
		t.Error(view, err)
	}
	for _, query := range []url.Values{{"session": {"none"}}, {"identity": {"none"}}, {"session": {session}, "identity": {"work"}}} {
		if _, err := client.Get(ctx, api.ViewPath, query); err == nil || fault.HintOf(err) == "" && query.Get("session") != "none" {
			t.Errorf("view %v: %v", query, err)
		}
	}
	for _, actor := range r.fleet.actors {
		if actor.Kind != audit.KindOperator || actor.PID == 0 {
			t.Errorf("actor %+v, want an operator with a pid", actor)
		}
	}
	if len(r.fleet.actors) != 7 {
		t.Errorf("%d actors", len(r.fleet.actors))
	}
}

func TestControlRefusesBadRequests(t *testing.T) {
	r := newRig(t, nil)
	client := api.HTTPClient(r.socket)
	for _, test := range []struct {
		method, path, kind, body string
		status                   int
		code                     fault.Code
	}{
		{"GET", "/nothing", "", "", 404, fault.NotFound},
		{"DELETE", api.IdentitiesPath, "", "", 405, fault.InvalidArgument},
		{"GET", api.UsePath, "", "", 405, fault.InvalidArgument},
		{"POST", api.UsePath, "text/plain", "{}", 415, fault.UnsupportedMediaType},
		{"POST", api.UsePath, "", "{}", 415, fault.UnsupportedMediaType},
		{"POST", api.UsePath, "application/json", "", 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", "null", 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", "[]", 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", "{} {}", 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", "{} x", 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", `{"sesion":"s"}`, 400, fault.InvalidArgument},
		{"POST", api.UsePath, "application/json", `{"session":"` + strings.Repeat("x", api.MaxBody) + `"}`, 413, fault.BodyTooLarge},
		{"POST", api.UsePath, "application/json; charset=utf-8", `{"session":"s","identity":"none"}`, 404, fault.IdentityNotFound},
	} {
		request, err := http.NewRequestWithContext(t.Context(), test.method, api.Base+test.path, strings.NewReader(test.body))
		if err != nil {
			t.Fatal(err)
		}
		if test.kind != "" {
			request.Header.Set("Content-Type", test.kind)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		var answer api.Answer
		if err := json.Unmarshal(body, &answer); err != nil || answer.OK || answer.Error == nil {
			t.Errorf("%s %s %.40s: %s %s", test.method, test.path, test.body, response.Status, body)
			continue
		}
		if response.StatusCode != test.status || answer.Error.Code != test.code || !strings.HasPrefix(answer.Error.Message, "cannot ") {
			t.Errorf("%s %s %.40s: %s %+v, want %d %s", test.method, test.path, test.body, response.Status, answer.Error, test.status, test.code)
		}
	}
}

// A client that sends too much reads why, instead of a broken pipe in the middle
// of sending.
func TestTooLargeIsTakenAndRefused(t *testing.T) {
	conn, err := net.Dial("unix", newRig(t, nil).socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := strings.Repeat("x", 8<<20)
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: abfleet\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", api.UsePath, len(body), body); err != nil {
		t.Fatal(err)
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || response.StatusCode != http.StatusRequestEntityTooLarge {
		t.Fatalf("%+v, %v", response, err)
	}
}

func TestPanicIsAnsweredAndLogged(t *testing.T) {
	r := newRig(t, func(d *Deps) { d.Doctor = func(context.Context) []api.Finding { panic("x") } })
	_, err := api.NewClient(r.socket).Get(t.Context(), api.DoctorPath, nil)
	if fault.CodeOf(err) != fault.Internal || !strings.Contains(err.Error(), "unexpected failure") {
		t.Errorf("%v", err)
	}
}
