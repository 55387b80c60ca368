package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// A kind of pods, of which each call starts one by a name, and returns how long that took.
type kind struct {
	name  string
	start func(name string) time.Duration
}

// keepsPace: pods of one kind take at most a fifth longer to start than those of another, by the
// medians. Pods of both kinds take turns. It is measured a second time if the first one misses: a
// machine that is busy for some of the pods is so twice in a row hardly ever.
func keepsPace(t *testing.T, one, other kind) {
	t.Helper()
	const slower = 1.2
	measured := max(*pairs, 1)
	measure := func(turn string, count int) (ones, others []time.Duration) {
		for i := range count {
			name := fmt.Sprintf("-%s-%d", turn, i)
			if i%2 == 0 {
				ones = append(ones, one.start("one"+name))
			}
			others = append(others, other.start("other"+name))
			if i%2 != 0 {
				ones = append(ones, one.start("one"+name))
			}
		}
		slices.Sort(ones)
		slices.Sort(others)
		return ones, others
	}
	figures := func(of []time.Duration) string {
		return fmt.Sprintf("median %v, p95 %v", of[len(of)/2].Round(time.Millisecond),
			of[len(of)*95/100].Round(time.Millisecond))
	}
	measure("first", 1) // of each kind reads programs from the disk
	start := time.Now()
	for _, turn := range []string{"once", "again"} {
		ones, others := measure(turn, measured)
		ratio := float64(ones[measured/2]) / float64(others[measured/2])
		fmt.Printf("e2e: %s created until its pod runs: %s; %s: %s; %d each; %.2f x, to be below %.1f\n",
			one.name, figures(ones), other.name, figures(others), measured, ratio, slower)
		phase(fmt.Sprintf("%d pairs of pods", measured), start)
		if ratio < slower {
			return
		}
		if turn == "again" {
			t.Errorf("%s takes %.2f times as long as %s, want less than %.1f, as before", one.name, ratio, other.name, slower)
		}
	}
}

// untilRuns creates a pod and returns how long after start it runs. Then it calls look with its
// name, and deletes the pod.
func untilRuns(
	ctx context.Context, t *testing.T, n *node.Node, start time.Time, pod *corev1.Pod, look func(name string),
) time.Duration {
	t.Helper()
	if _, err := n.Client.CoreV1().Pods(corev1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	err := node.Wait(limited, 10*time.Millisecond, func(ctx context.Context) error {
		pod, err := n.Client.CoreV1().Pods(corev1.NamespaceDefault).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		return isRunning(pod)
	})
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	look(pod.Name)
	kubectl(ctx, t, n, "delete", "pod", pod.Name) // which waits until it has gone
	return took
}

// partsOfGPUs: pods get units of GPUs, beside pods that get whole ones; what containers see is what
// the daemon says of them; and a pod with units starts as soon as one with a whole GPU.
func partsOfGPUs(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const (
		units   = "volcano.sh/gpu-mem.128Mi"
		inUnits = 2
		each    = (81559 - 1024) / 128 // units of a GPU
		wanted  = 80                   // units of a pod
	)
	held := heldDevices(ctx, t, kubelet, holder)
	free := slices.DeleteFunc(simulatedGPUs(ctx, t, n), func(g simulated) bool { return slices.Contains(held, g.UUID) })
	withoutDaemon(ctx, t, n)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, fmt.Sprintf(
		"config: {map: {default: '{selectors: [{uuids: [%s, %s], units: true}], units: {enforce: none, reserveMiB: 1024}}'}}\n", free[0].UUID, free[1].UUID,
	))...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus-inUnits, stepLimit)
	waitAllocatable(ctx, t, kubelet, units, each, stepLimit)
	waitNodeCapacity(ctx, t, n, units, inUnits*each)
	if says := daemonExec(ctx, t, n, "status"); !strings.HasPrefix(says, "ready: ") {
		t.Errorf("with units of one GPU offered, status says %q", says)
	}

	gpuOfPod := func(name string) string {
		seen := visibleDevices(ctx, t, n, name)
		if len(seen) != 1 {
			t.Fatalf("pod %s sees %v, want one GPU", name, seen)
		}
		return seen[0]
	}
	runPod(ctx, t, n, "part-1", units, wanted)
	runPod(ctx, t, n, "part-2", units, wanted)
	emptiest := each                              // free units there
	if gpuOfPod("part-1") != gpuOfPod("part-2") { // the emptiest was offered again before the second one came
		emptiest -= wanted
	}
	waitAllocatable(ctx, t, kubelet, units, 2*wanted+emptiest, stepLimit)
	holders := daemonExec(ctx, t, n, "status", "--holders")
	for _, want := range []string{"part-1", "part-2", "10240 MiB"} {
		if !strings.Contains(holders, want) {
			t.Errorf("status --holders does not say %q:\n%s", want, holders)
		}
	}
	// The last unit of the emptiest GPU, and not one more.
	runPod(ctx, t, n, "part-all", units, int64(emptiest))
	createPod(ctx, t, n, "part-more", units, each)
	waitUnschedulable(ctx, t, n, "part-more")
	for _, name := range []string{"part-1", "part-2", "part-all"} {
		deletePod(ctx, t, n, name)
	}
	waitPod(ctx, t, n, "part-more", isRunning)
	deletePod(ctx, t, n, "part-more")
	waitAllocatable(ctx, t, kubelet, units, each, stepLimit)

	start := func(resource string, count int64) func(string) time.Duration {
		return func(name string) time.Duration {
			return untilRuns(ctx, t, n, time.Now(), podOf(name, resource, count), func(name string) { gpuOfPod(name) })
		}
	}
	keepsPace(t, kind{units, start(units, wanted)}, kind{gpu, start(gpu, 1)})
}

// partsComeAndGo: random pods with units come and go while the kubelet writes the Node's status as
// rarely as it does by default. While the GPUs have room, none fails. On GPUs that are full all
// along, the scheduler goes by an old status: how many fail is logged.
func partsComeAndGo(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const (
		units = "volcano.sh/gpu-mem.128Mi"
		each  = (81559 - 1024) / 128 // units of a GPU
	)
	held := heldDevices(ctx, t, kubelet, holder)
	free := slices.DeleteFunc(simulatedGPUs(ctx, t, n), func(g simulated) bool { return slices.Contains(held, g.UUID) })
	withoutDaemon(ctx, t, n)
	setStatusFrequency := func(frequency string) {
		if err := n.SetKubelet("nodeStatusUpdateFrequency", frequency); err != nil {
			t.Fatal(err)
		}
		restartKubelet(ctx, t, n)
	}
	setStatusFrequency("10s")
	defer setStatusFrequency("1s")
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, fmt.Sprintf(
		"config: {map: {default: '{selectors: [{uuids: [%s, %s], units: true}], units: {enforce: none, reserveMiB: 1024}}'}}\n", free[0].UUID, free[1].UUID,
	))...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, units, each, stepLimit)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 1))
	for _, part := range []int{16, 2} {
		end := startChurnOf(ctx, t, n, func(name string) *corev1.Pod {
			pod := podOf(name, units, int64(1+random.IntN(each/part)))
			pod.Spec.Containers[0].Command = []string{"busybox", "sleep", fmt.Sprint(1 + random.IntN(10))}
			return pod
		})
		pause(ctx, time.Minute)
		churn := end()
		t.Logf("seed %d: pods of up to 1/%d of a GPU: %v", seed, part, churn)
		if failed := len(churn.refused); part > 2 && failed > 0 {
			t.Errorf("%d of %d pods failed on GPUs that have room", failed, churn.made)
		}
	}
}
