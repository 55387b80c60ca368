package real_test

import (
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// libraries returns the path of NVML of each branch.
func libraries(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	name := regexp.MustCompile(`^libnvidia-ml\.so\.(\d+)\.`)
	err := filepath.WalkDir(part(t, "nvml"), func(path string, d fs.DirEntry, err error) error {
		if branch := name.FindStringSubmatch(filepath.Base(path)); err == nil && d.Type().IsRegular() && branch != nil {
			found[branch[1]] = path
		}
		return err
	})
	if err != nil || len(found) < 5 {
		t.Fatalf("libraries %v, %v", found, err)
	}
	return found
}

// symbolsOf returns the functions of a library.
func symbolsOf(t *testing.T, path string) map[string]bool {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	symbols, err := file.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]bool{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			has[s.Name] = true
		}
	}
	return has
}

// TestInit opens NVML of each branch without a kernel module: the driver is absent, and the error
// says so. Each is opened by a process of its own, because a process keeps the first library.
func TestInit(t *testing.T) {
	if root := os.Getenv("REAL_DRIVER_ROOT"); root != "" {
		_, err := nvidia.New(nvidia.Options{DriverRoot: root}).Open(t.Context())
		fmt.Println("open:", err)
		return
	}
	t.Parallel()
	for branch, library := range libraries(t) {
		t.Run(branch, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			folder := filepath.Join(root, "usr/lib64")
			if err := os.MkdirAll(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(library)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "libnvidia-ml.so.1"), text, 0o600); err != nil {
				t.Fatal(err)
			}
			c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInit$")
			c.Env = append(os.Environ(), "REAL_DRIVER_ROOT="+root)
			out, err := c.CombinedOutput()
			const want = "nvmlInit: no NVIDIA driver: Driver Not Loaded"
			if !strings.Contains(string(out), want) {
				t.Errorf("%v: %s; want %s", err, out, want)
			}
			answer, _, _ := strings.Cut(string(out), "\n")
			found("NVML", branch, "%s", strings.TrimPrefix(answer, "open: "))
		})
	}
}

// A branchLibrary has the functions of one branch, and answers for a simulated node.
type branchLibrary struct {
	nvml.Interface
	has   map[string]bool
	lacks map[string]bool // of those that were looked for, without their versions
}

func (l *branchLibrary) Extensions() nvml.ExtendedInterface { return l }

func (l *branchLibrary) LookupSymbol(name string) error {
	base, _, _ := strings.Cut(name, "_v")
	if !l.has[name] {
		if _, known := l.lacks[base]; !known {
			l.lacks[base] = true
		}
		return fmt.Errorf("undefined symbol: %s", name)
	}
	l.lacks[base] = false
	return l.Interface.Extensions().LookupSymbol(name) // some that the simulator does not have, it cannot be asked for
}

// since has the functions that package nvidia looks for, by the first branch of Debian's that has
// them; 0 for none of them: 555 is the newest there. Those that 340 has are left out. What a
// function tells is unknown where it is missing, and nothing else is.
var since = map[int][]string{
	0: {
		"DeviceGetAddressingMode", "DeviceGetMemoryLimits", "DeviceGetRepairStatus", "DeviceGetTemperatureV",
		"DeviceGetUnrepairableMemoryFlag", "SystemEventSetCreate", "SystemEventSetFree", "SystemEventSetWait", "SystemRegisterEvents",
	},
	390: {
		"DeviceGetCudaComputeCapability", "DeviceGetFieldValues", "DeviceGetGridLicensableFeatures", "DeviceGetNvLinkRemotePciInfo",
		"DeviceGetNvLinkState", "DeviceGetNvLinkVersion", "DeviceGetPcieReplayCounter", "DeviceGetPcieThroughput",
		"DeviceGetTopologyCommonAncestor", "DeviceGetTotalEnergyConsumption", "DeviceGetVirtualizationMode", "SystemGetCudaDriverVersion",
	},
	450: {
		"ComputeInstanceDestroy", "ComputeInstanceGetInfo", "DeviceGetArchitecture", "DeviceGetAttributes", "DeviceGetComputeInstanceId",
		"DeviceGetGpuInstanceById", "DeviceGetGpuInstanceId", "DeviceGetGpuInstancePossiblePlacements", "DeviceGetGpuInstanceProfileInfo",
		"DeviceGetGpuInstances", "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex", "DeviceGetMigMode",
		"DeviceGetRemappedRows", "DeviceSetMigMode", "GpuInstanceCreateComputeInstance", "GpuInstanceDestroy",
		"GpuInstanceGetComputeInstanceById", "GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceGetComputeInstances",
		"GpuInstanceGetInfo",
	},
	460: {
		"DeviceCreateGpuInstanceWithPlacement",
	},
	470: {
		"DeviceGetNvLinkRemoteDeviceType",
	},
	525: {
		"DeviceGetGpuFabricInfo", "GpmMetricsGet", "GpmMigSampleGet", "GpmQueryDeviceSupport", "GpmSampleAlloc", "GpmSampleFree",
		"GpmSampleGet", "GpuInstanceCreateComputeInstanceWithPlacement",
	},
	535: {
		"DeviceGetCurrentClocksEventReasons", "DeviceGetSramEccErrorStatus",
		"SystemGetConfComputeGpusReadyState", "SystemGetConfComputeState",
	},
	550: {
		"DeviceGetGpuFabricInfoV",
	},
}

// TestSymbolsOfEveryBranch: a session opens and looks at all GPUs with the functions that each
// branch has.
func TestSymbolsOfEveryBranch(t *testing.T) {
	t.Parallel()
	for branch, library := range libraries(t) {
		t.Run(branch, func(t *testing.T) {
			t.Parallel()
			profile, err := simulator.Load("dgx-h100")
			if err != nil {
				t.Fatal(err)
			}
			node := simulator.New(profile)
			l := &branchLibrary{Interface: node.NVML(), has: symbolsOf(t, library), lacks: map[string]bool{}}
			session, err := nvidia.New(nvidia.Options{Library: l, Root: node.Root()}).Open(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			seen, err := session.Scan(t.Context())
			if err != nil || len(seen.GPUs) != 8 {
				t.Errorf("%d GPUs, %v", len(seen.GPUs), err)
			}
			for _, g := range seen.GPUs {
				if _, err := session.Read(t.Context(), g.UUID); err != nil {
					t.Errorf("GPU %d: %v", g.Index, err)
				}
			}
			if err := session.Close(t.Context()); err != nil {
				t.Error(err)
			}
			var lacks []string
			for name, missing := range l.lacks {
				if missing {
					lacks = append(lacks, strings.TrimPrefix(name, "nvml"))
				}
			}
			slices.Sort(lacks)
			number, err := strconv.Atoi(branch)
			if err != nil {
				t.Fatal(err)
			}
			if number > 555 {
				t.Logf("branch %d is new in Debian's archive: its functions are not in the table", number)
				return
			}
			var want []string
			for first, names := range since {
				if first == 0 || first > number {
					want = append(want, names...)
				}
			}
			slices.Sort(want)
			found("NVML", branch, "%d of %d functions that this program looks for are missing; 8 simulated GPUs are seen and read", len(lacks), len(l.lacks))
			if diff := cmp.Diff(want, lacks); diff != "" {
				t.Errorf("functions that branch %s lacks (-want +got):\n%s", branch, diff)
			}
		})
	}
}
