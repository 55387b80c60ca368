package eviction_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
)

// TestEvict: a pod is evicted once in ten seconds, and the log has the first result and each change.
func TestEvict(t *testing.T) {
	t.Parallel()
	a, b := eviction.Pod{Namespace: "team", Name: "a"}, eviction.Pod{Namespace: "team", Name: "b"}
	start := time.Unix(0, 0)
	budget, away := errors.New("the budget allows none"), errors.New("the API server is away")
	var e eviction.Evictions
	for _, step := range []struct {
		after   time.Duration
		results map[eviction.Pod]error // of calls
		called  []eviction.Pod
		want    string
		logs    int
	}{
		{0, map[eviction.Pod]error{b: budget}, []eviction.Pod{a, b}, "the budget allows none", 2},
		{9 * time.Second, nil, nil, "the budget allows none", 0},
		{10 * time.Second, map[eviction.Pod]error{b: budget}, []eviction.Pod{a, b}, "the budget allows none", 0},
		{20 * time.Second, map[eviction.Pod]error{a: away, b: away}, []eviction.Pod{a, b},
			"the API server is away; the API server is away", 2},
		{30 * time.Second, nil, []eviction.Pod{a, b}, "", 2},
		{40 * time.Second, nil, []eviction.Pod{a, b}, "", 0},
	} {
		logs := 0
		ctx := klog.NewContext(t.Context(), funcr.New(func(_, _ string) { logs++ }, funcr.Options{}))
		var called []eviction.Pod
		got := e.Evict(ctx, start.Add(step.after), "repair of GPU 0", []eviction.Pod{a, b},
			func(ctx context.Context, p eviction.Pod) error {
				if end, limited := ctx.Deadline(); !limited || time.Until(end) > 10*time.Second {
					t.Error("a call has no limit of ten seconds")
				}
				called = append(called, p)
				return step.results[p]
			})
		if got != step.want || !slices.Equal(called, step.called) || logs != step.logs {
			t.Errorf("after %v: %q, want %q; calls %v, want %v; %d lines, want %d", step.after, got, step.want, called,
				step.called, logs, step.logs)
		}
		if e.Refusal(a) != "" && step.results[a] == nil {
			t.Errorf("after %v: pod a was refused: %s", step.after, e.Refusal(a))
		}
	}
}
