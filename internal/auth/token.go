package auth

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
	"abfleet/internal/safefs"
)

// tokenBytes is the randomness of a token, before its encoding.
const tokenBytes = 32

// maxTokenFile caps what is read of a token file; a token and a line feed need
// far less.
const maxTokenFile = 4 << 10

var tokenForm = regexp.MustCompile(`^[A-Za-z0-9_-]{40,80}$`)

// LoadToken reads the token in path, and makes one first where there is none.
// Two processes that race to make it end up with the same one.
func LoadToken(path string) (string, error) {
	token, err := ReadToken(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return token, err
	}
	if err := createToken(path); err != nil {
		return "", fault.Wrap(err, fault.Internal, "create access token", "Check that the state directory is on a writable file system with free space")
	}
	return ReadToken(path)
}

// ReadToken reads an existing token. The error wraps fs.ErrNotExist where
// there is no file.
func ReadToken(path string) (string, error) {
	const op = "read access token"
	file, err := safefs.OpenPrivate(path, unix.O_RDONLY, 0)
	if err != nil {
		return "", fmt.Errorf("%s: %w", op, err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxTokenFile))
	if err != nil {
		return "", fault.Wrap(err, fault.Internal, op, "")
	}
	token := bytes.TrimSuffix(data, []byte("\n"))
	if !tokenForm.Match(token) {
		return "", fault.New(fault.InvalidToken, op,
			"Remove the file "+path+" and restart the service, which then makes a new one",
			"the file does not hold one token")
	}
	return string(token), nil
}

// createToken puts a fresh token at path unless there is a file already. The
// token is complete before it gets its name: a reader never sees half of one.
func createToken(path string) error {
	secret := make([]byte, tokenBytes)
	// rand.Read does not fail: it ends the program where there is no
	// randomness.
	_, _ = rand.Read(secret)
	text := base64.RawURLEncoding.EncodeToString(secret) + "\n"

	dir := filepath.Dir(path)
	temp, err := os.CreateTemp(dir, filepath.Base(path)+".*.new")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	defer temp.Close()
	if _, err := temp.WriteString(text); err != nil {
		return err
	}
	if err := temp.Sync(); err != nil {
		return err
	}
	if err := os.Link(temp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	handle, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer handle.Close()
	return handle.Sync()
}
