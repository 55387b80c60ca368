package manifests

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	helm "helm.sh/helm/v3/pkg/chartutil"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
)

// TestChartGivesTheStaticDRA: deployments/node-agent-dra is what the chart gives with Dynamic
// Resource Allocation, and deployments/node-agent-dra-mps what it gives with MPS for claims.
func TestChartGivesTheStaticDRA(t *testing.T) {
	t.Parallel()
	const values = "{cdi: {enabled: true}, failOnInitError: false, nvidiaDriverRoot: /, affinity: null, dra: {enabled: true}, " +
		"features: {labels: node, events: true, condition: true, taint: true}}"
	agent := append(decode(t, "rights.yaml", read(t, "../../deployments/node-agent/rights.yaml")),
		only[*appsv1.DaemonSet](t, decode(t, "static", read(t, filepath.Join(static, "gpu-device-plugin.yaml")))))
	agent = kustomize(t, "../../deployments/node-agent", []string{"../static", "rights.yaml"}, agent)
	for _, file := range []string{"classes.yaml", "rights.yaml"} {
		agent = append(agent, decode(t, file, read(t, filepath.Join("../../deployments/node-agent-dra", file)))...)
	}
	agent = kustomize(t, "../../deployments/node-agent-dra", []string{"../node-agent", "classes.yaml", "rights.yaml"},
		agent)
	// Whoever goes back edits the mode in the static manifest, and so the account there may list
	// claims.
	for _, object := range agent {
		if role, is := object.(*rbacv1.ClusterRole); is && role.Name == "gpu-device-plugin-dra" {
			role.Rules[1].Verbs = slices.DeleteFunc(role.Rules[1].Verbs, func(v string) bool { return v == "list" })
		}
	}
	givesTheSame(t, values, agent)
	agent = append(agent, decode(t, "mps", read(t, filepath.Join(mpsFolder, "mps-control-daemon.yaml")))...)
	agent = kustomize(t, "../../deployments/node-agent-dra-mps", []string{"../node-agent-dra", "../mps-control-daemon"},
		agent)
	givesTheSame(t, strings.TrimSuffix(values, "}")+", mps: {enabled: true}}", agent)
}

