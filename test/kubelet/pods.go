package kubelet

import (
	"maps"
	"slices"
	"sync"
)

// podTable holds the pods that are active on the node. They outlive kubelet's process. The zero value is empty.
type podTable struct {
	mu   sync.Mutex          // guards all following fields
	pods map[string][]string // pod → containers, in the order of their admission
}

func (t *podTable) add(pod, container string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods == nil {
		t.pods = map[string][]string{}
	}
	if !slices.Contains(t.pods[pod], container) {
		t.pods[pod] = append(slices.Clip(t.pods[pod]), container)
	}
}

func (t *podTable) remove(pod string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.pods, pod)
}

func (t *podTable) has(pod string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, active := t.pods[pod]
	return active
}

func (t *podTable) all() map[string][]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.pods)
}
