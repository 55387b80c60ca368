package manifests

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// rights returns what the account of the daemon's pod may do at the API server, and what its
// admission policies are about. It checks that each role is bound to that account alone, and each
// policy in force for it.
func rights(t *testing.T, objects []runtime.Object) []string {
	t.Helper()
	pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
	found := []string{strings.Join(append(pod.Containers[0].Command, "as", pod.ServiceAccountName), " ")}
	if *pod.AutomountServiceAccountToken {
		found = append(found, "token")
	}
	add := func(where string, rules []rbacv1.PolicyRule) {
		for _, r := range rules {
			for _, resource := range r.Resources {
				found = append(found, fmt.Sprintf("%s: %s %s %s", where, strings.Join(r.APIGroups, ","), resource,
					strings.Join(r.Verbs, ",")))
			}
		}
	}
	account := []rbacv1.Subject{{Kind: "ServiceAccount", Name: pod.ServiceAccountName, Namespace: "kube-system"}}
	bound := map[string]int{}
	bind := func(kind, namespace, name string, subjects []rbacv1.Subject) {
		bound[kind+namespace+name]++
		if diff := cmp.Diff(account, subjects); diff != "" {
			t.Errorf("%s %s is bound to (-want +got):\n%s", kind, name, diff)
		}
	}
	for _, object := range objects {
		switch o := object.(type) {
		case *corev1.ServiceAccount:
			found = append(found, "account "+o.Name)
		case *rbacv1.ClusterRole:
			bound["ClusterRole"+o.Name]--
			add("cluster", o.Rules)
		case *rbacv1.Role:
			bound["Role"+o.Namespace+o.Name]--
			add(o.Namespace, o.Rules)
		case *rbacv1.ClusterRoleBinding:
			bind(o.RoleRef.Kind, "", o.RoleRef.Name, o.Subjects)
		case *rbacv1.RoleBinding:
			bind(o.RoleRef.Kind, o.Namespace, o.RoleRef.Name, o.Subjects)
		case *admissionv1.ValidatingAdmissionPolicy:
			bound["policy"+o.Name]--
			want := fmt.Sprintf("request.userInfo.username == 'system:serviceaccount:kube-system:%s'", pod.ServiceAccountName)
			if c := o.Spec.MatchConditions; len(c) != 1 || c[0].Expression != want || *o.Spec.FailurePolicy != admissionv1.Fail {
				t.Errorf("policy %s is for %v and fails %s", o.Name, c, *o.Spec.FailurePolicy)
			}
			found = append(found, "policy "+o.Name)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			bound["policy"+o.Spec.PolicyName]++
			if !slices.Equal(o.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
				t.Errorf("policy %s does %v", o.Name, o.Spec.ValidationActions)
			}
		}
	}
	for name, n := range bound {
		if n != 0 {
			t.Errorf("%s is not bound once", name)
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// What the account needs for each feature, and for any of them.
var (
	anyRights = []string{"gpu-node-agent as gpu-device-plugin", "token", "account gpu-device-plugin",
		"cluster:  nodes get,list,watch"}
	labelRights = map[string][]string{
		"null": nil, "off": nil, "file": nil,
		"node": {"cluster:  nodes patch", "policy gpu-device-plugin-nodes"},
		"nodeFeature": {"kube-system:  pods get", "kube-system: nfd.k8s-sigs.io nodefeatures get,create,patch",
			"policy gpu-device-plugin-nodefeatures"},
	}
	otherRights = []struct {
		name   string
		rights []string
	}{
		{"events", []string{"default: events.k8s.io events create,patch", "policy gpu-device-plugin-events"}},
		{"podEvents", []string{"cluster: events.k8s.io events create,patch"}},
		{"condition", []string{"cluster:  nodes/status patch", "policy gpu-device-plugin-nodes"}},
		{"taint", []string{"cluster:  nodes patch", "policy gpu-device-plugin-nodes"}},
		{"nodeConfig", nil},
	}
	migRights = map[string][]string{
		"label: true":       {"cluster:  nodes patch", "policy gpu-device-plugin-nodes"},
		"disruption: evict": {"cluster:  pods/eviction create"},
		"disruption: pause": {"cluster:  nodes patch", "cluster:  pods list", "cluster:  pods/eviction create",
			"policy gpu-device-plugin-nodes"},
		"budget: true": {"kube-system: coordination.k8s.io leases list,create,update,delete", "policy gpu-device-plugin-slots"},
		"label: true, disruption: evict": {"cluster:  nodes patch", "cluster:  pods/eviction create",
			"policy gpu-device-plugin-nodes"},
	}
)

// TestRightsOfMIG: the account may write the state of the layout where the label names it, and
// evict pods where that is on; only where layouts are changed. It makes no difference whether
// values or a file ask.
func TestRightsOfMIG(t *testing.T) {
	t.Parallel()
	for keys, want := range migRights {
		for enabled, want := range map[string][]string{"true": append(want, anyRights...), "false": {"as default"}} {
			slices.Sort(want)
			for _, values := range []string{
				fmt.Sprintf("{mig: {enabled: %s, %s}, rollout: {slots: 1}}", enabled, keys),
				fmt.Sprintf("{config: {map: {a: %q}}}", fmt.Sprintf("mig: {enabled: %s, %s}", enabled, keys)),
			} {
				if diff := cmp.Diff(want, rights(t, decode(t, "chart", render(t, values)))); diff != "" {
					t.Errorf("%s: rights (-want +got):\n%s", values, diff)
				}
			}
		}
	}
}

// TestMIGValues: values reach the daemon, NVIDIA's runtime is told to add nothing, and the file of
// layouts is mounted.
func TestMIGValues(t *testing.T) {
	t.Parallel()
	pod := daemonSet(t, decode(t, "chart", render(t, "{mig: {enabled: true, layout: a, label: true, replace: true, resetInVM: true, disruption: pause, evictTimeout: 5m, "+
		"config: {name: default-mig-parted-config}}}")), "gpu-device-plugin").Spec.Template.Spec
	got := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		if strings.Contains(e.Name, "MIG_") || e.Name == "NVIDIA_VISIBLE_DEVICES" {
			got[e.Name] = e.Value
		}
	}
	want := map[string]string{
		"MIG_ENABLED": "true", "MIG_LAYOUT": "a", "MIG_LABEL": "true", "MIG_REPLACE": "true", "MIG_RESET_IN_VM": "true", "MIG_DISRUPTION": "pause", "MIG_EVICT_TIMEOUT": "5m",
		"MIG_CONFIG_FILE": "/mig/config.yaml", "NVIDIA_VISIBLE_DEVICES": "void",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("env (-want +got):\n%s", diff)
	}
	mounts(t, pod)
	if i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "mig" }); i < 0 ||
		pod.Volumes[i].ConfigMap.Name != "default-mig-parted-config" {
		t.Errorf("volumes %v", pod.Volumes)
	}
}

