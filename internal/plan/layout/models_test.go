package layout_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// simulated are models that the simulator has, by the device and vendor IDs.
var simulated = map[uint32]string{
	a100: "a100-sxm4-40gb", 0x20b210de: "a100-sxm4-80gb", h100: "h100-sxm5-80gb", 0x232110de: "h100-nvl-94gb",
	0x232910de: "h20-sxm5-96gb",
	0x233510de: "h200-sxm5-141gb", 0x290110de: "b200-sxm-180gb", 0x31c210de: "gb300-278gb", b30: "a30-pcie-24gb",
	rtx: "rtx-pro-6000",
}

// devices returns the IDs of the simulated models in order.
func devices() []uint32 { return slices.Sorted(maps.Keys(simulated)) }

// drivers are the profiles that the driver of a simulated GPU tells with privileges, by the model's
// ID. The GPUs of the tests do not have them: package layout knows them by itself.
var drivers = sync.OnceValues(func() (map[uint32][]inventory.MIGProfile, error) {
	all := map[uint32][]inventory.MIGProfile{}
	for device, model := range simulated {
		g, err := onlyGPU(model)
		if err != nil {
			return nil, err
		}
		if g.PCIDevice != device {
			return nil, fmt.Errorf("%s has the ID %x, want %x", model, g.PCIDevice, device)
		}
		all[device] = g.Profiles
	}
	return all, nil
})

// profilesOf returns the profiles of a model.
func profilesOf(device uint32) []inventory.MIGProfile {
	all, err := drivers()
	if err != nil {
		panic(err)
	}
	return all[device]
}

// onlyGPU reads the only GPU of a simulated node.
func onlyGPU(model string) (inventory.Partitions, error) {
	folder, err := os.MkdirTemp("", "layout")
	if err != nil {
		return inventory.Partitions{}, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	path := filepath.Join(folder, "node.yaml")
	text := fmt.Sprintf("{description: One GPU, driver: 590.48.01, cuda: \"13.1\", model: %s, gpus: [{bdf: "+
		"\"0000:17:00.0\", pcie: 0/0/0}]}", model)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return inventory.Partitions{}, err
	}
	profile, err := simulator.Load(path)
	if err != nil {
		return inventory.Partitions{}, err
	}
	node := simulator.New(profile)
	defer node.Close()
	session, err := nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root()}).Open(context.Background())
	if err != nil {
		return inventory.Partitions{}, err
	}
	defer func() { _ = session.Close(context.Background()) }()
	if _, err := session.Scan(context.Background()); err != nil {
		return inventory.Partitions{}, err
	}
	return session.Partitions(context.Background(), node.List()[0].UUID)
}

// names returns the names of profiles.
func names(profiles []inventory.MIGProfile) []string {
	var all []string
	for _, p := range profiles {
		all = append(all, p.Name)
	}
	return all
}

// parse reads the compute slices of a MIG device's name: those of the compute instance and of the
// GPU instance, and the name of that.
func parse(name string) (compute, all int, instance string) {
	if part, rest, ok := strings.Cut(name, "c."); ok {
		compute, name = int(part[0]-'0'), rest
	}
	all = int(name[0] - '0')
	return cmp.Or(compute, all), all, name
}
