package claims_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestPrepare: what kubelet and the runtime are told of a whole GPU and a MIG device, the second
// time the same; nothing is left afterwards. The UID of the claim begins with a digit, as most do,
// which older versions of CDI do not allow.
func TestPrepare(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	want := claim("4f23a4ec-1", gpuA, migB0)
	want.Results[1].Request = "part/small"
	for range 2 {
		got, err := ask(t.Context(), c, want)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]dra.Prepared{
			{Requests: []string{"gpu"}, Pool: "node", Device: gpuA,
				CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=4f23a4ec-1-gpu-0"}},
			{Requests: []string{"part"}, Pool: "node", Device: migB0,
				CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=4f23a4ec-1-" + migB0}},
		}, got); diff != "" {
			t.Errorf("prepared (-want +got):\n%s", diff)
		}
		if got, want := r.nodes(ids(got)...), "nvidia0 nvidia1 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31"; got != want {
			t.Errorf("device nodes %s, want %s", got, want)
		}
	}
	common := r.spec("4f23a4ec-1").ContainerEdits
	if !slices.Contains(common.Env, "NVIDIA_VISIBLE_DEVICES=void") || len(common.DeviceNodes) != 2 ||
		len(common.Mounts) == 0 {
		t.Errorf("every container is given %s", text(t, common))
	}
	if diff := cmp.Diff(map[string][]claims.Holder{
		"GPU-a": {{UID: "4f23a4ec-1", Namespace: "default", Name: "claim-4f23a4ec-1", Device: "GPU-a"}},
		"GPU-b": {{UID: "4f23a4ec-1", Namespace: "default", Name: "claim-4f23a4ec-1", Device: "MIG-b0"}},
	}, c.InUse().Value()); diff != "" {
		t.Errorf("in use (-want +got):\n%s", diff)
	}
	if s := c.Status().Value(); len(s) != 1 || s[0].Name != "claim-4f23a4ec-1" || len(s[0].Devices) != 2 ||
		s[0].Devices[1].MIG != "MIG-b0" || s[0].Restarted {
		t.Errorf("status %s", text(t, s))
	}
	for range 2 {
		r.unprepare(c, "4f23a4ec-1")
	}
	folder := filepath.Join(r.options.StateDir, "claims")
	for _, name := range files(t, folder) {
		if info, err := os.Stat(filepath.Join(folder, name)); err != nil {
			t.Error(err)
		} else if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has the mode %v", name, info.Mode())
		}
	}
	if r.record("4f23a4ec-1") != "" || r.spec("4f23a4ec-1") != nil || len(c.InUse().Value()) != 0 ||
		len(c.Status().Value()) != 0 {
		t.Errorf("after Unprepare: record %q, in use %v", r.record("4f23a4ec-1"), c.InUse().Value())
	}
}