// TestRolloutValues: values reach the daemon; the account may write Leases in the namespace of the
// slots, and of those the slots of its own node alone.
func TestRolloutValues(t *testing.T) {
	t.Parallel()
	objects := decode(t, "chart", render(t, "{mig: {enabled: true, label: true, budget: true}, rollout: {slots: 3, namespace: gpu, "+
		"waveLabel: wave, waveSoak: 1h, topologyLabel: rack, windows: [\"Sat 22:00-04:00\", \"01:00-05:00\"]}}"))
	got := map[string]string{}
	for _, e := range daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec.Containers[0].Env {
		if strings.Contains(e.Name, "ROLLOUT_") || e.Name == "MIG_BUDGET" {
			got[e.Name] = e.Value
		}
	}
	want := map[string]string{
		"MIG_BUDGET": "true", "ROLLOUT_SLOTS": "3", "ROLLOUT_NAMESPACE": "gpu", "ROLLOUT_WAVE_LABEL": "wave", "ROLLOUT_WAVE_SOAK": "1h",
		"ROLLOUT_TOPOLOGY_LABEL": "rack", "ROLLOUT_WINDOWS": "Sat 22:00-04:00,01:00-05:00",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("env (-want +got):\n%s", diff)
	}
	if found := rights(t, objects); !slices.Contains(found, "gpu: coordination.k8s.io leases list,create,update,delete") {
		t.Errorf("rights: %v", found)
	}
	i := slices.IndexFunc(objects, func(o runtime.Object) bool {
		p, is := o.(*admissionv1.ValidatingAdmissionPolicy)
		return is && p.Name == "gpu-device-plugin-slots"
	})
	if i < 0 {
		t.Fatal("there is no policy for slots")
	}
	agent := &user.DefaultInfo{Name: "system:serviceaccount:kube-system:gpu-device-plugin",
		Extra: map[string][]string{"authentication.kubernetes.io/node-name": {"n"}}}
	kind := schema.GroupVersionKind{Group: "coordination.k8s.io", Version: "v1", Kind: "Lease"}
	leases := kind.GroupVersion().WithResource("leases")
	lease := func(name, holder string) map[string]any {
		return map[string]any{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
			"metadata": map[string]any{"name": name, "namespace": "gpu"}, "spec": map[string]any{"holderIdentity": holder}}
	}
	for _, tt := range []struct {
		what             string
		object, previous map[string]any
		refused          string
	}{
		{"takes a slot", lease("gpu-change-0", "n"), nil, ""},
		{"renews it", lease("gpu-change-12", "n"), lease("gpu-change-12", "n"), ""},
		{"gives it back", nil, lease("gpu-change-0", "n"), ""},
		{"takes a slot for another node", lease("gpu-change-0", "m"), nil, "of another node"},
		{"takes the slot of another node", lease("gpu-change-0", "n"), lease("gpu-change-0", "m"), "of another node"},
		{"frees the slot of another node", nil, lease("gpu-change-0", "m"), "of another node"},
		{"pauses", lease("gpu-change-paused", "n"), nil, "no other Leases"},
		{"resumes", nil, map[string]any{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
			"metadata": map[string]any{"name": "gpu-change-paused", "namespace": "gpu"}}, "of another node"},
		{"reports its repairs", lease("gpu-repair-node-n", "n"), lease("gpu-repair-node-n", "n"), ""},
		{"reports repairs of another node", lease("gpu-repair-node-m", "n"), nil, "no other Leases"},
		{"stops all repairs", lease("gpu-repair-stopped", "n"), nil, ""},
		{"resumes repairs", nil, lease("gpu-repair-stopped", "n"), "no other Leases"},
		{"says that repairs were resumed", lease("gpu-repair-resumed", "n"), nil, "no other Leases"},
		{"leads another program", lease("kube-scheduler", "n"), nil, "no other Leases"},
	} {
		var operation admission.Operation
		var object, previous runtime.Object // nil for none
		if operation = admission.Delete; tt.object != nil {
			object, operation = &unstructured.Unstructured{Object: tt.object}, admission.Update
		}
		if tt.previous == nil {
			operation = admission.Create
		} else {
			previous = &unstructured.Unstructured{Object: tt.previous}
		}
		refused := strings.Join(judgeRequest(t, objects[i].(*admissionv1.ValidatingAdmissionPolicy),
			admission.NewAttributesRecord(object, previous, kind, "gpu", "", leases, "", operation, nil, false, agent)), "; ")
		if (refused == "") != (tt.refused == "") || !strings.Contains(refused, tt.refused) {
			t.Errorf("a node that %s: %q, want %q", tt.what, refused, tt.refused)
		}
	}
}

