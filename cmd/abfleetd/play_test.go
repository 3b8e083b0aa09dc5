package main

import (
	"os/exec"
	"testing"

	"abfleet/tests/rig"
)

func TestPlay(t *testing.T) {
	dir := "/srv/abf/service/bin"
	if out, err := exec.Command("go", "build", "-o", dir+"/", "abfleet/cmd/...").CombinedOutput(); err != nil {
		t.Fatal(string(out))
	}
	r := rig.BootTest(t, rig.Options{Name: "play"})
	if err := r.Install(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{
		"find ~/.config; strings -n1 /dev/null; abfleet doctor >/dev/null 2>&1; find ~/.config", "abfleet setup --now; find ~/.config/chromium",
		"abfleet uninstall", "systemctl --user list-units 'abfleet*' --all --no-pager; find ~/.config $XDG_RUNTIME_DIR/abfleet", "abfleet version; abfleet identity list; echo $?",
	} {
		out, err := r.Sh(t.Context(), "export PATH=/opt/abfleet/bin:$PATH; "+c)
		t.Logf("$ %s\n%s%v", c, out, err)
	}
}
