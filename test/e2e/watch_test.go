package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	gpu                = "nvidia.com/gpu"
	podResourcesSocket = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"
	// The kubelet answers a hundred questions a second, and the daemon asks some, too.
	watchInterval = 20 * time.Millisecond
	waitInterval  = 50 * time.Millisecond
)

// podResources is the kubelet's own account of devices. The Node object follows it a second later
// and hides short dips.
func podResources(t *testing.T) podresources.PodResourcesListerClient {
	t.Helper()
	connection, err := grpc.NewClient(podResourcesSocket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		// A restarted kubelet is asked again at once.
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		t.Fatalf("connect to PodResources: %v", err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return podresources.NewPodResourcesListerClient(connection)
}

// allocatable counts the devices of a resource that the kubelet would hand out or has handed out,
// unhealthy ones left out.
func allocatable(ctx context.Context, client podresources.PodResourcesListerClient, resource string) (int, error) {
	answer, err := client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return 0, fmt.Errorf("ask PodResources: %w", err)
	}
	count := 0
	for _, device := range answer.GetDevices() {
		if device.GetResourceName() == resource {
			count += len(device.GetDeviceIds())
		}
	}
	return count, nil
}

// waitAllocatable waits until the kubelet counts want devices, and returns how long that took.
func waitAllocatable(
	ctx context.Context, t *testing.T, client podresources.PodResourcesListerClient, resource string, want int,
	limit time.Duration,
) time.Duration {
	t.Helper()
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := node.Wait(ctx, waitInterval, func(ctx context.Context) error {
		got, err := allocatable(ctx, client, resource)
		if err == nil && got != want {
			err = fmt.Errorf("kubelet counts %d of %s, want %d", got, resource, want)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

// step is a time during which every answer was the same.
type step struct {
	count int
	from  time.Time
}

// record is what a watch saw.
type record struct {
	steps []step
	end   time.Time
	asked int
}

// watch asks PodResources every 20 ms until the returned function is called, which logs and returns
// what was seen. A test that fails before that logs it too.
func watch(
	ctx context.Context, t *testing.T, client podresources.PodResourcesListerClient, resource, during string,
) func() record {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var (
		running sync.WaitGroup
		seen    record
		failed  error
	)
	running.Go(func() {
		ticker := time.NewTicker(watchInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			count, err := allocatable(ctx, client, resource)
			if ctx.Err() != nil {
				return
			}
			if status.Code(err) == codes.ResourceExhausted {
				continue // one question too many within a second
			}
			if err != nil {
				failed = err
				return
			}
			seen.asked++
			seen.end = time.Now()
			if len(seen.steps) == 0 || seen.steps[len(seen.steps)-1].count != count {
				seen.steps = append(seen.steps, step{count, seen.end})
			}
		}
	})
	end := sync.OnceValue(func() record {
		cancel()
		running.Wait()
		t.Logf("%s: kubelet %s counted %v", during, *kubeletVersion, seen)
		if failed != nil {
			t.Errorf("watch PodResources: %v", failed)
		}
		return seen
	})
	t.Cleanup(func() { end() })
	return end
}

// times gives how often the count came to be so many.
func (r record) times(count int) int {
	times := 0
	for _, s := range r.steps {
		if s.count == count {
			times++
		}
	}
	return times
}

// below gives the smallest count seen and the longest time below want without a break.
func (r record) below(want int) (lowest int, longest time.Duration) {
	lowest = want
	var since time.Time // start of the present time below want
	for i, s := range r.steps {
		end := r.end
		if i+1 < len(r.steps) {
			end = r.steps[i+1].from
		}
		if s.count >= want {
			since = time.Time{}
			continue
		}
		if since.IsZero() {
			since = s.from
		}
		lowest, longest = min(lowest, s.count), max(longest, end.Sub(since))
	}
	return lowest, longest
}

// fell gives the time of the first answer that was below want.
func (r record) fell(want int) time.Time {
	for _, s := range r.steps {
		if s.count < want {
			return s.from
		}
	}
	return r.end
}

// String reads "8 for 1.204s, 0 for 60ms, 8 for 4.1s".
func (r record) String() string {
	parts := make([]string, len(r.steps))
	for i, s := range r.steps {
		end := r.end
		if i+1 < len(r.steps) {
			end = r.steps[i+1].from
		}
		parts[i] = fmt.Sprintf("%d for %v", s.count, end.Sub(s.from).Round(time.Millisecond))
	}
	return fmt.Sprintf("%s (%d answers)", strings.Join(parts, ", "), r.asked)
}