// TestDRAValues: the mode is that of the value, else that of the file, else dra; the account has
// rights only where it is enabled.
func TestDRAValues(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"{dra: {enabled: true}}": "DRA_MODE=dra",
		"{dra: {enabled: true, mode: split}, config: {map: {a: \"version: v1\"}}}": "DRA_MODE=split",
		"{dra: {enabled: true}, config: {map: {a: \"dra: {mode: plugin}\"}}}":      "",
		"{dra: {enabled: true}, config: {map: {a: \"version: v1\"}}}":              "DRA_MODE=dra",
		"{dra: {enabled: true}, config: {name: a, default: b}}":                    "",
		"{dra: {enabled: true, mode: plugin}, kubeletRoot: /data/kubelet/}":        "DRA_MODE=plugin KUBELET_ROOT=/data/kubelet",
		"{dra: {enabled: true, dynamicMIG: true}}":                                 "DRA_MODE=dra DRA_DYNAMIC_MIG=true",
		"{dra: {enabled: true, dynamicMIG: true, switchMIG: true}}":                "DRA_MODE=dra DRA_DYNAMIC_MIG=true DRA_SWITCH_MIG=true",
		"{dra: {enabled: true, dynamicMIG: true}, mig: {enabled: true}}":           "DRA_MODE=dra DRA_DYNAMIC_MIG=true",
		"{dra: {enabled: true}, config: {map: {a: \"dra: {dynamicMIG: true}\"}}}":  "DRA_MODE=dra",
		"{dra: {enabled: true, claimStatus: true, shares: 2, shareBy: count}}":     "DRA_MODE=dra DRA_SHARES=2 DRA_SHARE_BY=count DRA_CLAIM_STATUS=true",
		"{dra: {enabled: true, driverName: gpu.nvidia.com}}":                       "DRA_MODE=dra",
		"{dra: {enabled: true, metadata: true}}":                                   "DRA_MODE=dra DRA_METADATA=true",
		"{dra: {enabled: true, deviceClasses: false, extendedResourceName: \"\"}}": "DRA_MODE=dra",
	} {
		objects := decode(t, "chart", render(t, values))
		pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
		var got []string
		void := false // NVIDIA's runtime adds nothing
		for _, e := range pod.Containers[0].Env {
			if strings.HasPrefix(e.Name, "DRA_") || e.Name == "KUBELET_ROOT" {
				got = append(got, e.Name+"="+e.Value)
			}
			void = void || e.Name == "NVIDIA_VISIBLE_DEVICES" && e.Value == "void"
		}
		privileged := slices.Contains(grants(t, pod), "privileged")
		if made := strings.Contains(values, "dynamicMIG: true"); made != void || made != privileged {
			t.Errorf("%s: NVIDIA's runtime adds nothing: %t, privileged: %t", values, void, privileged)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", values, got, want)
		}
		classes := 0
		for _, o := range objects {
			if _, is := o.(*resourcev1.DeviceClass); is {
				classes++
			}
		}
		if none := strings.Contains(values, "deviceClasses: false"); none != (classes == 0) {
			t.Errorf("%s: %d DeviceClasses", values, classes)
		}
		claims := "cluster: resource.k8s.io resourceclaims get,list"
		if strings.HasPrefix(want, "DRA_MODE=dra") {
			claims = "cluster: resource.k8s.io resourceclaims get"
		}
		wanted := append([]string{claims, "policy gpu-device-plugin-slices",
			"cluster: resource.k8s.io resourceslices get,list,watch,create,update,delete"}, anyRights...)
		if strings.Contains(values, "claimStatus: true") {
			wanted = append(wanted, "cluster: resource.k8s.io resourceclaims/status update", "policy gpu-device-plugin-claims",
				"cluster: resource.k8s.io resourceclaims/driver associated-node:update")
		}
		if slices.Sort(wanted); !slices.Equal(rights(t, objects), wanted) {
			t.Errorf("%s: rights %q, want %q", values, rights(t, objects), wanted)
		}
	}
}

