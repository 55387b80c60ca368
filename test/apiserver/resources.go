package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured/unstructuredscheme"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// NodeFeatureKind is the kind of node-feature-discovery's NodeFeature objects.
var NodeFeatureKind = schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"}

// resource is a kind of objects that is served.
type resource struct {
	name       string
	kind       schema.GroupVersionKind
	namespaced bool
	custom     bool // of a custom resource definition, whose fields nobody knows
	status     bool // has a subresource of that name
	versioned  bool // is served in older versions, too, where the server is told so
}

// resources are all that are served, by name.
var resources = map[string]resource{
	"nodes":      {name: "nodes", kind: corev1.SchemeGroupVersion.WithKind("Node"), status: true},
	"pods":       {name: "pods", kind: corev1.SchemeGroupVersion.WithKind("Pod"), namespaced: true},
	"daemonsets": {name: "daemonsets", kind: appsv1.SchemeGroupVersion.WithKind("DaemonSet"), namespaced: true},
	"leases":     {name: "leases", kind: coordinationv1.SchemeGroupVersion.WithKind("Lease"), namespaced: true},
	"events":     {name: "events", kind: eventsv1.SchemeGroupVersion.WithKind("Event"), namespaced: true},
	"resourceslices": {name: "resourceslices", kind: resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"),
		versioned: true},
	"resourceclaims": {
		name: "resourceclaims", kind: resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"),
		namespaced: true, status: true, versioned: true,
	},
	"deviceclasses": {name: "deviceclasses", kind: resourceapi.SchemeGroupVersion.WithKind("DeviceClass"),
		versioned: true},
	"nodefeatures": {name: "nodefeatures", kind: NodeFeatureKind, namespaced: true, custom: true},
}

func (r resource) group() schema.GroupResource {
	return schema.GroupResource{Group: r.kind.Group, Resource: r.name}
}

// empty returns an object of the resource without content.
func (r resource) empty() (runtime.Object, error) {
	if r.custom {
		object := &unstructured.Unstructured{}
		object.SetGroupVersionKind(r.kind)
		return object, nil
	}
	object, err := scheme.Scheme.New(r.kind)
	if err != nil {
		return nil, fmt.Errorf("make object: %w", err)
	}
	object.GetObjectKind().SetGroupVersionKind(r.kind)
	return object, nil
}

// decode returns the object in the body of a request, which is JSON, YAML or protobuf.
func (r resource) decode(data []byte) (runtime.Object, error) {
	object, err := r.empty()
	if err != nil {
		return nil, err
	}
	if r.custom {
		err = json.Unmarshal(data, object)
	} else {
		object, _, err = scheme.Codecs.UniversalDeserializer().Decode(data, &r.kind, object)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if kind := object.GetObjectKind().GroupVersionKind(); kind != r.kind {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("object is of %s, expected %s", kind, r.kind))
	}
	return object, nil
}

// fieldManager returns what merges applied configurations and keeps the managed fields of objects.
func (r resource) fieldManager(subresource string) (*managedfields.FieldManager, error) {
	if r.custom {
		return managedfields.NewDefaultCRDFieldManager(managedfields.NewDeducedTypeConverter(), oneVersion{},
			oneVersion{}, unstructuredscheme.NewUnstructuredCreator(),
			r.kind, r.kind.GroupVersion(), subresource, nil)
	}
	ignored := map[fieldpath.APIVersion]fieldpath.Filter{}
	if r.status || r.name == "pods" {
		other := "status"
		if subresource == "status" {
			other = "spec"
		}
		version := fieldpath.APIVersion(r.kind.GroupVersion().String())
		ignored[version] = fieldpath.NewExcludeSetFilter(fieldpath.NewSet(fieldpath.MakePathOrDie(other)))
	}
	return managedfields.NewDefaultFieldManager(applyconfigurations.NewTypeConverter(scheme.Scheme), scheme.Scheme,
		scheme.Scheme,
		scheme.Scheme, r.kind, r.kind.GroupVersion(), subresource, ignored)
}

// protect gives an object that a client wrote the parts of the old one that such a write does not
// change, and checks it.
func (r resource) protect(subresource string, object, old runtime.Object) error {
	written, err := meta.Accessor(object)
	if err != nil {
		return fmt.Errorf("check object: %w", err)
	}
	if old != nil {
		kept, err := meta.Accessor(old)
		if err != nil {
			return fmt.Errorf("check object: %w", err)
		}
		k := key{r.name, kept.GetNamespace(), kept.GetName()}
		if err := checkPreconditions(k, kept, written.GetResourceVersion(), written.GetUID()); err != nil {
			return err
		}
		written.SetUID(kept.GetUID())
		written.SetCreationTimestamp(kept.GetCreationTimestamp())
		written.SetResourceVersion(kept.GetResourceVersion())
	}
	switch object := object.(type) {
	case *corev1.Node:
		if old, ok := old.(*corev1.Node); ok {
			if subresource == "status" {
				object.Spec = old.Spec
			} else {
				object.Status = old.Status
			}
		}
	case *resourceapi.ResourceClaim:
		if old, ok := old.(*resourceapi.ResourceClaim); ok {
			if subresource == "status" {
				object.Spec = old.Spec
			} else {
				object.Status = old.Status
			}
		}
	case *resourceapi.ResourceSlice:
		old, _ := old.(*resourceapi.ResourceSlice)
		if err := checkSlice(object, old); err != nil {
			return apierrors.NewInvalid(r.kind.GroupKind(), written.GetName(), err)
		}
	case *eventsv1.Event:
		old, _ := old.(*eventsv1.Event)
		if err := checkEvent(object, old); err != nil {
			return apierrors.NewInvalid(r.kind.GroupKind(), written.GetName(), err)
		}
	}
	return nil
}

