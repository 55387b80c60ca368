package daemon

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// reporting is a node of one GPU whose daemon writes Events, the condition and the taint. It is not
// started.
func reporting(t *testing.T, profile string) (*stage, *apiserver.Server) {
	t.Helper()
	return openAgent(t, profile, "--node-events", "--node-condition", "--node-taint")
}

// reported is what the API server has of a node's GPUs, in one line: the condition, whether it is
// tainted, how many Events of each reason.
func reported(server *apiserver.Server) string {
	n, err := server.Node(nodeName)
	if err != nil {
		return err.Error()
	}
	var parts []string
	for _, c := range n.Status.Conditions {
		if c.Type == "GPUHealthy" {
			parts = append(parts, fmt.Sprint(c.Status, " ", c.Reason))
		}
	}
	if slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return strings.HasSuffix(t.Key, "/no-healthy-gpu") }) {
		parts = append(parts, "tainted")
	}
	reasons := map[string]int{}
	for _, e := range server.Events() {
		reasons[e.Reason]++
		if e.Series != nil {
			reasons[e.Reason] += int(e.Series.Count) - 1
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		parts = append(parts, fmt.Sprintf("%d %s", reasons[reason], reason))
	}
	return strings.Join(parts, ", ")
}

// becomes waits until the API server has this of the node's GPUs, and returns how long that took.
func (s *stage) becomes(server *apiserver.Server, want string) time.Duration {
	s.t.Helper()
	begun := time.Now()
	s.eventually(want, func() bool { return reported(server) == want })
	return time.Since(begun)
}

// TestReports: what happens to the only GPU is told, and what ends is. A daemon that is killed and
// starts again writes nothing twice. An API server that is away, also at the start, changes nothing
// for kubelet.
func TestReports(t *testing.T) {
	t.Parallel()
	s, server := reporting(t, "t4")
	s.start()
	s.becomes(server, "True AllHealthy")
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 64})
	t.Logf("told after %v", s.becomes(server, "False GPUUnhealthy, tainted, 1 GPUNeedsOperator"))
	uuid := slices.Collect(maps.Keys(s.known()))[0]

	s.kill()
	writes := server.Writes()
	server.Stop()
	mark := s.Mark()
	s.start()
	s.next(mark, standin.Listed)
	s.allocatable(0)
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	s.call("health.clear", map[string]string{"gpu": uuid})
	s.allocatable(1)
	s.becomes(server, "True AllHealthy, 1 GPUNeedsOperator, 1 GPURecovered")
	if n := server.Writes() - writes; n > 4 {
		t.Errorf("%d writes after the restart, want an Event, a condition and a taint", n)
	}
}

// TestReportsToPods: the pod that holds the GPU has the Event too, by its name from PodResources
// and its UID from kubelet's checkpoint.
func TestReportsToPods(t *testing.T) {
	t.Parallel()
	s, server := reporting(t, "dgx-h100")
	s.Args = append(s.Args, "--node-events=pods")
	s.start()
	s.allocatable(8)
	s.admit("work", 8)
	s.eventually("the Node is known", func() bool { return server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}] > 0 })
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "2", XID: 79})
	s.eventually("an Event of the Node and one of the pod", func() bool {
		var about []string
		for _, e := range server.Events() {
			if e.Regarding.UID != "" {
				about = append(about, e.Regarding.Kind+" "+e.Namespace+" "+e.Regarding.Name)
			}
		}
		slices.Sort(about)
		return slices.Equal(about, []string{"Node default " + nodeName, "Pod default work"})
	})
}
