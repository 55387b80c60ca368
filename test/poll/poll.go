// Package poll is for tests that wait for what other goroutines or processes do.
package poll

import (
	"context"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// Limit is how long Until waits. It is long because a machine may be slow and busy.
const Limit = 3 * time.Minute

// Until waits until is returns true, and ends the test if that takes longer than Limit. what says
// what is waited for.
func Until(t testing.TB, what string, is func() bool) {
	t.Helper()
	Within(t, Limit, what, is)
}

// Within is Until with a limit of its own.
func Within(t testing.TB, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for late := time.Now().Add(limit); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// Latest waits until the latest value of a feed is as wanted, and returns it. It ends the test if
// that takes longer than Limit.
func Latest[T any](t testing.TB, what string, f *feed.Feed[T], wanted func(T) bool) (value T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Limit)
	defer cancel()
	if !feed.Until(ctx, f, func(now T) bool { value = now; return wanted(now) }) {
		t.Fatalf("not within %v: %s; it is %+v", Limit, what, value)
	}
	return value
}

// Once fails the test unless one of ten calls of do takes less than the limit, which is what do
// takes each time where there is a defect. On a machine that is busy, one call may take any time.
func Once(t testing.TB, what string, limit time.Duration, do func()) {
	t.Helper()
	for range 10 {
		began := time.Now()
		if do(); time.Since(began) < limit || t.Failed() {
			return
		}
	}
	t.Errorf("it takes %v or longer: %s", limit, what)
}
