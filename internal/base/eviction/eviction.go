// Package eviction repeats requests to evict pods.
package eviction

import (
	"context"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

const (
	// Interval is the time between two requests for a pod that does not end.
	Interval = 10 * time.Second
	// timeout limits one request.
	timeout = 10 * time.Second
)

// A Pod identifies a pod. Either Name or UID may be empty.
type Pod struct{ Namespace, Name, UID string }

// Evictions are the latest requests to evict pods. The zero value has none. Only one goroutine may use
// it at a time.
type Evictions struct{ latest map[Pod]request }

// A request is a request to evict a pod: its time, and why it was refused; empty if it was not.
type request struct {
	at      time.Time
	refusal string
}

// Evict calls evict for each pod whose latest call was at least Interval ago. It returns why the pods'
// latest calls were refused, joined by "; "; empty if none was. The log has the first call for a pod and
// each change of its result, with the purpose of the evictions.
func (e *Evictions) Evict(ctx context.Context, now time.Time, purpose string, pods []Pod,
	evict func(context.Context, Pod) error,
) string {
	if e.latest == nil {
		e.latest = map[Pod]request{}
	}
	var refusals []string
	for _, pod := range pods {
		last, requested := e.latest[pod]
		if !requested || now.Sub(last.at) >= Interval {
			limited, cancel := context.WithTimeout(ctx, timeout)
			next := request{at: now}
			if err := evict(limited, pod); err != nil {
				next.refusal = err.Error()
			}
			cancel()
			switch {
			case requested && next.refusal == last.refusal:
			case next.refusal == "":
				klog.FromContext(ctx).Info("Evicted a pod", "namespace", pod.Namespace, "pod", pod.Name,
					"purpose", purpose)
			default:
				klog.FromContext(ctx).Info("Cannot evict a pod; retrying", "namespace", pod.Namespace, "pod", pod.Name,
					"purpose", purpose, "reason", next.refusal)
			}
			e.latest[pod], last = next, next
		}
		if last.refusal != "" {
			refusals = append(refusals, last.refusal)
		}
	}
	return strings.Join(refusals, "; ")
}

// Refusal returns why the latest call for a pod was refused; empty if it was not.
func (e *Evictions) Refusal(pod Pod) string { return e.latest[pod].refusal }
