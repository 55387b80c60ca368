package scenario

import (
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// account is what PodResources tells.
var account = []scenario{
	{name: "allocatable devices are the healthy ones, held or not", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b", "c")
		client := l.podResources()
		l.admit("pod", 1)
		p.Send(device("a", v1beta1.Healthy), device("b", v1beta1.Unhealthy), device("c", v1beta1.Healthy))
		l.shows(3, 2)
		l.same("allocatable", []string{"a", "c"}, l.allocatable(client))
		p.Stop()
		l.shows(3, 0)
		l.same("allocatable with no stream", []string(nil), l.allocatable(client))
	}},
	{name: "a device whose topology names no node is left out", run: func(l *lab) {
		bare := device("bare", v1beta1.Healthy)
		bare.Topology = &v1beta1.TopologyInfo{}
		p := l.serve("p.sock", Script{}, bare, device("one", v1beta1.Healthy, 1), device("none", v1beta1.Healthy))
		l.must(p.Register(l.ctx))
		l.shows(3, 3)
		l.same("allocatable", []string{"none", "one"}, l.allocatable(l.podResources()))
	}},
	{name: "pods and what they hold", run: func(l *lab) {
		l.start("p.sock", Script{}, "a", "b")
		client := l.podResources()
		got := l.admit("pod", 2)
		l.same("held", got.IDs, l.held(client, "pod"))
		question := &podresources.GetPodResourcesRequest{PodName: "pod", PodNamespace: "default"}
		one, err := client.Get(l.ctx, question)
		l.must(err)
		l.same("held, asked for alone", got.IDs, ids(one.GetPodResources().GetContainers()[0].GetDevices()))
		l.subject.Remove("pod")
		l.same("held by a pod that is gone", []string(nil), l.held(client, "pod"))
		if _, err := client.Get(l.ctx, question); err == nil {
			l.Error("a pod that is gone can be asked for")
		}
	}},
	{name: "a failed pod holds nothing", run: func(l *lab) {
		l.start("p.sock", Script{}, "a")
		l.refuse("pod", 2, kubelet.UnexpectedAdmission, "Available: 1")
		l.same("held", []string(nil), l.held(l.podResources(), "pod"))
	}},
	{name: "a question while a device is allocated frees it, if a pod has ended", run: func(l *lab) {
		client, ask := l.podResources(), false
		l.start("p.sock", Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
			if ask {
				l.subject.Remove("ended")
				l.same("held by the pod that is admitted", []string(nil), l.held(client, "first"))
			}
			return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, nil
		}}, "a", "b")
		l.admit("ended", 1)
		ask = true
		first := l.admit("first", 1).IDs
		ask = false
		second := l.admit("second", 2).IDs
		l.same("the second pod has the first one's, too", true, slices.Contains(second, first[0]))
		l.same("held by the first pod", first, l.held(client, "first"))
		l.refuse("third", 1, kubelet.UnexpectedAdmission, "Available: 0")
	}},
	{name: "too many questions at once are refused", run: func(l *lab) {
		client := l.podResources()
		var refused atomic.Int32
		// A machine that is busy enough answers a few hundred as slowly as is allowed.
		l.eventually("a refusal", func() bool {
			var calls sync.WaitGroup
			for range 200 {
				calls.Go(func() {
					_, err := client.List(l.ctx, &podresources.ListPodResourcesRequest{})
					if status.Code(err) == codes.ResourceExhausted {
						refused.Add(1)
					}
				})
			}
			calls.Wait()
			return refused.Load() > 0
		})
	}},
}

func (l *lab) allocatable(client podresources.PodResourcesListerClient) []string {
	l.Helper()
	response, err := client.GetAllocatableResources(l.ctx, &podresources.AllocatableResourcesRequest{})
	l.must(err)
	return ids(response.GetDevices())
}

func (l *lab) held(client podresources.PodResourcesListerClient, pod string) []string {
	l.Helper()
	response, err := client.List(l.ctx, &podresources.ListPodResourcesRequest{})
	l.must(err)
	var held []string
	for _, p := range response.GetPodResources() {
		if p.GetName() != pod || p.GetNamespace() != "default" {
			continue
		}
		for _, c := range p.GetContainers() {
			held = append(held, ids(c.GetDevices())...)
		}
	}
	return held
}

func ids(devices []*podresources.ContainerDevices) []string {
	var all []string
	for _, d := range devices {
		if d.GetResourceName() == resource {
			all = append(all, d.GetDeviceIds()...)
		}
	}
	slices.Sort(all)
	return all
}
