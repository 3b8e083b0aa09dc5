package page

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"maps"
	"math"
	"time"

	"abfleet/internal/cdp"
	"abfleet/internal/fault"
)

// Bounds of pictures.
const (
	// captureWait bounds one capture: a page in the background or one that
	// never paints is captured all the same, but not waited for longer.
	captureWait = 10 * time.Second
	// captureAgain is how often a picture of a page in the background is asked
	// for again, maxCaptures how often at most.
	captureAgain = 500 * time.Millisecond
	maxCaptures  = 16
	// captureTries bounds how often a picture is begun again on a page that
	// goes on loading other documents.
	captureTries = 3
	// maxCaptureSide is the longest side captured, in CSS pixels. The rest of a
	// longer page is left out; Image.Cut says so.
	maxCaptureSide = 16384
	// Models see no more than this; larger pictures only cost.
	fitSide   = 1568
	fitPixels = 1_150_000
	// jpegQuality is used for all JPEG pictures.
	jpegQuality = 90
)

// errUnpainted ends the wait for a page that makes no picture.
var errUnpainted = fmt.Errorf("the page painted nothing within %v", captureWait)

const opScreenshot = "take screenshot"

// Screenshot captures the viewport, the whole page or one element. It does not
// change the page except that an element is scrolled into view.
func (t *Tab) Screenshot(ctx context.Context, o ScreenshotOptions) (Image, error) {
	const op = opScreenshot
	img := Image{MIME: "image/png"}
	params := map[string]any{"format": "png", "optimizeForSpeed": true, "fromSurface": true}
	switch o.Type {
	case "", "png":
	case "jpeg", "webp":
		img.MIME = "image/" + o.Type
		params = map[string]any{"format": o.Type, "quality": jpegQuality, "optimizeForSpeed": true, "fromSurface": true}
	default:
		return img, fault.New(fault.InvalidArgument, op, "use png, jpeg or webp", "unknown picture type %s", quote(o.Type))
	}
	if o.FullPage && o.Target != "" {
		return img, fault.New(fault.InvalidArgument, op, "leave out one of them", "the full page and one element cannot both be captured")
	}
	ctx, end, err := t.interruptible(ctx, false)
	if err != nil {
		return img, t.b.explain(op, err)
	}
	defer end()
	limited, cancel := context.WithTimeout(ctx, t.b.opts.ActionTimeout+captureWait)
	defer cancel()
	// Pictures of one page are made one after another: each may resize it.
	select {
	case t.camera <- struct{}{}:
		defer func() { <-t.camera }()
	case <-limited.Done():
		return img, t.b.explain(op, context.Cause(limited))
	}
	for range captureTries {
		err = t.shoot(limited, o, params, &img)
		if ce := (*cdp.CallError)(nil); !errors.As(err, &ce) || ce.Code != codeServerError {
			break
		}
		// The document was replaced in the middle.
		t.paint(limited)
	}
	if errors.Is(err, errUnpainted) {
		return img, fault.New(fault.Timeout, op, "take a snapshot instead", "%w", err)
	}
	return img, t.explain(op, o.Target, err)
}

// shoot makes the picture of the page as it is now.
func (t *Tab) shoot(ctx context.Context, o ScreenshotOptions, params map[string]any, img *Image) error {
	params = maps.Clone(params)
	var r rect
	if o.Target != "" {
		p, err := t.find(ctx, o.Target, &r, "rect", map[string]any{"scroll": true})
		if err != nil {
			return err
		}
		img.Located = p.located(r.element)
		if err := t.pageRect(ctx, p.frame, &r); err != nil {
			return err
		}
	}
	var m layout
	if err := t.target.session.Call(ctx, "Page.getLayoutMetrics", nil, &m); err != nil {
		return err
	}
	clip, beyond := m.clip(o, r)
	if clip.Width < 1 || clip.Height < 1 {
		return fault.New(fault.TargetNotActionable, opScreenshot, "capture the page instead", "the element has no size")
	}
	img.Cut = clip.cut()
	scale := 1.0
	if !o.DeviceScale {
		var p pageInfo
		err := t.onMain(ctx, func(ctx context.Context, f *frame) error { return t.ask(ctx, f, &p, "page") })
		if err != nil {
			return err
		}
		if p.DPR > 0 {
			scale = 1 / p.DPR
		}
	}
	if o.Target != "" || o.FullPage || scale != 1 {
		params["clip"] = map[string]any{"x": clip.X, "y": clip.Y, "width": clip.Width, "height": clip.Height, "scale": scale}
	}
	if beyond {
		params["captureBeyondViewport"] = true
	}
	data, err := t.capture(ctx, params)
	if err != nil {
		return err
	}
	img.Data = data
	if c, _, err := image.DecodeConfig(bytes.NewReader(data)); err == nil {
		img.Width, img.Height = c.Width, c.Height
	} else {
		img.Width, img.Height = int(math.Round(clip.Width)), int(math.Round(clip.Height))
	}
	return nil
}

// capture has Chromium make the picture. The picture of a page in the background
// is finished only when the next one is asked for, since nothing else makes
// such a page paint; so it is asked for again and again until one arrives.
func (t *Tab) capture(ctx context.Context, params map[string]any) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, captureWait, errUnpainted)
	defer cancel()
	hidden, err := t.hidden(ctx)
	if err != nil {
		return nil, err
	}
	t.b.mu.Lock()
	background := hidden || t.awake.on
	t.b.mu.Unlock()
	type answer struct {
		data []byte
		err  error
	}
	most := 1
	if background {
		most = maxCaptures
	}
	answers := make(chan answer, most)
	ask := func() {
		p := t.target.session.Start(ctx, "Page.captureScreenshot", params)
		go func() {
			var shot struct {
				Data []byte `json:"data"`
			}
			err := p.Wait(ctx, &shot)
			answers <- answer{shot.Data, err}
		}()
	}
	ask()
	asked := 1
	if background {
		ask()
		asked++
	}
	again := time.NewTicker(captureAgain)
	defer again.Stop()
	for {
		select {
		case a := <-answers:
			if a.err != nil && errors.Is(context.Cause(ctx), errUnpainted) {
				a.err = errUnpainted
			}
			return a.data, a.err
		case <-again.C:
			if asked < most {
				ask()
				asked++
			}
		}
	}
}

