package manifests

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

const twoDrivers = "driver: {images: {r570: {reference: r.example/driver:570}, r580: {reference: r.example/driver:580, pullPolicy: Always}}}"

// TestDriver: the drivers' images are volumes, and init containers copy them before Kubernetes has
// those. The daemon uses the driver of the node's current folder, and cannot write any.
func TestDriver(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ version, values string }{
		{"1.37", "{" + twoDrivers + "}"}, {"1.36", "{" + twoDrivers + "}"},
		{"1.35", "{" + strings.Replace(twoDrivers, "{images", "{imageVolumes: true, images", 1) + "}"},
	} {
		pod := driverPod(t, test.version, test.values)
		mounts(t, pod)
		if len(pod.InitContainers) > 0 || !*pod.Containers[0].SecurityContext.Privileged || !pod.HostPID {
			t.Errorf("%s: pod %+v", test.version, pod)
		}
		images := map[string]string{}
		for _, v := range pod.Volumes {
			if v.Image != nil {
				images[v.Name] = v.Image.Reference + string(v.Image.PullPolicy)
			}
		}
		want := map[string]string{"driver-r570": "r.example/driver:570", "driver-r580": "r.example/driver:580Always"}
		if diff := cmp.Diff(want, images); diff != "" {
			t.Errorf("%s: images (-want +got):\n%s", test.version, diff)
		}
	}
	for _, test := range []struct{ version, values string }{
		{"1.35", "{" + twoDrivers + "}"},
		{"1.37", "{" + strings.Replace(twoDrivers, "{images", "{imageVolumes: false, images", 1) + "}"},
	} {
		pod := driverPod(t, test.version, test.values)
		var copies []string
		for _, c := range pod.InitContainers {
			copies = append(copies, c.Image+" "+strings.Join(append(c.Command, c.Args...), " "))
			if s := c.SecurityContext; s.Privileged != nil || *s.AllowPrivilegeEscalation {
				t.Errorf("%s: the init container %s has %+v", test.version, c.Name, s)
			}
		}
		want := []string{
			"ghcr.io/gpu-device-plugin/gpu-device-plugin:" + number(t) + "-driver copy-self /tools/gpu-driver",
			"r.example/driver:570 /tools/gpu-driver place --from=/ --directory=/var/lib/gpu-device-plugin/driver",
			"r.example/driver:580 /tools/gpu-driver place --from=/ --directory=/var/lib/gpu-device-plugin/driver",
		}
		if diff := cmp.Diff(want, copies); diff != "" {
			t.Errorf("%s: init containers (-want +got):\n%s", test.version, diff)
		}
		for _, v := range pod.Volumes {
			if v.Image != nil {
				t.Errorf("%s: an image volume %s", test.version, v.Name)
			}
		}
	}
	daemon := daemonSet(t, decode(t, "chart", render(t, "{"+twoDrivers+"}")), "gpu-device-plugin").Spec.Template.Spec
	env := map[string]string{}
	for _, e := range daemon.Containers[0].Env {
		env[e.Name] = e.Value
	}
	if env["NVIDIA_DRIVER_ROOT"] != "/var/lib/gpu-device-plugin/driver/current" || env["DRIVER_ROOT_CTR_PATH"] != "/driver-root/current" {
		t.Errorf("driver root %q, in the container %q", env["NVIDIA_DRIVER_ROOT"], env["DRIVER_ROOT_CTR_PATH"])
	}
	folders := map[string]string{}
	for _, v := range daemon.Volumes {
		if v.HostPath != nil {
			folders[v.Name] = v.HostPath.Path
		}
	}
	for _, m := range daemon.Containers[0].VolumeMounts {
		if strings.HasPrefix(folders[m.Name], "/var/lib/gpu-device-plugin/driver") && !m.ReadOnly {
			t.Errorf("the daemon can write to %s", folders[m.Name])
		}
	}
}