// TestRights: with each combination of features the account may do what these need, and nothing
// else; without one that needs the API server there is no account, and the program without a client
// runs. It makes no difference whether values or a file ask.
func TestRights(t *testing.T) {
	t.Parallel()
	for labels := range labelRights {
		for combination := range 1 << len(otherRights) {
			on := map[string]bool{}
			var want []string
			features := []string{"labels: " + labels}
			want = append(want, labelRights[labels]...)
			agent := labels == "node" || labels == "nodeFeature"
			for i, o := range otherRights {
				if on[o.name] = combination&(1<<i) != 0; on[o.name] {
					if o.name == "podEvents" {
						features = append(slices.DeleteFunc(features, func(f string) bool { return f == "events: true" }), "events: pods")
					} else {
						features = append(features, o.name+": true")
					}
					want = append(want, o.rights...)
					agent = true
				}
			}
			if on["podEvents"] {
				if !on["events"] {
					continue // as with both
				}
				want = slices.DeleteFunc(want, func(r string) bool { return strings.HasPrefix(r, "default:") })
			}
			if agent {
				want = append(want, anyRights...)
			} else {
				want = append(want, "as default")
			}
			slices.Sort(want)
			want = slices.Compact(want)
			ways := []string{fmt.Sprintf("{features: {%s}, config: {map: {a: \"\"}}}", strings.Join(features, ", "))}
			if !on["nodeConfig"] { // which no file has
				ways = append(ways, fmt.Sprintf("{config: {map: {a: %q}}}", "features: {"+strings.Join(features, ", ")+"}"))
			}
			for _, values := range ways {
				if diff := cmp.Diff(want, rights(t, decode(t, "chart", render(t, values)))); diff != "" {
					t.Errorf("%s: rights (-want +got):\n%s", values, diff)
				}
			}
		}
	}
}

