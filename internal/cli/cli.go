// Package cli is the abfleet command. Every subcommand that asks the service
// does so over the control socket, through package api; setup, uninstall and
// doctor also look at the host themselves.
//
// Output is for people, or with --json one JSON object for programs, on standard
// output. Failures are told on standard error as "abfleet: cannot ...", with a
// hint and a code, and by the exit code.
package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"abfleet/internal/api"
	"abfleet/internal/config"
	"abfleet/internal/fault"
)

// The exit codes. They are part of the interface.
const (
	ExitOK          = 0
	ExitFailed      = 1 // the command failed; the code on standard error says why
	ExitUsage       = 2 // unknown command, wrong flags or arguments
	ExitUnreachable = 3 // the service cannot be reached, or does not answer
	ExitUnknown     = 4 // the service went away: the command may have taken effect
	ExitUnhealthy   = 5 // doctor found an error
)

const exitHelp = `Exit codes:
  0  done
  1  failed; the code on standard error says why
  2  wrong usage
  3  the service cannot be reached, or does not answer
  4  the service went away: the command may have taken effect
  5  doctor found an error`

// app is one run of the command.
type app struct {
	in          io.Reader
	out, errOut io.Writer
	getenv      func(string) string

	json   bool
	prefix string
	socket string
	config string
}

// usageError is a failure to call the command rightly.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// errUnhealthy makes doctor exit with ExitUnhealthy; it has said all already.
var errUnhealthy = errors.New("the host is not ready")

// Main runs the command and returns its exit code.
func Main(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer, getenv func(string) string) int {
	a := &app{in: in, out: out, errOut: errOut, getenv: getenv}
	root := a.command()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	cmd, err := root.ExecuteContextC(ctx)
	return a.report(cmd, a.explain(err))
}

// otherCommand is a command of ours in a text.
var otherCommand = regexp.MustCompile(`\babfleet (setup|uninstall|identity|session|recover|store|mcp|view|doctor)\b`)

// otherUnit is the service or a socket of ours in a command.
var otherUnit = regexp.MustCompile(`(systemctl --user [a-z-]+ )abfleetd\b`)

// ours has the commands in a text be of this fleet: followed as it is printed, a
// hint must not act on another one.
func (a *app) ours(text string) string {
	if a.prefix == "abfleet" {
		return text
	}
	text = otherUnit.ReplaceAllString(text, "${1}"+a.prefix+"d")
	return otherCommand.ReplaceAllString(text, "abfleet --prefix "+a.prefix+" $1")
}

// confirm asks the person at a terminal. Elsewhere nobody can be asked: --yes has
// to say it.
func (a *app) confirm(op string, sure bool, question string) error {
	if sure {
		return nil
	}
	if in, ok := a.in.(*os.File); !ok || !isTerminal(in) {
		return fault.New(fault.InvalidArgument, op, "Run it in a terminal, or with --yes", "it has to be confirmed, and nobody can be asked")
	}
	_, _ = fmt.Fprintf(a.errOut, "%s [y/N] ", question)
	line, err := bufio.NewReader(io.LimitReader(a.in, 100)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fault.Wrap(err, fault.Canceled, op, "Run it again")
	}
	if answer := strings.ToLower(strings.TrimSpace(line)); answer != "y" && answer != "yes" {
		return fault.New(fault.Canceled, op, "Nothing was changed", "it was not confirmed")
	}
	return nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// usageHint says where to read how a command is called, and which one may have
// been meant.
func usageHint(cmd *cobra.Command) string {
	hint := "run " + cmd.CommandPath() + " --help"
	if words := cmd.Flags().Args(); len(words) > 0 {
		cmd.SuggestionsMinimumDistance = 2
		if like := cmd.SuggestionsFor(words[0]); len(like) > 0 {
			hint = "Did you mean " + cmd.CommandPath() + " " + like[0] + "? Else " + hint
		}
	}
	return hint
}

// report tells a failure and returns the exit code.
func (a *app) report(cmd *cobra.Command, err error) int {
	var usage usageError
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, errUnhealthy):
		return ExitUnhealthy
	case errors.As(err, &usage):
		hint := usageHint(cmd)
		_, _ = fmt.Fprintf(a.errOut, "abfleet: %v\nhint: %s\ncode: %s\n", err, hint, fault.InvalidArgument)
		if a.json {
			a.writeJSON(api.Answer{Error: &api.Error{Code: fault.InvalidArgument, Message: err.Error(), Hint: hint}})
		}
		return ExitUsage
	}
	e := api.ErrorOf(err)
	e.Hint = a.ours(e.Hint)
	_, _ = fmt.Fprintf(a.errOut, "abfleet: %s\n", e.Message)
	if e.Hint != "" {
		_, _ = fmt.Fprintf(a.errOut, "hint: %s\n", e.Hint)
	}
	_, _ = fmt.Fprintf(a.errOut, "code: %s\n", e.Code)
	if a.json {
		a.writeJSON(api.Answer{Error: e})
	}
	switch e.Code {
	case fault.ServiceUnavailable:
		return ExitUnreachable
	case fault.EffectUnknown:
		return ExitUnknown
	}
	return ExitFailed
}

