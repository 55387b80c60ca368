package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// maxAdmission is how long kubelet may take to admit a pod while nothing happens to its GPUs.
const maxAdmission = 5 * time.Second

// runPods has pods come and go, until ctx ends; all pods have ended then.
func (s *stage) runPods(ctx context.Context, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 2))
	ends := map[string]time.Time{}
	for n := 0; ctx.Err() == nil; n++ {
		for _, pod := range slices.Sorted(maps.Keys(ends)) {
			if time.Now().After(ends[pod]) {
				s.endPod(pod)
				delete(ends, pod)
			}
		}
		pod := fmt.Sprintf("pod-%d-%d", time.Now().UnixMilli(), n)
		if s.startPod(ctx, random, pod) {
			// Most pods are short; some outlive a change of the configuration or a restart of the daemon.
			life := time.Duration(random.ExpFloat64() * float64(4*time.Second))
			if random.IntN(8) == 0 {
				life += time.Minute
			}
			ends[pod] = time.Now().Add(life)
		}
		pause(ctx, time.Duration(random.ExpFloat64()*float64(300*time.Millisecond)))
	}
	for pod := range ends {
		s.endPod(pod)
	}
}

// endPod ends a pod. From then on its GPUs may be given in another form, once the daemon knows.
func (s *stage) endPod(pod string) {
	s.mu.Lock()
	for _, h := range s.pods[pod] {
		g := s.gpus[h.slot]
		if w, planned := s.wantLocked()[h.key]; !planned || !w.healthy && g.good() {
			s.settleLocked(unheld, g)
		}
	}
	delete(s.pods, pod)
	s.mu.Unlock()
	s.Remove(pod)
}

// startPod has kubelet admit a pod, if there are devices for one.
func (s *stage) startPod(ctx context.Context, random *rand.Rand, pod string) bool {
	s.mu.Lock()
	free := map[string]int{}
	taken := map[key]bool{}
	for _, devices := range s.pods {
		for _, h := range devices {
			taken[h.key] = true
		}
	}
	for k, healthy := range s.viewLocked() {
		if healthy && !taken[k] {
			free[k.resource]++
		}
	}
	s.mu.Unlock()
	if len(free) == 0 {
		return false
	}
	names := slices.Sorted(maps.Keys(free))
	c := standin.Container{Pod: pod, Name: "main", Resource: names[random.IntN(len(names))], Init: random.IntN(10) == 0}
	c.Count = 1 + random.IntN(min(3, free[c.Resource]))
	mark, began := s.Mark(), time.Now()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second*s.options.slack)
	defer cancel()
	got, err := s.Admit(ctx, c)
	var refusal *standin.PodError
	if errors.As(err, &refusal) && refusal.Reason == standin.CreateContainerConfig {
		s.Remove(pod)
	}
	if err != nil {
		if ctx.Err() == nil {
			s.refused(c, mark, began, err)
		}
		return false
	}
	s.given(c, got)
	if took := time.Since(began); took > maxAdmission*s.options.slack && s.undisturbed(began, got.IDs, c.Resource) {
		s.violate("kubelet took %s to admit a pod, while nothing happened to its GPUs", short(took))
	}
	return true
}

// undisturbed reports whether nothing has happened, since a time, to the GPUs of devices; without
// any, of the resource.
func (s *stage) undisturbed(since time.Time, ids []string, resource string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy || s.settled.After(since) {
		return false
	}
	for k, w := range s.wantLocked() {
		if k.resource == resource && (len(ids) == 0 || slices.Contains(ids, k.id)) && !s.settledLocked(w.gpu, since) {
			return false
		}
	}
	for _, id := range ids {
		if g := s.gpuOfLocked(key{resource, id}.uuid()); g == nil || !s.settledLocked(g, since) {
			return false // it has left the plan
		}
	}
	return true
}

// refused judges a pod that did not come up.
func (s *stage) refused(c standin.Container, mark int, began time.Time, err error) {
	var ids []string
	for _, e := range s.Events(mark) {
		if e.Kind == standin.Allocated && e.Resource == c.Resource && e.Err != nil {
			ids = e.IDs
		}
	}
	s.count("pods refused", 1)
	if s.undisturbed(began, ids, c.Resource) && !strings.Contains(err.Error(), standin.ErrStopped.Error()) {
		s.violate("a pod that wants %d %s (%v) was refused, while nothing happened to the GPUs: %v", c.Count, c.Resource, ids,
			err)
	}
}

// given judges what a pod was given.
func (s *stage) given(c standin.Container, got standin.Allocation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts["pods"]++
	var devices []held
	for _, id := range got.IDs {
		k := key{c.Resource, id}
		g := s.gpuOfLocked(k.uuid())
		if g == nil {
			if !s.busy && time.Now().After(s.settled) {
				s.violateLocked("pod %s was given %s, which no GPU has", c.Pod, k)
			}
			continue
		}
		h := held{key: k, slot: g.slot}
		if k.uuid() != g.uuid {
			h.part = k.uuid()
		}
		for other, others := range s.pods {
			for _, o := range others {
				if o.key == k {
					s.violateLocked("%s was given to pod %s and then to pod %s", k, other, c.Pod)
				}
				if h.excludes(o) {
					s.violateLocked("GPU %d was given to pod %s as %s, while pod %s holds it as %s", g.slot, c.Pod, k, other, o.key)
				}
			}
		}
		devices = append(devices, h)
	}
	s.pods[c.Pod] = devices
	s.checkEditsLocked(c, got)
}

// checkEditsLocked holds what a container gets to its devices.
func (s *stage) checkEditsLocked(c standin.Container, got standin.Allocation) {
	var want []string
	for _, id := range got.IDs {
		if uuid := (key{c.Resource, id}).uuid(); !slices.Contains(want, uuid) {
			want = append(want, uuid)
		}
	}
	slices.Sort(want)
	if visible := got.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"]; strings.HasPrefix(visible, "GPU-") ||
		strings.HasPrefix(visible, "MIG-") {
		has := strings.Split(visible, ",")
		slices.Sort(has)
		if !slices.Equal(has, want) {
			s.violateLocked("NVIDIA_VISIBLE_DEVICES has %v, and the devices are %v", has, want)
		}
	}
	if len(got.Response.GetCdiDevices()) == 0 {
		return
	}
	s.counts["pods by CDI"]++
	var specs strings.Builder
	files, _ := filepath.Glob(s.Path("cdi/*"))
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			specs.Write(text)
		}
	}
	for _, d := range got.Response.GetCdiDevices() {
		_, name, _ := strings.Cut(d.GetName(), "=")
		if !strings.Contains(specs.String(), `"`+name+`"`) && !strings.Contains(specs.String(), name) {
			s.violateLocked("pod %s was given the CDI device %s, which no spec in %v has", c.Pod, d.GetName(), files)
		}
	}
}
