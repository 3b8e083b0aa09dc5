package server

import (
	"context"
	"net/http"

	"abfleet/internal/api"
	"abfleet/internal/fleet"
	"abfleet/internal/server/web"
	"abfleet/internal/vnc"
)

// webRoutes serves people on loopback TCP.
func (s *Server) webRoutes() http.Handler {
	a := s.deps.Auth
	mux := http.NewServeMux()
	mux.Handle("/", a.Page(web.Handler()))
	mux.Handle(api.WebPrefix+"/", a.API(http.HandlerFunc(notFound)))
	mux.Handle(api.StatusPath, onlyMethod(http.MethodGet, a.StatusHandler()))
	mux.Handle(api.SignInPath, onlyMethod(http.MethodPost, a.LoginHandler()))
	mux.Handle(api.StatePath, a.API(methods(map[string]http.HandlerFunc{http.MethodGet: answering(s.state)})))
	mux.Handle(api.SocketPath, a.WebSocket(s.gateway))
	return mux
}

// onlyMethod guards a handler that does not look at the method itself.
func onlyMethod(method string, next http.Handler) http.Handler {
	return methods(map[string]http.HandlerFunc{method: next.ServeHTTP})
}

// pageState is what the page shows: less than the views, and nothing that an
// operator's tools would need.
type pageState struct {
	Sessions []pageSession `json:"sessions"`
	Logins   []pageLogin   `json:"logins"`
}

type pageSession struct {
	Session  string `json:"session"`
	Identity string `json:"identity"` // name
	Running  bool   `json:"running"`
}

type pageLogin struct {
	Identity string `json:"identity"` // id
	Name     string `json:"name"`
	Running  bool   `json:"running"`
}

func (s *Server) state(r *http.Request) (any, error) {
	sessions, err := s.deps.Fleet.Sessions(r.Context())
	if err != nil {
		return nil, err
	}
	identities, err := s.deps.Fleet.Identities(r.Context())
	if err != nil {
		return nil, err
	}
	state := pageState{Sessions: []pageSession{}, Logins: []pageLogin{}}
	for _, view := range sessions {
		state.Sessions = append(state.Sessions, pageSession{view.Session, view.IdentityName, view.State == fleet.Controllable})
	}
	for _, view := range identities {
		if view.Login.State != fleet.Stopped && view.Login.State != "" {
			state.Logins = append(state.Logins, pageLogin{view.ID, view.Name, view.Login.State == fleet.Controllable})
		}
	}
	return map[string]any{"ok": true, "state": state}, nil
}

// resolveViewer finds the display that a viewer asks for. It starts nothing: a
// page that keeps trying to reconnect would otherwise undo every stop.
func (s *Server) resolveViewer(ctx context.Context, r *http.Request) (vnc.Target, error) {
	session, ref, err := vnc.Selector(r)
	if err != nil {
		return vnc.Target{}, err
	}
	browser, err := s.runningBrowser(ctx, session, ref)
	if err != nil {
		return vnc.Target{}, err
	}
	viewer, err := browser.OpenViewer(ctx)
	if err != nil {
		return vnc.Target{}, err
	}
	return vnc.Target{Conn: viewer.Conn, Password: viewer.Password, Running: browser.Running}, nil
}

func (s *Server) runningBrowser(ctx context.Context, session, ref string) (*fleet.Browser, error) {
	if session != "" {
		return s.deps.Fleet.RunningBrowser(ctx, session)
	}
	return s.deps.Fleet.LoginBrowser(ctx, ref)
}
