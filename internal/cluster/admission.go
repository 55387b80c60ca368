package cluster

import (
	"cmp"
	"errors"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// requestLife is how long a request for an admission counts. The daemon repeats its request each second
// while the change waits, and after a failure in up to five minutes.
const requestLife = 10 * time.Second

// An admission is a request of the daemon that it repeats while it waits, and the answer.
type admission struct {
	begun *feed.Feed[struct{}] // published when a request begins
	first string               // answer to a request that begins; empty if the latest answer stays

	mu        sync.Mutex // guards all following fields
	what      string     // what the latest request is about
	requested time.Time  // time of the latest request
	reason    string     // why the request is not granted; empty if it is
	since     time.Time  // since when it is granted; zero if it is not
}

// newAdmission returns an admission without a request.
func newAdmission(reason, first string) *admission {
	return &admission{begun: feed.New(struct{}{}), reason: reason, first: first}
}

// request begins or repeats a request. It returns nil if the request is granted, and otherwise why not.
func (a *admission) request(what string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	isNew := time.Since(a.requested) >= requestLife
	a.what, a.requested = what, time.Now()
	if isNew {
		a.reason = cmp.Or(a.first, a.reason)
		a.begun.Publish(struct{}{})
	}
	if a.reason == "" {
		return nil
	}
	return errors.New(a.reason)
}

// pending returns what is requested; empty if nothing is.
func (a *admission) pending(now time.Time) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now.Sub(a.requested) >= requestLife {
		return ""
	}
	return a.what
}

// answer sets the answer: why the request is not granted, or empty and since when it is.
func (a *admission) answer(reason string, since time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reason, a.since = reason, since
}

// latest returns what the latest request is about, and since when requests are granted; zero if they
// are not.
func (a *admission) latest() (what string, since time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.what, a.since
}
