package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
)

// sliceWrites counts the writes of slices by verb.
func (c *claimable) sliceWrites() string {
	requests := c.api.Requests()
	var text []string
	for _, verb := range []string{"create", "update", "delete"} {
		text = append(text, fmt.Sprint(verb, " ", requests[apiserver.Request{Verb: verb, Resource: "resourceslices"}]))
	}
	return strings.Join(text, ", ")
}

// TestSlicesAfterRestarts: a kubelet that starts removes the slices of its node, and they are there again soon; a daemon that starts again
// finds them, and writes nothing.
func TestSlicesAfterRestarts(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	are := func(when string, wants ...string) {
		t.Helper()
		// A write that gets no answer for half a minute is made again.
		if now := c.sliceWrites(); !slices.Contains(wants, now) && !c.logged("Cannot talk to the API server") {
			t.Errorf("%s: %s, want %s", when, now, wants[0])
		}
	}
	// Where a look takes longer than a second, the links between GPUs are asked for by the next one, and written then.
	are("writes of 8 GPUs", "create 1, update 0, delete 0", "create 1, update 1, delete 0")
	c.kill()
	c.becomesReady("")
	c.eventually("status tells of the slices", func() bool { return strings.Contains(c.command("status", "-o", "json"), `"devices": 8`) })
	are("after a restart of the daemon", "create 1, update 0, delete 0", "create 1, update 1, delete 0", "create 1, update 2, delete 0",
		"create 1, update 3, delete 0")
	_, updates, _ := strings.Cut(c.sliceWrites(), ",")
	for i := range 2 {
		c.plugins.Stop()
		if err := c.api.WipeSlices(nodeName); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		c.plugins = plugins.Start(plugins.Options{Dir: c.Path("registry")})
		t.Cleanup(c.plugins.Stop)
		c.published(8)
		t.Logf("restart %d of kubelet: the slices are back after %v", i, time.Since(began).Round(time.Millisecond))
		c.eventually("kubelet has registered the daemon", func() bool { return len(c.plugins.Registered()) == 1 })
	}
	are("after two restarts of kubelet", "create 3,"+updates)
}