// rect is what the walker's rect() answers, in CSS pixels of its frame.
type rect struct {
	element
	X      float64 `json:"x"`
	Y      float64 `json:"y"`
	Width  float64 `json:"width"`
	Height float64 `json:"height"`
}

// pageRect moves a rectangle from a frame's viewport into the page's.
func (t *Tab) pageRect(ctx context.Context, f *frame, r *rect) error {
	for {
		parent, err := t.parentOf(f)
		if err != nil || parent == nil {
			return err
		}
		s, world, err := t.walker(ctx, parent)
		if err != nil {
			return err
		}
		id, err := t.ownerObject(ctx, f, s, world)
		if err != nil {
			return err
		}
		var box struct {
			Model struct {
				Content []float64 `json:"content"`
			} `json:"model"`
		}
		err = s.Call(ctx, "DOM.getBoxModel", map[string]any{"objectId": id}, &box)
		s.Start(ctx, "Runtime.releaseObject", map[string]any{"objectId": id})
		if err != nil || len(box.Model.Content) < 2 {
			return &walkerError{Code: "not_visible", Message: "the element's frame is not visible"}
		}
		r.X += box.Model.Content[0]
		r.Y += box.Model.Content[1]
		f = parent
	}
}

type area struct{ X, Y, Width, Height float64 }

// cut limits an area to what is captured at most.
func (a *area) cut() bool {
	cut := a.Width > maxCaptureSide || a.Height > maxCaptureSide
	a.Width, a.Height = min(a.Width, maxCaptureSide), min(a.Height, maxCaptureSide)
	return cut
}

// layout is the part of Page.getLayoutMetrics that is used.
type layout struct {
	Visual struct {
		PageX  float64 `json:"pageX"`
		PageY  float64 `json:"pageY"`
		Width  float64 `json:"clientWidth"`
		Height float64 `json:"clientHeight"`
	} `json:"cssVisualViewport"`
	Content area `json:"cssContentSize"`
}

// clip is the area to capture, in document coordinates, and whether it leaves
// the viewport.
func (m layout) clip(o ScreenshotOptions, r rect) (area, bool) {
	view := area{m.Visual.PageX, m.Visual.PageY, m.Visual.Width, m.Visual.Height}
	switch {
	case o.FullPage:
		full := area{0, 0, m.Content.Width, m.Content.Height}
		return full, full.Width > view.Width || full.Height > view.Height
	case o.Target != "":
		left, top := math.Floor(r.X), math.Floor(r.Y)
		right, bottom := math.Ceil(r.X+r.Width), math.Ceil(r.Y+r.Height)
		beyond := left < 0 || top < 0 || right > view.Width || bottom > view.Height
		return area{left + view.X, top + view.Y, right - left, bottom - top}, beyond
	default:
		return view, false
	}
}

// FitImage scales a PNG or JPEG picture down to what models see: at most 1568
// pixels a side and 1.15 megapixels. Smaller ones, and WebP, are returned as
// they are.
func FitImage(img Image) (Image, error) {
	w, h := float64(img.Width), float64(img.Height)
	scale := min(1, fitSide/w, fitSide/h, math.Sqrt(fitPixels/(w*h)))
	if scale >= 1 || img.MIME == "image/webp" || w == 0 || h == 0 {
		return img, nil
	}
	src, _, err := image.Decode(bytes.NewReader(img.Data))
	if err != nil {
		return img, fmt.Errorf("scale picture: %w", err)
	}
	dst := shrink(src, max(1, int(w*scale)), max(1, int(h*scale)))
	var buf bytes.Buffer
	if img.MIME == "image/jpeg" {
		err = jpeg.Encode(&buf, dst, &jpeg.Options{Quality: jpegQuality})
	} else {
		err = (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&buf, dst)
	}
	if err != nil {
		return img, fmt.Errorf("scale picture: %w", err)
	}
	img.Data, img.Width, img.Height = buf.Bytes(), dst.Bounds().Dx(), dst.Bounds().Dy()
	return img, nil
}

// shrink scales a picture down; each pixel is the average of those it covers.
func shrink(src image.Image, w, h int) *image.RGBA {
	b := src.Bounds()
	dst := image.NewRGBA(image.Rect(0, 0, w, h))
	for y := range h {
		y0 := b.Min.Y + y*b.Dy()/h
		y1 := max(y0+1, b.Min.Y+(y+1)*b.Dy()/h)
		for x := range w {
			x0 := b.Min.X + x*b.Dx()/w
			x1 := max(x0+1, b.Min.X+(x+1)*b.Dx()/w)
			var r, g, bl, a uint32
			for sy := y0; sy < y1; sy++ {
				for sx := x0; sx < x1; sx++ {
					pr, pg, pb, pa := src.At(sx, sy).RGBA()
					r, g, bl, a = r+pr>>8, g+pg>>8, bl+pb>>8, a+pa>>8
				}
			}
			n := uint32((x1 - x0) * (y1 - y0))
			o := dst.PixOffset(x, y)
			dst.Pix[o], dst.Pix[o+1], dst.Pix[o+2], dst.Pix[o+3] = uint8(r/n), uint8(g/n), uint8(bl/n), uint8(a/n)
		}
	}
	return dst
}
