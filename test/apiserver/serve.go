package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

const bodyLimit = 3 << 20 // the API server's own, in bytes

// target is what the path of a request names.
type target struct {
	resource    resource
	version     string // that the client speaks
	key         key    // without a name for a collection
	subresource string
}

// apiVersion is that of the objects that the client speaks of.
func (t target) apiVersion() string {
	return schema.GroupVersion{Group: t.resource.kind.Group, Version: t.version}.String()
}

// serve answers a request.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if err := s.answer(w, r); err != nil {
		var status apierrors.APIStatus
		if !errors.As(err, &status) {
			status = apierrors.NewInternalError(err)
		}
		content := status.Status()
		content.Kind, content.APIVersion = "Status", "v1"
		if acceptsProtobuf(r) {
			_ = writeProtobuf(w, int(content.Code), &content)
			return
		}
		write(w, int(content.Code), &content)
	}
}

// acceptsProtobuf reports whether a client wants nothing but Kubernetes' own encoding.
func acceptsProtobuf(r *http.Request) bool {
	return r.Header.Get("Accept") == runtime.ContentTypeProtobuf
}

func writeProtobuf(w http.ResponseWriter, code int, object runtime.Object) error {
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(code)
	return protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(object, w)
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request) error {
	if s.answerForPod(w, r) {
		return nil
	}
	t, found := parsePath(r.URL.Path)
	request := Request{Verb: verb(r, t), Resource: t.resource.name}
	if t.subresource != "" {
		request.Resource += "/" + t.subresource
	}
	fault, late := s.admit(w, r, request)
	if late && request.IsWrite() {
		_ = s.carryOut(httptest.NewRecorder(), r, t, found, request) // its answer is lost
	}
	if fault != nil {
		return fault
	}
	err := s.carryOut(w, r, t, found, request)
	if err == nil && request.IsWrite() && r.URL.Query().Get("dryRun") == "" {
		s.mu.Lock()
		s.writers = append(s.writers, r.Header.Get(authenticationv1.ImpersonateUserHeader))
		s.mu.Unlock()
	}
	return err
}

// carryOut does what a request asks for, and answers it.
func (s *Server) carryOut(w http.ResponseWriter, r *http.Request, t target, found bool, request Request) error {
	s.mu.Lock()
	served := !t.resource.custom || !s.noFeatures
	if t.resource.versioned {
		served = slices.Contains(s.resourceVersions, t.version)
	}
	s.mu.Unlock()
	if !found || !served {
		http.NotFound(w, r)
		return nil
	}
	switch request.Verb {
	case "get":
		object, err := s.store.get(t.key)
		if err != nil {
			return err
		}
		if acceptsProtobuf(r) && t.version == t.resource.kind.Version { // of other versions the stand-in has JSON alone
			return writeProtobuf(w, http.StatusOK, object)
		}
		return t.write(w, http.StatusOK, object)
	case "list":
		return s.list(w, t, r.URL.Query())
	case "watch":
		return s.watch(w, r, t)
	case "create", "update", "patch", "apply":
		if t.subresource == evictionResource {
			return s.evict(w, r, t, request.Verb)
		}
		return s.change(w, r, t, request.Verb)
	case "delete":
		return s.remove(w, r, t)
	}
	return apierrors.NewMethodNotSupported(t.resource.group(), request.Verb)
}

// verb returns the verb of a request, as the API server's own metrics have it; apply stands beside
// patch.
func verb(r *http.Request, t target) string {
	switch {
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "" && r.URL.Query().Get("watch") != "false":
		return "watch"
	case r.Method == http.MethodGet && t.key.name == "":
		return "list"
	case r.Method == http.MethodGet:
		return "get"
	case r.Method == http.MethodPost:
		return "create"
	case r.Method == http.MethodPut:
		return "update"
	case r.Method == http.MethodPatch && strings.HasPrefix(r.Header.Get("Content-Type"), "application/apply-patch"):
		return "apply"
	}
	return strings.ToLower(r.Method)
}

// parsePath returns what a path such as /api/v1/nodes/NAME/status names, and false where nothing is
// served.
func parsePath(path string) (target, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var group, version string
	switch {
	case parts[0] == "api" && len(parts) >= 3:
		version, parts = parts[1], parts[2:]
	case parts[0] == "apis" && len(parts) >= 4:
		group, version, parts = parts[1], parts[2], parts[3:]
	default:
		return target{}, false
	}
	t := target{}
	if parts[0] == "namespaces" && len(parts) >= 3 {
		t.key.namespace, parts = parts[1], parts[2:]
	}
	r, ok := resources[parts[0]]
	if !ok || r.kind.Group != group || r.kind.Version != version && !r.versioned || len(parts) > 3 {
		return target{}, false
	}
	t.resource, t.key.resource, t.version = r, r.name, version
	if len(parts) > 1 {
		t.key.name = parts[1]
	}
	if len(parts) > 2 {
		t.subresource = parts[2]
		return t, r.status && t.subresource == "status" || r.name == "pods" && t.subresource == evictionResource
	}
	return t, (t.key.namespace != "") == r.namespaced || t.key.name == ""
}