// TestRightsOfChoice: where a label of the node chooses the file, the account may do what any of
// the files asks for; a value counts before all of them.
func TestRightsOfChoice(t *testing.T) {
	t.Parallel()
	const files = "config: {map: {a: \"features: {taint: true}\", b: \"features: {labels: node}\", default: \"\"}}"
	for values, want := range map[string][]string{
		"{features: {nodeConfig: true}, " + files + "}": {"cluster:  nodes patch",
			"policy gpu-device-plugin-nodes"},
		"{features: {nodeConfig: true, taint: false, labels: \"off\"}, " + files + "}": nil,
	} {
		want = append(want, anyRights...)
		slices.Sort(want)
		if diff := cmp.Diff(want, rights(t, decode(t, "chart", render(t, values)))); diff != "" {
			t.Errorf("%s: rights (-want +got):\n%s", values, diff)
		}
	}
}

// TestAccountValues: an account that is there already is used, with the rights it needs; the
// policies can be left out.
func TestAccountValues(t *testing.T) {
	t.Parallel()
	got := rights(t, decode(t, "chart", render(t,
		"{features: {taint: true}, serviceAccount: {create: false, name: mine}, admissionPolicy: {enabled: false}}")))
	want := []string{"cluster:  nodes get,list,watch", "cluster:  nodes patch", "gpu-node-agent as mine", "token"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rights (-want +got):\n%s", diff)
	}
}

