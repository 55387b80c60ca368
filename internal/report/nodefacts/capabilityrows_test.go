package nodefacts_test

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// capabilityRows are about MIG capabilities in the daemon's container.
var capabilityRows = []row{
	{
		name:   "MIG capabilities that this container cannot open",
		change: changes{"dev/nvidia-caps/nvidia-cap30": "char 234:30", "dev/char/234:30": "-> x"},
		facts: func(f *doctor.NodeFacts) {
			f.Container = diagnosis.Fact[doctor.Devices]{Value: doctor.Devices{Nodes: []doctor.DeviceFile{{Name: "nvidiactl"},
				{Name: "nvidia-caps/nvidia-cap2"}}}}
		},
		check: "device-nodes", severity: diagnosis.Warning,
		says: "cannot open /dev/nvidia-caps/nvidia-cap2: MIG devices cannot be seen",
	},
	{
		name: "MIG capabilities of layouts", status: func(s *status.Status) { s.MIG = &status.MIGLayout{} },
		facts: func(f *doctor.NodeFacts) {
			f.Container = diagnosis.Fact[doctor.Devices]{Value: doctor.Devices{Nodes: []doctor.DeviceFile{
				{Name: "nvidiactl"}, {Name: "nvidia-caps/nvidia-cap2", Opens: true},
			}}}
		},
		check: "device-nodes", severity: diagnosis.Warning, says: "toolkit 1.18.0 to 1.20.0 ignores",
	},
	{
		name: "MIG capabilities that are opened", change: changes{"dev/nvidia-caps/nvidia-cap30": "char 234:30",
			"dev/char/234:30": "-> x"},
		facts: func(f *doctor.NodeFacts) {
			f.Container = diagnosis.Fact[doctor.Devices]{Value: doctor.Devices{Nodes: []doctor.DeviceFile{
				{Name: "nvidiactl"}, {Name: "nvidia-caps/nvidia-cap2", Opens: true},
			}}}
		},
		check: "device-nodes", severity: diagnosis.OK, says: "1 GPU with device nodes",
	},
}
