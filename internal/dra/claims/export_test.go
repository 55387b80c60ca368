package claims

import (
	"context"
	"encoding/json"
	"fmt"
)

// Every is how often Run looks at the records.
const RefreshInterval = refreshInterval

// AtEachStep has a function called before and after each change of a file. It is for Claims without
// calls.
func (c *Claims) AtEachStep(step func()) { c.store.step = step }

// Signed returns a record with the checksum that it has now.
func Signed(text string) string {
	var p recordFile
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"checksum":%q,"record":%s}`, checksum(p.Record), p.Record)
}

// Started is closed when Run has read the records and looked at their specs.
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

// GiveBackReleased is what Run does when it is due.
func (c *Claims) RetryReleases(ctx context.Context) { c.retryReleases(ctx) }