// TestFeatureValues: values reach the daemon.
func TestFeatureValues(t *testing.T) {
	t.Parallel()
	tests := []struct {
		values string
		env    map[string]string
	}{
		{"{features: {labels: off}}", map[string]string{"NODE_LABELS": "off"}}, // a bool of YAML 1.1
		{"{features: {labels: file}}", map[string]string{"NODE_LABELS": "file"}},
		// by reference
		{"{features: {labels: nodeFeature}}", map[string]string{"NODE_LABELS": "nodeFeature", "NAMESPACE": "",
			"POD_NAME": ""}},
		{"{features: {events: pods, taint: false, changeTaint: true, startupTaint: true}}",
			map[string]string{"NODE_EVENTS": "pods", "NODE_TAINT": "false", "NODE_CHANGE_TAINT": "true",
				"NODE_STARTUP_TAINT": "true"}},
		{"{features: {condition: true, conditionTypes: [A, B=problem]}}",
			map[string]string{"NODE_CONDITION": "true", "NODE_CONDITION_TYPES": "A,B=problem"}},
		{"{features: {healthEvents: unix:///a/b, healthEventsStrategy: executeRemediation, healthEventsMachine: vm}}",
			map[string]string{"HEALTH_EVENTS": "unix:///a/b", "HEALTH_EVENTS_STRATEGY": "executeRemediation",
				"HEALTH_EVENTS_MACHINE": "vm"}},
		{"{features: {quiesce: true}}", map[string]string{"NODE_QUIESCE": "true"}},
		{"{features: {nodeConfig: true}, config: {map: {default: \"\", b: \"\"}}}",
			map[string]string{"CONFIG_FILE_SRCDIR": "/config", "FALLBACK_STRATEGIES": "named,single"}},
		{"{features: {nodeConfig: true, nodeConfigLabel: l}, config: {name: mine, default: a, fallbackStrategies: [empty]}, migStrategy: none}",
			map[string]string{"CONFIG_FILE_SRCDIR": "/config", "FALLBACK_STRATEGIES": "empty", "DEFAULT_CONFIG": "a",
				"NODE_LABEL":   "l",
				"MIG_STRATEGY": "none"}},
	}
	for _, tt := range tests {
		container := daemonSet(t, decode(t, "chart", render(t, tt.values)),
			"gpu-device-plugin").Spec.Template.Spec.Containers[0]
		got := map[string]string{}
		for _, e := range container.Env {
			got[e.Name] = e.Value
		}
		for _, name := range []string{
			"FAIL_ON_INIT_ERROR", "NVIDIA_DRIVER_ROOT", "POD_IP", "METRICS_ADDRESS", "GPU_METRICS", "NODE_NAME", "CONTAINER_DRIVER_ROOT", "MPS_ROOT",
		} {
			delete(got, name)
		}
		if diff := cmp.Diff(tt.env, got); diff != "" {
			t.Errorf("%s: env (-want +got):\n%s", tt.values, diff)
		}
	}
}

// TestChoiceOfMPS: the MPS control daemon follows the label of the node, too.
func TestChoiceOfMPS(t *testing.T) {
	t.Parallel()
	const files = "config: {map: {a: \"sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\", default: \"\"}}"
	objects := decode(t, "chart", render(t, "{features: {nodeConfig: true}, "+files+"}"))
	pod := daemonSet(t, objects, "gpu-device-plugin-mps-control-daemon").Spec.Template.Spec
	env := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		env[e.Name] = e.Value
	}
	if env["CONFIG_FILE_SRCDIR"] != "/config" || env["FALLBACK_STRATEGIES"] != "named,single" || env["CONFIG_FILE"] != "" {
		t.Errorf("env %v", env)
	}
	if pod.ServiceAccountName != "gpu-device-plugin-mps" || !*pod.AutomountServiceAccountToken ||
		pod.Containers[0].Command[0] != "gpu-node-agent" {
		t.Errorf("account %q, token %t, command %v", pod.ServiceAccountName, *pod.AutomountServiceAccountToken,
			pod.Containers[0].Command)
	}
	mounts(t, pod)
	text := string(render(t, "{features: {nodeConfig: true, labels: node}, dra: {enabled: true}, openshiftSCC: privileged, "+files+"}"))
	const subject = "name: gpu-device-plugin-mps, namespace: kube-system}"
	if n := strings.Count(text, subject); n != 2 || !strings.Contains(text,
		"name: gpu-device-plugin-mps}\nsubjects:\n  - {kind: ServiceAccount, "+subject) {
		t.Errorf("the account of the MPS control daemon is in %d bindings, want that of its own role and that of OpenShift",
			n)
	}
	own := daemonSet(t, decode(t, "chart", render(t, "{features: {nodeConfig: true}, serviceAccount: {create: false, name: theirs}, "+files+"}")),
		"gpu-device-plugin-mps-control-daemon").Spec.Template.Spec.ServiceAccountName
	if own != "theirs" {
		t.Errorf("beside an account that is there the MPS control daemon has %q", own)
	}
}

