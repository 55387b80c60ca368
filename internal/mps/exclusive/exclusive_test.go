package exclusive_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
)

// computeModes are the modes of GPUs. No GPU may be in exclusive mode without a mark.
type computeModes struct {
	t     *testing.T
	mark  string
	modes map[string]inventory.ComputeMode
	fail  map[string]error
}

func (c *computeModes) SetComputeMode(ctx context.Context, uuid string,
	mode inventory.ComputeMode) (inventory.ComputeMode, error) {
	c.checkMark("before the mode of " + uuid + " is set")
	if err := errors.Join(c.fail[uuid], ctx.Err()); err != nil {
		return 0, err
	}
	before := c.modes[uuid]
	c.modes[uuid] = mode
	c.checkMark("after the mode of " + uuid + " is set")
	return before, nil
}

func (c *computeModes) checkMark(when string) {
	c.t.Helper()
	for uuid, mode := range c.modes {
		if _, err := os.Stat(c.mark); err != nil && mode == inventory.ComputeExclusiveProcess {
			c.t.Errorf("%s: %s is in exclusive mode, and there is no mark", when, uuid)
		}
	}
}

// TestAMarkThatAKilledProcessLeft stays until the GPUs of every resource are set back: also a
// second kill, and an end before a GPU was claimed again, leave none in exclusive mode.
func TestAMarkThatAKilledProcessLeft(t *testing.T) {
	t.Parallel()
	const one, two, claim = "nvidia.com/gpu", "nvidia.com/gpu.shared", "claims/uid-1-0"
	gpus := map[string][]string{one: {"GPU-a"}, two: {"GPU-b", "GPU-c"}}
	for name, next := range map[string]func(context.Context, *computeModes, *exclusive.GPUs) error{
		"a claim that is not exclusive ends": func(ctx context.Context, _ *computeModes, e *exclusive.GPUs) error {
			return e.Restore(ctx, claim, nil)
		},
		"an exclusive claim ends": func(ctx context.Context, _ *computeModes, e *exclusive.GPUs) error {
			return e.Restore(ctx, claim, []string{"GPU-d"})
		},
		"a resource is claimed": func(ctx context.Context, _ *computeModes, e *exclusive.GPUs) error {
			return e.Claim(ctx, one, gpus[one])
		},
		"a resource ends before its first claim": func(ctx context.Context, _ *computeModes, e *exclusive.GPUs) error {
			return e.Restore(ctx, one, gpus[one])
		},
		"a resource that was never claimed is released": func(ctx context.Context, _ *computeModes, e *exclusive.GPUs) error {
			return e.Release(ctx, one)
		},
		"a GPU cannot be set back": func(ctx context.Context, c *computeModes, e *exclusive.GPUs) error {
			c.fail = map[string]error{"GPU-b": errors.New("GPU is lost")}
			defer func() { c.fail = nil }()
			if err := e.Restore(ctx, two, gpus[two]); err == nil {
				return errors.New("no error of a GPU that is lost")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"),
				modes: map[string]inventory.ComputeMode{}}
			start := func() *exclusive.GPUs { return exclusive.New(c, c.mark) } // each is the process after a kill
			first := start()
			for resource, uuids := range gpus {
				if err := first.Claim(t.Context(), resource, uuids); err != nil {
					t.Fatal(err)
				}
			}
			if err := first.Claim(t.Context(), claim, []string{"GPU-d"}); err != nil {
				t.Fatal(err)
			}
			if err := next(t.Context(), c, start()); err != nil {
				t.Fatal(err)
			}
			c.checkMark("after the second kill")
			last := start()
			for resource, uuids := range gpus {
				if err := last.Restore(t.Context(), resource, uuids); err != nil {
					t.Fatal(err)
				}
			}
			if err := last.Restore(t.Context(), claim, []string{"GPU-d"}); err != nil {
				t.Fatal(err)
			}
			want := map[string]inventory.ComputeMode{
				"GPU-a": inventory.ComputeDefault, "GPU-b": inventory.ComputeDefault, "GPU-c": inventory.ComputeDefault,
				"GPU-d": inventory.ComputeDefault,
			}
			if diff := cmp.Diff(want, c.modes); diff != "" {
				t.Errorf("modes at the end (-want +got):\n%s", diff)
			}
			if _, err := os.Stat(c.mark); err == nil {
				t.Error("the mark is there with no GPU in exclusive mode")
			}
		})
	}
}