// TestRefusals are the sentences in the Events of pods.
func TestRefusals(t *testing.T) {
	t.Parallel()
	lost := inventory.Health{State: inventory.Lost, Reason: "the GPU has fallen off the bus",
		Remedy: inventory.RemedyReboot}
	xid := inventory.Health{State: inventory.Unhealthy, Reason: "XID 48: an uncorrectable ECC error", XID: 48,
		Remedy: inventory.RemedyReset}
	sick := func(h inventory.Health, gpu int) func(*rig) {
		return func(r *rig) {
			s := snapshot()
			s.GPUs[gpu].Health = h
			r.publish(s)
		}
	}
	configured := func(parameters string, requests ...string) func(*dra.Claim) {
		return func(c *dra.Claim) {
			c.Configs = append(c.Configs, dra.OpaqueConfig{Source: dra.FromClaim, Requests: requests,
				Parameters: []byte(parameters)})
		}
	}
	const gpuConfig = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"`
	for name, tt := range map[string]struct {
		node   func(*rig)
		claim  func(*dra.Claim)
		device string
		want   string // empty for none
	}{
		"a device that is not published": {device: "gpu-7", want: "the device gpu-7 of pool node is not offered to claims by this node now"},
		"another node's pool": {claim: func(c *dra.Claim) { c.Results[0].Pool = "other" },
			want: "the device gpu-0 of pool other is not offered to claims"},
		"no device at all": {claim: func(c *dra.Claim) { c.Results = nil },
			want: "the claim has no device of the driver gpu.nvidia.com"},
		"a UID that is none": {claim: func(c *dra.Claim) { c.UID = "../x" },
			want: `"../x" is not the UID of a claim`},
		"a UID that is long": {claim: func(c *dra.Claim) { c.UID = strings.Repeat("u", 128) }},
		"a UID that is too long": {claim: func(c *dra.Claim) { c.UID = strings.Repeat("u", 129) },
			want: `u" is not the UID of a claim`},
		"a lost GPU": {node: sick(lost, 0), want: "GPU 0 (GPU-a) is Lost: the GPU has fallen off the bus; remedy: reboot; " +
			"the claim does not tolerate the taint gpu.nvidia.com/gpu-lost"},
		"an unhealthy GPU": {node: sick(xid, 0), want: "GPU 0 (GPU-a) is Unhealthy: XID 48: an uncorrectable ECC error; remedy: reset; " +
			"the claim does not tolerate the taint gpu.nvidia.com/xid"},
		"the GPU of a MIG device": {node: sick(xid, 1), device: migB0, want: "MIG device 1:0 (MIG-b0) is Unhealthy: XID 48"},
		"tolerated by key": {node: sick(xid, 0), claim: func(c *dra.Claim) {
			c.Results[0].Tolerations = []dra.Toleration{{Key: dra.TaintXID, Operator: "Exists", Effect: "NoSchedule"}}
		}},
		"tolerated by value": {node: sick(xid, 0), claim: func(c *dra.Claim) {
			c.Results[0].Tolerations = []dra.Toleration{{Key: dra.TaintXID, Value: "48"}}
		}},
		"tolerated like all": {node: sick(lost, 0), claim: func(c *dra.Claim) { c.Results[0].Tolerations = []dra.Toleration{{Operator: "Exists"}} }},
		"another taint is tolerated": {node: sick(xid, 0), claim: func(c *dra.Claim) {
			c.Results[0].Tolerations = []dra.Toleration{
				{Key: dra.TaintXID, Value: "79"}, {Value: "48"}, {Key: dra.TaintLost, Operator: "Exists"}, {Key: dra.TaintXID,
					Operator: "Exists", Effect: "NoExecute"},
			}
		}, want: "the claim does not tolerate the taint gpu.nvidia.com/xid"},
		"unhealthy, and not published so yet": {node: func(r *rig) {
			s := snapshot()
			s.GPUs[0].Health = xid
			r.snapshots.Publish(s)
		}, want: "GPU 0 (GPU-a) is Unhealthy: XID 48"},
		"the GPU is suspected": {node: sick(inventory.Health{State: inventory.Suspect}, 0)},
		"a GPU that is gone": {node: func(r *rig) {
			s := snapshot()
			s.GPUs = s.GPUs[1:]
			r.snapshots.Publish(s)
		}, want: "the device gpu-0 (GPU-a) no longer exists"},
		"a GPU that was divided since": {node: func(r *rig) {
			s := snapshot()
			s.GPUs[0].MIG = inventory.MIGEnabled
			r.snapshots.Publish(s)
		}, want: "the device gpu-0 (GPU-a) no longer exists"},
		"no look yet": {node: func(r *rig) { r.snapshots.Publish(inventory.Snapshot{}) },
			want: "the driver has not answered"},
		"no device nodes": {node: func(r *rig) { s := snapshot(); s.Control = 0; r.publish(s) },
			want: "/dev/nvidiactl does not exist yet"},
		"no nvidia-uvm": {
			node: func(r *rig) { s := snapshot(); s.Control = inventory.NodeControl; r.publish(s) }, want: "/dev/nvidia-uvm does not exist yet",
		},
		"no nvidia-uvm, but its number": {node: func(r *rig) {
			s := snapshot()
			s.Control, s.Majors.UVM = inventory.NodeControl, 510
			r.publish(s)
		}},
		"held by the device plugin": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-a", Pod: "ns/pod"}}
		}, want: "the device gpu-0 (GPU-a) is in use by the pod ns/pod, which holds nvidia.com/gpu through the device plugin"},
		"a replica is held": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/gpu.shared", ID: "GPU-a::3", Pod: "ns/pod"}}
		}, want: "which holds nvidia.com/gpu.shared through the device plugin"},
		"another GPU is held": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-c", Pod: "ns/pod"}}
		}},
		"the GPU of a MIG device is held": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-b", Pod: "ns/pod"}}
		}, device: migB0, want: "in use by the pod ns/pod"},
		"the MIG device is held": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/mig-3g.40gb", ID: "MIG-b0", Pod: "ns/pod"}}
		}, device: migB0, want: "in use by the pod ns/pod, which holds nvidia.com/mig-3g.40gb"},
		"another MIG device is held": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/mig-3g.40gb", ID: "MIG-b1", Pod: "ns/pod"}}
		}, device: migB0},
		"kubelet does not say": {node: func(r *rig) { r.heldErr = errors.New("connection refused") },
			want: "cannot check whether a pod holds the devices through the device plugin: connection refused"},
		"held, with admin access": {node: func(r *rig) {
			r.held = []kubelet.HeldDevice{{Resource: "nvidia.com/gpu", ID: "GPU-a", Pod: "ns/pod"}}
		}, claim: func(c *dra.Claim) { c.Results[0].AdminAccess = true }},
		"configuration that is none": {claim: configured(`{`),
			want: "the configuration of the claim is refused: parameters: are not JSON"},
		"a field that is not known": {claim: configured(gpuConfig+`,"sharing":{"strategy":"TimeSlicing","x":1}}`, "gpu"),
			want: "the configuration of the claim for gpu is refused: sharing.x: is not known"},
		"of the class": {claim: func(c *dra.Claim) {
			c.Configs = []dra.OpaqueConfig{{Source: dra.FromClass, Parameters: []byte(`{"kind":"X"}`)}}
		}, want: "the configuration of the DeviceClass is refused"},
		"the default": {claim: configured(gpuConfig + `}`)},
		"time-slicing": {claim: configured(gpuConfig +
			`,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Default"}}}`)},
		"of the other kind": {claim: configured(strings.Replace(gpuConfig, "Gpu", "MigDevice", 1) + `}`)},
		"named, of another kind": {claim: configured(strings.Replace(gpuConfig, "Gpu", "MigDevice", 1)+`}`, "gpu"),
			want: "is a MigDeviceConfig, and its device gpu-0 needs a GpuConfig"},
		"MPS": {claim: configured(gpuConfig + `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":0}}}`),
			want: "defaultActiveThreadPercentage: 0 is not a whole number from 1 to 100"},
		"the last one counts": {claim: func(c *dra.Claim) {
			configured(gpuConfig + `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}}}`)(c)
			configured(gpuConfig + `}`)(c)
		}},
		"of another request": {claim: configured(gpuConfig+`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}}}`, "other")},
		"of a subrequest": {claim: func(c *dra.Claim) {
			c.Results[0].Request = "gpu/big"
			configured(gpuConfig+`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}}}`,
				"gpu")(c)
		}, want: "defaultPerDevicePinnedMemoryLimit.1: the claim has no such device"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, _ := r.start()
			device := tt.device
			if device == "" {
				device = gpuA
			}
			wanted := claim("uid-1", device)
			if tt.node != nil {
				r.mu.Lock()
				tt.node(r)
				r.mu.Unlock()
			}
			if tt.claim != nil {
				tt.claim(&wanted)
			}
			got, err := ask(t.Context(), c, wanted)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("Prepare() = %v", err)
			case tt.want == "":
				r.nodes(ids(got)...)
			case err == nil || !strings.Contains(err.Error(), tt.want):
				t.Errorf("Prepare() = %v, want %q", err, tt.want)
			case r.record("uid-1") != "" || len(files(t, r.options.CDIDir)) != 0 || len(c.InUse().Value()) != 0:
				t.Errorf("a refused claim has left record %q, specs %v", r.record("uid-1"), files(t, r.options.CDIDir))
			}
		})
	}
}

