package apiserver

import (
	"fmt"
	"io"
	"net/http"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

// evictionResource is the subresource of pods that evicts them.
const evictionResource = "eviction"

// SetDisruptionBudget says whether a disruption budget forbids the eviction of every pod.
func (s *Server) SetDisruptionBudget(forbids bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.budget = forbids
}

// Pods returns the UIDs of all pods by their names, as namespace/name.
func (s *Server) Pods() map[string]types.UID {
	objects, _ := s.store.list(ofResource("pods"))
	uids := map[string]types.UID{}
	for _, object := range objects {
		if m, err := meta.Accessor(object); err == nil {
			uids[m.GetNamespace()+"/"+m.GetName()] = m.GetUID()
		}
	}
	return uids
}

// evict answers an eviction. The pod is gone at once: there is no kubelet that ends it first.
func (s *Server) evict(w http.ResponseWriter, r *http.Request, t target, verb string) error {
	if verb != "create" {
		return apierrors.NewMethodNotSupported(t.resource.group(), verb)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyLimit))
	if err != nil {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	kind := policyv1.SchemeGroupVersion.WithKind("Eviction")
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, &kind, nil)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	eviction, ok := object.(*policyv1.Eviction)
	if !ok || eviction.Name != t.key.name || eviction.Namespace != t.key.namespace {
		return apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	s.mu.Lock()
	forbidden := s.budget
	s.mu.Unlock()
	_, err = s.store.update(t.key, func(old runtime.Object) (runtime.Object, error) {
		if old == nil {
			return nil, apierrors.NewNotFound(t.resource.group(), t.key.name)
		}
		m, err := meta.Accessor(old)
		if err != nil {
			return nil, fmt.Errorf("evict a pod: %w", err)
		}
		if o := eviction.DeleteOptions; o != nil && o.Preconditions != nil && o.Preconditions.UID != nil {
			if err := checkPreconditions(t.key, m, "", *o.Preconditions.UID); err != nil {
				return nil, err
			}
		}
		if forbidden {
			refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
			refused.ErrStatus.Details.Causes = append(refused.ErrStatus.Details.Causes, metav1.StatusCause{
				Type: "DisruptionBudget", Message: "The disruption budget stand-in needs 1 healthy pods and has 1 currently",
			})
			return nil, refused
		}
		return nil, nil
	})
	if err != nil {
		return err
	}
	write(w, http.StatusCreated, &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: metav1.StatusSuccess})
	return nil
}