// matcher returns whether an object is one of a collection. Of field selectors it knows those by
// name and namespace, of ResourceSlices those by node and driver, and of pods those by node and
// phase.
func (t target) matcher(selector string) (match, error) {
	chosen, err := fields.ParseSelector(selector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	empty, err := t.resource.empty()
	if err != nil {
		return nil, err
	}
	known := fieldsOf(key{}, empty)
	for _, requirement := range chosen.Requirements() {
		if !known.Has(requirement.Field) {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s", requirement.Field))
		}
	}
	return func(k key, f fields.Set) bool {
		inScope := k.resource == t.key.resource && (t.key.namespace == "" || t.key.namespace == k.namespace)
		return inScope && chosen.Matches(f)
	}, nil
}

// labelled returns the objects that match a label selector.
func labelled(objects []runtime.Object, selector string) ([]runtime.Object, error) {
	parsed, err := labels.Parse(selector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	var matching []runtime.Object
	for _, object := range objects {
		accessor, err := meta.Accessor(object)
		if err != nil {
			return nil, fmt.Errorf("read metadata: %w", err)
		}
		if parsed.Matches(labels.Set(accessor.GetLabels())) {
			matching = append(matching, object)
		}
	}
	return matching, nil
}

func (s *Server) list(w http.ResponseWriter, t target, query url.Values) error {
	match, err := t.matcher(query.Get("fieldSelector"))
	if err != nil {
		return err
	}
	objects, version := s.store.list(match)
	if from, err := strconv.ParseInt(query.Get("resourceVersion"), 10, 64); err == nil && from > version {
		behind := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", from, version), 1)
		behind.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}
		return behind
	}
	if query.Get("resourceVersion") == "" {
		s.mu.Lock()
		s.latest[t.resource.name]++
		s.mu.Unlock()
	}
	if objects, err = labelled(objects, query.Get("labelSelector")); err != nil {
		return err
	}
	objects, listMeta := page(objects, version, query)
	items := make([]any, len(objects))
	for i, object := range objects {
		if items[i], err = t.spoken(object); err != nil {
			return err
		}
	}
	write(w, http.StatusOK, map[string]any{
		"kind": t.resource.kind.Kind + "List", "apiVersion": t.apiVersion(),
		"metadata": listMeta, "items": items,
	})
	return nil
}

// change answers a request that creates, updates or patches an object.
func (s *Server) change(w http.ResponseWriter, r *http.Request, t target, verb string) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyLimit))
	if err != nil {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	if body, err = s.understood(t, body); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if err := s.checkCounters(t, body); err != nil {
		return err
	}
	query := r.URL.Query()
	manager := query.Get("fieldManager")
	if manager == "" && verb != "apply" {
		manager, _, _ = strings.Cut(r.UserAgent(), "/")
	}
	if verb == "create" {
		object, err := t.resource.create(body, manager)
		if err != nil {
			return err
		}
		if query.Get("dryRun") == "All" { // of creations alone
			return t.write(w, http.StatusCreated, object)
		}
		return s.create(w, t, object)
	}
	if verb == "update" {
		return s.replace(w, t, body, manager)
	}
	media, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	kind, known := patchTypes[media]
	if !known || t.resource.custom && kind == "application/strategic-merge-patch+json" {
		return apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, verb, t.resource.group(), t.key.name,
			"the body of the request was in an unknown format", 0, true)
	}
	p := patch{kind: kind, data: body, manager: manager, force: query.Get("force") == "true"}
	existed := false
	object, err := s.store.update(t.key, func(old runtime.Object) (runtime.Object, error) {
		existed = old != nil
		return t.resource.patched(t.key, old, t.subresource, p)
	})
	if err != nil {
		return err
	}
	if !existed {
		return t.write(w, http.StatusCreated, object)
	}
	return t.write(w, http.StatusOK, object)
}

