// Package poll is for tests that wait for what other goroutines or processes do.
package poll

import (
	"testing"
	"time"
)

// Limit is how long Until waits. It is long because a machine may be slow and busy.
const Limit = 3 * time.Minute

// Until waits until is returns true, and ends the test if that takes longer than Limit. what says what is waited for.
func Until(t testing.TB, what string, is func() bool) {
	t.Helper()
	for late := time.Now().Add(Limit); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("not within %v: %s", Limit, what)
		}
	}
}

// Once fails the test unless one of ten calls of do takes less than the limit, which is what do takes each time where there is a defect.
// On a machine that is busy, one call may take any time.
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