// TestLabelKeys: the policy lets all labels through that the daemon writes, and none by which
// others tell the node something.
func TestLabelKeys(t *testing.T) {
	t.Parallel()
	text := string(render(t, "{features: {labels: node}}"))
	quoted := regexp.MustCompile(`k\.matches\('(.*)'\)`).FindStringSubmatch(text)
	if quoted == nil {
		t.Fatal("the policy has no expression for keys")
	}
	keys := regexp.MustCompile(quoted[1])
	sets, err := filepath.Glob("../../internal/plan/labels/testdata/sets/*.txt")
	if err != nil || len(sets) < 40 {
		t.Fatalf("%d label sets, error %v", len(sets), err)
	}
	ours := map[string]bool{}
	for _, file := range sets {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if key, _, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
				ours[key] = true
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(ours)) {
		if !keys.MatchString(key) {
			t.Errorf("%s is refused", key)
		}
	}
	for _, key := range []string{
		"nvidia.com/mig.config", "nvidia.com/mig.config.state", "nvidia.com/device-plugin.config", "nvidia.com/gpu.deploy.driver",
		"nvidia.com/gpu.workload.config", "nvidia.com/mps.capable.x", "xnvidia.com/gpu.count", "nvidia.com/gpu.counts", "kubernetes.io/hostname",
		"node-role.kubernetes.io/control-plane", "gpu-device-plugin.github.io/other", "nvidia_com/gpu.count", "nvidia.com/mig-x.count",
	} {
		if keys.MatchString(key) {
			t.Errorf("%s is let through", key)
		}
	}
}

// TestChartGivesTheStaticNodeAgents: the patches of deployments/node-agent make of the static
// DaemonSet what the chart gives, and those of deployments/node-agent-mig of that what it gives
// where a label of the node names the MIG layout; the other objects are the chart's. So it is with
// deployments/host-dev and the value hostDev.
func TestChartGivesTheStaticNodeAgents(t *testing.T) {
	t.Parallel()
	const values = "{cdi: {enabled: true}, failOnInitError: false, nvidiaDriverRoot: /, affinity: null, " +
		"features: {labels: node, events: true, condition: true, taint: true}"
	agent := append(decode(t, "rights.yaml", read(t, "../../deployments/node-agent/rights.yaml")),
		only[*appsv1.DaemonSet](t, decode(t, "static", read(t, filepath.Join(static, "gpu-device-plugin.yaml")))))
	agent = kustomize(t, "../../deployments/node-agent", []string{"../static", "rights.yaml"}, agent)
	givesTheSame(t, values+"}", agent)
	agent = kustomize(t, "../../deployments/node-agent-mig", []string{"../node-agent"}, agent)
	givesTheSame(t, values+", migStrategy: mixed, mig: {enabled: true, label: true}}", agent)
	plugin := []runtime.Object{only[*appsv1.DaemonSet](t, decode(t, "static",
		read(t, filepath.Join(static, "gpu-device-plugin.yaml"))))}
	givesTheSame(t, "{cdi: {enabled: true}, failOnInitError: false, nvidiaDriverRoot: /, affinity: null, hostDev: true}",
		kustomize(t, "../../deployments/host-dev", []string{"../static"}, plugin))
}

