package nvidia_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FuzzLibrary: a library says of one GPU what cannot be, in each function that returns a count, a
// size, a length, a name or a handle. The session goes on, and the other GPUs are as they were.
func FuzzLibrary(f *testing.F) {
	for seed := range uint64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		const liar = 3
		lies := &lies{random: rand.New(rand.NewPCG(seed, seed))}
		r := newRigWith(t, "a100-mig-mixed", hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
			if index != liar {
				return d
			}
			return lyingDevice{d, lies}
		}}))
		others := func(s inventory.Snapshot) (names []string) {
			for _, g := range s.GPUs {
				if g.Index != liar {
					names = append(names, g.UUID)
				}
			}
			return names
		}
		before := others(r.scan())
		lies.begin()
		for range 3 {
			s, err := r.Scan(r.ctx)
			if err != nil {
				continue // the owner opens another session
			}
			compare(t, "the others", before, others(s))
			for _, g := range s.GPUs {
				_, _ = r.Read(r.ctx, g.UUID)
				_, _ = r.Processes(r.ctx, g.UUID)
				_, _ = r.Partitions(r.ctx, g.UUID)
			}
		}
		lies.end()
		for _, uuid := range before {
			if _, err := r.Read(r.ctx, uuid); err != nil {
				t.Errorf("GPU %s: %v", uuid, err)
			}
		}
	})
}

// lies are the answers that a device gives in place of its own.
type lies struct {
	mu     sync.Mutex
	random *rand.Rand
	begun  bool
}

func (l *lies) begin() { l.set(true) }
func (l *lies) end()   { l.set(false) }

func (l *lies) set(begun bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = begun
}

// pick returns one of several answers, or the true one.
func pick[T any](l *lies, answer T, ret nvml.Return, others ...T) (T, nvml.Return) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.begun || l.random.IntN(3) > 0 {
		return answer, ret
	}
	return others[l.random.IntN(len(others))], nvml.SUCCESS
}

type lyingDevice struct {
	nvml.Device
	lies *lies
}

var (
	numbers = []int{-1, 0, 1, 7, 1000, math.MaxInt32, math.MinInt32, math.MaxInt}
	texts   = []string{"", "all", "\x00\xff", strings.Repeat("x", 1<<16), "GPU-", "../..", "\x1b[2J", "MIG-GPU-a/1/2"}
)

func (d lyingDevice) GetMaxMigDeviceCount() (int, nvml.Return) {
	n, ret := d.Device.GetMaxMigDeviceCount()
	return pick(d.lies, n, ret, numbers...)
}

func (d lyingDevice) GetMinorNumber() (int, nvml.Return) {
	n, ret := d.Device.GetMinorNumber()
	return pick(d.lies, n, ret, numbers...)
}

func (d lyingDevice) GetPcieReplayCounter() (int, nvml.Return) {
	n, ret := d.Device.GetPcieReplayCounter()
	return pick(d.lies, n, ret, numbers...)
}

func (d lyingDevice) GetName() (string, nvml.Return) {
	name, ret := d.Device.GetName()
	return pick(d.lies, name, ret, texts...)
}

func (d lyingDevice) GetUUID() (string, nvml.Return) {
	uuid, ret := d.Device.GetUUID()
	return pick(d.lies, uuid, ret, texts...)
}

func (d lyingDevice) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	m, ret := d.Device.GetMemoryInfo()
	return pick(d.lies, m, ret, nvml.Memory{}, nvml.Memory{Total: math.MaxUint64, Used: math.MaxUint64,
		Free: math.MaxUint64})
}

func (d lyingDevice) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	info, ret := d.Device.GetPciInfo()
	return pick(d.lies, info, ret, nvml.PciInfo{}, nvml.PciInfo{Domain: math.MaxUint32, Bus: math.MaxUint32,
		Device: math.MaxUint32})
}

func (d lyingDevice) GetMigMode() (current, pending int, ret nvml.Return) {
	current, pending, ret = d.Device.GetMigMode()
	current, ret = pick(d.lies, current, ret, numbers...)
	return current, pending, ret
}

func (d lyingDevice) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	m, ret := d.Device.GetMigDeviceHandleByIndex(index)
	return pick(d.lies, m, ret, nil, nvml.Device(d))
}

func (d lyingDevice) GetGpuInstanceId() (int, nvml.Return) { //nolint:staticcheck // go-nvml's name
	n, ret := d.Device.GetGpuInstanceId()
	return pick(d.lies, n, ret, numbers...)
}

func (d lyingDevice) GetGpuInstanceById(id int) (nvml.GpuInstance, nvml.Return) { //nolint:staticcheck // go-nvml's name
	i, ret := d.Device.GetGpuInstanceById(id)
	return pick(d.lies, i, ret, nil)
}

func (d lyingDevice) GetGpuInstances(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
	all, ret := d.Device.GetGpuInstances(info)
	return pick(d.lies, all, ret, nil, []nvml.GpuInstance{nil}, make([]nvml.GpuInstance, 1000))
}

func (d lyingDevice) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	info, ret := d.Device.GetGpuInstanceProfileInfo(number)
	return pick(d.lies, info, ret, nvml.GpuInstanceProfileInfo{}, nvml.GpuInstanceProfileInfo{
		Id: math.MaxUint32, SliceCount: math.MaxUint32, InstanceCount: math.MaxUint32, MemorySizeMB: math.MaxUint64,
	})
}

func (d lyingDevice) GetGpuInstancePossiblePlacements(
	info *nvml.GpuInstanceProfileInfo,
) ([]nvml.GpuInstancePlacement, nvml.Return) {
	all, ret := d.Device.GetGpuInstancePossiblePlacements(info)
	return pick(d.lies, all, ret, nil, []nvml.GpuInstancePlacement{{Start: math.MaxUint32, Size: math.MaxUint32}},
		make([]nvml.GpuInstancePlacement, 5000))
}

func (d lyingDevice) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	all, ret := d.Device.GetComputeRunningProcesses()
	return pick(d.lies, all, ret, nil, []nvml.ProcessInfo{{Pid: math.MaxUint32, UsedGpuMemory: math.MaxUint64 - 1,
		GpuInstanceId: 1 << 31}})
}

func (d lyingDevice) GetNvLinkRemotePciInfo(lane int) (nvml.PciInfo, nvml.Return) {
	info, ret := d.Device.GetNvLinkRemotePciInfo(lane)
	return pick(d.lies, info, ret, nvml.PciInfo{}, nvml.PciInfo{Domain: math.MaxUint32})
}

func (d lyingDevice) GetAttributes() (nvml.DeviceAttributes, nvml.Return) {
	a, ret := d.Device.GetAttributes()
	return pick(d.lies, a, ret, nvml.DeviceAttributes{}, nvml.DeviceAttributes{MultiprocessorCount: math.MaxUint32,
		MemorySizeMB: math.MaxUint64})
}
