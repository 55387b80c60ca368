package unitreport_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/unitreport"
)

const (
	mem   = "volcano.sh/gpu-mem.1Gi"
	cores = "volcano.sh/gpu-core.percentage"
)

// at is the time of all allocations.
var at = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

// given returns the kubelet's record of an allocation to container c, with an answer made by the
// policy.
func given(t *testing.T, o containeredits.Options, name string, sharing resource.SharingMode,
	ids ...string) kubelet.Answer {
	t.Helper()
	var devices []resource.Device
	for _, id := range ids {
		uuid, _ := resource.SplitID(id)
		devices = append(devices, resource.Device{ID: id, UUID: uuid, Resource: name, Sharing: sharing})
	}
	e, err := containeredits.For(devices, o)
	if err != nil {
		t.Fatal(err)
	}
	if name == mem { // as the server does
		if e.Annotations == nil {
			e.Annotations = map[string]string{}
		}
		e.Annotations[containeredits.AllocatedKey] = at.Format(time.RFC3339)
	}
	return kubelet.Answer{Resource: name, PodUID: "uid", Container: "c", IDs: ids, Env: e.Env, CDIDevices: e.CDIDevices,
		Annotations: e.Annotations}
}

func ids(from, to int, gpu string) (all []string) {
	for n := from; n < to; n++ {
		all = append(all, fmt.Sprint(gpu, "::", n))
	}
	return all
}

// TestReceipts: requests are joined with allocations for each way of enforcing limits, and
// differences are named.
func TestReceipts(t *testing.T) {
	t.Parallel()
	strategies := map[string]containeredits.Options{
		"cdi-cri": {Strategies: []containeredits.Strategy{containeredits.CDICRI}, MPSRoot: "/mps"},
		"cdi-annotations": {Strategies: []containeredits.Strategy{containeredits.CDIAnnotations}, MPSRoot: "/mps",
			AnnotationPrefix: "cdi.k8s.io/"},
		"envvar": {Strategies: []containeredits.Strategy{containeredits.EnvVar}, MPSRoot: "/mps"},
		"both": {Strategies: []containeredits.Strategy{containeredits.EnvVar, containeredits.CDICRI},
			MPSRoot: "/mps"},
	}
	good := status.Receipt{MemoryMiB: 4 << 10, Percentage: 25, Layer: "mps", Since: at}
	differs := func(r status.Receipt, why string) status.Receipt {
		r.Differences = []string{why}
		return r
	}
	unknown := status.Receipt{MemoryMiB: 4 << 10, Percentage: 25}
	counted := status.Receipt{MemoryMiB: 4 << 10, Percentage: 25, Layer: "none", Since: at}
	for name, o := range strategies {
		memory := given(t, o, mem, resource.InMPSUnits, ids(0, 4, "GPU-a")...)
		threads := given(t, o, cores, resource.Percentage, ids(0, 25, "node")...)
		less := given(t, o, mem, resource.InMPSUnits, ids(0, 3, "GPU-a")...)
		less.IDs = memory.IDs
		whole := given(t, o, mem, resource.InUnits, ids(0, 4, "GPU-a")...)
		onlyCounted := counted
		onlyCounted.Differences = []string{"the allocated limit is 0 percent",
			"the container started without limits, but is configured for limits by MPS"}
		for what, tt := range map[string]struct {
			answers []kubelet.Answer
			err     error
			gpu     *unitreport.GPU
			want    status.Receipt
		}{
			"as asked for": {answers: []kubelet.Answer{threads, memory}, want: good},
			"MPS is away": {
				answers: []kubelet.Answer{threads, memory}, gpu: &unitreport.GPU{MPS: true, Away: "it does not answer"},
				want: differs(good, "it does not answer"),
			},
			"own limits": {
				answers: []kubelet.Answer{threads, memory}, gpu: &unitreport.GPU{MPS: true, OwnLimits: "2G of memory"},
				want: differs(good, "the MPS control daemon allows each client 2G of memory"),
			},
			"another form": {
				answers: []kubelet.Answer{threads, memory}, gpu: &unitreport.GPU{},
				want: differs(good, "the container started as a client of MPS, but is configured for no limits"),
			},
			"fewer were answered": {answers: []kubelet.Answer{threads, less},
				want: differs(good, "the allocated limit is 3072 MiB")},
			"only counted": {answers: []kubelet.Answer{whole}, want: onlyCounted},
			"no answer": {answers: []kubelet.Answer{threads},
				want: differs(unknown, "the kubelet's checkpoint does not have the allocation")},
			"no checkpoint": {err: errors.New("no file"), want: differs(unknown,
				"the allocation is unknown: no file")},
		} {
			gpus := map[string]unitreport.GPU{"GPU-a": {MPS: true}}
			if tt.gpu != nil {
				gpus["GPU-a"] = *tt.gpu
			}
			var devices []kubelet.ContainerDevice
			for resource, all := range map[string][]string{mem: memory.IDs, cores: threads.IDs, "nvidia.com/gpu": {"GPU-z"}} {
				for _, id := range all {
					devices = append(devices, kubelet.ContainerDevice{Resource: resource, ID: id, Namespace: "ns", Pod: "p",
						Container: "c"})
				}
			}
			want := []status.Holder{{Device: "GPU-a", Namespace: "ns", Pod: "p", Container: "c", Receipt: &tt.want}}
			if diff := cmp.Diff(want, unitreport.Of(devices, unitreport.Answers{All: tt.answers, Err: tt.err},
				gpus)); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", name, what, diff)
			}
		}
	}
}

