package claims_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
)

// nvidia is a checkpoint as NVIDIA's driver writes it: two claims that are prepared, one that is
// half prepared, one with MPS, and one for another kind of device.
const nvidia = `{"version":"v2","checksum":3141592653,"v1":{"preparedClaims":{"uid-gpu":{"status":{}}}},"v2":{"checksum":2718281828,"preparedClaims":{
"uid-gpu":{"checkpointState":"PrepareCompleted","status":{"allocation":{"devices":{"results":[
  {"request":"gpu/big","driver":"gpu.nvidia.com","pool":"node","device":"gpu-0","tolerations":[{"key":"a","operator":"Exists"}]},
  {"request":"nic","driver":"nic.example.com","pool":"node","device":"nic-0"}]},"nodeSelector":{}}},
 "preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":"GPU-a"},"device":{"Requests":["gpu/big"],"PoolName":"node","DeviceName":"gpu-0",
  "CDIDeviceIDs":["k8s.gpu.nvidia.com/claim=uid-gpu-gpu-0"]}},"mig":null}],"configState":{"mpsControlDaemonID":""}}],"name":"one","namespace":"ns"},
"uid-mig":{"checkpointState":"PrepareCompleted","status":{"allocation":{"devices":{"results":[
  {"request":"mig","driver":"gpu.nvidia.com","pool":"node","device":"gpu-1-mig-3g40gb-9-0"}]}}},
 "preparedDevices":[{"devices":[{"gpu":null,"mig":{"concrete":{"parentMinor":1,"giId":1,"ciId":0,"migUUID":"MIG-b0","parentUUID":"GPU-b"},
  "device":{"Requests":["mig"],"PoolName":"node","DeviceName":"gpu-1-mig-3g40gb-9-0","CDIDeviceIDs":null}}}],"configState":{}}],
 "name":"two","namespace":"ns"},
"uid-half":{"checkpointState":"PrepareStarted","status":{"allocation":{"devices":{"results":[
  {"request":"gpu","driver":"gpu.nvidia.com","pool":"node","device":"gpu-2"}]}}},"name":"three","namespace":"ns"},
"uid-mps":{"checkpointState":"PrepareCompleted","status":{"allocation":{"devices":{"results":[
  {"request":"gpu","driver":"gpu.nvidia.com","pool":"node","device":"gpu-2"}]}}},
 "preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":"GPU-c"},"device":{"DeviceName":"gpu-2"}},"mig":null}],
  "configState":{"mpsControlDaemonID":"uid-mps-abc"}}],"name":"four","namespace":"ns"},
"uid-vfio":{"checkpointState":"PrepareCompleted","status":{"allocation":{"devices":{"results":[
  {"request":"vm","driver":"gpu.nvidia.com","pool":"node","device":"gpu-vfio-0"}]}}},
 "preparedDevices":[{"devices":[{"gpu":null,"mig":null,"vfio":{"info":{"uuid":"GPU-d"},"device":{"DeviceName":"gpu-vfio-0"}}}],"configState":{}}],
 "name":"five","namespace":"ns"}
},"nodeBootID":"one"}}`

// checkpoint has NVIDIA's driver leave a checkpoint, and the spec that it made.
func (r *rig) checkpoint(content string) {
	r.tb.Helper()
	r.mode(config.DRAAll)
	r.options.Checkpoint = filepath.Join(r.tb.TempDir(), "checkpoint.json")
	if err := os.WriteFile(r.options.Checkpoint, []byte(content), 0o600); err != nil {
		r.tb.Fatal(err)
	}
	if err := r.specs().Write("uid-gpu", []byte(`{"cdiVersion":"0.3.0","kind":"k8s.gpu.nvidia.com/claim","devices":[
{"name":"uid-gpu-gpu-0","containerEdits":{"deviceNodes":[{"path":"/dev/old"}]}}]}`)); err != nil {
		r.tb.Fatal(err)
	}
}

// mode changes the mode of the configuration.
func (r *rig) mode(mode config.DRAMode) {
	next := r.configs.Value()
	next.DRA.Mode = mode
	r.configs.Publish(next)
}

