package server

import (
	"context"
	"net/http"
	"net/url"
	"os"

	"abfleet/internal/api"
	"abfleet/internal/audit"
	"abfleet/internal/auth"
	"abfleet/internal/config"
	"abfleet/internal/fault"
	"abfleet/internal/fleet"
)

// controlRoutes serves operators and agents on the unix socket. The answers are
// the fleet's own views: package fleet makes them public.
func (s *Server) controlRoutes() http.Handler {
	get := func(handler func(*http.Request) (any, error)) http.Handler {
		return methods(map[string]http.HandlerFunc{http.MethodGet: answering(handler)})
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", notFound)
	mux.Handle(api.MCPPath, s.mcp)
	mux.Handle(api.VersionPath, get(s.version))
	mux.Handle(api.DoctorPath, get(s.doctor))
	mux.Handle(api.ViewPath, get(s.view))
	mux.Handle(api.IdentityPath, get(func(r *http.Request) (any, error) {
		return named("identity")(s.deps.Fleet.Identity(r.Context(), r.URL.Query().Get("identity")))
	}))
	mux.Handle(api.SessionsPath, get(func(r *http.Request) (any, error) {
		return named("sessions")(s.deps.Fleet.Sessions(r.Context()))
	}))
	mux.Handle(api.SessionPath, get(func(r *http.Request) (any, error) {
		return named("session")(s.operated(r.Context(), r.URL.Query().Get("session")))
	}))
	mux.Handle(api.IdentitiesPath, methods(map[string]http.HandlerFunc{
		http.MethodGet: answering(func(r *http.Request) (any, error) {
			return named("identities")(s.deps.Fleet.Identities(r.Context()))
		}),
		http.MethodPost: posting(func(ctx context.Context, actor audit.Actor, body api.CreateIdentity) (any, error) {
			return named("identity")(s.deps.Fleet.CreateIdentity(ctx, actor, body.Name))
		}),
	}))
	mux.Handle(api.LoginPath, post(func(ctx context.Context, actor audit.Actor, body api.IdentityRequest) (any, error) {
		return named("identity")(s.deps.Fleet.StartLogin(ctx, actor, body.Identity, body.URL))
	}))
	mux.Handle(api.StopLoginPath, post(func(ctx context.Context, actor audit.Actor, body api.IdentityRequest) (any, error) {
		return named("identity")(s.deps.Fleet.StopLogin(ctx, actor, body.Identity))
	}))
	mux.Handle(api.SavePath, post(func(ctx context.Context, actor audit.Actor, body api.IdentityRequest) (any, error) {
		return named("identity")(s.deps.Fleet.SaveIdentity(ctx, actor, body.Identity))
	}))
	mux.Handle(api.UsePath, post(func(ctx context.Context, actor audit.Actor, body api.SessionRequest) (any, error) {
		return named("session")(s.deps.Fleet.UseIdentity(ctx, actor, body.Session, body.Identity))
	}))
	mux.Handle(api.StopSessionPath, post(func(ctx context.Context, actor audit.Actor, body api.SessionRequest) (any, error) {
		return named("session")(s.deps.Fleet.StopSession(ctx, actor, body.Session))
	}))
	mux.Handle(api.RenamePath, post(func(ctx context.Context, actor audit.Actor, body api.IdentityRequest) (any, error) {
		return named("identity")(s.deps.Fleet.RenameIdentity(ctx, actor, body.Identity, body.Name))
	}))
	mux.Handle(api.LimitsPath, post(func(ctx context.Context, actor audit.Actor, body limitsRequest) (any, error) {
		return named("identity")(s.deps.Fleet.LimitIdentity(ctx, actor, body.Identity, body.Limits))
	}))
	mux.Handle(api.DeletePath, post(func(ctx context.Context, actor audit.Actor, body api.IdentityRequest) (any, error) {
		return named("identity")(s.deps.Fleet.DeleteIdentity(ctx, actor, body.Identity))
	}))
	mux.Handle(api.RestartPath, post(func(ctx context.Context, actor audit.Actor, body api.SessionRequest) (any, error) {
		return named("session")(s.deps.Fleet.RestartSession(ctx, actor, body.Session))
	}))
	mux.Handle(api.ReleasePath, post(func(ctx context.Context, actor audit.Actor, body api.SessionRequest) (any, error) {
		return named("session")(s.deps.Fleet.ReleaseSession(ctx, actor, body.Session, body.LoggedOut))
	}))
	mux.Handle(api.RecoveryPath, get(func(r *http.Request) (any, error) {
		v, err := s.deps.Fleet.ExamineSession(r.Context(), r.URL.Query().Get("session"))
		if err != nil {
			return nil, fleet.Unredacted(err)
		}
		return map[string]any{"ok": true, "session": operatedSession{v.SessionView, v.SessionUnits}, "examination": v.Examination}, nil
	}))
	mux.Handle(api.CopyStatePath, post(s.copyState))
	return mux
}

// limitsRequest is api.LimitsRequest, understood.
type limitsRequest struct {
	Identity string        `json:"identity"`
	Limits   config.Limits `json:"limits"`
}

// operatedSession is a session with what an operator calls it by.
type operatedSession struct {
	fleet.SessionView
	fleet.SessionUnits
}

func (s *Server) operated(ctx context.Context, session string) (operatedSession, error) {
	view, err := s.deps.Fleet.Session(ctx, session)
	if err != nil {
		return operatedSession{}, err
	}
	units, err := s.deps.Fleet.SessionUnits(ctx, session)
	return operatedSession{view, units}, err
}

// named puts a view under its name.
func named(name string) func(view any, err error) (any, error) {
	return func(view any, err error) (any, error) { return map[string]any{"ok": true, name: view}, err }
}

// answering writes what handler returns.
func answering(handler func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		answer, err := handler(r)
		if err != nil {
			Deny(w, r, err)
			return
		}
		writeAnswer(w, http.StatusOK, answer)
	}
}

