package cluster

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/agent"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// TestLabelsAfterARestore: an older version of the node counts after a while: the cluster may have been restored from a backup.
func TestLabelsAfterARestore(t *testing.T) {
	t.Parallel()
	set := map[string]string{"nvidia.com/gpu.count": "8"}
	timer := clocktesting.NewFakeClock(time.Now())
	client := kubeapi.New(kubeapi.Options{Node: "n"})
	l := &nodeLabeler{labeler: labeler{client: client, clock: timer, daemon: agent.Daemon{Labels: feed.New(set)}}}
	due := func(when string, want bool) {
		t.Helper()
		if got := l.due(); want != (len(got) > 0) {
			t.Errorf("%s: due are %v, want some: %v", when, got, want)
		}
	}
	client.Nodes().Publish(kubeapi.Node{UID: "u", ResourceVersion: "1000", Labels: set})
	due("labeled", false)
	timer.Step(time.Hour)
	due("still labeled", false)
	client.Nodes().Publish(kubeapi.Node{UID: "u", ResourceVersion: "999"})
	due("an older version, such as of a watch that is behind", false)
	timer.Step(ownWrite - time.Second)
	due("just before the limit", false)
	timer.Step(time.Second)
	due("the older version is the node", true)
	client.Nodes().Publish(kubeapi.Node{UID: "u", ResourceVersion: "1001", Labels: set})
	due("a newer version", false)
}