// TestDriverName: the name of the driver is that of the daemon, of classes, rights and admission
// policies. A name that only the daemon would have is refused.
func TestDriverName(t *testing.T) {
	t.Parallel()
	const name = "gpu.example.com"
	const values = "{dra: {enabled: true, driverName: " + name + ", claimStatus: true}}"
	text := render(t, values)
	objects := decode(t, "chart", text)
	for _, e := range daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec.Containers[0].Env {
		if e.Name == "DRA_DRIVER_NAME" && e.Value != name {
			t.Errorf("the daemon is told %s", e.Value)
		}
	}
	var classes []string
	for _, o := range objects {
		switch o := o.(type) {
		case *resourcev1.DeviceClass:
			classes = append(classes, o.Name)
			if s := o.Spec.Selectors[0].CEL.Expression; !strings.HasPrefix(s,
				"device.driver == '"+name+"' && device.attributes['"+name+"'].type == ") {
				t.Errorf("the class %s selects %s", o.Name, s)
			}
		case *rbacv1.ClusterRole:
			for _, r := range o.Rules {
				if slices.Contains(r.Resources, "resourceclaims/driver") && !slices.Equal(r.ResourceNames, []string{name}) {
					t.Errorf("the account may write the status for %q", r.ResourceNames)
				}
			}
		}
	}
	if slices.Sort(classes); !slices.Equal(classes, []string{name, "mig.example.com"}) {
		t.Errorf("the classes %q", classes)
	}
	kept := map[string]bool{"{name: plugins, mountPath: /var/lib/kubelet/plugins/gpu.nvidia.com, readOnly: true}": true,
		"path: /var/lib/kubelet/plugins/gpu.nvidia.com": true} // the folder is that of NVIDIA's driver
	for line := range strings.Lines(string(text)) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "- ")
		if strings.Contains(line, "gpu.nvidia.com") && !kept[line] &&
			!strings.Contains(line, "hostPath: {path: /var/lib/kubelet/plugins/gpu.nvidia.com,") {
			t.Errorf("a line with NVIDIA's name: %s", line)
		}
	}
	inFile := "{dra: {enabled: true}, config: {map: {a: \"dra: {driverName: " + name + "}\"}}}"
	if _, notes, err := renderFor("1.37", inFile); err != nil || !strings.Contains(notes, "set dra.driverName.") {
		t.Errorf("a name in a file alone: %v, notes:\n%s", err, notes)
	}
	for bad, want := range map[string]string{
		"{dra: {enabled: true, driverName: GPU_x}}": "driverName",
		"{dra: {enabled: true}, extraArgs: [--dra-driver-name=" + name +
			"]}": "set dra.driverName",
		"{dra: {enabled: true}, devicePlugin: {containers: {main: {env: [{name: DRA_DRIVER_NAME, value: a.b}]}}}}": "set dra.driverName",
	} {
		if _, err := renderChart(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestClasses: the chart has the classes that plan prints, in place of its own of the same name.
func TestClasses(t *testing.T) {
	t.Parallel()
	const config = `[{opaque: {driver: gpu.nvidia.com, parameters: {kind: GpuConfig}}}]`
	const values = `{dra: {enabled: true, classes: [{name: gpu.nvidia.com, selector: "a == 'b'", extendedResourceName: nvidia.com/gpu},
		{name: mig-1g.10gb.nvidia.com, selector: c, extendedResourceName: nvidia.com/mig-1g.10gb, config: ` + config + `}]}}`
	found := map[string]resourcev1.DeviceClassSpec{}
	for _, o := range decode(t, "chart", render(t, values)) {
		if class, is := o.(*resourcev1.DeviceClass); is {
			found[class.Name] = class.Spec
		}
	}
	if len(found) != 3 || found["gpu.nvidia.com"].Selectors[0].CEL.Expression != "a == 'b'" ||
		len(found["mig-1g.10gb.nvidia.com"].Config) != 1 ||
		*found["mig-1g.10gb.nvidia.com"].ExtendedResourceName != "nvidia.com/mig-1g.10gb" ||
		!strings.Contains(found["mig.nvidia.com"].Selectors[0].CEL.Expression, "!('shared' in") {
		t.Errorf("%+v", found)
	}
}

// TestClaimsByVersion: the chart refuses claims before Kubernetes 1.34. Before 1.36, NOTES.txt says
// that pods get no GPU by the name of a resource where all GPUs are given by claims.
func TestClaimsByVersion(t *testing.T) {
	t.Parallel()
	const claims, split = "{dra: {enabled: true}}", "{dra: {enabled: true, mode: split}}"
	served := helm.VersionSet{"resource.k8s.io/v1/DeviceClass"}
	for _, tt := range []struct {
		kubernetes, values string
		refused, note      bool
	}{
		{kubernetes: "1.33", values: claims, refused: true},
		{kubernetes: "1.33", values: "{}"},
		{kubernetes: "1.34", values: claims, note: true},
		{kubernetes: "1.35", values: split},
		{kubernetes: "1.36", values: claims},
	} {
		_, notes, err := renderServed(tt.kubernetes, served, tt.values)
		if refused := err != nil && strings.Contains(err.Error(), "ResourceClaims need 1.34 or newer"); refused != tt.refused {
			t.Errorf("%+v: %v", tt, err)
		}
		if note := strings.Contains(notes, "Before Kubernetes 1.36"); note != tt.note {
			t.Errorf("%+v: NOTES.txt speaks of names of resources: %v", tt, note)
		}
	}
}

// TestHelmTestOfClaims: helm test claims a GPU where GPUs are in slices, in the newest version of
// the API that there is, and asks for the resource where a pod can get it. Where there is no such
// API, NOTES.txt says that there is no claim.
func TestHelmTestOfClaims(t *testing.T) {
	t.Parallel()
	all := helm.VersionSet{"resource.k8s.io/v1beta1/DeviceClass", "resource.k8s.io/v1beta2/DeviceClass",
		"resource.k8s.io/v1/DeviceClass"}
	const resource, claim = "nvidia.com/gpu", "claim"
	for _, tt := range []struct {
		kubernetes, values string
		served             helm.VersionSet
		want               []string // what pods of the test ask for
		request            string   // part of the claim's template
		note               bool
	}{
		{kubernetes: newest, served: all, want: []string{resource}},
		{kubernetes: newest, values: "{test: {deviceClass: a}}", served: all, want: []string{resource}},
		{kubernetes: newest, values: "{dra: {enabled: true}}", served: all, want: []string{claim, resource},
			request: `{"exactly":{"count":1,"deviceClassName":"gpu.nvidia.com"},"name":"gpus"}`},
		{kubernetes: newest, values: "{dra: {enabled: true, mode: plugin}}", served: all, want: []string{resource}},
		{kubernetes: newest, values: "{dra: {enabled: true, mode: plugin}, test: {deviceClass: a, devices: 2}}", served: all,
			want: []string{claim, resource}, request: `{"exactly":{"count":2,"deviceClassName":"a"},"name":"gpus"}`},
		{kubernetes: newest, values: "{dra: {enabled: true}, test: {deviceClass: \"\"}}", served: all,
			want: []string{resource}},
		{kubernetes: newest, values: "{dra: {enabled: true, extendedResourceName: \"\"}}", served: all, want: []string{claim},
			request: "exactly"},
		{kubernetes: "1.35", values: "{dra: {enabled: true}}", served: all, want: []string{claim}, request: "exactly"},
		{kubernetes: "1.35", values: "{dra: {enabled: true, mode: split}}", served: all, want: []string{claim, resource},
			request: "exactly"},
		{kubernetes: "1.34", values: "{dra: {enabled: true}}", served: all[:1], want: []string{claim},
			request: `{"count":1,"deviceClassName":"gpu.nvidia.com","name":"gpus"}`},
		{kubernetes: newest, values: "{dra: {enabled: true, mode: split, deviceClasses: false}}", want: []string{resource},
			note: true},
	} {
		text, notes, err := renderServed(tt.kubernetes, tt.served, tt.values)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(notes, "helm test leaves its claim out"); got != tt.note {
			t.Errorf("%+v: NOTES.txt says that there is no claim: %v", tt, got)
		}
		if tt.request != "" && (!strings.Contains(string(text), tt.request) ||
			strings.Count(string(text), `helm.sh/hook-weight: "-1"`) != 1) {
			t.Errorf("%+v: no claim with %s that Helm makes before its pod", tt, tt.request)
		}
		version := "resource.k8s.io/" + strings.TrimSuffix(strings.TrimPrefix(slices.Max(append(tt.served, "")),
			"resource.k8s.io/"), "/DeviceClass")
		if len(tt.served) == 1 { // this program knows v1 alone
			text = []byte(strings.ReplaceAll(string(text), version, "resource.k8s.io/v1"))
			text = []byte(strings.ReplaceAll(string(text), tt.request, `{"name":"gpus"}`))
		}
		var got []string
		for _, o := range decode(t, "chart", text) {
			pod, is := o.(*corev1.Pod)
			if !is {
				continue
			}
			for name := range pod.Spec.Containers[0].Resources.Limits {
				got = append(got, string(name))
			}
			for range pod.Spec.Containers[0].Resources.Claims {
				got = append(got, claim)
			}
			if args := strings.Join(pod.Spec.Containers[0].Args, " "); !strings.HasPrefix(args, "check-container --devices=") {
				t.Errorf("%+v: the pod runs %s", tt, args)
			}
		}
		if slices.Sort(got); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: pods ask for %q, want %q", tt, got, tt.want)
		}
	}
}

// TestClaimsAreListedOnlyToGoBack: the account lists the claims of all namespaces only where a GPU
// may go back to the device plugin.
func TestClaimsAreListedOnlyToGoBack(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]bool{
		"": false, ", mode: dra": false, ", mode: split": true, ", mode: plugin": true,
		"}, config: {name: mine": true, "}, config: {map: {a: \"dra: {mode: plugin}\"}": true,
	} {
		got := strings.Contains(string(render(t, "{dra: {enabled: true"+values+"}}")),
			"resources: [resourceclaims], verbs: [get, list]")
		if got != want {
			t.Errorf("%s: claims are listed %t, want %t", values, got, want)
		}
	}
}