// TestGPUExclusiveBeforeMPS stays exclusive after MPS: only GPUs of the mark were made
// exclusive by MPS.
func TestGPUExclusiveBeforeMPS(t *testing.T) {
	t.Parallel()
	c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"), modes: map[string]inventory.ComputeMode{}}
	if err := exclusive.New(c, c.mark).Claim(t.Context(), "nvidia.com/gpu", []string{"GPU-a"}); err != nil {
		t.Fatal(err)
	}
	c.modes["GPU-b"] = inventory.ComputeExclusiveProcess // by the administrator
	e := exclusive.New(c, c.mark)
	if err := e.Claim(t.Context(), "nvidia.com/gpu", []string{"GPU-a", "GPU-b"}); err != nil {
		t.Fatal(err)
	}
	c.mark = t.TempDir() // GPU-b needs none
	if err := e.Release(t.Context(), "nvidia.com/gpu"); err != nil {
		t.Fatal(err)
	}
	want := map[string]inventory.ComputeMode{"GPU-a": inventory.ComputeDefault,
		"GPU-b": inventory.ComputeExclusiveProcess}
	if diff := cmp.Diff(want, c.modes); diff != "" {
		t.Errorf("modes at the end (-want +got):\n%s", diff)
	}
}

// TestClaimWithoutLeftoverGPUs: no mode is set, because this could wake a GPU or disturb a
// process.
func TestClaimWithoutLeftoverGPUs(t *testing.T) {
	t.Parallel()
	c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"), modes: map[string]inventory.ComputeMode{}}
	if err := exclusive.New(c, c.mark).Restore(t.Context(), "claims/uid-1-0", []string{"GPU-a"}); err != nil {
		t.Fatal(err)
	}
	if len(c.modes) != 0 {
		t.Errorf("modes were set: %v", c.modes)
	}
}

// TestFailedRestoreOfGPU does not delay other GPUs, stays in the mark, and is restored later.
func TestFailedRestoreOfGPU(t *testing.T) {
	t.Parallel()
	c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"), modes: map[string]inventory.ComputeMode{}}
	e := exclusive.New(c, c.mark)
	if err := e.Claim(t.Context(), "nvidia.com/gpu", []string{"GPU-b", "GPU-a", "GPU-c"}); err != nil {
		t.Fatal(err)
	}
	checkText := func(when, want string) {
		t.Helper()
		if text, err := os.ReadFile(c.mark); err != nil || string(text) != want {
			t.Errorf("the mark %s is %q (%v), want %q", when, text, err, want)
		}
	}
	checkText("with all GPUs", "GPU-a\nGPU-b\nGPU-c\n")
	c.fail = map[string]error{"GPU-b": errors.New("b is lost"), "GPU-c": errors.New("c is lost")}
	if err := e.Release(t.Context(), "nvidia.com/gpu"); err == nil ||
		!strings.Contains(err.Error(), "b is lost") || !strings.Contains(err.Error(), "c is lost") {
		t.Errorf("Release() = %v, want what is wrong with both", err)
	}
	checkText("after the release", "GPU-b\nGPU-c\n")
	want := map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeDefault, "GPU-b": inventory.ComputeExclusiveProcess,
		"GPU-c": inventory.ComputeExclusiveProcess,
	}
	if diff := cmp.Diff(want, c.modes); diff != "" {
		t.Errorf("modes after the release (-want +got):\n%s", diff)
	}
	if err := e.Claim(t.Context(), "nvidia.com/other", []string{"GPU-a"}); err == nil {
		t.Error("no error of GPUs that are lost")
	}
	c.fail = nil
	if err := e.Claim(t.Context(), "nvidia.com/other", []string{"GPU-a"}); err != nil {
		t.Error(err)
	}
	checkText("of the next resource", "GPU-a\n")
	if err := e.Release(t.Context(), "nvidia.com/other"); err != nil {
		t.Error(err)
	}
	c.checkMark("at the end")
	c.mark = filepath.Join(c.mark, "not a folder")
	if err := os.WriteFile(filepath.Dir(c.mark), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := exclusive.New(c, c.mark).Claim(t.Context(), "nvidia.com/gpu", []string{"GPU-a"}); err == nil ||
		c.modes["GPU-a"] != inventory.ComputeDefault {
		t.Errorf("a GPU is in mode %v without a mark: %v", c.modes["GPU-a"], err)
	}
}