// TestReceiptsOfTwoGPUs: impossible requests and GPUs that are no longer offered in units are
// differences.
func TestReceiptsOfTwoGPUs(t *testing.T) {
	t.Parallel()
	var devices []kubelet.ContainerDevice
	for _, id := range []string{"GPU-a::0", "GPU-b::0", "GPU-b::1"} {
		devices = append(devices, kubelet.ContainerDevice{Resource: mem, ID: id, Namespace: "ns", Pod: "p", Container: "c"})
	}
	got := unitreport.Of(devices, unitreport.Answers{}, map[string]unitreport.GPU{"GPU-a": {}})
	if len(got) != 2 || got[0].Receipt.MemoryMiB != 1024 || got[1].Receipt.MemoryMiB != 2048 {
		t.Fatalf("receipts: %+v", got)
	}
	if text := got[1].Receipt.String(); !strings.Contains(text, "units of 2 GPUs") ||
		!strings.Contains(text, "no longer offered in units") {
		t.Errorf("%s", text)
	}
}

// TestReceiptsByTheDriver: receipts name the driver as the layer, and a later change of the GPU's
// units is a difference.
func TestReceiptsByTheDriver(t *testing.T) {
	t.Parallel()
	for what, o := range map[string]containeredits.Options{
		"cdi-cri": {Strategies: []containeredits.Strategy{containeredits.CDICRI}},
		"cdi-annotations": {Strategies: []containeredits.Strategy{containeredits.CDIAnnotations},
			AnnotationPrefix: "cdi.k8s.io/"},
	} {
		limited := given(t, o, mem, resource.InDriverUnits, ids(0, 2, "GPU-a")...)
		counted := given(t, o, mem, resource.InUnits, ids(0, 2, "GPU-a")...)
		var devices []kubelet.ContainerDevice
		for _, id := range limited.IDs {
			devices = append(devices, kubelet.ContainerDevice{Resource: mem, ID: id, Namespace: "ns", Pod: "p", Container: "c"})
		}
		for _, tt := range []struct {
			answer  kubelet.Answer
			gpu     unitreport.GPU
			layer   string
			differs []string
		}{
			{answer: limited, gpu: unitreport.GPU{Driver: true}, layer: "driver"},
			{answer: limited, layer: "driver", differs: []string{"the container started with a limit by the " +
				"driver, but is configured for none"}},
			{answer: counted, gpu: unitreport.GPU{Driver: true}, layer: "none",
				differs: []string{"the container started without limits, but is configured for limits by the driver"}},
		} {
			got := unitreport.Of(devices, unitreport.Answers{All: []kubelet.Answer{tt.answer}},
				map[string]unitreport.GPU{"GPU-a": tt.gpu})
			want := status.Receipt{MemoryMiB: 2 << 10, Layer: tt.layer, Since: at, Differences: tt.differs}
			if len(got) != 1 || !cmp.Equal(want, *got[0].Receipt) {
				t.Errorf("%s: %+v, want %+v", what, got, want)
			}
		}
	}
}