// TestModuleParameters: gpu-driver gets each parameter of the modules as an argument.
func TestModuleParameters(t *testing.T) {
	t.Parallel()
	values := strings.Replace(twoDrivers, "{images",
		"{moduleParameters: [nvidia.NVreg_EnableGpuFirmware=0, \"nvidia.NVreg_RegistryDwords=a=1;b=2\", nvidia-drm.modeset=0], images", 1)
	got := driverPod(t, newest, "{"+values+"}").Containers[0].Args
	want := []string{"serve", "--host-root=/host", "--directory=/var/lib/gpu-device-plugin/driver", "--sources=/drivers",
		"--module-parameter=nvidia.NVreg_EnableGpuFirmware=0", "--module-parameter=nvidia.NVreg_RegistryDwords=a=1;b=2",
		"--module-parameter=nvidia-drm.modeset=0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
}

// TestDriverByURL: gpu-driver may download drivers from servers that are named, also without an image
// and before image volumes.
func TestDriverByURL(t *testing.T) {
	t.Parallel()
	const values = "{driver: {downloadFrom: [\"https://a.example/drivers/\", \"http://b:81\"], caFile: /etc/pki/ca.pem, proxy: \"http://proxy:3128\", noProxy: \".example,10.0.0.0/8\"}}"
	for _, version := range []string{"1.37", "1.31"} {
		pod := driverPod(t, version, values)
		mounts(t, pod)
		c := pod.Containers[0]
		want := []string{"serve", "--host-root=/host", "--directory=/var/lib/gpu-device-plugin/driver", "--sources=/drivers",
			"--download-from=https://a.example/drivers/", "--download-from=http://b:81", "--ca-file=/etc/pki/ca.pem"}
		if diff := cmp.Diff(want, c.Args); diff != "" || len(pod.InitContainers) > 0 {
			t.Errorf("%s: init containers %v; arguments (-want +got):\n%s", version, pod.InitContainers, diff)
		}
		env := []corev1.EnvVar{{Name: "HTTPS_PROXY", Value: "http://proxy:3128"}, {Name: "HTTP_PROXY", Value: "http://proxy:3128"},
			{Name: "NO_PROXY", Value: ".example,10.0.0.0/8"}}
		if diff := cmp.Diff(env, c.Env); diff != "" {
			t.Errorf("%s: environment (-want +got):\n%s", version, diff)
		}
	}
	digest := strings.Repeat("0a", 32)
	set := daemonSet(t, decode(t, "chart", render(t, "{driver: {version: 580.95.05, source: \"https://a.example/drivers/580?b=c\", sha256: "+digest+
		", downloadFrom: [\"https://a.example/\"]}, rollout: {slots: 1}}")), "gpu-device-plugin")
	env := map[string]string{}
	for _, e := range set.Spec.Template.Spec.Containers[0].Env {
		env[e.Name] = e.Value
	}
	if env["DRIVER_SOURCE"] != "https://a.example/drivers/580?b=c" || env["DRIVER_SHA256"] != digest ||
		env["NVIDIA_DRIVER_ROOT"] != "/var/lib/gpu-device-plugin/driver/current" {
		t.Errorf("the daemon has %v", env)
	}
}

func driverPod(t *testing.T, version, values string) corev1.PodSpec {
	t.Helper()
	objects, _, err := renderFor(version, values)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range decode(t, "chart", objects) {
		if set, ok := o.(*appsv1.DaemonSet); ok && set.Name == "gpu-device-plugin-driver" {
			return set.Spec.Template.Spec
		}
	}
	t.Fatalf("no DaemonSet for %s with %s", version, values)
	return corev1.PodSpec{}
}

// TestDriverRefused: values with which a driver could never be changed.
func TestDriverRefused(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"mps: {enabled: true}":                                           "GPUs are shared by MPS",
		"nvidiaDriverRootFolders: [/usr]":                                "leave nvidiaDriverRootFolders out",
		"gpuOperatorClient: true":                                        "changes the driver of its nodes itself",
		"driver: {images: {R580: {reference: a}}}":                       "",
		"driver: {moduleParameters: [nvidia.NVreg_EnableGpuFirmware=0]}": "without driver.images",
		"driver: {images: {r580: {reference: a}}, moduleParameters: [NVreg_EnableGpuFirmware=0]}":         "moduleParameters",
		"driver: {images: {r580: {reference: a}}, moduleParameters: [\"nvidia.a=1 nvidia.b=2\"]}":         "moduleParameters",
		"driver: {images: {r580: {reference: a}}, moduleParameters: [xhci_hcd.quirks=1]}":                 "moduleParameters",
		"driver: {images: {r580: {reference: a}}, moduleParameters: {nvidia: NVreg_EnableGpuFirmware=0}}": "moduleParameters",
		"driver: {images: {r580: {}}}":                        "",
		"driver: {images: {r580: {reference: \"a b\"}}}":      "",
		"driver: {images: {r580: {reference: a, sha256: b}}}": "",
		"driver: {source: /drivers/580.tar.gz}":               "",
		"driver: {source: \"https://u:p@a/b\"}":               "",
		"driver: {sha256: 0a}":                                "",
		"driver: {downloadFrom: [drivers.example.com]}":       "",
	} {
		if !strings.HasPrefix(values, "driver") {
			values += ", " + twoDrivers
		}
		if _, _, err := renderFor(newest, "{"+values+"}"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", values, err, want)
		}
	}
}

