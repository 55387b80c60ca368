package claims

import (
	"context"
	"encoding/json"
	"fmt"
)

// RefreshInterval is how often Run checks the records.
const RefreshInterval = refreshInterval

// AtEachStep calls step before and after each change of a file. It is for Claims without calls.
func (c *Claims) AtEachStep(step func()) { c.store.step = step }

// Signed returns a record file with a new checksum.
func Signed(text string) string {
	var p recordFile
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"checksum":%q,"record":%s}`, checksum(p.Record), p.Record)
}

// Started is closed when Run has read the records and checked their specs.
func (c *Claims) Started() <-chan struct{} {
	started := make(chan struct{})
	go func() {
		for {
			open, changed := c.open.Latest()
			if open {
				close(started)
				return
			}
			<-changed
		}
	}()
	return started
}

// RetryReleases retries failed releases, as Run does.
func (c *Claims) RetryReleases(ctx context.Context) { c.retryReleases(ctx) }
