package kubeapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// reporter is the reporting controller of this program's Events.
	reporter = "gpu-node-agent"
	// sameEventWindow is the longest time between two daemons on a node seeing the same fact.
	sameEventWindow = 15 * time.Second
	// maxObjectName is the size limit of object names, in bytes.
	maxObjectName = 253
	// microTime is the API's format for the times of Events.
	microTime = "2006-01-02T15:04:05.000000Z07:00"
)

// An EventRecord is the content of an Event of events.k8s.io/v1.
type EventRecord struct {
	// Pod is the pod that the Event regards; nil for the daemon's own Node.
	Pod *Pod
	// Key identifies the series: two records with the same key are in the same series.
	Key string
	// Reason, Action and Type ("Normal", "Warning") are for programs, Note is for users.
	Reason, Action, Type, Note string
	// At is the time of the fact.
	At time.Time
	// AtStart says that an earlier process may have recorded the same fact.
	AtStart bool
}

// A Pod identifies a pod on the node.
type Pod struct{ Namespace, Name, UID string }

// objectReference identifies the object that an Event regards.
type objectReference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
}

type eventSeries struct {
	Count            int    `json:"count"`
	LastObservedTime string `json:"lastObservedTime"`
}

// WriteEvent writes an Event about the daemon's own Node, which has this UID, or about a pod on it.
// The name of the Event is derived from its key, so that a fact has one Event, no matter how many
// daemons record it and how often. A later repetition is counted in the series of the Event.
func (c *Client) WriteEvent(ctx context.Context, uid string, r EventRecord) error {
	regarding, namespace := objectReference{APIVersion: "v1", Kind: "Node", Name: c.node, UID: uid}, "default"
	if r.Pod != nil {
		namespace = r.Pod.Namespace
		regarding = objectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: r.Pod.Name,
			UID: r.Pod.UID}
	}
	sum := sha256.Sum256([]byte(regarding.UID + "/" + r.Key))
	id := "." + hex.EncodeToString(sum[:8])
	name := strings.TrimRight(regarding.Name[:min(len(regarding.Name), maxObjectName-len(id))], ".-") + id
	path := "/apis/events.k8s.io/v1/namespaces/" + namespace + "/events"
	body, err := json.Marshal(map[string]any{
		"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": map[string]string{"name": name,
			"namespace": namespace},
		"eventTime": r.At.UTC().Format(microTime), "reportingController": reporter,
		"reportingInstance": c.node[:min(len(c.node), 128)],
		"action":            r.Action, "reason": r.Reason, "regarding": regarding, "note": r.Note, "type": r.Type,
	})
	if err != nil {
		return fmt.Errorf("encode an Event: %w", err)
	}
	_, err = c.send(ctx, request{verb: http.MethodPost, path: path, contentType: "application/json", body: body})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if r.AtStart {
		return nil
	}
	return c.countEvent(ctx, path+"/"+name, r.At)
}

// countEvent adds a later fact to the series of an existing Event. It reads the Event by an empty
// patch, because the right to get Events would apply to all Events of the namespace.
func (c *Client) countEvent(ctx context.Context, path string, at time.Time) error {
	patch := func(body string) ([]byte, error) {
		return c.send(ctx, request{verb: http.MethodPatch, path: path, contentType: mergePatch, body: []byte(body)})
	}
	answer, err := patch("{}")
	if err != nil {
		return err
	}
	var event struct {
		EventTime time.Time `json:"eventTime"`
		Series    *struct {
			Count            int       `json:"count"`
			LastObservedTime time.Time `json:"lastObservedTime"`
		} `json:"series"`
	}
	if err := json.Unmarshal(answer, &event); err != nil {
		return fmt.Errorf("read the answer of the API server: %w", err)
	}
	count, last := 1, event.EventTime
	if event.Series != nil {
		count, last = event.Series.Count, event.Series.LastObservedTime
	}
	if at.Before(last.Add(sameEventWindow)) {
		return nil
	}
	body, err := json.Marshal(map[string]eventSeries{"series": {Count: count + 1,
		LastObservedTime: at.UTC().Format(microTime)}})
	if err != nil {
		return fmt.Errorf("encode the series of an Event: %w", err)
	}
	_, err = patch(string(body))
	return err
}
