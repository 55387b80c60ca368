package nodefacts_test

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func claims(s *doctor.Settings) { s.Claims = true }

// given is the status of a daemon with its GPU in a slice.
func given(change func(*status.DRA)) func(*status.Status) {
	return func(s *status.Status) {
		s.Resources = nil
		s.DRA = &status.DRA{
			Mode: "dra", Driver: status.DRADriver{Registered: true}, Slices: 1, Devices: 1, Generation: 1, API: "v1",
			GPUs: []status.DRAGPU{{UUID: "GPU-1", Owner: "dra"}},
		}
		if change != nil {
			change(s.DRA)
		}
	}
}

// answers makes the kubelet report devices of the device plugin.
func answers(a doctor.PodResourcesAnswer) func(*doctor.NodeFacts) {
	return func(f *doctor.NodeFacts) {
		f.PodResources.Value, f.Kubelet.Value.Registered = a, nil
	}
}

var claimRows = []row{
	{name: "not used", check: "dra", severity: diagnosis.OK, says: "No GPU is offered"},
	{
		name: "used", settings: claims, status: given(nil), facts: answers(doctor.PodResourcesAnswer{}),
		check: "dra", severity: diagnosis.OK, says: "1 GPU of 1 in 1 ResourceSlice",
	},
	{
		name: "left out", settings: claims, status: given(func(d *status.DRA) {
			d.GPUs = append(d.GPUs, status.DRAGPU{UUID: "GPU-2", Owner: "dra", Unpublished: "a taint"})
		}), facts: answers(doctor.PodResourcesAnswer{}), check: "dra", severity: diagnosis.OK,
		says: "1 GPU of 2 in 1 ResourceSlice",
	},
	{
		name: "not registered", settings: claims,
		status: given(func(d *status.DRA) { d.Driver = status.DRADriver{Problem: "kubelet refused it"} }),
		facts:  answers(doctor.PodResourcesAnswer{}), check: "dra", severity: diagnosis.Error,
		says:   "has not registered the driver for claims: kubelet refused it",
		remedy: "/var/lib/kubelet/plugins_registry",
	},
	{
		name: "foreign driver", settings: claims,
		status: given(func(d *status.DRA) { d.Driver = status.DRADriver{NameConflict: "/reg/gpu.nvidia.com.sock"} }),
		facts:  answers(doctor.PodResourcesAnswer{}), check: "dra", severity: diagnosis.Error,
		says:  "Another driver named gpu.nvidia.com",
		shows: "/reg/gpu.nvidia.com.sock",
	},
	{
		name: "no API", settings: claims, status: given(func(d *status.DRA) { d.Problem = "the API server serves resource.k8s.io in none of the versions" }),
		facts: answers(doctor.PodResourcesAnswer{}), check: "dra", severity: diagnosis.Error, says: "in none of the versions",
		remedy: "kubectl get --raw /apis/resource.k8s.io",
	},
	{
		name: "an old API", settings: claims, status: given(func(d *status.DRA) { d.API = "v1beta1" }),
		facts: answers(doctor.PodResourcesAnswer{}),
		check: "dra", severity: diagnosis.Info, says: "as v1beta1",
	},
	{
		name: "gate off", settings: claims, status: given(func(d *status.DRA) { d.NoTaints = true }),
		facts: answers(doctor.PodResourcesAnswer{}),
		check: "dra", severity: diagnosis.Info, says: "does not keep taints", remedy: "DRADeviceTaints",
	},
	{
		name: "gate of partitions off", settings: claims, status: given(func(d *status.DRA) { d.NoCounters = true }),
		facts: answers(doctor.PodResourcesAnswer{}),
		check: "dra", severity: diagnosis.Error, says: "keeps no counters", remedy: "DRAPartitionableDevices",
	},
	{
		name: "gate of shares off", settings: claims, status: given(func(d *status.DRA) { d.NoShares = true }),
		facts: answers(doctor.PodResourcesAnswer{}),
		check: "dra", severity: diagnosis.Warning, says: "are allocated as a whole", remedy: "DRAConsumableCapacity",
	},
	{
		name: "split, and devices by the environment", check: "dra", severity: diagnosis.Error,
		settings: func(s *doctor.Settings) { s.CDI, s.DeviceNodes, s.Envvar, s.Claims = false, false, true, true },
		status:   given(func(d *status.DRA) { d.Mode = "split" }), facts: answers(doctor.PodResourcesAnswer{}),
		says: "nvidia.com/gpu and a claim gets only the GPU of its claim", remedy: "--device-list-strategy=cdi-cri",
		also: []string{"visible-devices", "daemon-reload"},
	},
	{
		name: "offered, too", settings: claims, status: given(nil),
		facts: answers(doctor.PodResourcesAnswer{Offered: map[string][]string{"nvidia.com/gpu": {"GPU-1::2"}}}),
		check: "dra", severity: diagnosis.Error, says: "GPU 0 is in a ResourceSlice, and the kubelet offers it as a " +
			"device of nvidia.com/gpu",
	},
	{
		name: "held, too", settings: claims, status: given(nil),
		facts: answers(doctor.PodResourcesAnswer{Held: []doctor.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-1",
			Pod: "ns/pod"}}}),
		check: "dra", severity: diagnosis.Error, says: "a pod has it by a device plugin", shows: "ns/pod",
	},
	{
		name: "on its way back", settings: claims, status: given(func(d *status.DRA) { d.GPUs[0].Owner = "leaving-plugin" }),
		facts: answers(doctor.PodResourcesAnswer{Held: []doctor.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-1",
			Pod: "ns/pod"}}}),
		check: "dra", severity: diagnosis.OK, says: "0 GPUs of 1",
	},
	{
		name: "no daemon", settings: claims, facts: noDaemon, check: "dra", severity: diagnosis.NotChecked,
		says: "No daemon answers",
		also: []string{"daemon", "persistence"},
	},
	{
		name: "CDI off", settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts, s.Claims = false, true, true },
		status: given(nil),
		facts: func(f *doctor.NodeFacts) {
			f.Runtime.Value.Readings[0].CDI = false
			answers(doctor.PodResourcesAnswer{})(f)
		},
		check: "container-runtime", severity: diagnosis.Error, says: "ResourceClaims use it", remedy: "--cdi.enabled",
		also: []string{"daemon-reload"},
	},
}
