package apiserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
)

// SetResourceVersions says in which versions resource.k8s.io is served from now on: of v1, v1beta2
// and v1beta1. It is v1 at first.
func (s *Server) SetResourceVersions(versions ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resourceVersions = versions
}

// SetDroppedFields says which fields of ResourceSlices, their devices and capacities are not kept,
// as those of a feature gate that is off. Slices that are there stay as they are.
func (s *Server) SetDroppedFields(names ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropped = names
}

// SetCountersBesideDevices says whether devices may use only counters of their own slice, which is
// the rule of Kubernetes 1.34. From 1.35 on, devices and counters are in slices of their own.
func (s *Server) SetCountersBesideDevices(only bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countersBeside = only
}

// checkCounters checks the body of a write by the rule of SetCountersBesideDevices.
func (s *Server) checkCounters(t target, body []byte) error {
	s.mu.Lock()
	beside := s.countersBeside
	s.mu.Unlock()
	var slice resourceapi.ResourceSlice
	if !beside || t.key.resource != "resourceslices" || json.Unmarshal(body, &slice) != nil {
		return nil
	}
	var errs field.ErrorList
	for i, device := range slice.Spec.Devices {
		for _, use := range device.ConsumesCounters {
			if !slices.ContainsFunc(slice.Spec.SharedCounters,
				func(set resourceapi.CounterSet) bool { return set.Name == use.CounterSet }) {
				errs = append(errs, field.Invalid(
					field.NewPath("spec", "devices").Index(i).Child("consumesCounters"), use.CounterSet,
					"must reference a counterSet defined in the ResourceSlice sharedCounters"))
			}
		}
	}
	if len(errs) > 0 {
		return apierrors.NewInvalid(t.resource.kind.GroupKind(), slice.Name, errs)
	}
	return nil
}

// Slices returns all ResourceSlices in the order of their names.
func (s *Server) Slices() []*resourceapi.ResourceSlice {
	objects, _ := s.store.list(ofResource("resourceslices"))
	all := make([]*resourceapi.ResourceSlice, 0, len(objects))
	for _, object := range objects {
		all = append(all, object.(*resourceapi.ResourceSlice))
	}
	return all
}

// ChangeSlice changes a ResourceSlice as another program does. It makes it where there is none.
func (s *Server) ChangeSlice(name string, change func(*resourceapi.ResourceSlice)) error {
	_, err := s.store.update(key{resource: "resourceslices", name: name},
		func(old runtime.Object) (runtime.Object, error) {
			slice, ok := old.(*resourceapi.ResourceSlice)
			if !ok {
				slice = &resourceapi.ResourceSlice{}
			}
			change(slice)
			return slice, nil
		})
	return err
}

