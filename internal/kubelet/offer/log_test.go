package offer

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// record has run log in a bubble until ctx ends. It returns what is logged, without what comes
// before the words, after each call of a step.
func record(t *testing.T, run func(context.Context) error, words string, steps ...func()) (logged []string) {
	synctest.Test(t, func(t *testing.T) {
		var lines []string
		log := funcr.New(func(_, args string) {
			if _, line, found := strings.Cut(args, words); found {
				lines = append(lines, line)
			}
		}, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
		ended := make(chan error, 1)
		go func() { ended <- run(ctx) }()
		synctest.Wait()
		for _, step := range steps {
			lines = nil
			step()
			synctest.Wait()
			logged = append(logged, strings.Join(lines, ", "))
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return logged
}

// TestAWarningIsLoggedWhenItComes: once, and again when it comes back. One that goes at once is not
// logged.
func TestAWarningIsLoggedWhenItComes(t *testing.T) {
	t.Parallel()
	plans := feed.New(resource.Plan{})
	becomes := func(warnings ...string) func() {
		return func() {
			plans.Publish(resource.Plan{Warnings: append(warnings, "not written yet")})
			time.Sleep(warnAfter / 2)
			plans.Publish(resource.Plan{Warnings: warnings})
			time.Sleep(2 * warnAfter)
		}
	}
	got := record(t, func(ctx context.Context) error { return warn(ctx, plans) }, `"warning"=`,
		becomes("a"), becomes("a", "b"), becomes("b"), becomes("a", "b"), becomes())
	if diff := cmp.Diff([]string{`"a"`, `"b"`, "", `"a"`, ""}, got); diff != "" {
		t.Errorf("logged (-want +got):\n%s", diff)
	}
}

// TestAFailureOfTheDiskIsLoggedOnce: until it is another one, or has ended.
func TestAFailureOfTheDiskIsLoggedOnce(t *testing.T) {
	t.Parallel()
	d := &disk{}
	k := newSpecTask(d)
	offered(k, by(containeredits.CDICRI), "a")
	// becomes lets the files be checked some times.
	becomes := func(err error) func() {
		return func() {
			d.mu.Lock()
			d.err = err
			d.mu.Unlock()
			time.Sleep(3 * rewriteEvery)
		}
	}
	full, broken := errors.New("disk full"), errors.New("disk broken")
	got := record(t, k.run, `CDI specs`, becomes(nil), becomes(full), becomes(broken), becomes(nil), becomes(broken))
	const cannot = ` and device nodes; devices without them are not offered" "error"="`
	if diff := cmp.Diff([]string{"", cannot + `disk full"`, cannot + `disk broken"`,
		` and device nodes are complete again"`, cannot + `disk broken"`}, got); diff != "" {
		t.Errorf("logged (-want +got):\n%s", diff)
	}
}