func (s *Server) create(w http.ResponseWriter, t target, object runtime.Object) error {
	m, err := meta.Accessor(object)
	if err != nil {
		return fmt.Errorf("create object: %w", err)
	}
	if m.GetNamespace() != "" && m.GetNamespace() != t.key.namespace {
		return apierrors.NewBadRequest(
			"the namespace of the provided object does not match the namespace sent on the request")
	}
	if m.GetName() == "" && m.GetGenerateName() != "" {
		m.SetName(m.GetGenerateName() + utilrand.String(5))
	}
	if t.key.name = m.GetName(); t.key.name == "" {
		return apierrors.NewBadRequest("name or generateName is required")
	}
	created, err := s.store.update(t.key, func(old runtime.Object) (runtime.Object, error) {
		if old != nil {
			return nil, apierrors.NewAlreadyExists(t.resource.group(), t.key.name)
		}
		return object, nil
	})
	if err != nil {
		return err
	}
	return t.write(w, http.StatusCreated, created)
}

// replace puts an object in the place of the one that is there, if its version is that one's.
func (s *Server) replace(w http.ResponseWriter, t target, body []byte, manager string) error {
	object, err := t.resource.create(body, manager)
	if err != nil {
		return err
	}
	written, err := meta.Accessor(object)
	if err != nil {
		return fmt.Errorf("replace object: %w", err)
	}
	version := written.GetResourceVersion()
	replaced, err := s.store.update(t.key, func(old runtime.Object) (runtime.Object, error) {
		if old == nil {
			return nil, apierrors.NewNotFound(t.resource.group(), t.key.name)
		}
		m, err := meta.Accessor(old)
		if err == nil && m.GetResourceVersion() != version {
			err = apierrors.NewConflict(t.resource.group(), t.key.name, errors.New("the object has been modified"))
		}
		if err == nil {
			err = t.resource.protect(t.subresource, object, old)
		}
		if err == nil {
			err = keepsAllocation(object, old)
		}
		return object, err
	})
	if err != nil {
		return err
	}
	return t.write(w, http.StatusOK, replaced)
}

// watch answers with changes until the client goes, its time is over or watches are ended.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, t target) error {
	query := r.URL.Query()
	selector := query.Get("fieldSelector")
	if t.key.name != "" {
		selector = "metadata.name=" + t.key.name
	}
	match, err := t.matcher(selector)
	if err != nil {
		return err
	}
	version := int64(0)
	if text := query.Get("resourceVersion"); text != "" {
		if version, err = strconv.ParseInt(text, 10, 64); err != nil {
			return apierrors.NewBadRequest(err.Error())
		}
	}
	if version == 0 && query.Get("allowWatchBookmarks") == "true" || query.Get("sendInitialEvents") == "true" {
		// An API server whose etcd is older than 3.4.25 answers this, and takes the first for a watch with
		// sendInitialEvents.
		return apierrors.NewInternalError(errors.New("the required storage feature RequestWatchProgress is disabled"))
	}
	seconds, err := strconv.Atoi(query.Get("timeoutSeconds"))
	if err != nil || seconds <= 0 {
		seconds = 1800
	}
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(seconds)*time.Second)
	defer cancel()
	s.mu.Lock()
	ended := s.watches
	s.mu.Unlock()

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	for {
		changes, upTo, changed, err := s.store.since(version, match)
		var expired apierrors.APIStatus
		if errors.As(err, &expired) {
			status := expired.Status()
			status.Kind, status.APIVersion = "Status", "v1"
			return send(w, watch.Error, &status)
		}
		gone, err := t.sendAll(w, changes, query.Get("allowWatchBookmarks") == "true")
		if gone || err != nil {
			return err
		}
		version = upTo
		_ = http.NewResponseController(w).Flush()
		select {
		case <-changed:
		case <-ended:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// sendAll sends changes to a watch. It returns true if the client has gone.
func (t target) sendAll(w http.ResponseWriter, changes []change, bookmarks bool) (gone bool, err error) {
	for _, c := range changes {
		if c.kind == watch.Bookmark && !bookmarks {
			continue
		}
		object, err := t.event(c)
		if err != nil {
			return false, err
		}
		if err := send(w, c.kind, object); err != nil {
			return true, nil
		}
	}
	return false, nil
}

// event returns what a watch sends of a change: the object, or the version alone.
func (t target) event(c change) (any, error) {
	if c.kind != watch.Bookmark {
		return t.spoken(c.object)
	}
	return metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{Kind: t.resource.kind.Kind, APIVersion: t.apiVersion()},
		ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.FormatInt(c.version, 10)},
	}, nil
}

func send(w io.Writer, kind watch.EventType, object any) error {
	return json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": object})
}

func write(w http.ResponseWriter, code int, content any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(content) // the client has gone
}