var prefixForm = regexp.MustCompile(`^[a-z][a-z0-9]{0,15}$`)

// command returns the whole tree of commands.
func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:           "abfleet",
		Short:         "Durable, logged-in browsers for agents, on systemd",
		Long:          "abfleet manages the Identities and Session Browsers of this user's Agent Browser Fleet.\n\n" + exitHelp,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			// It is a part of unit names and of paths.
			if !prefixForm.MatchString(a.prefix) {
				return usageError{fmt.Errorf("--prefix %q: use 1 to 16 lower case letters and digits, starting with a letter", a.prefix)}
			}
			return nil
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON instead of text")
	flags.StringVar(&a.prefix, "prefix", "abfleet", "prefix of the fleet's units and directories")
	flags.StringVar(&a.socket, "socket", "", "control socket (default $AGENT_BROWSER_FLEET_SOCKET, else in the runtime directory)")
	flags.StringVar(&a.config, "config", "", "configuration file (default the one of the prefix)")
	root.AddCommand(a.setupCommand(), a.uninstallCommand(), a.identityCommand(), a.sessionCommand(), a.recoverCommand(),
		a.storeCommand(), a.mcpCommand(), a.viewCommand(), a.doctorCommand(), a.versionCommand())
	checkArguments(root)
	return root
}

// checkArguments makes wrong arguments usage errors, everywhere.
func checkArguments(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError{err}
			}
			return nil
		}
	}
	for _, child := range cmd.Commands() {
		checkArguments(child)
	}
}

// group returns a command that only holds others.
func group(use, short string, members ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return usageError{fmt.Errorf("%s needs a command", cmd.CommandPath())}
	}}
	cmd.AddCommand(members...)
	return cmd
}

// load reads the configuration of the prefix.
func (a *app) load() (*config.Config, error) {
	path := a.config
	if path == "" && a.prefix != "abfleet" {
		// A fleet under another prefix says so in a file of its own.
		path = a.configFile()
	}
	return config.Load(path, a.getenv)
}

// configDir is the directory below which this user's configuration is.
func (a *app) configDir() string {
	if dir := a.getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return dir
	}
	return filepath.Join(a.getenv("HOME"), ".config")
}

func (a *app) configFile() string { return filepath.Join(a.configDir(), a.prefix, "config.toml") }

// controlSocket returns the path of the socket to use. It needs no valid
// configuration: with a broken one, the commands should still reach a service
// that runs. A file that was named and is not there is another fleet than meant.
func (a *app) controlSocket() (string, error) {
	if a.config != "" {
		if _, err := os.Stat(a.config); err != nil {
			return "", fault.New(fault.InvalidConfig, "load configuration", "Name a readable file with --config, or leave it out for the defaults", "%w", err)
		}
	}
	if a.socket != "" {
		return a.socket, nil
	}
	if socket := a.getenv("AGENT_BROWSER_FLEET_SOCKET"); socket != "" {
		return socket, nil
	}
	if cfg, err := a.load(); err == nil {
		return cfg.ControlSocket(), nil
	}
	if dir := a.getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, a.prefix, "control.sock"), nil
	}
	return "", fault.New(fault.ServiceUnavailable, "reach the service", "Run: export XDG_RUNTIME_DIR=/run/user/$(id -u); or name the socket with --socket", "XDG_RUNTIME_DIR is not set")
}

func (a *app) client() (*api.Client, error) {
	socket, err := a.controlSocket()
	if err != nil {
		return nil, err
	}
	return api.NewClient(socket), nil
}

// writeJSON writes one JSON object.
func (a *app) writeJSON(value any) {
	encoder := json.NewEncoder(a.out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value)
}

// printf writes text for people, nothing with --json.
func (a *app) printf(format string, args ...any) {
	if !a.json {
		_, _ = io.WriteString(a.out, a.ours(fmt.Sprintf(format, args...)))
	}
}

// show writes an answer: as JSON, or by text.
func (a *app) show(answer *api.Answer, text func()) {
	if a.json {
		a.writeJSON(answer)
		return
	}
	text()
}

func executableDir() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		path = resolved
	}
	return filepath.Dir(path)
}
