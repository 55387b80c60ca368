package daemon

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestReadinessStays: tasks are asked until all are ready, and never again.
func TestReadinessStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		began := time.Now()
		after := func(d time.Duration, late, good string) Task {
			return Task{Name: late, Ready: func(context.Context) (bool, string) {
				asked.Add(1)
				if time.Since(began) < d {
					return false, late
				}
				return true, good
			}}
		}
		r := NewReadiness(lead.New(lead.Options{}), []Task{{Name: "always"}, after(10*time.Second, "a is late", "")},
			[]Task{after(20*time.Second, "b is late", "b is empty")})
		ended := make(chan error, 1)
		go func() { ended <- r.Run(klog.NewContext(t.Context(), klog.Logger{})) }()
		for _, tt := range []struct {
			at     time.Duration
			ready  bool
			reason string
		}{
			{0, false, "the daemon is starting"},
			{5 * time.Second, false, "a is late; b is late"},
			{15 * time.Second, false, "b is late"},
			{25 * time.Second, true, "b is empty"},
		} {
			time.Sleep(time.Until(began.Add(tt.at)))
			synctest.Wait()
			if got := r.Answer().Value(); got.Ready != tt.ready || got.Reason != tt.reason || got.Since.IsZero() {
				t.Errorf("after %s: %+v, want %t, %q", tt.at, got, tt.ready, tt.reason)
			}
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		before := asked.Load()
		if time.Sleep(time.Hour); asked.Load() != before {
			t.Error("tasks are asked although all were ready")
		}
	})
}

func TestUnserved(t *testing.T) {
	t.Parallel()
	healthy := inventory.Health{State: inventory.Healthy}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{
		{UUID: "GPU-a", Index: 0, Health: healthy}, {UUID: "GPU-b", Index: 1, Health: healthy},
	}}, resource.Options{})
	const name = resource.WholeGPU
	held := plan.Under([]resource.Hold{{UUID: "GPU-a", Reason: "no file", Hidden: true},
		{UUID: "GPU-b", Reason: "no file", Hidden: true}})
	for what, tt := range map[string]struct {
		offered     resource.Plan
		server      serve.Status
		accountable bool
		want        string
	}{
		"agreed": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing, Agreed: true}, true, ""},
		"not compared": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing}, true,
			"is not served: the kubelet's account"},
		"no account": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing}, false, ""},
		"another account": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing, Problem: "it differs"}, true,
			"is not served: it differs"},
		"waiting for kubelet": {plan, serve.Status{Resource: name, Phase: serve.PhaseNoKubelet}, false,
			"is not served: waiting for kubelet"},
		"refused": {plan, serve.Status{Resource: name, Phase: serve.PhaseRegistering, Problem: "refused"}, true,
			"is not served: refused"},
		"no server yet": {plan, serve.Status{Resource: "another"}, true, "is not offered: its server is starting"},
		"no file":       {held, serve.Status{Resource: "another"}, true, "is not offered: no file"},
		"no file any more": {held, serve.Status{Resource: name, Phase: serve.PhaseServing, Agreed: true}, true,
			"is not offered: no file"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			got := strings.Join(unserved(plan, tt.offered, []serve.Status{tt.server}, tt.accountable), "; ")
			if !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
				t.Errorf("not served: %q, want %q", got, tt.want)
			}
		})
	}
}

// others are the device plugins of a node.
type others struct {
	Others
	remembered map[string][]string
	forgotten  error
	sockets    []string
}

func (e others) Remembered() (map[string][]string, error) { return e.remembered, e.forgotten }
func (e others) Listening(context.Context) []string       { return e.sockets }

func TestOtherPlugins(t *testing.T) {
	t.Parallel()
	unread := errors.New("no such file")
	gpus := map[string][]string{"nvidia.com/gpu.shared": {"GPU-a::0", "GPU-a::1"}}
	for name, tt := range map[string]struct {
		allocatable map[string][]string
		failed      error
		others      others
		want        string
	}{
		"nobody": {nil, nil, others{}, ""},
		"GPUs":   {gpus, nil, others{}, "nvidia.com/gpu.shared is served by another device plugin, with 2 devices"},
		"MIG devices": {map[string][]string{"a.b/c": {"MIG-x"}}, nil, others{},
			"a.b/c is served by another device plugin, with 1 device"},
		"names that are no UUIDs": {map[string][]string{"nvidia.com/gpu": {"nvidia0"}}, nil, others{},
			"nvidia.com/gpu is served by another device plugin, with 1 device"},
		"other devices of NVIDIA's": {map[string][]string{"nvidia.com/hostdev": {"0000:3b:00.2"}}, nil, others{}, ""},
		"GPUs that are all unhealthy": {map[string][]string{"nvidia.com/gpu": nil}, nil,
			others{sockets: []string{"nvidia-gpu.sock"}}, ""},
		"GPUs of a short time ago": {nil, nil, others{remembered: gpus},
			"nvidia.com/gpu.shared was served until recently, and the kubelet still remembers it, with 2 devices"},
		"no account, but a memory":  {nil, unread, others{remembered: gpus}, "the kubelet still remembers it"},
		"no account, and no memory": {nil, unread, others{sockets: []string{"nvidia-gpu.sock"}}, ""},
		"nothing of kubelet, a socket": {nil, unread, others{forgotten: unread, sockets: []string{"nvidia-gpu.sock"}},
			"another device plugin listens at nvidia-gpu.sock, and the kubelet's account cannot be read: no such file"},
		"nothing at all": {nil, unread, others{forgotten: unread}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := (&Serving{Others: tt.others}).others(t.Context(), tt.allocatable, tt.failed)
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Error(cmp.Diff(tt.want, got))
			}
		})
	}
}

func TestWhyNothingIsServed(t *testing.T) {
	t.Parallel()
	some, bad := []inventory.GPU{{UUID: "GPU-a"}}, []inventory.LeftOut{{Reason: "no UUID"}}
	for want, seen := range map[string]monitor.Status{
		"this node has no GPU": {},
		"the driver is released; to end this, run: gpu-device-plugin resume": {Quiesced: time.Now(),
			Err: errors.New("no driver")},
		"the driver of the node is being changed": {Quiesced: time.Now(), ForChange: true},
		"no driver": {Err: errors.New("no driver"), Snapshot: inventory.Snapshot{GPUs: some}},
	} {
		if got := why(seen); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, s := range []inventory.Snapshot{{GPUs: some}, {LeftOut: bad}, {GPUs: some, LeftOut: bad}} {
		if got, want := why(monitor.Status{Snapshot: s}), "none of the node's GPUs can be offered, see status"; got != want {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}
