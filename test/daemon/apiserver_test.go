package daemon

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A clustered node is one whose daemon has all features on that need the API server.
type clustered struct {
	*stage
	api     *apiserver.Server
	labels  string // how labels are written
	metrics string // the daemon's address
}

// healthLabel has the sum of the health of the node's GPUs.
const healthLabel = "gpu-device-plugin.github.io/gpu.health"

// cluster makes a node that is clustered, and starts the daemon.
func cluster(t *testing.T, labels string) *clustered {
	t.Helper()
	s, api := openAgent(t, "", "--node-labels", labels, "--node-events", "--node-condition", "--node-taint")
	c := &clustered{stage: s, api: api, labels: labels, metrics: metricsAddress(t)}
	for _, folder := range []string{"configs", "state"} {
		if err := os.Mkdir(c.Path(folder), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// The node has had a configuration: without one, an API server that is slow at the start is told
	// of as a fault, too.
	c.write("state/node-config.json", `{"version": 1, "file": "whole"}`)
	c.write("configs/whole", "version: v1\n")
	c.write("configs/shared", "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	c.Args = append(c.Args,
		"--namespace", "gpus", "--metrics-address", c.metrics, "--node-config-dir", c.Path("configs"), "--node-config-default", "whole")
	c.start()
	c.next(0, standin.Listed)
	return c
}

// label returns the value of a label that the daemon gives the node, directly or for
// node-feature-discovery.
func (c *clustered) label(key string) string {
	if c.labels == "nodeFeature" {
		object, err := c.api.NodeFeature("gpus", "gpu-node-agent-"+nodeName)
		if err != nil {
			return ""
		}
		spec, _ := object.Object["spec"].(map[string]any)
		labels, _ := spec["labels"].(map[string]any)
		value, _ := labels[key].(string)
		return value
	}
	n, err := c.api.Node(nodeName)
	if err != nil {
		c.t.Fatal(err)
	}
	return n.Labels[key]
}

// condition returns status, reason and message of the condition of the node's GPUs.
func (c *clustered) condition() string {
	n, err := c.api.Node(nodeName)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == "GPUHealthy" {
			return fmt.Sprintf("%s %s %s", condition.Status, condition.Reason, condition.Message)
		}
	}
	return ""
}

// events returns how often each thing was reported, by reason.
func (c *clustered) events() map[string]int {
	counts := map[string]int{}
	for _, e := range c.api.Events() {
		counts[e.Reason]++
		if e.Series != nil {
			counts[e.Reason] += int(e.Series.Count) - 1
		}
	}
	return counts
}

// requests returns how many requests came, writes aside or writes alone.
func (c *clustered) requests(of func(apiserver.Request) bool) int {
	n := 0
	for request, count := range c.api.Requests() {
		if of(request) {
			n += count
		}
	}
	return n
}

// resident returns how much memory the daemon has, in kB.
func (s *stage) resident() int {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(s.Running().Pid), "status"))
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	size, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		s.t.Fatal(err)
	}
	return size
}

// unchanged fails the test unless the daemon serves kubelet and scrapes as if there were no API
// server: a GPU fails, and kubelet knows it soon; a pod gets another; probes and metrics answer.
func (c *clustered) unchanged(registrations int) {
	c.t.Helper()
	const soon = 25 * time.Second // hundredths of a second where the machine is idle; requests to the API server have 30 s
	began := time.Now()
	c.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
	c.allocatable(7)
	if took := time.Since(began); took > soon {
		c.t.Errorf("kubelet learned of a bad GPU after %v", took)
	}
	c.admit("work", 1)
	c.answers(c.metrics, "/healthz", 200, "")
	c.answers(c.metrics, "/readyz", 200, "")
	c.answers(c.metrics, "/metrics", 200, `gpu="3",xid="48"} 1`)
	if n := c.registrations(); n != registrations {
		c.t.Errorf("the daemon registered %d times, want %d", n, registrations)
	}
}

// TestFaultsOfTheAPIServer plays each fault of the API server, while a GPU fails and the label of
// the node asks for another configuration. Kubelet and scrapes see no difference; afterwards the
// cluster knows all, and nothing twice.
func TestFaultsOfTheAPIServer(t *testing.T) {
	t.Parallel()
	for _, labels := range []string{"node", "nodeFeature"} {
		for _, fault := range apiserver.Faults() {
			t.Run(labels+"/"+fault.Name, func(t *testing.T) {
				t.Parallel()
				c := cluster(t, labels)
				c.eventually("labels", func() bool { return c.label(healthLabel) == "healthy" && c.label("nvidia.com/gpu.count") == "8" })
				mark, before := c.Mark(), c.requests(func(apiserver.Request) bool { return true })
				registrations := c.registrations()
				if err := fault.Begin(c.api); err != nil {
					t.Fatal(err)
				}
				c.unchanged(registrations)
				relabel(t, c.api, "shared")
				if !fault.Passes {
					c.logs("annot ") // Cannot talk to the API server, or Cannot watch the node
				}
				if err := fault.End(c.api); err != nil {
					t.Fatal(err)
				}

				c.eventually("the condition", func() bool { return strings.HasPrefix(c.condition(), "False GPUUnhealthy GPU-") })
				c.eventually("the label", func() bool { return c.label(healthLabel) == "degraded" })
				c.eventually("the Event", func() bool { return c.events()["GPUUnhealthy"] > 0 })
				c.until("two replicas of each GPU", func() bool { return c.Resources()[gpu].Capacity >= 15 })
				c.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
				c.eventually("the second Event", func() bool { return c.events()["GPURecovered"] > 0 })
				c.eventually("the label of before", func() bool { return c.label(healthLabel) == "healthy" })

				if events := c.events(); !maps.Equal(events, map[string]int{"GPUUnhealthy": 1, "GPURecovered": 1}) {
					t.Errorf("Events %v, want each once", events)
				}
				for _, e := range c.Events(mark) {
					if e.Kind == standin.Registering || e.Kind == standin.StreamEnded || e.Kind == standin.Crash {
						t.Errorf("kubelet saw: %v", e)
					}
				}
				requests := c.requests(func(apiserver.Request) bool { return true }) - before
				if requests > 100 {
					t.Errorf("the daemon made %d requests: %v", requests, c.api.Requests())
				}
				size := c.resident()
				t.Logf("%d requests, %d kB resident", requests, size)
				if limit := 60 << 10; buildFlags == nil && size > limit { // the race detector's own memory is larger
					t.Errorf("the daemon has %d kB, want less than %d", size, limit)
				}
			})
		}
	}
}