// TestOverlap: which claims may have their devices at the same time.
func TestOverlap(t *testing.T) {
	t.Parallel()
	admin := claim("", gpuA)
	admin.Results[0].AdminAccess = true
	for name, tt := range map[string]struct {
		first, second dra.Claim
		fits          bool
	}{
		"one GPU":                       {claim("", gpuA), claim("", gpuA), false},
		"two GPUs":                      {claim("", gpuA), claim("", gpuC), true},
		"one of several":                {claim("", gpuC, gpuA), claim("", gpuA), false},
		"two MIG devices":               {claim("", migB0), claim("", migB1), true},
		"one MIG device":                {claim("", migB0), claim("", migB0), false},
		"one with admin access, second": {claim("", gpuA), admin, true},
		"one with admin access, first":  {admin, claim("", gpuA), true},
		"two shares":                    {part("one", 40, gpuA), part("two", 40, gpuA), true},
		"a share and a whole":           {part("one", 20, gpuA), claim("", gpuA), false},
		"a whole and a share":           {claim("", gpuA), part("two", 20, gpuA), false},
		"all of a shared GPU":           {part("one", 80, gpuA), part("two", 20, gpuA), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, _ := r.start()
			tt.first.UID, tt.first.Namespace, tt.first.Name = "first", "ns", "one"
			tt.second.UID, tt.second.Namespace, tt.second.Name = "second", "ns", "two"
			r.prepare(c, tt.first)
			_, err := ask(t.Context(), c, tt.second)
			if (err == nil) != tt.fits || err != nil && !strings.Contains(err.Error(),
				"is in use by the claim ns/one, which is not unprepared yet") {
				t.Fatalf("the second: %v, fits %v", err, tt.fits)
			}
			if err := c.Unprepare(t.Context(), "first", "ns", "one"); err != nil {
				t.Fatal(err)
			}
			if _, err := ask(t.Context(), c, tt.second); err != nil {
				t.Errorf("after the first was given back: %v", err)
			}
		})
	}
}
