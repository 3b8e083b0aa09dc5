// Package server answers on the two doors of the service.
//
// On the unix socket (ServeControl) it serves the control API of package api to
// our own user's programs, and MCP at /mcp to agents. The kernel says who the
// peer is; which session an agent acts for is said by a header that its trusted
// client sets, never by a tool argument.
//
// On loopback TCP (ServeWeb) it serves the page, the few answers the page needs
// and the noVNC websocket, behind the checks of package auth.
//
// MCP is served stateless: nothing hangs on Mcp-Session-Id, so that a restart
// of the service is invisible to a client. The SDK's stateless mode does not
// cancel calls of clients before protocol 2026-07-28; calls does, for all.
package server