// TestMarkWithoutGPUs: a mark that names no GPU, such as one that a full disk cut off, may mean any
// GPU. A GPU that two resources claim has its mode of before the first.
func TestMarkWithoutGPUs(t *testing.T) {
	t.Parallel()
	c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"), modes: map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-b": inventory.ComputeProhibited,
		"GPU-c": inventory.ComputeExclusiveProcess,
	}}
	if err := os.WriteFile(c.mark, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e := exclusive.New(c, c.mark)
	for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/other"} {
		if err := e.Claim(t.Context(), resource, []string{"GPU-a", "GPU-b"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Restore(t.Context(), "claims/uid-1-0", []string{"GPU-c"}); err != nil {
		t.Fatal(err)
	}
	if err := e.Release(t.Context(), "nvidia.com/gpu"); err != nil {
		t.Fatal(err)
	}
	if c.modes["GPU-a"] != inventory.ComputeExclusiveProcess || c.modes["GPU-b"] != inventory.ComputeExclusiveProcess {
		t.Errorf("modes while the other resource claims the GPUs: %v", c.modes)
	}
	if err := e.Release(t.Context(), "nvidia.com/other"); err != nil {
		t.Fatal(err)
	}
	want := map[string]inventory.ComputeMode{"GPU-a": inventory.ComputeDefault, "GPU-b": inventory.ComputeProhibited,
		"GPU-c": inventory.ComputeDefault}
	if diff := cmp.Diff(want, c.modes); diff != "" {
		t.Errorf("modes at the end (-want +got):\n%s", diff)
	}
}

// TestRestoreUnwanted: of the GPUs that an earlier process left, those that a daemon needs stay
// exclusive. One that is lost delays no other.
func TestRestoreUnwanted(t *testing.T) {
	t.Parallel()
	c := &computeModes{t: t, mark: filepath.Join(t.TempDir(), "exclusive"), modes: map[string]inventory.ComputeMode{}}
	if err := exclusive.New(c, c.mark).Claim(t.Context(), "nvidia.com/gpu", []string{"GPU-a", "GPU-b",
		"GPU-c"}); err != nil {
		t.Fatal(err)
	}
	c.fail = map[string]error{"GPU-b": errors.New("b is lost")}
	e := exclusive.New(c, c.mark)
	if err := e.RestoreUnwanted(t.Context(), []string{"GPU-a"}); err == nil || !strings.Contains(err.Error(), "b is lost") {
		t.Errorf("RestoreUnwanted() = %v", err)
	}
	want := map[string]inventory.ComputeMode{"GPU-a": inventory.ComputeExclusiveProcess,
		"GPU-b": inventory.ComputeExclusiveProcess, "GPU-c": inventory.ComputeDefault}
	if diff := cmp.Diff(want, c.modes); diff != "" {
		t.Errorf("modes (-want +got):\n%s", diff)
	}
	c.fail = nil
	if err := e.RestoreUnwanted(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	c.checkMark("at the end")
	if _, err := os.Stat(c.mark); err == nil {
		t.Error("the mark is there with no GPU in exclusive mode")
	}
}
