// Package feed hands the latest value of one owner to many readers. The owner never waits for a
// reader. A reader that was busy sees only the newest value.
package feed

import "sync"

// A Feed holds the latest value of its owner.
//
// The zero value is ready for use and holds the zero value of T. Values are shared, not copied:
// nobody may change a published value.
type Feed[T any] struct {
	mu      sync.Mutex // guards all following fields
	value   T
	changed chan struct{}
}

// New returns a Feed with a value.
func New[T any](value T) *Feed[T] { return &Feed[T]{value: value} }

// Publish sets the latest value and wakes all waiting readers. It never blocks.
func (f *Feed[T]) Publish(value T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.value = value
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

// Latest returns the latest value and a channel. A newer value closes the channel.
func (f *Feed[T]) Latest() (value T, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.value, f.changed
}

// Value returns the latest value.
func (f *Feed[T]) Value() T {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.value
}