// oneVersion converts between the versions of a resource that has one, and has no default values.
type oneVersion struct{}

func (oneVersion) Default(runtime.Object) {}

func (oneVersion) Convert(in, out, _ any) error {
	from, ok := in.(*unstructured.Unstructured)
	to, isObject := out.(*unstructured.Unstructured)
	if !ok || !isObject {
		return errors.New("only unstructured objects are converted")
	}
	to.Object = from.DeepCopy().Object
	return nil
}

func (oneVersion) ConvertToVersion(in runtime.Object, _ runtime.GroupVersioner) (runtime.Object, error) {
	return in, nil
}

func (oneVersion) ConvertFieldLabel(_ schema.GroupVersionKind, label, value string) (string, string, error) {
	return label, value, nil
}

// Node returns a node, or an error when there is none of that name.
func (s *Server) Node(name string) (*corev1.Node, error) {
	object, err := s.store.get(key{resource: "nodes", name: name})
	if err != nil {
		return nil, err
	}
	return object.(*corev1.Node), nil
}

// ChangeNode changes a node as an administrator does, spec and status alike. It makes the node
// where there is none.
func (s *Server) ChangeNode(name string, change func(*corev1.Node)) error {
	_, err := s.store.update(key{resource: "nodes", name: name}, func(old runtime.Object) (runtime.Object, error) {
		node, ok := old.(*corev1.Node)
		if !ok {
			node = &corev1.Node{}
		}
		change(node)
		return node, nil
	})
	return err
}

// DeleteNode removes a node. A node that is created again with this name has another UID.
func (s *Server) DeleteNode(name string) error {
	_, err := s.store.update(key{resource: "nodes", name: name},
		func(runtime.Object) (runtime.Object, error) { return nil, nil })
	return err
}

// AddPod adds a pod, or replaces the one of its name. One without a UID gets one.
func (s *Server) AddPod(pod *corev1.Pod) error {
	k := key{"pods", pod.Namespace, pod.Name}
	_, err := s.store.update(k, func(runtime.Object) (runtime.Object, error) { return pod.DeepCopy(), nil })
	return err
}

// ofResource returns what matches all objects of a resource.
func ofResource(name string) match {
	return func(k key, _ fields.Set) bool { return k.resource == name }
}

// Events returns all Events in the order of their names.
func (s *Server) Events() []*eventsv1.Event {
	objects, _ := s.store.list(ofResource("events"))
	events := make([]*eventsv1.Event, 0, len(objects))
	for _, object := range objects {
		events = append(events, object.(*eventsv1.Event))
	}
	return events
}

// NodeFeature returns a NodeFeature object, or an error when there is none of that name.
func (s *Server) NodeFeature(namespace, name string) (*unstructured.Unstructured, error) {
	object, err := s.store.get(key{"nodefeatures", namespace, name})
	if err != nil {
		return nil, err
	}
	return object.(*unstructured.Unstructured), nil
}

// patchTypes are the media types of patches.
var patchTypes = map[string]types.PatchType{
	string(types.MergePatchType):          types.MergePatchType,
	string(types.StrategicMergePatchType): types.StrategicMergePatchType,
	string(types.ApplyYAMLPatchType):      types.ApplyYAMLPatchType,
	string(types.JSONPatchType):           types.JSONPatchType,
}

// Leases returns the Leases in a namespace, by name.
func (s *Server) Leases(namespace string) []*coordinationv1.Lease {
	objects, _ := s.store.list(func(k key, _ fields.Set) bool {
		return k.resource == "leases" && k.namespace == namespace
	})
	leases := make([]*coordinationv1.Lease, len(objects))
	for i, object := range objects {
		leases[i] = object.(*coordinationv1.Lease)
	}
	return leases
}

// DeleteLease deletes a Lease, as an operator does, or the API server after the Node of its owner.
func (s *Server) DeleteLease(namespace, name string) error {
	_, err := s.store.update(key{"leases", namespace, name},
		func(runtime.Object) (runtime.Object, error) { return nil, nil })
	return err
}
