package statefile

import "sync"

// A Head is a writer that keeps the first bytes of its input, such as the output of a program, and
// drops the rest without an error. Several goroutines may write.
type Head struct {
	limit int // in bytes

	mu   sync.Mutex
	head []byte
}

// NewHead returns a Head for at most limit bytes.
func NewHead(limit int) *Head { return &Head{limit: limit} }

// Write keeps bytes up to the limit. It never fails.
func (h *Head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.head = append(h.head, p[:min(len(p), h.limit-len(h.head))]...)
	return len(p), nil
}

// Bytes returns a copy of the bytes kept so far.
func (h *Head) Bytes() []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]byte(nil), h.head...)
}

// String returns the bytes kept so far.
func (h *Head) String() string { return string(h.Bytes()) }
