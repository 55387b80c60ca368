package nodefacts_test

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// readerRows are nodes whose remedies are read by kubectl.
var readerRows = []row{
	{
		name: "read by kubectl", settings: func(s *doctor.Settings) {
			s.Reader = doctor.Reader{Node: "node-1", Namespace: "gpu", Pod: "daemon-x", MayReset: true}
		},
		status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 62", string(inventory.RemedyReset)
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 62", remedy: "kubectl gpu reset node-1 --gpu 0",
	},
	{
		name: "read by kubectl, and the daemon may not reset GPUs", settings: func(s *doctor.Settings) {
			s.Reader = doctor.Reader{Namespace: "gpu", Pod: "daemon-x"}
		},
		status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 62", string(inventory.RemedyReset)
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 62",
		remedy: "kubectl gpu reset NODE --gpu 0   # needs hostDev: true in the chart",
	},
	{
		name: "read by kubectl, after a repair", settings: func(s *doctor.Settings) {
			s.Reader = doctor.Reader{Node: "node-1", Namespace: "gpu", Pod: "daemon-x"}
		},
		status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 54", string(inventory.RemedyHuman)
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 54",
		remedy: "kubectl gpu health clear node-1 --gpu GPU-1   # after the repair",
	},
	{
		name: "read by kubectl, for a command of the container", settings: func(s *doctor.Settings) {
			s.Reader = doctor.Reader{Node: "node-1", Namespace: "gpu", Pod: "daemon-x"}
		},
		status: func(s *status.Status) { s.Readiness = status.Readiness{Reason: "no list"} },
		check:  "daemon", severity: diagnosis.Error, says: "no list",
		remedy: "kubectl -n gpu exec daemon-x -- gpu-device-plugin ready --wait=20s",
	},
	{
		name: "read by kubectl, for the node", settings: func(s *doctor.Settings) {
			s.Reader = doctor.Reader{Node: "node-1", Namespace: "gpu", Pod: "daemon-x"}
		},
		status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Lost", "XID 79", string(inventory.RemedyReboot)
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 79", remedy: "kubectl drain node-1 --ignore-daemonsets",
	},
}
