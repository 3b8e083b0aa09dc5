package page

import (
	"testing"
)

func BenchmarkPage(b *testing.B) {
	url := site{"/": `<title>B</title><form><button type=button onclick="this.textContent++">0</button><input id=i></form>`}.start(b)
	_, tab := openTab(b, url+"/")
	ctx := testContext(b)
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"click", func() error { _, err := tab.Click(ctx, "button", ClickOptions{}); return err }},
		{"fill", func() error { _, err := tab.Fill(ctx, "#i", "hello"); return err }},
		{"press", func() error { return tab.Press(ctx, "a") }},
		{"evaluate", func() error { _, _, err := tab.Evaluate(ctx, "() => 1+1", ""); return err }},
		{"snapshot", func() error { _, err := tab.Snapshot(ctx, SnapshotOptions{}); return err }},
		{"state", func() error { _, err := tab.State(ctx); return err }},
		{"screenshot", func() error { _, err := tab.Screenshot(ctx, ScreenshotOptions{}); return err }},
		{"navigate", func() error { return tab.Navigate(ctx, url+"/") }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
