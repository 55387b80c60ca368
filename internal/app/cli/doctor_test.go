package cli_test

import (
	"flag"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/findings"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

var update = flag.Bool("update", false, "update the parts of docs/reference.md that are made from the code")

const doctorDoc = "../../../docs/reference.md"

// exampleNode is a node with an upgraded driver before its restart, and with containerd's package.
var exampleNode = fstest.MapFS{
	"sys/bus/pci/devices/0000:3b:00.0/vendor": {Data: []byte("0x10de\n")},
	"sys/bus/pci/devices/0000:3b:00.0/class":  {Data: []byte("0x030200\n")},
	"sys/bus/pci/devices/0000:3b:00.0/driver": {Data: []byte("../../drivers/nvidia"), Mode: fs.ModeSymlink},
	"sys/bus/pci/drivers/nvidia/bind":         {},
	"proc/driver/nvidia/version": {Data: []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  " +
		"570.86.15\n")},
	"proc/driver/nvidia/gpus/0000:3b:00.0/information": {Data: []byte("Device Minor: \t 0\n")},
	"proc/1/comm":   {Data: []byte("systemd\n")},
	"proc/600/comm": {Data: []byte("nvidia-persiste\n")},
	"proc/700/comm": {Data: []byte("containerd\n")},
	"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": {Data: []byte("libnvidia-ml.so.580.95.05"),
		Mode: fs.ModeSymlink},
	"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05": {},
	"dev/nvidiactl":  {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"dev/nvidia0":    {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"dev/nvidia-uvm": {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"etc/containerd/config.toml": {Data: []byte("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\n" +
		"enable_cdi = false\n" +
		"[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'nvidia'\n" +
		"[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia.options]\n" +
		"BinaryName = '/usr/bin/nvidia-container-runtime'\n")},
	"usr/bin/nvidia-container-runtime": {},
}

// TestDoctorDoc compares the table and the example of docs/reference.md with the code. `go test
// ./internal/app/cli -run TestDoctorDoc -update` rewrites them.
func TestDoctorDoc(t *testing.T) {
	var table strings.Builder
	table.WriteString("| check | content when | needs to see |\n|---|---|---|\n")
	for _, c := range doctor.Checks {
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", c.Name, c.About, c.Needs)
	}
	facts := nodefacts.Places{
		Kernel: exampleNode, Host: exampleNode, Driver: exampleNode, DriverRoot: "/", Devices: exampleNode, DevFolder: "/dev",
	}.Gather(t.Context())
	facts.Settings = doctor.Settings{CDI: true, CDIFolder: "/var/run/cdi", CDIVendor: containeredits.CDIVendor,
		KernelLog: true, DriverRoot: "/"}
	facts.Kubelet = diagnosis.Fact[doctor.Kubelet]{Value: doctor.Kubelet{Socket: config.DefaultKubeletSocket}}
	facts.PodResources = diagnosis.Fact[doctor.PodResourcesAnswer]{}
	facts.Daemon.Missing = "no daemon answers"
	example := findings.Text("doctor", "the node's files: /", doctor.Examine(facts), 100)
	example, _, cut := strings.Cut(example, "not checked  ") // problems come first
	if !cut {
		t.Fatal("the example has no check that is not checked")
	}
	example += "…\n"

	documents.HoldPart(t, doctorDoc, "checks", table.String(), *update)
	documents.HoldPart(t, doctorDoc, "example", "```console\n# gpu-device-plugin doctor --device-list-strategy=cdi-cri\n"+
		example+"```\n", *update)
}