// adopted returns the names of the claims that are recorded.
func adopted(c *claims.Claims) string {
	var all []string
	for _, s := range c.Status().Value() {
		all = append(all, s.Name)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// TestAdopt: claims that NVIDIA's driver has prepared are prepared here, once; their specs are
// ours, and nobody else gets their GPUs.
func TestAdopt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.checkpoint(nvidia)
	c, stop := r.start()
	if got := adopted(c); got != "one two" {
		t.Errorf("adopted: %s", got)
	}
	want := []claims.DeviceStatus{{Request: "gpu/big", Name: gpuA, GPU: "GPU-a"}}
	if diff := cmp.Diff(want, c.Status().Value()[0].Devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err == nil ||
		!strings.Contains(err.Error(), "in use by the claim ns/one") {
		t.Errorf("another claim: %v", err)
	}
	again := claim("uid-gpu", gpuA)
	answer, err := ask(t.Context(), c, again)
	if err != nil || answer[0].Requests[0] != "gpu" {
		t.Fatalf("Prepare() = %+v, %v", answer, err)
	}
	if got := r.nodes("k8s.gpu.nvidia.com/claim=uid-gpu-gpu-0",
		"k8s.gpu.nvidia.com/claim=uid-mig-"+migB0); !strings.HasPrefix(got, "nvidia0 nvidia1 ") {
		t.Errorf("device nodes %s", got)
	}
	if err := c.Unprepare(t.Context(), "uid-gpu", "ns", "one"); err != nil || r.spec("uid-gpu") != nil {
		t.Errorf("Unprepare() = %v, spec %v", err, r.spec("uid-gpu"))
	}
	record := r.record("uid-mig")
	restart := func(content, want string) {
		t.Helper()
		stop()
		if err := os.WriteFile(r.options.Checkpoint, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		c, stop = r.start()
		if got := adopted(c); got != want || r.record("uid-mig") != record {
			t.Errorf("adopted: %s, want %s; its record was %s and is %s", got, want, record, r.record("uid-mig"))
		}
		if text, err := os.ReadFile(r.options.Checkpoint); err != nil || string(text) != content {
			t.Errorf("the checkpoint of NVIDIA's driver has changed: %v", err)
		}
	}
	restart(nvidia, "two")
	restart(nvidia+"\n", "one two") // NVIDIA's driver was there again: the claim is its own until it is known to be leaked
}

// TestAdoptNothing: what is not adopted, and that the claims of this program go on beside it.
func TestAdoptNothing(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]string{
		"another boot": strings.Replace(nvidia, `"nodeBootID":"one"`, `"nodeBootID":"zero"`, 1),
		"damaged":      nvidia[:200],
		"only v1":      `{"checksum":1,"v1":{"preparedClaims":{"uid-gpu":{}}}}`,
		"no claims":    `{"checksum":1,"v2":{"checksum":1}}`,
		"a wrong name": strings.ReplaceAll(nvidia, `"uid-`, `"../uid-`),
		"no namespace": strings.ReplaceAll(nvidia, `"namespace":"ns"`, `"namespace":""`),
		"no name":      strings.NewReplacer(`"name":"one"`, `"name":""`, `"name":"two"`, `"name":""`).Replace(nvidia),
		"begun":        strings.ReplaceAll(nvidia, "PrepareCompleted", "PrepareStarted"),
		"of others":    strings.ReplaceAll(nvidia, `"driver":"gpu.nvidia.com"`, `"driver":"gpu.example.com"`),
		"no UUIDs": strings.NewReplacer(`"uuid":"GPU-a"`, `"uuid":""`, `"migUUID":"MIG-b0"`,
			`"migUUID":""`).Replace(nvidia),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.checkpoint(content)
			c, _ := r.start()
			if got := adopted(c); got != "" {
				t.Errorf("adopted: %s", got)
			}
			r.prepare(c, claim("uid-1", gpuA))
		})
	}
}

// TestAdoptWhenNVIDIAsDriverHasEnded: as long as it answers at one of its sockets, its claims are
// its own.
func TestAdoptWhenNVIDIAsDriverHasEnded(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"plugins/nv/dra.sock", "plugins/nv/dra-0f1e2d3c.sock", "plugins_registry/gpu.nvidia.com-reg.sock",
		"plugins_registry/gpu.nvidia.com-0f1e2d3c-reg.sock",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.checkpoint(nvidia)
				kubelet, err := os.MkdirTemp("", "k") // the path of a socket is short
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = os.RemoveAll(kubelet) })
				for _, folder := range []string{"plugins/nv", "plugins_registry"} {
					if err := os.MkdirAll(filepath.Join(kubelet, folder), 0o700); err != nil {
						t.Fatal(err)
					}
				}
				r.options.Checkpoint = filepath.Join(kubelet, "plugins/nv/checkpoint.json")
				if err := os.WriteFile(r.options.Checkpoint, []byte(nvidia), 0o600); err != nil {
					t.Fatal(err)
				}
				socket, err := net.Listen("unix", filepath.Join(kubelet, name))
				if err != nil {
					t.Fatal(err)
				}
				defer socket.Close()
				c, stop := r.start()
				defer stop()
				time.Sleep(3 * claims.RefreshInterval)
				synctest.Wait()
				if got := adopted(c); got != "" {
					t.Errorf("adopted while NVIDIA's driver runs: %s", got)
				}
				if err := socket.Close(); err != nil {
					t.Error(err)
				}
				time.Sleep(claims.RefreshInterval)
				synctest.Wait()
				if got := adopted(c); got != "one two" {
					t.Errorf("adopted: %s", got)
				}
			})
		})
	}
}

// TestAdoptWhenTheModeChanges: they are taken over as soon as GPUs are to be given to claims here,
// and not before.
func TestAdoptWhenTheModeChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.checkpoint(nvidia)
		r.mode(config.DRAOff)
		c, stop := r.start()
		defer stop()
		time.Sleep(3 * claims.RefreshInterval)
		synctest.Wait()
		if got := adopted(c); got != "" {
			t.Errorf("adopted in the mode plugin: %s", got)
		}
		r.mode(config.DRAAll)
		synctest.Wait()
		if got := adopted(c); got != "one two" {
			t.Errorf("adopted: %s", got)
		}
	})
}
