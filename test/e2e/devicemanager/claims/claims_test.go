package claims

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// classes are the DeviceClasses of deployments/node-agent-dra, and others before them.
type classes []dra.DeviceClass

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	all, err := c.List()
	if i := slices.IndexFunc(all, func(class *resourceapi.DeviceClass) bool { return class.Name == name }); err != nil ||
		i >= 0 {
		return all[max(i, 0)], err
	}
	return nil, fmt.Errorf("no class is called %s", name)
}

func (c classes) List() (all []*resourceapi.DeviceClass, err error) {
	for _, class := range c {
		all = append(all, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class.Name},
			Spec: resourceapi.DeviceClassSpec{
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: class.Selector}}},
			}})
	}
	text, err := os.ReadFile("../../../../deployments/node-agent-dra/classes.yaml")
	for _, document := range strings.Split(string(text), "\n---\n") {
		class := &resourceapi.DeviceClass{}
		err = errors.Join(err, yaml.UnmarshalStrict([]byte(document), class))
		all = append(all, class)
	}
	return all, err
}

// A scheduler allocates devices of one node.
type scheduler struct {
	t      *testing.T
	slices []*resourceapi.ResourceSlice
	taken  sets.Set[structured.DeviceID]
	cache  *cel.Cache
	// classes are there beside those of the deployments.
	classes classes
	// shares are those that claims have of devices, and used is what they have together.
	shares sets.Set[structured.SharedDeviceID]
	used   structured.ConsumedCapacityCollection
}

func newScheduler(t *testing.T, s inventory.Snapshot) *scheduler {
	return &scheduler{t: t, slices: publish(t, s), taken: sets.New[structured.DeviceID](),
		cache: cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})}
}

func id(device string) structured.DeviceID { return structured.MakeDeviceID(dra.Driver, node, device) }

// take has devices be another claim's.
func (s *scheduler) take(devices ...string) *scheduler {
	for _, d := range devices {
		s.taken.Insert(id(d))
	}
	return s
}

// allocate returns the requests that got devices and the devices of a claim, which are taken from
// then on; nothing if the pod stays Pending.
func (s *scheduler) allocate(claim *resourceapi.ResourceClaim) (requests, devices []string) {
	s.t.Helper()
	for _, r := range s.results(claim) {
		requests, devices = append(requests, r.Request), append(devices, r.Device)
	}
	return slices.Compact(requests), devices
}

// results returns what is allocated to a claim, which is taken from then on; nothing if the pod
// stays Pending.
func (s *scheduler) results(claim *resourceapi.ResourceClaim) (all []resourceapi.DeviceRequestAllocationResult) {
	s.t.Helper()
	if s.used == nil {
		s.shares, s.used = sets.New[structured.SharedDeviceID](), structured.NewConsumedCapacityCollection()
	}
	state := structured.AllocatedState{
		AllocatedDevices: s.taken, AllocatedSharedDeviceIDs: s.shares, AggregatedCapacity: s.used,
	}
	allocator, err := structured.NewAllocator(s.t.Context(), allocatorFeatures, state, s.classes, s.slices, s.cache)
	if err != nil {
		s.t.Fatal(err)
	}
	claim.UID = types.UID(claim.Name)
	results, err := allocator.Allocate(s.t.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
		[]*resourceapi.ResourceClaim{claim})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, result := range results {
		for _, r := range result.Devices.Results {
			if s.taken.Has(id(r.Device)) {
				s.t.Fatalf("%s is given twice", r.Device)
			}
			if all = append(all, r); r.ShareID == nil {
				s.take(r.Device)
				continue
			}
			s.shares.Insert(structured.MakeSharedDeviceID(id(r.Device), r.ShareID))
			s.used.Insert(structured.NewDeviceConsumedCapacity(id(r.Device), r.ConsumedCapacity))
		}
	}
	return all
}

// free has a device, or a share of it, be nobody's again.
func (s *scheduler) free(r resourceapi.DeviceRequestAllocationResult) {
	if r.ShareID == nil {
		s.taken.Delete(id(r.Device))
		return
	}
	s.shares.Delete(structured.MakeSharedDeviceID(id(r.Device), r.ShareID))
	s.used.Remove(structured.NewDeviceConsumedCapacity(id(r.Device), r.ConsumedCapacity))
}

// parse returns a claim that is written as users do.
func parse(t *testing.T, text string) *resourceapi.ResourceClaim {
	t.Helper()
	var claim resourceapi.ResourceClaim
	if err := yaml.UnmarshalStrict([]byte(text), &claim); err != nil {
		t.Fatal(err)
	}
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if r.Exactly != nil && r.Exactly.AllocationMode == "" {
			r.Exactly.AllocationMode, r.Exactly.Count = resourceapi.DeviceAllocationModeExactCount, max(r.Exactly.Count, 1)
		}
		for j := range r.FirstAvailable {
			r.FirstAvailable[j].AllocationMode = resourceapi.DeviceAllocationModeExactCount
			r.FirstAvailable[j].Count = max(r.FirstAvailable[j].Count, 1)
		}
	}
	return &claim
}

