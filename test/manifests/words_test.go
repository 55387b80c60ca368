package manifests

import (
	"context"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"
)

// judge returns what the API server's own CEL says of a pod by a policy: a message for each
// validation that fails, none if the policy is not about the pod.
func judge(t *testing.T, policy *admissionv1.ValidatingAdmissionPolicy, pod *corev1.Pod) (refused []string) {
	t.Helper()
	kind := schema.GroupVersionKind{Version: "v1", Kind: "Pod"}
	resource := schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	return judgeRequest(t, policy, admission.NewAttributesRecord(pod, nil, kind, "default", pod.Name, resource, "",
		admission.Create, &metav1.CreateOptions{}, false, nil))
}

// judgeRequest is judge for any request that writes.
func judgeRequest(
	t *testing.T, policy *admissionv1.ValidatingAdmissionPolicy, attributes admission.Attributes,
) (refused []string) {
	t.Helper()
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		t.Fatal(err)
	}
	declared := cel.OptionalVariableDeclarations{HasAuthorizer: true}
	var variables []cel.NamedExpressionAccessor
	for _, v := range policy.Spec.Variables {
		variables = append(variables, &validating.Variable{Name: v.Name, Expression: v.Expression})
	}
	compiler.CompileAndStoreVariables(variables, declared, environment.StoredExpressions)
	var conditions, validations, messages []cel.ExpressionAccessor
	for i := range policy.Spec.MatchConditions {
		conditions = append(conditions, (*matchconditions.MatchCondition)(&policy.Spec.MatchConditions[i]))
	}
	for _, v := range policy.Spec.Validations {
		validations = append(validations, &validating.ValidationCondition{Expression: v.Expression, Message: v.Message,
			Reason: v.Reason})
		var message cel.ExpressionAccessor
		if v.MessageExpression != "" {
			message = &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}
		}
		messages = append(messages, message)
	}
	var matcher matchconditions.Matcher
	if len(conditions) > 0 {
		matcher = matchconditions.NewMatcher(compiler.CompileCondition(conditions, declared, environment.StoredExpressions),
			policy.Spec.FailurePolicy, "policy", "validate", policy.Name)
	}
	validator := validating.NewValidator(compiler.CompileCondition(validations, declared, environment.StoredExpressions),
		matcher,
		compiler.CompileCondition(nil, declared, environment.StoredExpressions),
		compiler.CompileCondition(messages, cel.OptionalVariableDeclarations{},
			environment.StoredExpressions), policy.Spec.FailurePolicy, nil)
	versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: attributes.GetKind(),
		VersionedObject:    admission.NewLazyObject(attributes.GetObject()),
		VersionedOldObject: admission.NewLazyObject(attributes.GetOldObject())}
	result := validator.Validate(context.Background(), attributes.GetResource(), versioned, nil, &corev1.Namespace{},
		celconfig.RuntimeCELCostBudget, nil)
	for _, d := range result.Decisions {
		if d.Action == validating.ActionDeny {
			refused = append(refused, d.Message)
		}
	}
	return refused
}

// wordsPod returns a pod with a container of these limits.
func wordsPod(t *testing.T, limits string, labels, notes map[string]string, scheduler string) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: labels, Annotations: notes}}
	pod.Spec.SchedulerName = scheduler
	c := corev1.Container{Name: "c", Image: "i"}
	if err := yaml.Unmarshal([]byte("{"+limits+"}"), &c.Resources.Limits); err != nil {
		t.Fatal(err)
	}
	pod.Spec.Containers = []corev1.Container{c}
	return pod
}

