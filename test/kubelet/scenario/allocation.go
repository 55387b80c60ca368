package scenario

import (
	"errors"
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// asksAll wants to be asked for everything.
var asksAll = &v1beta1.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}

// prefers returns a script that answers GetPreferredAllocation so, and hands what it was asked to
// asked.
func prefers(asked chan<- *v1beta1.ContainerPreferredAllocationRequest, ids ...string) Script {
	return Script{
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
		Prefer: func(r *v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
			asked <- r
			return ids, nil
		},
	}
}

var allocation = []scenario{
	{name: "the order of the calls", run: func(l *lab) {
		p := l.start("p.sock", Script{
			Options: asksAll,
			Prefer:  func(*v1beta1.ContainerPreferredAllocationRequest) ([]string, error) { return []string{"b"}, nil },
		}, "a", "b")
		p.ForgetCalls()
		l.same("allocation", []string{"b"}, l.admit("pod", 1).IDs)
		l.same("calls", []string{"GetPreferredAllocation", "Allocate", "PreStartContainer"}, p.Calls())
		p.ForgetCalls()
		l.admit("pod", 1) // the container starts again
		l.same("calls of a second start", []string{"PreStartContainer"}, p.Calls())
	}},
	{name: "the plugin is asked for its preference even when there is no choice", run: func(l *lab) {
		asked := make(chan *v1beta1.ContainerPreferredAllocationRequest, 1)
		l.start("p.sock", prefers(asked), "a", "b")
		l.same("allocation", []string{"a", "b"}, l.admit("pod", 2).IDs)
		r := <-asked
		l.same("available", []string{"a", "b"}, slices.Sorted(slices.Values(r.GetAvailableDeviceIDs())))
		l.same("to be included", 0, len(r.GetMustIncludeDeviceIDs()))
		l.same("size", int32(2), r.GetAllocationSize())
	}},
	{name: "a preference is not binding", run: func(l *lab) {
		asked := make(chan *v1beta1.ContainerPreferredAllocationRequest, 3)
		l.start("p.sock", prefers(asked, "b", "no-such-device"), "a", "b", "c")
		l.same("first", true, slices.Contains(l.admit("first", 2).IDs, "b"))    // short: filled up
		l.same("second", false, slices.Contains(l.admit("second", 1).IDs, "b")) // held: ignored
	}},
	{name: "a failing preference fails the pod, and takes nothing", run: func(l *lab) {
		fail := true
		l.start("p.sock", Script{
			Options: asksAll,
			Prefer: func(*v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
				if fail {
					return nil, errors.New("no preference today")
				}
				return nil, nil
			},
		}, "a", "b")
		l.refuse("first", 1, kubelet.UnexpectedAdmission, "no preference today")
		fail = false
		l.admit("second", 2)
	}},
	{name: "an Allocate that fails fails the pod, and takes nothing", run: func(l *lab) {
		fail := true
		l.start("p.sock", Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
			if fail {
				return nil, errors.New("not today")
			}
			return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, nil
		}}, "a", "b")
		l.refuse("first", 1, kubelet.UnexpectedAdmission, "not today")
		fail = false
		l.admit("second", 2)
	}},
	{name: "an Allocate that answers nothing fails the pod, and its devices stay counted", run: func(l *lab) {
		empty := false
		l.start("p.sock", Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
			if empty {
				return &v1beta1.AllocateResponse{}, nil
			}
			return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, nil
		}}, "a", "b")
		l.admit("first", 1)
		empty = true
		l.refuse("second", 1, kubelet.UnexpectedAdmission, "no containers return")
		empty = false
		l.refuse("third", 1, kubelet.UnexpectedAdmission, "Available: 0")
		l.subject.Remove("first")
		l.admit("fourth", 2)
	}},
	{name: "only the first answer counts", run: func(l *lab) {
		l.start("p.sock", Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
			return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{
				{Envs: map[string]string{"N": "1"}}, {Envs: map[string]string{"N": "2"}},
			}}, nil
		}}, "a")
		l.same("environment", map[string]string{"N": "1"}, l.admit("pod", 1).Response.GetEnvs())
	}},
	{name: "a PreStartContainer that fails holds the container back, on the same devices", run: func(l *lab) {
		fail := true
		l.start("p.sock", Script{
			Options: &v1beta1.DevicePluginOptions{PreStartRequired: true},
			PreStart: func([]string) error {
				if fail {
					return errors.New("not ready")
				}
				return nil
			},
		}, "a", "b")
		l.refuse("pod", 1, kubelet.CreateContainerConfig, "not ready")
		l.refuse("greedy", 2, kubelet.UnexpectedAdmission, "Available: 1")
		fail = false
		l.admit("pod", 1)
	}},
	{name: "too few devices", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		p.ForgetCalls()
		l.refuse("pod", 3, kubelet.UnexpectedAdmission, "Requested: 3, Available: 2")
		l.same("calls", 0, len(p.Calls()))
	}},
	{name: "a pod's devices are free once it is gone, and no call says so", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		l.admit("first", 2)
		l.refuse("second", 1, kubelet.UnexpectedAdmission, "Available: 0")
		p.ForgetCalls()
		l.subject.Remove("first")
		l.same("calls", 0, len(p.Calls()))
		l.admit("third", 2)
	}},
	{name: "a container does not start again on a device that has turned unhealthy", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		id := l.admit("pod", 1).IDs[0]
		other := map[string]string{"a": "b", "b": "a"}[id]
		p.Send(device(id, v1beta1.Unhealthy), device(other, v1beta1.Healthy))
		l.shows(2, 1)
		l.same("status", map[string]map[string]bool{resource: {id: false}}, l.subject.PodStatus("pod"))
		l.refuse("pod", 1, kubelet.UnexpectedAdmission, "previously allocated devices are no longer healthy")
	}},
	{name: "the end of a stream is not in a pod's status", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a")
		l.admit("pod", 1)
		p.Stop()
		l.shows(1, 0)
		l.same("status", map[string]map[string]bool{resource: {"a": true}}, l.subject.PodStatus("pod"))
	}},
	{name: "a held ID that leaves the list turns healthy", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a")
		l.admit("pod", 1)
		p.Send(device("a", v1beta1.Unhealthy))
		l.shows(1, 0)
		l.same("status", map[string]map[string]bool{resource: {"a": false}}, l.subject.PodStatus("pod"))
		p.Send()
		l.shows(0, 0)
		l.same("status", map[string]map[string]bool{resource: {"a": true}}, l.subject.PodStatus("pod"))
	}},
	{name: "an ID that leaves the list while it is allocated crashes kubelet", run: func(l *lab) {
		var p *Plugin
		p = l.start("p.sock", Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
			p.Send()
			l.until(func() bool { return l.looksLike(0, 0) })
			return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, nil
		}}, "a")
		_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 1})
		if !errors.Is(err, kubelet.ErrCrash) {
			l.Fatalf("admit: %v, want a crash", err)
		}
	}},
	{name: "an ID that leaves the list during GetPreferredAllocation crashes kubelet too", run: func(l *lab) {
		var p *Plugin
		p = l.start("p.sock", Script{
			Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
			Prefer: func(*v1beta1.ContainerPreferredAllocationRequest) ([]string, error) {
				p.Send(devices("b")...)
				l.until(func() bool { return l.looksLike(1, 1) })
				return []string{"a"}, nil
			},
		}, "a", "b")
		_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 1})
		if !errors.Is(err, kubelet.ErrCrash) {
			l.Fatalf("admit: %v, want a crash", err)
		}
	}},
	{name: "enough devices on the chosen NUMA node: the plugin is asked among them", run: func(l *lab) {
		asked := make(chan *v1beta1.ContainerPreferredAllocationRequest, 1)
		p := l.serve("p.sock", prefers(asked, "d", "c"), onNodes()...)
		l.must(p.Register(l.ctx))
		l.shows(5, 5)
		l.same("allocation", []string{"c"}, l.admitOn(0, 1).IDs)
		r := <-asked
		l.same("available", []string{"a", "b", "c"}, slices.Sorted(slices.Values(r.GetAvailableDeviceIDs())))
		l.same("to be included", 0, len(r.GetMustIncludeDeviceIDs()))
	}},
	{name: "too few devices on the chosen NUMA node: the plugin is asked for the rest", run: func(l *lab) {
		asked := make(chan *v1beta1.ContainerPreferredAllocationRequest, 1)
		p := l.serve("p.sock", prefers(asked, "d"), onNodes()...)
		l.must(p.Register(l.ctx))
		l.shows(5, 5)
		l.same("allocation", []string{"a", "b", "c", "d"}, l.admitOn(0, 4).IDs)
		r := <-asked
		l.same("available", []string{"a", "b", "c", "d", "e"}, slices.Sorted(slices.Values(r.GetAvailableDeviceIDs())))
		l.same("to be included", []string{"a", "b", "c"}, slices.Sorted(slices.Values(r.GetMustIncludeDeviceIDs())))
		l.same("size", int32(4), r.GetAllocationSize())
	}},
	{name: "exactly as many devices on the chosen NUMA node: the plugin is not asked", run: func(l *lab) {
		asked := make(chan *v1beta1.ContainerPreferredAllocationRequest, 1)
		p := l.serve("p.sock", prefers(asked, "d"), onNodes()...)
		l.must(p.Register(l.ctx))
		l.shows(5, 5)
		l.same("allocation", []string{"a", "b", "c"}, l.admitOn(0, 3).IDs)
		l.same("questions", 0, len(asked))
	}},
}

// onNodes returns five devices: a, b and c on NUMA node 0, d on 1, e on none.
func onNodes() []*v1beta1.Device {
	return []*v1beta1.Device{
		device("a", v1beta1.Healthy, 0), device("b", v1beta1.Healthy, 0), device("c", v1beta1.Healthy, 0, 1),
		device("d", v1beta1.Healthy, 1), device("e", v1beta1.Healthy),
	}
}

// admitOn admits a pod for which the Topology Manager has chosen a NUMA node.
func (l *lab) admitOn(node, count int) kubelet.Allocation {
	l.Helper()
	got, err := l.subject.Admit(l.ctx, kubelet.Container{
		Pod: "pod", Name: "main", Resource: resource, Count: count, NUMA: []int{node},
	})
	l.must(err)
	return got
}
