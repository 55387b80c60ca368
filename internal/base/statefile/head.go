package statefile

import "sync"

// A Head is a writer that keeps the first bytes of what is written, such as the output of a
// program, and drops the rest without an error. Several goroutines may write.
type Head struct {
	limit int // in bytes

	mu   sync.Mutex
	kept []byte
}

// NewHead returns a Head that keeps so many bytes.
func NewHead(limit int) *Head { return &Head{limit: limit} }

// Write keeps what there is room for. It never fails.
func (h *Head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kept = append(h.kept, p[:min(len(p), h.limit-len(h.kept))]...)
	return len(p), nil
}

// Bytes returns what was kept until now. The caller owns it.
func (h *Head) Bytes() []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]byte(nil), h.kept...)
}

// String returns what was kept until now.
func (h *Head) String() string { return string(h.Bytes()) }
