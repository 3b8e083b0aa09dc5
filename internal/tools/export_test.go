package tools

// Sessions is how many sessions the Host keeps something for.
func (h *Host) Sessions() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sessions)
}
