package kubeapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

const (
	// reporter is the controller that Events of this program come from.
	reporter = "gpu-node-agent"
	// sameFact is how long after each other two daemons on one node may see one fact.
	sameFact = 15 * time.Second
	// maxObjectName is how long the name of an object may be, in bytes.
	maxObjectName = 253
	// microTime is how the API writes the times of Events.
	microTime = "2006-01-02T15:04:05.000000Z07:00"
)

// An EventRecord is written as an Event of events.k8s.io/v1.
type EventRecord struct {
	// Pod is the pod that the Event regards; the own node if it is nil.
	Pod *Pod
	// Key is the same for records of one series, and another for any other.
	Key string
	// Reason, Action and Type ("Normal", "Warning") are for programs, Note is for people.
	Reason, Action, Type, Note string
	// At is when the fact was seen.
	At time.Time
	// AtStart says that an earlier process may have recorded the same fact.
	AtStart bool
}

// A Pod is one of the own node.
type Pod struct{ Namespace, Name, UID string }

// objectReference names the object that an Event is about.
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

// WriteEvent writes an Event about the own node, which has this UID, or about a pod of it. The name
// of the Event follows from its key, so that a fact has one Event, however often and by how many
// daemons it is recorded: what happens again, later than the Event says, is counted in its series.
func (c *Client) WriteEvent(ctx context.Context, uid string, r EventRecord) error {
	regarding, namespace := objectReference{APIVersion: "v1", Kind: "Node", Name: c.node, UID: uid}, "default"
	if r.Pod != nil {
		namespace = r.Pod.Namespace
		regarding = objectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: r.Pod.Name, UID: r.Pod.UID}
	}
	sum := sha256.Sum256([]byte(regarding.UID + "/" + r.Key))
	id := "." + hex.EncodeToString(sum[:8])
	name := strings.TrimRight(regarding.Name[:min(len(regarding.Name), maxObjectName-len(id))], ".-") + id
	path := "/apis/events.k8s.io/v1/namespaces/" + namespace + "/events"
	body, err := json.Marshal(map[string]any{
		"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": map[string]string{"name": name,
			"namespace": namespace},
		"eventTime": r.At.UTC().Format(microTime), "reportingController": reporter, "reportingInstance": c.node[:min(len(c.node), 128)],
		"action": r.Action, "reason": r.Reason, "regarding": regarding, "note": r.Note, "type": r.Type,
	})
	if err != nil {
		return fmt.Errorf("encode an Event: %w", err)
	}
	_, err = c.send(ctx, request{verb: http.MethodPost, path: path, contentType: "application/json", body: body})
	var refused *Refused
	if !errors.As(err, &refused) || refused.Reason != "AlreadyExists" {
		return err
	}
	if r.AtStart {
		return nil
	}
	return c.countEvent(ctx, path+"/"+name, r.At)
}

// countEvent counts one more fact in the series of an Event that is there, if the Event does not
// tell of it. An empty patch reads the Event: there is no right to read Events then, which would be
// one for all of the namespace.
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
	if at.Before(last.Add(sameFact)) {
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