// WipeSlices removes all ResourceSlices of a node, as its kubelet does when it starts.
func (s *Server) WipeSlices(node string) error {
	var errs []error
	for _, slice := range s.Slices() {
		if ptr.Deref(slice.Spec.NodeName, "") != node {
			continue
		}
		k := key{resource: "resourceslices", name: slice.Name}
		_, err := s.store.update(k, func(runtime.Object) (runtime.Object, error) { return nil, nil })
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Claim returns a ResourceClaim, or an error when there is none of that name.
func (s *Server) Claim(namespace, name string) (*resourceapi.ResourceClaim, error) {
	object, err := s.store.get(key{"resourceclaims", namespace, name})
	if err != nil {
		return nil, err
	}
	return object.(*resourceapi.ResourceClaim), nil
}

// ChangeClaim changes a ResourceClaim, spec and status alike, as a user and a scheduler do. It
// makes it where there is none.
func (s *Server) ChangeClaim(namespace, name string, change func(*resourceapi.ResourceClaim)) error {
	_, err := s.store.update(key{"resourceclaims", namespace, name}, func(old runtime.Object) (runtime.Object, error) {
		claim, ok := old.(*resourceapi.ResourceClaim)
		if !ok {
			claim = &resourceapi.ResourceClaim{}
		}
		change(claim)
		return claim, nil
	})
	return err
}

// DeleteClaim removes a ResourceClaim. One that is created again with this name has another UID.
func (s *Server) DeleteClaim(namespace, name string) error {
	_, err := s.store.update(key{"resourceclaims", namespace, name},
		func(runtime.Object) (runtime.Object, error) { return nil, nil })
	return err
}

// Limits of a ResourceSlice.
const (
	maxDevices     = 128
	maxTainted     = 64 // devices of a slice of which one has a taint, or uses counters
	maxCounterSets = 8
)

// checkSlice checks a ResourceSlice that a client wrote, in the place of another one or of none.
func checkSlice(slice, old *resourceapi.ResourceSlice) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	if slice.Spec.Driver == "" {
		errs = append(errs, field.Required(spec.Child("driver"), ""))
	}
	if slice.Spec.Pool.Name == "" || slice.Spec.Pool.ResourceSliceCount < 1 {
		errs = append(errs, field.Required(spec.Child("pool"), "a name and a number of slices"))
	}
	if slice.Spec.Devices != nil && slice.Spec.SharedCounters != nil {
		errs = append(errs, field.Invalid(spec, "", "only one of `sharedCounters` or `devices` is allowed"))
	}
	if len(slice.Spec.SharedCounters) > maxCounterSets {
		errs = append(errs, field.TooMany(spec.Child("sharedCounters"), len(slice.Spec.SharedCounters), maxCounterSets))
	}
	most, names := maxDevices, map[string]bool{}
	for i, device := range slice.Spec.Devices {
		if len(device.Taints) > 0 || len(device.ConsumesCounters) > 0 {
			most = maxTainted
		}
		if names[device.Name] {
			errs = append(errs, field.Duplicate(spec.Child("devices").Index(i).Child("name"), device.Name))
		}
		names[device.Name] = true
	}
	if len(slice.Spec.Devices) > most {
		errs = append(errs, field.TooMany(spec.Child("devices"), len(slice.Spec.Devices), most))
	}
	if old != nil && (old.Spec.Driver != slice.Spec.Driver ||
		ptr.Deref(old.Spec.NodeName, "") != ptr.Deref(slice.Spec.NodeName, "")) {
		errs = append(errs, field.Invalid(spec, slice.Spec.Driver, "driver and nodeName are immutable"))
	}
	return errs
}

// remove answers a request that deletes an object, or a collection.
func (s *Server) remove(w http.ResponseWriter, r *http.Request, t target) error {
	var options metav1.DeleteOptions
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyLimit))
	if err == nil && len(body) > 0 {
		kind := metav1.Unversioned.WithKind("DeleteOptions")
		_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, &kind, &options)
	}
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	keys := []key{t.key}
	if t.key.name == "" {
		match, err := t.matcher(r.URL.Query().Get("fieldSelector"))
		if err != nil {
			return err
		}
		objects, _ := s.store.list(func(k key, f fields.Set) bool { return match(k, f) })
		keys = nil
		for _, object := range objects {
			m, err := meta.Accessor(object)
			if err != nil {
				return fmt.Errorf("delete: %w", err)
			}
			keys = append(keys, key{t.key.resource, m.GetNamespace(), m.GetName()})
		}
	}
	for _, k := range keys {
		_, err := s.store.update(k, func(old runtime.Object) (runtime.Object, error) {
			if old == nil {
				return nil, apierrors.NewNotFound(t.resource.group(), k.name)
			}
			m, err := meta.Accessor(old)
			if p := options.Preconditions; err == nil && p != nil {
				err = checkPreconditions(k, m, ptr.Deref(p.ResourceVersion, ""), ptr.Deref(p.UID, types.UID("")))
			}
			return nil, err
		})
		if err != nil {
			return err
		}
	}
	write(w, http.StatusOK, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: metav1.StatusSuccess})
	return nil
}

