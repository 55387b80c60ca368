package daemon_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/unitreport"
)

// limits are the answers of a driver.
type limits struct {
	asked  map[string][]string
	answer map[string]map[string]int
	err    error
}

func (l *limits) MemoryLimits(_ context.Context, cgroups map[string][]string) (map[string]map[string]int, error) {
	l.asked = cgroups
	return l.answer, l.err
}

// TestLimitReader: the driver is asked only about containers of pods with units whose limits it
// enforces.
func TestLimitReader(t *testing.T) {
	t.Parallel()
	const mem = "volcano.sh/gpu-mem.1Gi"
	plan := resource.Plan{Resources: []resource.Resource{{Name: mem, Devices: []resource.Device{
		{ID: "GPU-a::0", UUID: "GPU-a", Minor: 3}, {ID: "GPU-b::0", UUID: "GPU-b", Minor: 4},
	}}}}
	answers := []kubelet.Answer{
		{Resource: mem, PodUID: "p", IDs: []string{"GPU-a::0", "GPU-a::1"}}, {Resource: mem, PodUID: "q",
			IDs: []string{"GPU-b::0"}},
		{Resource: "nvidia.com/gpu", PodUID: "r", IDs: []string{"GPU-a"}},
	}
	pods := map[string][]kubelet.SeenContainer{
		"p": {{Cgroup: "/p/sandbox"}, {Cgroup: "/p/main", Nodes: []string{"nvidia3", "nvidiactl"}},
			{Cgroup: "/p/ended", Nodes: []string{"nvidia3"}}},
		"q": {{Cgroup: "/q/main"}}, "r": {{Cgroup: "/r/main"}},
	}
	byDriver, byMPS := unitreport.GPU{Driver: true}, unitreport.GPU{MPS: true}
	read := byDriver
	read.Read = map[string][]unitreport.Cgroup{"p": {{}, {LimitMiB: 2048, HasGPU: true}}}
	for name, tt := range map[string]struct {
		driver limits
		gpus   map[string]unitreport.GPU
		hidden error
		asked  map[string][]string
		want   unitreport.GPU
	}{
		"read": {
			driver: limits{answer: map[string]map[string]int{"GPU-a": {"/p/sandbox": 0, "/p/main": 2048}}},
			asked:  map[string][]string{"GPU-a": {"/p/sandbox", "/p/main", "/p/ended"}}, want: read,
		},
		"by MPS":              {gpus: map[string]unitreport.GPU{"GPU-a": byMPS}, want: byMPS},
		"no cgroups are seen": {hidden: errors.New("no folder"), want: byDriver},
		"no answer in time": {driver: limits{err: context.DeadlineExceeded},
			asked: map[string][]string{"GPU-a": {"/p/sandbox", "/p/main", "/p/ended"}}, want: byDriver},
	} {
		gpus := map[string]unitreport.GPU{"GPU-a": byDriver, "GPU-b": byMPS}
		if tt.gpus != nil {
			gpus = tt.gpus
		}
		reader := daemon.LimitReader{Driver: &tt.driver,
			Containers: func(wanted func(string) bool) (map[string][]kubelet.SeenContainer, error) {
				seen := map[string][]kubelet.SeenContainer{}
				for uid, all := range pods {
					if wanted(uid) && tt.hidden == nil {
						seen[uid] = all
					}
				}
				return seen, tt.hidden
			}}
		reader.Into(t.Context(), gpus, plan, answers)
		if diff := cmp.Diff(tt.want, gpus["GPU-a"]); diff != "" {
			t.Errorf("%s: GPU (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(tt.asked, tt.driver.asked); diff != "" {
			t.Errorf("%s: asked (-want +got):\n%s", name, diff)
		}
	}
}
