package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// patch is a PATCH request.
type patch struct {
	kind    types.PatchType
	data    []byte
	manager string // the field manager
	force   bool   // whether an apply takes fields over that others own
}

// create returns the object of a POST request, with the fields that its manager owns.
func (r resource) create(data []byte, manager string) (runtime.Object, error) {
	object, err := r.decode(data)
	if err != nil {
		return nil, err
	}
	live, err := r.empty()
	if err != nil {
		return nil, err
	}
	fields, err := r.fieldManager("")
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", r.name, err)
	}
	if object, err = fields.Update(live, object, manager); err != nil {
		return nil, fmt.Errorf("create %s: %w", r.name, err)
	}
	return object, r.protect("", object, nil)
}

// patched returns what a patch makes of an object, which is nil where there is none.
func (r resource) patched(k key, old runtime.Object, subresource string, p patch) (runtime.Object, error) {
	fields, err := r.fieldManager(subresource)
	if err != nil {
		return nil, fmt.Errorf("patch %s: %w", r.name, err)
	}
	if p.kind == types.ApplyYAMLPatchType {
		return r.applied(k, old, subresource, p, fields.Apply)
	}
	if old == nil {
		return nil, apierrors.NewNotFound(r.group(), k.name)
	}
	before, err := json.Marshal(old)
	if err != nil {
		return nil, fmt.Errorf("patch %s: %w", r.name, err)
	}
	after, err := r.merge(before, p)
	switch {
	case errors.Is(err, jsonpatch.ErrTestFailed):
		return nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", r.group(), k.name, err.Error(), 0,
			false)
	case err != nil:
		return nil, apierrors.NewBadRequest(err.Error())
	}
	object, err := r.decode(after)
	if err != nil {
		return nil, err
	}
	if err := r.protect(subresource, object, old); err != nil {
		return nil, err
	}
	if err := keepsAllocation(object, old); err != nil {
		return nil, err
	}
	return fields.Update(old, object, p.manager)
}

// keepsAllocation refuses a write that changes what a claim was given, which from Kubernetes 1.36
// on needs a right that only the scheduler has. As in the real server, parameters that mean the
// same in another text are a change.
func keepsAllocation(object, old runtime.Object) error {
	after, ok := object.(*resourceapi.ResourceClaim)
	before, existed := old.(*resourceapi.ResourceClaim)
	if !ok || !existed || equality.Semantic.DeepEqual(after.Status.Allocation, before.Status.Allocation) {
		return nil
	}
	return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), after.Name,
		field.ErrorList{
			field.Forbidden(field.NewPath("status", "allocation"),
				"changing status.allocation requires permission for resourceclaims/binding"),
		})
}

func (r resource) merge(before []byte, p patch) ([]byte, error) {
	switch p.kind {
	case types.JSONPatchType:
		steps, err := jsonpatch.DecodePatch(p.data)
		if err != nil {
			return nil, err
		}
		return steps.Apply(before)
	case types.MergePatchType:
		return jsonpatch.MergePatch(before, p.data)
	default:
		schema, err := r.empty()
		if err != nil {
			return nil, err
		}
		return strategicpatch.StrategicMergePatch(before, p.data, schema)
	}
}

// applied returns what a server-side apply makes of an object.
func (r resource) applied(
	k key, old runtime.Object, subresource string, p patch,
	apply func(live, applied runtime.Object, manager string, force bool) (runtime.Object, error),
) (runtime.Object, error) {
	if p.manager == "" {
		return nil, apierrors.NewBadRequest("PatchOptions.meta.k8s.io is invalid: fieldManager: is required for apply patch")
	}
	configuration := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(p.data, &configuration.Object); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if kind := configuration.GroupVersionKind(); kind != r.kind {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("object is of %s, expected %s", kind, r.kind))
	}
	if configuration.GetName() != "" && configuration.GetName() != k.name {
		return nil, apierrors.NewBadRequest("the name of the object does not match the name on the URL")
	}
	live := old
	if old == nil {
		if subresource != "" || r.name == "nodes" {
			return nil, apierrors.NewNotFound(r.group(), k.name)
		}
		var err error
		if live, err = r.empty(); err != nil {
			return nil, err
		}
	} else {
		m, err := meta.Accessor(old)
		if err != nil {
			return nil, fmt.Errorf("apply %s: %w", r.name, err)
		}
		if err := checkPreconditions(k, m, configuration.GetResourceVersion(), configuration.GetUID()); err != nil {
			return nil, err
		}
	}
	object, err := apply(live, configuration, p.manager, p.force)
	if err != nil {
		return nil, err
	}
	if err := r.protect(subresource, object, old); err != nil {
		return nil, err
	}
	return object, keepsAllocation(object, old)
}
