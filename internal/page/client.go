package page

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"abfleet/internal/fault"
)

// titleWait is how long a tab list waits for one page to say its title.
const titleWait = 200 * time.Millisecond

// maxClients bounds the clients remembered.
const maxClients = 1024

// Client is one user of a Browser: it has its own current tab.
type Client struct {
	browser *Browser
	key     string
	current *Tab // guarded by browser.mu; nil until first used
}

// Client returns the client with that key, made on first use. Keys come from
// the caller's channel; "" is a key like any other.
func (b *Browser) Client(key string) *Client {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.clients[key]
	if c == nil {
		if len(b.clients) >= maxClients {
			for k := range b.clients { // it starts anew, as after Forget
				delete(b.clients, k)
				break
			}
		}
		c = &Client{browser: b, key: key}
		b.clients[key] = c
	}
	return c
}

// Forget drops what the engine keeps for the client, which starts anew on its
// next use. No tab is closed.
func (c *Client) Forget() {
	c.browser.mu.Lock()
	defer c.browser.mu.Unlock()
	c.current = nil
	delete(c.browser.clients, c.key)
}

// pick returns the client's current tab, the first one when it has none yet,
// nil when the browser has no page. The caller holds b.mu.
func (c *Client) pick() *Tab {
	if c.current == nil && len(c.browser.tabs) > 0 {
		c.current = c.browser.tabs[0]
	}
	return c.current
}

// Tabs lists the tabs in order of appearance.
func (c *Client) Tabs(ctx context.Context) ([]TabInfo, error) {
	b := c.browser
	if err := b.Err(); err != nil {
		return nil, b.explain("list tabs", err)
	}
	b.mu.Lock()
	tabs, current := slices.Clone(b.tabs), c.pick()
	list := make([]TabInfo, len(tabs))
	for i, t := range tabs {
		list[i] = TabInfo{Index: i, URL: t.url(), Current: t == current, Crashed: t.crashed}
	}
	b.mu.Unlock()
	var wg sync.WaitGroup
	for i, t := range tabs {
		if list[i].Crashed {
			continue
		}
		wg.Go(func() { list[i].Title = t.title(ctx, titleWait) })
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, b.explain("list tabs", err)
	}
	return list, nil
}

// Current returns the client's current tab. Only where the browser has no page
// at all does it open one.
func (c *Client) Current(ctx context.Context) (*Tab, error) {
	b := c.browser
	if err := b.Err(); err != nil {
		return nil, b.explain("find current tab", err)
	}
	b.mu.Lock()
	t := c.pick()
	b.mu.Unlock()
	if t != nil {
		return t, nil
	}
	t, err := b.createPage(ctx)
	if err != nil {
		return nil, b.explain("open tab", err)
	}
	c.choose(t)
	return t, nil
}

func (c *Client) choose(t *Tab) {
	c.browser.mu.Lock()
	c.current = t
	c.browser.mu.Unlock()
}

// NewTab opens a tab, makes it the client's current one and, unless url is
// empty, navigates it. When the navigation fails the tab stays.
func (c *Client) NewTab(ctx context.Context, url string) (*Tab, error) {
	b := c.browser
	if url != "" {
		if _, err := NormalizeURL(url); err != nil {
			return nil, err
		}
	}
	t, err := b.createPage(ctx)
	if err != nil {
		return nil, b.explain("open tab", err)
	}
	c.choose(t)
	if url != "" {
		if err := t.Navigate(ctx, url); err != nil {
			return t, err
		}
	}
	return t, nil
}

// at returns the tab with an index of the tab list.
func (c *Client) at(op string, index int) (*Tab, error) {
	b := c.browser
	b.mu.Lock()
	defer b.mu.Unlock()
	if index < 0 || index >= len(b.tabs) {
		return nil, fault.New(fault.TargetNotFound, fmt.Sprintf("%s %d", op, index), "list the tabs to see their indexes",
			"there are %d tabs", len(b.tabs))
	}
	return b.tabs[index], nil
}

// SelectTab makes a tab the client's current one and shows it to whoever
// watches the browser.
func (c *Client) SelectTab(ctx context.Context, index int) (*Tab, error) {
	t, err := c.at("select tab", index)
	if err != nil {
		return nil, err
	}
	c.choose(t)
	ctx, cancel := context.WithTimeout(ctx, createWait)
	defer cancel()
	if err := t.target.session.Call(ctx, "Page.bringToFront", nil, nil); err != nil {
		return nil, c.browser.explain(fmt.Sprintf("select tab %d", index), err)
	}
	return t, nil
}

// CloseTab closes the tab with that index; a negative index is the current one.
// Closing the current tab makes the next one current, or the last.
func (c *Client) CloseTab(ctx context.Context, index int) error {
	b := c.browser
	const op = "close tab"
	var t *Tab
	if index < 0 {
		b.mu.Lock()
		t = c.pick()
		b.mu.Unlock()
		if t == nil {
			return fault.New(fault.TargetNotFound, op, "navigate to a URL to open one", "there is no open tab")
		}
	} else {
		var err error
		if t, err = c.at(op, index); err != nil {
			return err
		}
	}
	b.mu.Lock()
	last, dialog := len(b.tabs) == 1, t.dialog
	b.mu.Unlock()
	if last && b.opts.KeepPage {
		if _, err := b.createPage(ctx); err != nil {
			return b.explain(op, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, createWait)
	defer cancel()
	if err := b.conn.Root().Call(ctx, "Target.closeTarget", map[string]any{"targetId": t.id}, nil); err != nil {
		return b.explain(op, err)
	}
	// A dialog that was open goes with the tab. A new one is the page's question
	// whether to leave, which is for the person to answer.
	err := b.await(ctx, func() bool { return t.closed || t.dialog != nil && t.dialog != dialog })
	if err == nil {
		b.mu.Lock()
		if !t.closed {
			err = errDialog
		}
		b.mu.Unlock()
	}
	return b.explain(op, err)
}