// TestReadBack: the driver's limits of a pod's cgroups are joined with the allocations of its
// containers. A limit that may belong to another container, or to one that has not started, is no
// difference.
func TestReadBack(t *testing.T) {
	t.Parallel()
	o := containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}}
	main, other := given(t, o, mem, resource.InDriverUnits, ids(0, 2, "GPU-a")...), given(t, o, mem,
		resource.InDriverUnits, ids(2, 6, "GPU-a")...)
	other.Container = "other"
	var devices []kubelet.ContainerDevice
	for _, id := range main.IDs {
		devices = append(devices, kubelet.ContainerDevice{Resource: mem, ID: id, Namespace: "ns", Pod: "p", Container: "c"})
	}
	sandbox := unitreport.Cgroup{}
	for name, tt := range map[string]struct {
		cgroups []unitreport.Cgroup
		read    int
		differs []string
	}{
		"not seen":               {},
		"not started":            {cgroups: []unitreport.Cgroup{sandbox}},
		"an init container runs": {cgroups: []unitreport.Cgroup{sandbox, {}}},
		"the other one runs":     {cgroups: []unitreport.Cgroup{sandbox, {LimitMiB: 4096, HasGPU: true}}},
		"as asked for":           {cgroups: []unitreport.Cgroup{sandbox, {LimitMiB: 2048}}, read: 2048},
		"as asked for, both": {cgroups: []unitreport.Cgroup{sandbox, {LimitMiB: 4096, HasGPU: true},
			{LimitMiB: 2048, HasGPU: true}}, read: 2048},
		"no limit": {cgroups: []unitreport.Cgroup{sandbox, {HasGPU: true}},
			differs: []string{"the driver has no limit for the container"}},
		"another limit": {cgroups: []unitreport.Cgroup{{LimitMiB: 3000, HasGPU: true}}, read: 3000,
			differs: []string{"the driver's limit is 3000 MiB"}},
		"another limit, not known": {cgroups: []unitreport.Cgroup{{LimitMiB: 3000}}},
	} {
		gpus := map[string]unitreport.GPU{"GPU-a": {Driver: true,
			Read: map[string][]unitreport.Cgroup{"uid": tt.cgroups, "another": {{HasGPU: true}}}}}
		got := unitreport.Of(devices, unitreport.Answers{All: []kubelet.Answer{other, main}}, gpus)
		want := status.Receipt{MemoryMiB: 2048, Layer: "driver", ReadMiB: tt.read, Since: at, Differences: tt.differs}
		if len(got) != 1 || !cmp.Equal(want, *got[0].Receipt) {
			t.Errorf("%s: %+v, want %+v", name, *got[0].Receipt, want)
		}
	}
	gpus := map[string]unitreport.GPU{"GPU-a": {Driver: true,
		Read: map[string][]unitreport.Cgroup{"uid": {{LimitMiB: 2048}}}}}
	if text := unitreport.Of(devices, unitreport.Answers{All: []kubelet.Answer{main}},
		gpus)[0].Receipt.String(); !strings.HasPrefix(text, "2048 MiB, by driver, read back") {
		t.Error(text)
	}
}

// TestUnitsOfTwoSizes: while a roll-out changes the size, a container may request both sizes.
func TestUnitsOfTwoSizes(t *testing.T) {
	t.Parallel()
	const small = "volcano.sh/gpu-mem.256Mi"
	var devices []kubelet.ContainerDevice
	for _, d := range []struct{ resource, id string }{
		{mem, "GPU-a::0"}, {mem, "GPU-a::1"}, {cores, "percentage::1"}, {small, "GPU-b::0"}, {small, "GPU-b::1"}, {small,
			"GPU-b::2"},
	} {
		devices = append(devices, kubelet.ContainerDevice{Resource: d.resource, ID: d.id, Namespace: "ns", Pod: "p",
			Container: "c"})
	}
	got := map[string]string{}
	for _, h := range unitreport.Of(devices, unitreport.Answers{}, nil) {
		got[h.Device] = fmt.Sprintf("%d MiB, %d percent, %s", h.Receipt.MemoryMiB, h.Receipt.Percentage,
			strings.Join(h.Receipt.Differences, "; "))
	}
	const why = "the kubelet's checkpoint does not have the allocation; the container has units of 2 GPUs, but can " +
		"use only one; the GPU is no longer offered in units"
	want := map[string]string{"GPU-a": "2048 MiB, 1 percent, " + why, "GPU-b": "768 MiB, 1 percent, " + why}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("receipts (-want +got):\n%s", diff)
	}
}
