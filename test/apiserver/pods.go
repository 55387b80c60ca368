package apiserver

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
)

// SetPods sets what answers requests to pods/exec and pods/proxy, which need the token, too; nil
// for nobody. Faults do not apply to them, but they are counted.
func (s *Server) SetPods(h http.Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods = h
}

// answerForPod has a request to pods/exec or pods/proxy answered, and reports whether it is one and
// somebody answers such ones.
func (s *Server) answerForPod(w http.ResponseWriter, r *http.Request) bool {
	s.mu.Lock()
	h, token := s.pods, s.token
	s.mu.Unlock()
	parts := strings.Split(r.URL.Path, "/") // "", api, v1, namespaces, NAMESPACE, pods, NAME, exec
	if h == nil || len(parts) < 8 || parts[5] != "pods" || parts[7] != "exec" && parts[7] != "proxy" {
		return false
	}
	if r.Header.Get("Authorization") != "Bearer "+token {
		http.Error(w, "Unauthorized", http.StatusUnauthorized)
		return true
	}
	s.mu.Lock()
	s.counts[Request{Verb: "get", Resource: "pods/" + parts[7]}]++
	s.mu.Unlock()
	h.ServeHTTP(w, r)
	return true
}

// Add adds an object as the API server itself or a controller does, status and all, or replaces the
// one of its name.
func (s *Server) Add(resource string, object runtime.Object) error {
	m, err := meta.Accessor(object)
	if err != nil {
		return fmt.Errorf("add an object: %w", err)
	}
	_, err = s.store.update(key{resource, m.GetNamespace(), m.GetName()}, func(runtime.Object) (runtime.Object, error) {
		return object.DeepCopyObject(), nil
	})
	return err
}

// page returns the part of a list that a request wants, and the metadata of that part. The token to
// go on with is a position: objects that come and go between two pages move the rest.
func page(objects []runtime.Object, version int64, query url.Values) ([]runtime.Object, map[string]any) {
	listMeta := map[string]any{"resourceVersion": strconv.FormatInt(version, 10)}
	begin, _ := strconv.Atoi(query.Get("continue"))
	limit, _ := strconv.Atoi(query.Get("limit"))
	objects = objects[min(begin, len(objects)):]
	if rest := len(objects) - limit; limit > 0 && rest > 0 {
		listMeta["continue"], listMeta["remainingItemCount"] = strconv.Itoa(begin+limit), rest
		objects = objects[:limit]
	}
	return objects, listMeta
}