// documented returns a claim of docs/dra.md.
func documented(t *testing.T, name string) *resourceapi.ResourceClaim {
	t.Helper()
	docs, err := os.ReadFile("../../../../docs/dra.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(docs), "<!-- claim: "+name+" -->\n```yaml\n")
	text, _, closed := strings.Cut(text, "```\n")
	if !found || !closed {
		t.Fatalf("docs/dra.md has no claim %q", name)
	}
	return parse(t, text)
}

// request returns a claim with one request.
func request(t *testing.T, class string, count int, more string, selectors ...string) *resourceapi.ResourceClaim {
	t.Helper()
	text := fmt.Sprintf("metadata: {name: c}\nspec:\n  devices:\n    requests:\n    - name: r\n      exactly:\n        deviceClassName: %s\n        count: %d\n",
		class, count)
	if len(selectors) > 0 {
		text += "        selectors:\n"
	}
	for _, s := range selectors {
		text += fmt.Sprintf("        - cel: {expression: %q}\n", s)
	}
	return parse(t, text+more)
}

const (
	byParent  = "    constraints: [{requests: [r], matchAttribute: gpu.nvidia.com/parentUUID}]\n"
	byNUMA    = "    constraints: [{requests: [r], matchAttribute: resource.kubernetes.io/numaNode}]\n"
	tolerated = "        tolerations: [{key: gpu.nvidia.com/xid, operator: Equal, value: \"48\", effect: NoSchedule}]\n"
)

// TestClaims allocates claims of the shapes that users write.
func TestClaims(t *testing.T) {
	attribute := func(name string) string { return `device.attributes["gpu.nvidia.com"].` + name }
	for _, test := range []struct {
		name, machine string
		taken         []string
		bad           []int // GPUs with XID 48
		claim         *resourceapi.ResourceClaim
		want          string // the requests and devices; empty for Pending
	}{
		{"one GPU", "dgx-h100", nil, nil, request(t, "gpu.nvidia.com", 1, ""), "[r] [gpu-0]"},
		{"as NVIDIA's old manifests select", "dgx-h100", nil, nil,
			request(t, "gpu.nvidia.com", 1, "", attribute(`pcieBusID == "0000:9d:00.0"`)), "[r] [gpu-4]"},
		{"by product, architecture, memory and driver", "dgx-h100", nil, nil, request(t, "gpu.nvidia.com", 1, "",
			attribute(`productName.lowerAscii().matches("^.*h100.*$")`), attribute(`architecture == "Hopper"`),
			`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("40Gi")) >= 0`,
			attribute(`driverVersion.compareTo(semver("550.127.8")) >= 0`)), "[r] [gpu-0]"},
		{"another product", "dgx-h100", nil, nil, request(t, "gpu.nvidia.com", 1, "", attribute(`productName == "Tesla T4"`)),
			""},
		{"no MIG device among GPUs", "a100-mig-mixed", nil, nil, request(t, "gpu.nvidia.com", 3, ""), ""},
		{"a MIG profile", "a100-mig-mixed", nil, nil, request(t, "mig.nvidia.com", 1, "", attribute(`profile == "2g.20gb"`)),
			"[r] [gpu-6-mig-2g20gb-14-0]"},
		{"four MIG devices of one GPU", "h100-mig-1g", []string{"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1",
			"gpu-0-mig-1g10gb-19-2", "gpu-0-mig-1g10gb-19-3"},
			nil, request(t, "mig.nvidia.com", 4, byParent), "[r] [gpu-1-mig-1g10gb-19-0 gpu-1-mig-1g10gb-19-1 gpu-1-mig-1g10gb-19-2 gpu-1-mig-1g10gb-19-3]"},
		{"one NUMA node", "dgx-h100", []string{"gpu-1"}, nil, request(t, "gpu.nvidia.com", 4, byNUMA),
			"[r] [gpu-4 gpu-5 gpu-6 gpu-7]"},
		{"a GPU with a fault", "dgx-h100", nil, []int{0}, request(t, "gpu.nvidia.com", 1, ""), "[r] [gpu-1]"},
		{"all have faults", "t4", nil, []int{0}, request(t, "gpu.nvidia.com", 1, ""), ""},
		{"a fault that is tolerated", "t4", nil, []int{0}, request(t, "gpu.nvidia.com", 1, tolerated), "[r] [gpu-0]"},

		{"aligned or Pending, free", "dgx-h100", nil, nil, documented(t, "aligned or Pending"),
			"[gpus] [gpu-0 gpu-1 gpu-2 gpu-3]"},
		{"aligned or Pending, first group broken", "dgx-h100", []string{"gpu-2"}, nil, documented(t, "aligned or Pending"),
			"[gpus] [gpu-4 gpu-5 gpu-6 gpu-7]"},
		{"aligned or Pending, both broken", "dgx-h100", []string{"gpu-2"}, []int{5}, documented(t, "aligned or Pending"), ""},
		{"aligned if possible, too old to be aligned", "dgx-1", nil, nil, documented(t, "aligned if possible"),
			"[gpus/any] [gpu-0 gpu-1 gpu-2 gpu-3]"},
		{"aligned if possible, free", "dgx-a100", nil, nil, documented(t, "aligned if possible"),
			"[gpus/aligned] [gpu-0 gpu-1 gpu-2 gpu-3]"},
		{"aligned if possible, first group broken", "dgx-h100", []string{"gpu-0"}, nil, documented(t, "aligned if possible"),
			"[gpus/aligned] [gpu-4 gpu-5 gpu-6 gpu-7]"},
		{"aligned if possible, both broken", "dgx-h100", []string{"gpu-0"}, []int{7}, documented(t, "aligned if possible"),
			"[gpus/any] [gpu-1 gpu-2 gpu-3 gpu-4]"},
		{"aligned if possible, five of eight are taken", "dgx-h100", []string{"gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-6"},
			nil, documented(t, "aligned if possible"), ""},
	} {
		t.Run(test.name+" on "+test.machine, func(t *testing.T) {
			s := scan(t, test.machine, inventory.Health{State: inventory.Healthy})
			for _, i := range test.bad {
				s.GPUs[i].Health = inventory.Health{State: inventory.Unhealthy, XID: 48}
			}
			requests, devices := newScheduler(t, s).take(test.taken...).allocate(test.claim)
			slices.Sort(devices)
			got := fmt.Sprint(requests, " ", devices)
			if len(devices) == 0 {
				got = ""
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}
