//go:build !kubelet134 && !kubelet135 && !kubelet136

package dramanager

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A successQueue is a queue that says which pools the controller took as done.
type successQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	done chan string
}

func (q successQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	select {
	case q.done <- pool:
	default:
	}
}

// TestLibraryLosesSlice shows why this program writes its slices itself (ADR 44). The answer to the
// library's create of a slice is lost, and the pool is then removed. The library compares the pool with
// its informer, which does not have the slice, and is done, while the slice is stored: a GPU in it may
// still be given to a claim, and law 19 would free it for the device plugin. This program's own writer
// counts a GPU as published before the write: TestPublishedGPUs and TestLostAnswers in
// internal/cluster.
func TestLibraryLosesSlice(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if err := server.ChangeNode("n", func(*corev1.Node) {}); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	queue := successQueue{done: make(chan string, 1), TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](time.Hour, time.Hour))} // no second try
	failed := make(chan error, 100)
	c, err := resourceslice.StartController(t.Context(), resourceslice.Options{
		DriverName: "gpu.nvidia.com", KubeClient: client, Queue: queue, SyncDelay: ptr.To(time.Millisecond),
		MutationCacheTTL: ptr.To(time.Millisecond), Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "n"},
		ErrorHandler: func(_ context.Context, err error, text string) {
			t.Log(text, err)
			failed <- err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)

	// From now on answers about slices are lost, those of the informer too.
	server.SetFault(apiserver.Fault{Status: 500, Late: true, Only: func(r apiserver.Request) bool { return r.Resource == "resourceslices" }})
	server.DropWatches()
	c.Update(&resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		"n": {Slices: []resourceslice.Slice{{Devices: []resourcev1.Device{{Name: "gpu-0"}}}}},
	}})
	poll.Until(t, "the slice to be stored", func() bool { return len(server.Slices()) == 1 })
	poll.Until(t, "the lost answer", func() bool { return len(failed) > 0 })
	for len(queue.done) > 0 {
		<-queue.done
	}
	c.Update(&resourceslice.DriverResources{})
	poll.Until(t, "the end of the removal", func() bool { return len(queue.done) > 0 })
	if len(server.Slices()) != 1 {
		t.Error("the library has removed the slice: its controller can replace our writer of slices")
	}

	// The slice stays until the informer has an answer again.
	begin := time.Now()
	server.SetFault(apiserver.Fault{})
	poll.Until(t, "the removal of the slice", func() bool { return len(server.Slices()) == 0 })
	t.Logf("the library removed the slice %v after the outage", time.Since(begin).Round(time.Millisecond))
}