// write answers with an object in the version that the client speaks.
func (t target) write(w http.ResponseWriter, code int, object any) error {
	object, err := t.spoken(object)
	if err == nil {
		write(w, code, object)
	}
	return err
}

// spoken returns an object in the version that the client speaks.
func (t target) spoken(object any) (any, error) {
	if t.version == t.resource.kind.Version {
		return object, nil
	}
	var fields map[string]any
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	if err != nil {
		return nil, fmt.Errorf("convert object: %w", err)
	}
	fields["apiVersion"] = t.apiVersion()
	if t.version == "v1beta1" {
		for _, device := range parts(fields, "spec", "devices") {
			if t.key.resource == "resourceslices" {
				nest(device, "basic", "name")
			}
		}
		for _, request := range parts(fields, "spec", "devices", "requests") {
			unnest(request, "exactly")
		}
	}
	return fields, nil
}

// understood returns the body of a request about an object in the version that is stored, without
// the fields that are dropped, and with the defaults of taints.
func (s *Server) understood(t target, body []byte) ([]byte, error) {
	if !t.resource.versioned || t.subresource != "" && t.version == t.resource.kind.Version &&
		bytes.HasPrefix(body, []byte("k8s\x00")) {
		return body, nil
	}
	object, kind, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil) // JSON, YAML or protobuf
	if err == nil {
		object.GetObjectKind().SetGroupVersionKind(*kind)
		body, err = json.Marshal(object)
	}
	var fields map[string]any
	if err != nil || json.Unmarshal(body, &fields) != nil {
		return body, nil //nolint:nilerr // a patch, or what the decoder will refuse
	}
	if t.version == "v1beta1" {
		for _, device := range parts(fields, "spec", "devices") {
			unnest(device, "basic")
		}
		for _, request := range parts(fields, "spec", "devices", "requests") {
			if _, alternatives := request["firstAvailable"]; !alternatives {
				nest(request, "exactly", "name")
			}
		}
	}
	if fields["apiVersion"] == t.apiVersion() {
		fields["apiVersion"] = t.resource.kind.GroupVersion().String()
	}
	s.mu.Lock()
	dropped := slices.Clone(s.dropped)
	s.mu.Unlock()
	if spec, ok := fields["spec"].(map[string]any); ok && t.key.resource == "resourceslices" {
		for _, name := range dropped {
			delete(spec, name)
		}
	}
	for _, device := range parts(fields, "spec", "devices") {
		for _, name := range dropped {
			delete(device, name)
			capacities, _ := device["capacity"].(map[string]any)
			for _, capacity := range capacities {
				if fields, ok := capacity.(map[string]any); ok {
					delete(fields, name)
				}
			}
		}
		for _, taint := range parts(device, "taints") {
			if taint["timeAdded"] == nil {
				taint["timeAdded"] = time.Now().UTC().Format(time.RFC3339)
			}
		}
	}
	return json.Marshal(fields)
}

// parts returns the objects of a list below a path of fields; none if there is no such list.
func parts(object map[string]any, path ...string) []map[string]any {
	for _, name := range path[:len(path)-1] {
		object, _ = object[name].(map[string]any)
	}
	list, _ := object[path[len(path)-1]].([]any)
	var all []map[string]any
	for _, element := range list {
		if part, ok := element.(map[string]any); ok {
			all = append(all, part)
		}
	}
	return all
}

// nest moves all fields but one into a field.
func nest(object map[string]any, into, but string) {
	inner := map[string]any{}
	for name, value := range object {
		if name != but {
			inner[name] = value
			delete(object, name)
		}
	}
	object[into] = inner
}

// unnest moves the fields of a field out of it.
func unnest(object map[string]any, from string) {
	inner, ok := object[from].(map[string]any)
	if !ok {
		return
	}
	delete(object, from)
	maps.Copy(object, inner)
}
