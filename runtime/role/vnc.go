package role

// X11vnc describes the VNC server of an Xvfb, which listens on a path socket
// only.
type X11vnc struct {
	Program      string // path of x11vnc
	Display      int    // X display number
	Authority    string // path of the Xauthority file
	PasswordFile string // path of the VncAuth password file
	RFBSocket    string // path of the socket VNC is served on
	Home         string // directory given as HOME
}

// Args returns the command line.
//
// -rfbport 0 keeps it off IPv4 only. What keeps it off IPv6 is -rfbportv6 0:
// without that it listens on port 5900 of [::], with -noipv6 or -no6 too. What it
// listens on is proven after the start all the same. -localhost would turn away
// whoever comes through the path socket.
//
// -safer, -nocmds and -norc have neither X clients nor files configure it.
// -noshm, because a killed x11vnc leaves its shared memory behind until the next
// boot. No window manager runs whose windows -wireframe and -scrollcopyrect could
// guess at.
func (x X11vnc) Args() []string {
	return []string{
		x.Program, "-display", XDisplay(x.Display), "-auth", x.Authority,
		"-unixsock", x.RFBSocket, "-rfbport", "0", "-rfbportv6", "0", "-noipv6", "-no6", "-listen", "localhost",
		"-rfbauth", x.PasswordFile, "-forever", "-shared",
		"-safer", "-nocmds", "-norc", "-nolookup", "-noshm", "-nowireframe", "-noscrollcopyrect", "-quiet",
	}
}

// Env returns the whole environment of the role.
func (x X11vnc) Env() []string { return append(serverEnv(x.Home), "XAUTHORITY="+x.Authority) }
