package role

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"abfleet/internal/fault"
)

// TestUserNamespacesAreSeenToWork protects the refusal to start without a
// sandbox: only a program that ran in a namespace shows that there is one.
func TestUserNamespacesAreSeenToWork(t *testing.T) {
	for _, program := range []string{"/bin/true", "/bin/false"} {
		if err := CheckUserNamespaces(t.Context(), program); err != nil && !fault.Is(err, fault.UserNamespacesDenied) {
			t.Errorf("%s: %v", program, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := CheckUserNamespaces(ctx, "/bin/true"); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that gave up: %v", err)
	}
	err := CheckUserNamespaces(t.Context(), filepath.Join(t.TempDir(), "missing"))
	if !errors.Is(err, unix.ENOENT) || fault.Is(err, fault.UserNamespacesDenied) || fault.HintOf(err) == "" {
		t.Errorf("no helper: %v", err)
	}
}
