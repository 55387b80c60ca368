package scenario

import (
	"errors"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// single is a container on a node with the Topology Manager's policy single-numa-node.
func single(pod string, count int) kubelet.Container {
	return kubelet.Container{Pod: pod, Name: "main", Resource: resource, Count: count, SingleNode: true}
}

// topology is what a restart of kubelet does to pods that hold devices, where the Topology Manager
// has a policy: kubelet admits every pod again.
var topology = []scenario{
	{name: "a pod's devices are on one NUMA node, or it is refused", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy, 0), device("b", v1beta1.Healthy, 1))
		l.must(p.Register(l.ctx))
		l.shows(2, 2)
		_, err := l.subject.Admit(l.ctx, single("wide", 2))
		l.failsWith(err, kubelet.TopologyAffinity)
		_, err = l.subject.Admit(l.ctx, single("narrow", 1))
		l.must(err)
	}},
	{name: "a device that a pod holds and no list names crashes a kubelet that admits the pod again", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy, 0))
		l.must(p.Register(l.ctx))
		l.shows(1, 1)
		_, err := l.subject.Admit(l.ctx, single("pod", 1))
		l.must(err)
		p.Stop()
		l.must(l.subject.Restart())
		q := l.serve("q.sock", Script{}, device("b", v1beta1.Healthy, 0))
		l.must(q.Register(l.ctx))
		l.shows(1, 1)
		if _, err = l.subject.Admit(l.ctx, single("pod", 1)); !errors.Is(err, kubelet.ErrCrash) {
			l.Fatalf("admit: %v, want a crash", err)
		}
	}},
	{name: "a device that a pod holds and is listed Unhealthy does not crash kubelet", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy, 0))
		l.must(p.Register(l.ctx))
		l.shows(1, 1)
		_, err := l.subject.Admit(l.ctx, single("pod", 1))
		l.must(err)
		p.Stop()
		l.must(l.subject.Restart())
		q := l.serve("q.sock", Script{}, device("a", v1beta1.Unhealthy, 0), device("b", v1beta1.Healthy, 0))
		l.must(q.Register(l.ctx))
		l.shows(2, 1)
		_, err = l.subject.Admit(l.ctx, single("pod", 1))
		l.failsWith(err, kubelet.UnexpectedAdmission) // a container that runs is not asked for; this one would start
	}},
	{name: "a running pod whose device has lost its NUMA node is refused after a restart", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy, 0))
		l.must(p.Register(l.ctx))
		l.shows(1, 1)
		_, err := l.subject.Admit(l.ctx, single("pod", 1))
		l.must(err)
		p.Stop()
		l.must(l.subject.Restart())
		q := l.serve("q.sock", Script{}, device("a", v1beta1.Healthy), device("b", v1beta1.Healthy, 0))
		l.must(q.Register(l.ctx))
		l.shows(2, 2)
		_, err = l.subject.Admit(l.ctx, single("pod", 1))
		l.failsWith(err, kubelet.TopologyAffinity)
	}},
	{name: "a kubelet that does not know the pods shows none, and takes nothing back", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		got := l.admit("pod", 1)
		p.Stop()
		l.subject.SetPodsKnown(false)
		l.must(l.subject.Restart())
		before := l.holders()
		q := l.start("q.sock", Script{}, "a", "b")
		client := l.podResources()
		l.same("pods shown", 0, l.podCount(client))
		q.Send(devices("a", "b", "c")...)
		l.shows(3, 3)
		l.same("holders", before, l.holders())
		l.subject.SetPodsKnown(true)
		l.same("held", got.IDs, l.held(client, "pod"))
	}},
	{name: "an init container holds devices that PodResources does not show, and the next container reuses",
		run: func(l *lab) {
			p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy), device("b", v1beta1.Healthy))
			l.must(p.Register(l.ctx))
			l.shows(2, 2)
			client := l.podResources()
			c := kubelet.Container{Pod: "pod", Name: "init", Resource: resource, Count: 1, Init: true}
			got, err := l.subject.Admit(l.ctx, c)
			l.must(err)
			l.same("held", []string(nil), l.held(client, "pod"))
			l.same("holders", map[string]map[string][]string{"pod/init": {"-1": got.IDs}}, l.holders())
			l.same("devices of the next container", got.IDs, l.admit("pod", 1).IDs)
			l.same("held", got.IDs, l.held(client, "pod"))
			want := map[string]map[string][]string{"pod/init": {"-1": got.IDs}, "pod/main": {"-1": got.IDs}}
			l.same("holders", want, l.holders())
		}},
}

// failsWith fails the scenario unless err is a pod's error with that reason.
func (l *lab) failsWith(err error, reason string) {
	l.Helper()
	var failed *kubelet.PodError
	if !errors.As(err, &failed) || failed.Reason != reason {
		l.Fatalf("admit: %v, want %s", err, reason)
	}
}

func (l *lab) podCount(client podresources.PodResourcesListerClient) int {
	l.Helper()
	response, err := client.List(l.ctx, &podresources.ListPodResourcesRequest{})
	l.must(err)
	return len(response.GetPodResources())
}
