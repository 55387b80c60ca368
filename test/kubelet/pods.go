package kubelet

import (
	"maps"
	"slices"
	"sync"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podTable holds the pods that are active on the node. They outlive kubelet's process. The zero
// value is empty.
type podTable struct {
	mu      sync.Mutex                               // guards all following fields
	pods    map[string][]string                      // pod → containers, in the order of their admission
	inits   map[string]bool                          // pod/container → true if it is a plain init container
	claims  map[string]*podresources.DynamicResource // of pod/container
	unheard bool                                     // kubelet has not heard from the API server since it started
}

func (t *podTable) add(c Container) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods == nil {
		t.pods, t.inits = map[string][]string{}, map[string]bool{}
	}
	t.inits[c.Pod+"/"+c.Name] = c.Init
	if !slices.Contains(t.pods[c.Pod], c.Name) {
		t.pods[c.Pod] = append(slices.Clip(t.pods[c.Pod]), c.Name)
	}
}

// addClaim adds a container with the devices of a claim.
func (t *podTable) addClaim(c Container, claim *podresources.DynamicResource) {
	t.add(c)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.claims == nil {
		t.claims = map[string]*podresources.DynamicResource{}
	}
	t.claims[c.Pod+"/"+c.Name] = claim
}

// claim returns the claim of a container; nil for none.
func (t *podTable) claim(pod, container string) *podresources.DynamicResource {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.claims[pod+"/"+container]
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

func (t *podTable) isInit(pod, container string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.inits[pod+"/"+container]
}

// known reports whether kubelet knows the node's pods.
func (t *podTable) known() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.unheard
}

func (t *podTable) setKnown(known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unheard = !known
}

// all returns the pods that kubelet knows.
func (t *podTable) all() map[string][]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unheard {
		return nil
	}
	return maps.Clone(t.pods)
}
