package cluster

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestRestoreFromABackup: a condition, labels and a taint that a restore of the cluster took away are there again soon, however sure their
// writers were that they had just written them.
func TestRestoreFromABackup(t *testing.T) {
	s := newStage(t)
	for range 20 { // the cluster is older than its backup
		s.change(func(n *corev1.Node) {
			n.Annotations = map[string]string{"at": s.clock.Now().String()}
			s.clock.Step(time.Second)
		})
	}
	s.start(everything, gpu(0, bad))
	s.until("all is told", func() bool { return s.hasCondition("False")() && s.tainted() })
	watches := s.server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}]
	if err := s.server.Restore(); err != nil {
		t.Fatal(err)
	}
	s.change(func(n *corev1.Node) { n.Status.Conditions, n.Spec.Taints = nil, nil })
	for late := time.Now().Add(patience); s.server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}] == watches; {
		if time.Now().After(late) {
			t.Fatal("the node is not watched again")
		}
		<-time.After(5 * time.Millisecond)
	}
	began := s.clock.Now()
	s.until("all is told again", func() bool { return s.hasCondition("False")() && s.tainted() })
	if took := s.clock.Since(began); took > ownWrite/2 {
		t.Errorf("after %v, want it soon", took)
	}
}

// TestLabelsAfterARestore: an older version of the node counts after a while: the cluster may have been restored from a backup.
func TestLabelsAfterARestore(t *testing.T) {
	t.Parallel()
	set := map[string]string{"nvidia.com/gpu.count": "8"}
	timer := clocktesting.NewFakeClock(time.Now())
	client := kubeapi.New(kubeapi.Options{Node: "n"})
	l := &nodeLabeler{labeler: labeler{client: client, clock: timer, daemon: daemon.View{Labels: feed.New(set)}}}
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
