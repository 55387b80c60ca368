package apiserver

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// The longest texts of an Event, in bytes.
const (
	nameLimit = 128
	noteLimit = 1024
)

// checkEvent says what Kubernetes refuses in an Event of events.k8s.io/v1; old is nil for a new
// one.
func checkEvent(e, old *eventsv1.Event) field.ErrorList {
	var problems field.ErrorList
	refuse := func(bad bool, path string, value any, why string) {
		if bad {
			problems = append(problems, field.Invalid(field.NewPath(path), value, why))
		}
	}
	refuse(len(validation.IsDNS1123Subdomain(e.Name)) > 0, "metadata.name", e.Name, "must be a DNS subdomain")
	refuse(e.EventTime.IsZero(), "eventTime", "", "is required")
	refuse(e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning, "type", e.Type,
		"must be Normal or Warning")
	clusterWide := e.Namespace == metav1.NamespaceDefault || e.Namespace == metav1.NamespaceSystem
	refuse(e.Regarding.Namespace == "" && !clusterWide, "involvedObject.namespace", "", "does not match event.namespace")
	refuse(len(validation.IsQualifiedName(e.ReportingController)) > 0, "reportingController", e.ReportingController,
		"must be a qualified name")
	for _, text := range []struct{ path, value string }{
		{"reportingInstance", e.ReportingInstance}, {"action", e.Action}, {"reason", e.Reason},
	} {
		refuse(text.value == "", text.path, "", "is required")
		refuse(len(text.value) > nameLimit, text.path, text.value, "can have at most 128 characters")
	}
	refuse(len(e.Note) > noteLimit, "message", e.Note, "can have at most 1024 characters")
	if e.Series != nil {
		refuse(e.Series.Count < 2, "series.count", e.Series.Count, "should be at least 2")
		refuse(e.Series.LastObservedTime.IsZero(), "series.lastObservedTime", "", "is required")
	}
	if old == nil {
		return problems
	}
	for _, part := range []struct {
		path       string
		value, was any
	}{
		{"involvedObject", e.Regarding, old.Regarding}, {"related", e.Related, old.Related}, {"reason", e.Reason, old.Reason},
		{"message", e.Note, old.Note}, {"type", e.Type, old.Type}, {"action", e.Action, old.Action},
		{"eventTime", e.EventTime.UnixMicro(), old.EventTime.UnixMicro()},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
	} {
		refuse(!reflect.DeepEqual(part.value, part.was), part.path, part.value, "field is immutable")
	}
	return problems
}