// TestDriverRights: nodes that change their driver need the slots of the cluster, and evictions only
// where pods are evicted. A value counts before the files. The driver of a file with a simulated
// machine is a version.
func TestDriverRights(t *testing.T) {
	t.Parallel()
	const file = "config: {map: {a: \"driver: {version: 580.95.05, pods: evict}\"}}"
	const machine = `b: "{driver: 580.95.05, cuda: '13.0', model: h100-sxm5-80gb, gpus: [{pcie: 0/0/0}]}"`
	for values, want := range map[string][2]bool{ // agent, evictions
		"{}": {},
		"{config: {default: a, map: {a: \"version: v1\", " + machine + "}}}":                  {},
		"{config: {default: a, map: {a: \"driver: {version: 580.95.05}\", " + machine + "}}}": {true, false},
		"{driver: {version: 580.95.05}, rollout: {slots: 1}}":                                 {true, false},
		"{driver: {version: 580.95.05, pods: evict}, rollout: {slots: 1}}":                    {true, true},
		"{" + file + "}": {true, true},
		"{driver: {version: \"\"}, " + file + "}": {false, false},
		"{driver: {pods: wait}, " + file + "}":    {true, false},
		"{driver: {pods: evict}}":                 {false, false},
	} {
		text := string(render(t, values))
		got := [2]bool{strings.Contains(text, "resources: [leases]"), strings.Contains(text, "pods/eviction")}
		if got != want {
			t.Errorf("%s: slots and evictions %v, want %v", values, got, want)
		}
	}
}

// TestWithoutSlots: the daemon would end at its start.
func TestWithoutSlots(t *testing.T) {
	t.Parallel()
	for values, refused := range map[string]bool{
		"{repair: idle}":                                              true,
		"{repair: idle, rollout: {slots: 0}}":                         true,
		"{driver: {version: 580.95.05}}":                              true,
		"{mig: {enabled: true, budget: true}}":                        true,
		"{mig: {budget: true}}":                                       false,
		"{repair: plan}":                                              false,
		"{repair: idle, rollout: {slots: 1}}":                         false,
		"{repair: idle, config: {name: theirs}}":                      false,
		"{repair: idle, config: {map: {a: \"rollout: {slots: 2}\"}}}": false,
	} {
		if _, err := renderChart(values); (err != nil) != refused || err != nil && !strings.Contains(err.Error(), "set rollout.slots") {
			t.Errorf("%s: %v", values, err)
		}
	}
}
