package fault

import (
	"os/exec"
	"testing"
)

func TestWordIsOneWordOfAShell(t *testing.T) {
	for _, text := range []string{"", "work", "me@example.org", "my work", `it's "x" $HOME \`, "a;b", "*"} {
		out, err := exec.Command("sh", "-c", "printf %s "+Word(text)).Output()
		if err != nil || string(out) != text {
			t.Errorf("%s becomes %q, %v", Word(text), out, err)
		}
	}
	if Word("work") != "work" {
		t.Errorf("a plain word is quoted: %s", Word("work"))
	}
}
