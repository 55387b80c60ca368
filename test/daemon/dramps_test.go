package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
)

// A withMPS is a node that gives claims, with a stand-in for the driver's program of MPS.
type withMPS struct {
	*claimable
	programs, gpus string
}

func newWithMPS(t *testing.T, args ...string) *withMPS {
	t.Helper()
	c := newWithMPSAs(t, "dra", args...)
	c.published(8)
	return c
}

// newWithMPSAs does so with a mode and further arguments.
func newWithMPSAs(t *testing.T, mode string, args ...string) *withMPS {
	t.Helper()
	c := &withMPS{programs: t.TempDir(), gpus: t.TempDir()}
	out, err := exec.Command("go", "build", "-o", filepath.Join(c.programs, "nvidia-cuda-mps-control"),
		"../mps").CombinedOutput()
	if err != nil {
		t.Fatalf("build the stand-in: %v: %s", err, out)
	}
	c.claimable = newClaimable(t, mode, append(args, "--mps-root", "/run/nvidia/mps", "--mps-root-ctr-path",
		"$DIR/mps")...)
	if err := os.Mkdir(c.Path("mps"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if shared, err := os.ReadFile(filepath.Join(c.gpus, "shared")); !os.IsNotExist(err) {
			t.Errorf("a GPU had two control daemons at a time: %s (%v)", shared, err)
		}
		if t.Failed() {
			text, _ := os.ReadFile(c.Path("mps.log"))
			t.Logf("the log of mps-control-daemon:\n%s", text)
		}
	})
	return c
}

// mpsControlDaemon starts the process that runs control daemons, and returns what sends it a
// signal: SIGKILL and SIGTERM wait until it has ended.
func (c *withMPS) mpsControlDaemon() (signal func(syscall.Signal)) {
	c.t.Helper()
	p := exec.Command(c.Setup.Daemon, "mps-control-daemon", "--simulate", c.Profile, "--config-file", c.file,
		"--mps-root-ctr-path", c.Path("mps"))
	p.Env = append(os.Environ(), "PATH="+c.programs, "MPS_STAND_IN_GPUS="+c.gpus)
	log, err := os.OpenFile(c.Path("mps.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	p.Stdout, p.Stderr = log, log
	if err := p.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := false
	signal = func(signal syscall.Signal) {
		if ended {
			return
		}
		_ = p.Process.Signal(signal)
		if signal == syscall.SIGKILL || signal == syscall.SIGTERM {
			ended = true
			_ = p.Wait()
		}
	}
	c.t.Cleanup(func() {
		signal(syscall.SIGCONT)
		signal(syscall.SIGTERM)
	})
	return signal
}

// claimByMPS gives a device to a claim that is shared by MPS, with limits.
func (c *withMPS) claimByMPS(name, device string) (uid string) {
	c.t.Helper()
	uid = c.claim(name, device)
	kind := "GpuConfig"
	if strings.Contains(device, "-mig-") {
		kind = "MigDeviceConfig"
	}
	if err := c.api.ChangeClaim("default", name, func(claim *resourceapi.ResourceClaim) {
		claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: draDriver, Parameters: runtime.RawExtension{Raw: []byte(
					`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `","sharing":{"strategy":"MPS","mpsConfig":` +
						`{"defaultActiveThreadPercentage":25,"defaultPinnedDeviceMemoryLimit":"10Gi"}}}`)}}}}}
	}); err != nil {
		c.t.Fatal(err)
	}
	return uid
}

// TestClaimByMPS: a claim that is shared by MPS has a control daemon with its limits for exactly
// its GPU, as long as it is prepared; the deaths of all processes change nothing of that.
func TestClaimByMPS(t *testing.T) {
	t.Parallel()
	c := newWithMPS(t)
	uid := c.claimByMPS("one", "gpu-3")
	c.eventually("the claim is refused without mps-control-daemon", func() bool {
		_, err := c.prepare(t.Context(), "one", uid)
		return err != nil && strings.Contains(err.Error(), "mps-control-daemon does not run on this node")
	})
	signal := c.mpsControlDaemon()
	c.prepared("one", uid)
	dir := c.Path("mps/claims/" + uid + "-0")
	uuid := ""
	for _, s := range c.api.Slices() {
		for _, d := range s.Spec.Devices {
			if d.Name == "gpu-3" {
				uuid = *d.Attributes["uuid"].StringValue
			}
		}
	}
	told, err := os.ReadFile(filepath.Join(dir, "log/control.log"))
	for _, line := range []string{
		"Starting control daemon of " + uuid + " for one user\n", "set_default_active_thread_percentage 25\n",
		"set_default_device_pinned_mem_limit 0 10240M\n",
	} {
		if !strings.Contains(string(told), line) {
			t.Errorf("the control daemon was not told %q (%v): %s", line, err, told)
		}
	}
	specs, err := filepath.Glob(filepath.Join(c.Path("cdi"), "*claim*"))
	if err != nil || len(specs) != 1 {
		t.Fatalf("specs %q and %v", specs, err)
	}
	text, err := os.ReadFile(specs[0])
	for _, part := range []string{
		"CUDA_MPS_PIPE_DIRECTORY=/mps/claims/" + uid + "-0/pipe", "/run/nvidia/mps/claims/" + uid +
			"-0/pipe", "/run/nvidia/mps/shm",
	} {
		if !strings.Contains(string(text), part) {
			t.Errorf("the CDI spec has no %s (%v): %s", part, err, text)
		}
	}

	signal(syscall.SIGKILL)
	c.eventually("status says that mps-control-daemon does not run", func() bool {
		return strings.Contains(c.command("status"), "gpu-3: mps-control-daemon does not run on this node")
	})
	c.eventually("kubelet is told so", func() bool {
		health := c.plugins.Health("gpu-3")
		return health.GetHealth() == healthv1.HealthStatus_UNHEALTHY &&
			strings.Contains(health.GetMessage(), "mps-control-daemon")
	})
	c.crash()
	c.mpsControlDaemon()
	c.eventually("another control daemon serves the claim", func() bool {
		return c.plugins.Health("gpu-3").GetHealth() == healthv1.HealthStatus_HEALTHY &&
			!strings.Contains(c.command("status"), "gpu-3: ")
	})
	c.prepared("one", uid)
	c.release(t.Context(), "one", uid)
	c.eventually("nothing is left of the control daemon", func() bool {
		left, err := filepath.Glob(c.Path("mps/claims/*"))
		_, exclusive := os.Stat(c.Path("mps/.exclusive"))
		return err == nil && len(left) == 0 && os.IsNotExist(exclusive)
	})
	c.prepared("two", c.claim("two", "gpu-3"))
}
