package apiserver

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// historyLength is how many changes a watch can go back.
const historyLength = 1000

// key names an object.
type key struct{ resource, namespace, name string }

// change is an entry of the history.
type change struct {
	version int64
	kind    watch.EventType
	key     key
	fields  fields.Set      // that selectors know
	object  json.RawMessage // as it was after the change, or before a deletion
}

// match reports whether an object is one of a collection, by its key and the fields that selectors
// know.
type match func(k key, f fields.Set) bool

// fieldsOf returns the fields of an object that selectors know.
func fieldsOf(k key, object runtime.Object) fields.Set {
	f := fields.Set{"metadata.name": k.name, "metadata.namespace": k.namespace}
	switch o := object.(type) {
	case *resourceapi.ResourceSlice:
		f["spec.driver"], f["spec.nodeName"] = o.Spec.Driver, ptr.Deref(o.Spec.NodeName, "")
	case *corev1.Pod:
		f["spec.nodeName"], f["status.phase"] = o.Spec.NodeName, string(o.Status.Phase)
	case *eventsv1.Event:
		f["regarding.kind"], f["regarding.name"] = o.Regarding.Kind, o.Regarding.Name
	}
	return f
}

// store holds the objects and their history.
type store struct {
	mu      sync.Mutex // guards all following fields
	version int64
	oldest  int64 // changes after this version are in the history
	objects map[key]runtime.Object
	history []change
	changed chan struct{} // closed at the next change
}

func newStore() *store {
	return &store{version: 1, oldest: 1, objects: map[key]runtime.Object{}, changed: make(chan struct{})}
}

// get returns a copy of an object.
func (s *store) get(k key) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lookUp(k)
}

func (s *store) lookUp(k key) (runtime.Object, error) {
	object, ok := s.objects[k]
	if !ok {
		return nil, apierrors.NewNotFound(resources[k.resource].group(), k.name)
	}
	return object.DeepCopyObject(), nil
}

// list returns the objects that match in the order of their names, and the version of the list.
func (s *store) list(match match) (objects []runtime.Object, version int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.matching(match), s.version
}

func (s *store) matching(match match) []runtime.Object {
	var keys []key
	for k, object := range s.objects {
		if match(k, fieldsOf(k, object)) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	objects := make([]runtime.Object, 0, len(keys))
	for _, k := range keys {
		objects = append(objects, s.objects[k].DeepCopyObject())
	}
	return objects
}

// update replaces an object by what modify makes of it. Modify gets nil where there is none, and
// returns nil to remove it. An object that modify leaves as it was keeps its version.
func (s *store) update(k key, modify func(old runtime.Object) (runtime.Object, error)) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.lookUp(k)
	if err != nil {
		old = nil
	}
	var before runtime.Object
	if old != nil {
		before = old.DeepCopyObject()
	}
	object, err := modify(old)
	if err != nil {
		return nil, err
	}
	if object != nil {
		object.GetObjectKind().SetGroupVersionKind(resources[k.resource].kind)
	}
	kind := watch.Modified
	switch {
	case object == nil && before == nil:
		return nil, apierrors.NewNotFound(resources[k.resource].group(), k.name)
	case object == nil:
		kind, object = watch.Deleted, before
	case before == nil:
		kind = watch.Added
		m, err := meta.Accessor(object)
		if err != nil {
			return nil, fmt.Errorf("create object: %w", err)
		}
		m.SetName(k.name)
		m.SetNamespace(k.namespace)
		m.SetUID(cmp.Or(m.GetUID(), uuid.NewUUID()))
		m.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
	default:
		same, err := isSame(before, object)
		if err != nil || same {
			return before, err
		}
	}
	if err := s.record(kind, k, object); err != nil {
		return nil, err
	}
	return object.DeepCopyObject(), nil
}

// record notes a change, gives the object its version and wakes the watches.
func (s *store) record(kind watch.EventType, k key, object runtime.Object) error {
	s.version++
	m, err := meta.Accessor(object)
	if err != nil {
		return fmt.Errorf("record change: %w", err)
	}
	m.SetResourceVersion(strconv.FormatInt(s.version, 10))
	encoded, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("record change: %w", err)
	}
	if kind == watch.Deleted {
		delete(s.objects, k)
	} else {
		s.objects[k] = object
	}
	s.append(change{version: s.version, kind: kind, key: k, fields: fieldsOf(k, object), object: encoded})
	return nil
}

func (s *store) append(c change) {
	s.history = append(s.history, c)
	if extra := len(s.history) - historyLength; extra > 0 {
		s.oldest = s.history[extra-1].version
		s.history = slices.Delete(s.history, 0, extra)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// compact forgets the history.
func (s *store) compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.oldest = s.version
	s.history = nil
}

// restore has the versions begin again.
func (s *store) restore() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version, s.oldest, s.history = 1, 1, nil
	for _, object := range s.objects {
		m, err := meta.Accessor(object)
		if err != nil {
			return fmt.Errorf("restore: %w", err)
		}
		m.SetResourceVersion("1")
	}
	return nil
}

// bookmark puts a bookmark of a new version into the history.
func (s *store) bookmark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.append(change{version: s.version, kind: watch.Bookmark})
}

// since returns the changes after a version that match, the version to go on from, and what is
// closed at the next change. It fails with 410 Gone when the history does not go back so far.
// Version 0 begins with the objects that there are, and one that is not reached yet has no changes
// until it is.
func (s *store) since(version int64, match match) ([]change, int64, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var changes []change
	switch {
	case version == 0:
		for _, object := range s.matching(match) {
			encoded, err := json.Marshal(object)
			if err != nil {
				return nil, 0, nil, fmt.Errorf("begin watch: %w", err)
			}
			changes = append(changes, change{kind: watch.Added, object: encoded})
		}
	case version < s.oldest:
		return nil, 0, nil, apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", version, s.oldest))
	default:
		for _, c := range s.history {
			if c.version > version && (c.kind == watch.Bookmark || match(c.key, c.fields)) {
				changes = append(changes, c)
			}
		}
	}
	return changes, max(version, s.version), s.changed, nil
}

// isSame says whether two objects have the same content, the version aside and the times in managed
// fields.
func isSame(a, b runtime.Object) (bool, error) {
	encode := func(object runtime.Object) (string, error) {
		object = object.DeepCopyObject()
		m, err := meta.Accessor(object)
		if err != nil {
			return "", fmt.Errorf("compare objects: %w", err)
		}
		m.SetResourceVersion("")
		managed := m.GetManagedFields()
		for i := range managed {
			managed[i].Time = nil
		}
		m.SetManagedFields(managed)
		encoded, err := json.Marshal(object)
		return string(encoded), err
	}
	left, err := encode(a)
	if err != nil {
		return false, err
	}
	right, err := encode(b)
	return left == right, err
}

// checkPreconditions fails with 409 Conflict when a client's version or UID of an object is not
// that of the object.
func checkPreconditions(k key, old metav1.Object, version string, uid types.UID) error {
	if version != "" && version != old.GetResourceVersion() || uid != "" && uid != old.GetUID() {
		return apierrors.NewConflict(resources[k.resource].group(), k.name,
			fmt.Errorf("the object has been modified; please apply your changes to the latest version and try again"))
	}
	return nil
}
