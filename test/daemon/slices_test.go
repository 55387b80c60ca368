package daemon

import (
	"fmt"
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

// TestSlicesAfterRestarts: a kubelet that starts removes the slices of its node, and they are there
// again soon; a daemon that starts again finds them, and writes nothing. The driver is slow, so
// that the first looks do not tell all links between GPUs.
func TestSlicesAfterRestarts(t *testing.T) {
	t.Parallel()
	c := openClaimable(t, "dra")
	c.broken(slowLinks...)
	c.start()
	c.published(8)
	are := func(want, when string) {
		t.Helper()
		// A write that gets no answer for half a minute is made again.
		if now := c.sliceWrites(); now != want && !c.logged("Cannot talk to the API server") {
			t.Errorf("%s: %s, want %s", when, now, want)
		}
	}
	for _, s := range c.api.Slices() {
		for _, d := range s.Spec.Devices {
			if d.Attributes["gpu-device-plugin.github.io/nvlinkDomain"].StringValue == nil {
				t.Errorf("%s was published without links", d.Name)
			}
		}
	}
	are("create 1, update 0, delete 0", "writes of 8 GPUs")
	before := c.sliceWrites()
	c.crash()
	c.becomesReady("")
	c.eventually("status tells of the slices", func() bool { return strings.Contains(c.command("status", "-o", "json"), `"devices": 8`) })
	are(before, "after a restart of the daemon")
	for i := range 2 {
		c.plugins.Stop()
		if err := c.api.WipeSlices(nodeName); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		c.plugins = plugins.Start(plugins.Options{Dir: c.Path("plugins_registry")})
		t.Cleanup(c.plugins.Stop)
		c.published(8)
		t.Logf("restart %d of kubelet: the slices are back after %v", i, time.Since(began).Round(time.Millisecond))
		c.eventually("kubelet has registered the daemon", func() bool { return len(c.plugins.Registered()) == 1 })
	}
	are("create 3, update 0, delete 0", "after two restarts of kubelet")
}
