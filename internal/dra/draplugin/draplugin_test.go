package draplugin_test

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestServes: kubelet registers the driver, has claims prepared and unprepared, and is told the
// health of devices, in each pair of versions.
func TestServes(t *testing.T) {
	t.Parallel()
	for name, services := range map[string][]string{
		"kubelet 1.37": nil,
		"kubelet 1.36": {drav1.DRAPluginService, drav1beta1.DRAPluginService, healthv1alpha1.DRAResourceHealthService},
		// Without the gate ResourceHealthStatus, kubelet 1.34 and 1.35 never ask for the health of devices.
		"kubelet 1.34": {drav1.DRAPluginService, drav1beta1.DRAPluginService},
		"kubelet 1.33": {drav1beta1.DRAPluginService, healthv1alpha1.DRAResourceHealthService},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			k := n.startKubelet(t, services...)
			d := n.start(t, nil)
			d.awaitRegistered(t)
			if got := d.Status().Value().Registrations; got != 1 {
				t.Errorf("registered %d times, want once", got)
			}
			answers, err := k.Prepare(t.Context(), dra.Driver, claim("a"))
			if err != nil || answers["a"].GetError() != "" {
				t.Fatal(err, answers)
			}
			device := answers["a"].GetDevices()[0]
			got := []string{device.GetPoolName(), device.GetDeviceName(), strings.Join(device.GetRequestNames(), ","),
				strings.Join(device.GetCdiDeviceIds(), ",")}
			if diff := cmp.Diff([]string{"node-1", "gpu-0", "gpu", "k8s.gpu.nvidia.com/claim=a-gpu-0"}, got); diff != "" {
				t.Errorf("device (-want +got):\n%s", diff)
			}
			if id := device.GetShareId(); services == nil && id != "s" {
				t.Errorf("share %q, want s", id)
			}
			if len(services) != 2 || services[1] != drav1beta1.DRAPluginService {
				poll.Until(t, "the health of gpu-0 is Healthy", func() bool {
					return k.Health("gpu-0").GetHealth() == healthv1.HealthStatus_HEALTHY
				})
				n.publish(inventory.Health{State: inventory.Unhealthy, Reason: "XID 79", Remedy: inventory.RemedyReset})
				poll.Until(t, "the health of gpu-0 is Unhealthy", func() bool {
					return k.Health("gpu-0").GetHealth() == healthv1.HealthStatus_UNHEALTHY
				})
				if got := k.Health("gpu-0"); got.GetMessage() != "XID 79; remedy: reset" ||
					got.GetDevice().GetPoolName() != "node-1" {
					t.Errorf("health: %v", got)
				}
				if got := k.Health("gpu-1").GetHealth(); got != healthv1.HealthStatus_HEALTHY {
					t.Errorf("the health of the other device is %v", got)
				}
			}
			gone, err := k.Unprepare(t.Context(), dra.Driver, claim("a"))
			if err != nil || gone["a"].GetError() != "" || n.claims.isPrepared("a") {
				t.Error("not unprepared:", err, gone)
			}
			d.stop()
			if left := n.sockets(t); len(left) > 0 {
				t.Errorf("the driver left %q", left)
			}
		})
	}
}

// TestForeign: while another program's driver of the same name runs, the driver does not register,
// and reports a problem. It registers when the other driver has stopped, even by a kill, and leaves
// if another driver comes later.
func TestForeign(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t)
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.socket(name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
				_ = conn.Close() // the kubelet does not wait
			}
		}()
		return l
	}
	listen("nic.example.com-0b1c-reg.sock") // of a driver with another name, without effect
	foreign := listen("gpu.nvidia.com-0b1c-reg.sock")
	d := n.start(t, nil)
	beside := n.startProcess(t, draplugin.Options{Driver: "gpu.example.com",
		CompetingDriver: func(context.Context) string { return "NVIDIA's is there" }})
	if s := beside.await(t, "a driver of another name",
		func(s draplugin.Status) bool { return s.Registered }); s.NameConflict != "" || s.CompetingDriver == "" {
		t.Errorf("beside NVIDIA's driver: %+v", s)
	}
	beside.stop()
	isForeign := func(s draplugin.Status) bool { return s.NameConflict != "" && !s.Registered }
	status := d.await(t, "a foreign driver", isForeign)
	if !strings.Contains(status.Problem, "gpu.nvidia.com-0b1c-reg.sock; remove that driver") || len(n.sockets(t)) != 2 {
		t.Errorf("%+v, sockets %q", status, n.sockets(t))
	}
	foreign.SetUnlinkOnClose(false)
	if err := foreign.Close(); err != nil {
		t.Fatal(err)
	}
	d.awaitRegistered(t)
	if got := n.sockets(t); len(got) != 3 {
		t.Errorf("sockets %q: that of another program has to stay", got)
	}
	if ready, reason := d.Ready(t.Context()); !ready {
		t.Errorf("not ready: %s", reason)
	}
	removeFile(t, n.socket("gpu.nvidia.com-0b1c-reg.sock"))
	listen("gpu.nvidia.com-0b1c-reg.sock")
	d.await(t, "a foreign driver", isForeign)
	poll.Until(t, "only the sockets of other programs are there", func() bool { return len(n.sockets(t)) == 2 })
	if ready, reason := d.Ready(t.Context()); ready || !strings.Contains(reason, "remove that driver") {
		t.Errorf("ready %v: %s", ready, reason)
	}
}