func post[T any](handler func(context.Context, audit.Actor, T) (any, error)) http.Handler {
	return methods(map[string]http.HandlerFunc{http.MethodPost: posting(handler)})
}

// posting reads the body and passes it on with who sent it.
func posting[T any](handler func(context.Context, audit.Actor, T) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var body T
		if err := readBody(w, r, &body); err != nil {
			Deny(w, r, err)
			return
		}
		actor, ok := auth.ActorFrom(r.Context())
		if !ok {
			Deny(w, r, fault.New(fault.Unauthorized, "answer "+r.URL.Path, "", "nobody vouches for the caller"))
			return
		}
		answer, err := handler(r.Context(), actor, body)
		if err != nil {
			if actor.Kind == audit.KindOperator {
				err = fleet.Unredacted(err)
			}
			Deny(w, r, err)
			return
		}
		writeAnswer(w, http.StatusOK, answer)
	}
}

func (s *Server) version(*http.Request) (any, error) {
	running, quarantined := s.deps.Fleet.Counts()
	return api.Answer{OK: true, Version: &api.Build{
		Version: api.Version, PID: os.Getpid(), StartedAt: s.started.UTC(), Running: running, Quarantined: quarantined,
	}}, nil
}

func (s *Server) doctor(r *http.Request) (any, error) {
	if s.deps.Doctor == nil {
		return api.Answer{OK: true, Doctor: &api.Doctor{OK: true}}, nil
	}
	findings := s.deps.Doctor(r.Context())
	ok := true
	for _, f := range findings {
		ok = ok && !(f.Status == "failed" && f.Severity == "error")
	}
	return api.Answer{OK: true, Doctor: &api.Doctor{OK: ok, Findings: findings}}, nil
}

// copyState writes a copy of the state where the operator wants it. The service
// is the one that can, since it holds the file.
func (s *Server) copyState(ctx context.Context, _ audit.Actor, body api.CopyState) (any, error) {
	if s.deps.CopyState == nil {
		return nil, fault.New(fault.NotFound, "copy fleet state", "", "this service has no state file")
	}
	return api.Answer{OK: true}, s.deps.CopyState(ctx, body.Path)
}

// view makes a link to the page. The token travels in the fragment, which
// browsers do not send.
func (s *Server) view(r *http.Request) (any, error) {
	const op = "make a view link"
	s.mu.Lock()
	addr := s.webAddr
	s.mu.Unlock()
	if addr == nil {
		return nil, fault.New(fault.ServiceUnavailable, op, "Start the service through its sockets: systemctl --user start abfleetd-web.socket", "the service serves no web page")
	}
	query := url.Values{}
	asked := r.URL.Query()
	session, ref := asked.Get("session"), asked.Get("identity")
	switch {
	case session != "" && ref != "":
		return nil, fault.New(fault.InvalidArgument, op, "Name a session or an Identity", "both are named")
	case session != "":
		if _, err := s.deps.Fleet.Session(r.Context(), session); err != nil {
			return nil, err
		}
		query.Set("session", session)
	case ref != "":
		identity, err := s.deps.Fleet.Identity(r.Context(), ref)
		if err != nil {
			return nil, err
		}
		query.Set("identity", identity.ID)
	}
	link := url.URL{Scheme: "http", Host: addr.String(), Path: "/", RawQuery: query.Encode(), Fragment: "token=" + s.deps.Token}
	return api.Answer{OK: true, View: &api.View{URL: link.String()}}, nil
}