// kustomize applies the patches of a folder to objects.
func kustomize(t *testing.T, folder string, resources []string, objects []runtime.Object) []runtime.Object {
	t.Helper()
	var k kustomization
	if err := yaml.UnmarshalStrict(read(t, filepath.Join(folder, "kustomization.yaml")), &k); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(resources, k.Resources); diff != "" {
		t.Fatalf("%s: resources (-want +got):\n%s", folder, diff)
	}
	objects = slices.Clone(objects)
	for _, p := range k.Patches {
		i := slices.IndexFunc(objects, func(o runtime.Object) bool {
			m, err := meta.Accessor(o)
			return err == nil && m.GetName() == p.Target.Name && o.GetObjectKind().GroupVersionKind().Kind == p.Target.Kind
		})
		if i < 0 {
			t.Fatalf("%s: the patch is for %v, which is not there", folder, p.Target)
		}
		before, err := json.Marshal(objects[i])
		if err != nil {
			t.Fatal(err)
		}
		steps, err := yaml.ToJSON([]byte(p.Patch))
		if err != nil {
			t.Fatal(err)
		}
		patch, err := jsonpatch.DecodePatch(steps)
		if err != nil {
			t.Fatal(err)
		}
		after, err := patch.Apply(before)
		if err != nil {
			t.Fatal(err)
		}
		objects[i] = decode(t, folder, after)[0]
	}
	return objects
}

// givesTheSame holds objects of static manifests to those that the chart gives.
func givesTheSame(t *testing.T, values string, want []runtime.Object) {
	t.Helper()
	got := decode(t, "chart", render(t, values))
	got = slices.DeleteFunc(got, func(o runtime.Object) bool { _, is := o.(*corev1.Pod); return is })
	byName := func(objects []runtime.Object) map[string]runtime.Object {
		named := map[string]runtime.Object{}
		for _, o := range objects {
			o = o.DeepCopyObject()
			m, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			if d, is := o.(*appsv1.DaemonSet); is { // Helm tells releases apart by a label of its own
				instance := map[string]string{"app.kubernetes.io/instance": "gpu-device-plugin"}
				maps.Copy(d.Spec.Selector.MatchLabels, instance)
				maps.Copy(d.Spec.Template.Labels, instance)
				env := d.Spec.Template.Spec.Containers[0].Env
				slices.SortFunc(env, func(a, b corev1.EnvVar) int { return strings.Compare(a.Name, b.Name) })
			}
			m.SetLabels(nil)
			named[fmt.Sprintf("%T %s/%s", o, m.GetNamespace(), m.GetName())] = o
		}
		return named
	}
	if diff := cmp.Diff(byName(want), byName(got)); diff != "" {
		t.Errorf("objects (-static +chart):\n%s", diff)
	}
}

// TestHelmTest: helm test's pod asks for what it checks, and may do nothing else.
func TestHelmTest(t *testing.T) {
	t.Parallel()
	for values, want := range map[string][]string{
		"": {"check-container", "--devices=1"},
		"{simulate: t4, test: {resource: nvidia.com/mig-1g.5gb, devices: 2}}": {"check-container", "--devices=2",
			"--simulated"},
	} {
		pod := only[*corev1.Pod](t, decode(t, "chart", render(t, values)))
		container := pod.Spec.Containers[0]
		if diff := cmp.Diff(want, container.Args); diff != "" {
			t.Errorf("%s: arguments (-want +got):\n%s", values, diff)
		}
		var limits []string
		for name, quantity := range container.Resources.Limits {
			limits = append(limits, fmt.Sprintf("%s=%s", name, quantity.String()))
		}
		wantLimits := []string{"nvidia.com/gpu=1"}
		if values != "" {
			wantLimits = []string{"nvidia.com/mig-1g.5gb=2"}
		}
		if diff := cmp.Diff(wantLimits, limits); diff != "" || pod.Annotations["helm.sh/hook"] != "test" {
			t.Errorf("%s: hook %q, limits (-want +got):\n%s", values, pod.Annotations["helm.sh/hook"], diff)
		}
		if len(pod.Spec.Volumes) > 0 || *pod.Spec.AutomountServiceAccountToken || !*container.SecurityContext.RunAsNonRoot {
			t.Errorf("%s: the pod has more than it needs", values)
		}
		selector := daemonSet(t, decode(t, "chart", render(t, values)), "gpu-device-plugin").Spec.Selector.MatchLabels
		if pod.Labels["app.kubernetes.io/name"] == selector["app.kubernetes.io/name"] {
			t.Error("the DaemonSet selects the pod of the test")
		}
	}
}