// TestWordsOfOthers: a pod in the words of CCE, HAMi or Volcano means here what it meant there, or
// is refused with the word and what to write instead, by the API server's own CEL (D). What HAMi's
// words are changed into is shown at a real API server.
func TestWordsOfOthers(t *testing.T) {
	t.Parallel()
	num := func(n string) map[string]string { return map[string]string{"volcano.sh/gpu-num": n} }
	const usual, others = "{" + `config: {map: {default: "{version: v1, selectors: [{indices: [0], units: true}]}"}}, units: {hami: true}` + "}", "{" +
		`config: {map: {default: "{version: v1, selectors: [{indices: [0], units: true}], units: {name: a.b/c, size: 1Gi, enforce: none}}"}}, units: {hami: true}` + "}"
	const served = "volcano.sh/gpu-mem.128Mi"
	cases := []struct {
		name, values, limits string
		labels, notes        map[string]string
		scheduler            string
		refused              []string // words of each refusal; none: admitted
	}{
		{name: "units", limits: served + ": 64, volcano.sh/gpu-core.percentage: 25"},
		{name: "units by Volcano's scheduler", limits: served + ": 64", scheduler: "volcano"},
		{name: "whole GPUs", limits: "nvidia.com/gpu: 2", labels: num("2")},
		{name: "one GPU", limits: served + ": 64", labels: num("1"), notes: num("1")},
		{name: "two GPUs (CCE)", limits: served + ": 64", labels: num("2"),
			refused: []string{"volcano.sh/gpu-num asks for memory of several GPUs", served}},
		{name: "two GPUs by an annotation", limits: served + ": 64", notes: num("2"),
			refused: []string{"volcano.sh/gpu-num"}},
		{name: "no GPU", limits: served + ": 64", labels: num("0"), refused: []string{"volcano.sh/gpu-num"}},
		{name: "200 percent of four GPUs", limits: served + ": 64, volcano.sh/gpu-core.percentage: 200", labels: num("4"),
			refused: []string{"volcano.sh/gpu-num"}},
		{name: "200 percent", limits: served + ": 64, volcano.sh/gpu-core.percentage: 200",
			refused: []string{"volcano.sh/gpu-core.percentage", "a multiple of 5 up to 100"}},
		{name: "no multiple of 5", limits: served + ": 64, volcano.sh/gpu-core.percentage: 33",
			refused: []string{"a multiple of 5 up to 100"}},
		{name: "10^18 percent", limits: served + ": 64, volcano.sh/gpu-core.percentage: 1E",
			refused: []string{"a multiple of 5 up to 100"}},
		{name: "another size", limits: "volcano.sh/gpu-mem.256Mi: 4",
			refused: []string{"volcano.sh/gpu-mem.256Mi is served by no node here", served}},
		{name: "Volcano's memory", limits: "volcano.sh/gpu-memory: 1024",
			refused: []string{"volcano.sh/gpu-memory is served by no node here", served}},
		{name: "Volcano's number", limits: "volcano.sh/gpu-number: 1",
			refused: []string{"volcano.sh/gpu-number is served by no node here", "nvidia.com/gpu"}},
		{name: "vGPU's number", limits: "volcano.sh/vgpu-number: 1",
			refused: []string{"volcano.sh/vgpu-number is served by no node here", "nvidia.com/gpu"}},
		{name: "vGPU's memory", limits: "volcano.sh/vgpu-memory: 3000", refused: []string{"volcano.sh/vgpu-memory", served}},
		{name: "vGPU's percentage of memory", limits: "volcano.sh/vgpu-memory-percentage: 50",
			refused: []string{"volcano.sh/vgpu-memory-percentage", served}},
		{name: "vGPU's cores", limits: "volcano.sh/vgpu-cores: 50",
			refused: []string{"volcano.sh/vgpu-cores", "ask for volcano.sh/gpu-core.percentage"}},
		{name: "vGPU's mode", limits: served + ": 1", notes: map[string]string{"volcano.sh/vgpu-mode": "mig"},
			refused: []string{"the annotation volcano.sh/vgpu-mode has no meaning"}},
		{name: "HAMi's policy of nodes", limits: served + ": 1",
			notes: map[string]string{"hami.io/node-scheduler-policy": "binpack"}, refused: []string{"hami.io/node-scheduler-policy"}},
		{name: "HAMi's policy of GPUs", limits: "nvidia.com/gpu: 1",
			notes: map[string]string{"hami.io/gpu-scheduler-policy": "spread"}, refused: []string{"hami.io/gpu-scheduler-policy"}},
		{name: "HAMi's scheduler", limits: served + ": 1", scheduler: "hami-scheduler",
			refused: []string{"leave schedulerName out"}},
		{name: "HAMi's scheduler with whole GPUs", limits: "nvidia.com/gpu: 1", scheduler: "hami-scheduler"},
		{name: "no GPU at all", limits: "cpu: 1", labels: num("2")},
		{name: "CCE's usual name where units have another", values: others, limits: served + ": 64",
			refused: []string{served + " is served by no node here", "a.b/c.1Gi"}},
		{name: "CCE's percentage where nothing enforces it", values: others,
			limits: "a.b/c.1Gi: 1, volcano.sh/gpu-core.percentage: 5", refused: []string{"volcano.sh/gpu-core.percentage",
				"leave it out"}},
		{name: "units of another name", values: others, limits: "a.b/c.1Gi: 1"},
		{name: "units of another name on two GPUs", values: others, limits: "a.b/c.1Gi: 1", labels: num("2"),
			refused: []string{"volcano.sh/gpu-num", "a.b/c.1Gi"}},
	}
	for _, c := range []string{"use-gputype", "nouse-gputype", "use-gpuuuid", "nouse-gpuuuid", "numa-bind", "vgpu-mode"} {
		cases = append(cases, cases[0])
		last := &cases[len(cases)-1]
		last.name, last.notes, last.refused = "HAMi's annotation "+c, map[string]string{"nvidia.com/" + c: "x"}, []string{c}
	}
	for word, instead := range map[string]string{"gpumem": "MiB", "gpumem-percentage": "MiB", "gpucores": "gpumem",
		"priority": "priorityClassName"} {
		cases = append(cases, cases[0])
		last := &cases[len(cases)-1]
		last.name, last.limits, last.refused = "what HAMi's policy does not change: "+word, "nvidia.com/"+word+
			": 1", []string{"nvidia.com/" + word, instead}
	}
	policies := map[string][]*admissionv1.ValidatingAdmissionPolicy{}
	for _, values := range []string{usual, others} {
		objects, _, err := renderServed(newest, mutating, values)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range decode(t, "chart", objects) {
			if p, is := o.(*admissionv1.ValidatingAdmissionPolicy); is &&
				p.Spec.MatchConstraints.ResourceRules[0].Resources[0] == "pods" {
				policies[values] = append(policies[values], p)
			}
		}
		if len(policies[values]) < 3 {
			t.Fatalf("%d policies for pods", len(policies[values]))
		}
	}
	for _, c := range cases {
		if c.values == "" {
			c.values = usual
		}
		var refused []string
		for _, p := range policies[c.values] {
			refused = append(refused, judge(t, p, wordsPod(t, c.limits, c.labels, c.notes, c.scheduler))...)
		}
		text := strings.Join(refused, "\n")
		for _, want := range c.refused {
			if !strings.Contains(text, want) {
				t.Errorf("%s: refused with %q, want %q", c.name, text, want)
			}
		}
		if len(c.refused) == 0 && text != "" {
			t.Errorf("%s: refused: %s", c.name, text)
		}
		if strings.Contains(text, "expression") {
			t.Errorf("%s: %s", c.name, fmt.Sprint(refused))
		}
	}
}
