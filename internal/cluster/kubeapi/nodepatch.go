package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The media types of patches.
const (
	mergePatch          = "application/merge-patch+json"
	strategicMergePatch = "application/strategic-merge-patch+json"
	jsonPatch           = "application/json-patch+json"
	applyPatch          = "application/apply-patch+yaml" // JSON is a subset of YAML
)

// The field managers of this program. An apply removes the fields that the same manager applied
// before, so each kind of write has its own manager.
const (
	labelsManager = "gpu-node-agent-labels"
	migManager    = "gpu-node-agent-mig"
	answerManager = "gpu-node-agent-quiesce"
)

// A NodePatch is a change of the daemon's own Node. The types of this package are the only ones.
// Each type has its own field manager or format, so two types never undo each other's change.
type NodePatch interface {
	// encode returns the request for a change of this Node.
	encode(base Node) nodeRequest
}

// A nodeRequest is the request for a NodePatch.
type nodeRequest struct {
	what        string // purpose, for errors
	subresource string // for example /status; empty for the Node itself
	contentType string
	query       url.Values
	body        any // encoded as JSON
}

// PatchNode changes the daemon's own Node, and returns the updated Node. base is the newest known
// Node. The Node must still have the UID and the version of base; an empty version is not checked.
// IsStale reports whether another program was faster.
func (c *Client) PatchNode(ctx context.Context, base Node, patch NodePatch) (Node, error) {
	base.Name = c.node
	p := patch.encode(base)
	body, err := json.Marshal(p.body)
	if err != nil {
		return Node{}, fmt.Errorf("encode a patch of the node: %w", err)
	}
	restores := c.latestNode().restores
	answer, err := c.send(ctx, request{
		verb: http.MethodPatch, path: nodesPath + "/" + c.node + p.subresource, contentType: p.contentType,
		query: p.query, body: body,
	})
	if conflict := labelConflict(err); conflict != nil {
		return Node{}, conflict
	}
	if err != nil {
		return Node{}, fmt.Errorf("%s: %w", p.what, err)
	}
	return c.readNode(answer, restores)
}

// readNode records and returns the Node in a response. restores is the number of restores known
// when the request was sent.
func (c *Client) readNode(text []byte, restores int) (Node, error) {
	var n nodeObject
	if err := json.Unmarshal(text, &n); err != nil {
		return Node{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	written := n.node()
	written.restores = restores
	return c.recordNode(written), nil
}

// applyRequest returns the request for a server-side apply of metadata to a Node. Without force,
// the API server changes nothing if another program owns one of the fields with another value.
func applyRequest(what, manager string, base Node, fields metadata, force bool) nodeRequest {
	fields.Name, fields.UID, fields.ResourceVersion = base.Name, base.UID, base.ResourceVersion
	return nodeRequest{
		what: what, contentType: applyPatch,
		query: url.Values{"fieldManager": {manager}, "force": {strconv.FormatBool(force)}},
		body:  map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": fields},
	}
}

// A LabelsPatch sets the labels that describe the GPUs, and removes labels of an earlier
// LabelsPatch. If another program owns a label with another value, the error is a *Conflict, and
// nothing changes.
type LabelsPatch map[string]string

func (p LabelsPatch) encode(base Node) nodeRequest {
	return applyRequest("write the labels of the node", labelsManager, base, metadata{Labels: p}, false)
}

// A Conflict is the error for labels that other programs own.
type Conflict struct {
	// Labels has the API server's message about the owner, by the key of the label.
	Labels map[string]string
}

func (c *Conflict) Error() string {
	return fmt.Sprintf("labels of the node belong to other programs: %d", len(c.Labels))
}

// labelConflict returns the Conflict in the error of a request; nil if there is none.
func labelConflict(err error) error {
	status := statusOf(err)
	if status == nil || status.Details == nil {
		return nil
	}
	conflict := &Conflict{Labels: map[string]string{}}
	for _, f := range status.Details.Causes {
		key, isLabel := strings.CutPrefix(f.Field, ".metadata.labels.")
		if isLabel && f.Type == metav1.CauseTypeFieldManagerConflict {
			conflict.Labels[key] = f.Message
		}
	}
	if len(conflict.Labels) == 0 {
		return nil
	}
	return conflict
}

// A MIGStatePatch sets the labels and annotations about the MIG layout, and removes those of an
// earlier MIGStatePatch. Values of other programs are replaced.
type MIGStatePatch struct{ Labels, Annotations map[string]string }

func (p MIGStatePatch) encode(base Node) nodeRequest {
	return applyRequest("write the state of the MIG layout", migManager, base,
		metadata{Labels: p.Labels, Annotations: p.Annotations}, true)
}

// A ReleaseAnswerPatch sets the annotations that answer a request to release the driver, and
// removes those of an earlier ReleaseAnswerPatch. Values of other programs are replaced.
type ReleaseAnswerPatch map[string]string

func (p ReleaseAnswerPatch) encode(base Node) nodeRequest {
	return applyRequest("write the answer to a release of the driver", answerManager, base, metadata{Annotations: p},
		true)
}

// A LabelSwap changes labels from one value to another, all or none. If a label has another value
// than From, the error is IsInvalid. The version of the Node does not matter.
type LabelSwap struct {
	Keys     []string
	From, To string
}

func (p LabelSwap) encode(base Node) nodeRequest {
	type step struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value string `json:"value"`
	}
	steps := []step{{"test", "/metadata/uid", base.UID}}
	for _, k := range slices.Sorted(slices.Values(p.Keys)) {
		path := "/metadata/labels/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(k)
		steps = append(steps, step{"test", path, p.From}, step{"replace", path, p.To})
	}
	return nodeRequest{
		what: fmt.Sprintf("change labels of the node from %s to %s", p.From, p.To), contentType: jsonPatch, body: steps,
	}
}

// A ConditionPatch sets one condition of the Node. The rest of the status stays unchanged. Times
// have a resolution of one second.
type ConditionPatch Condition

func (p ConditionPatch) encode(base Node) nodeRequest {
	p.LastHeartbeatTime = p.LastHeartbeatTime.UTC().Truncate(time.Second)
	p.LastTransitionTime = p.LastTransitionTime.UTC().Truncate(time.Second)
	var body struct {
		Metadata versioned `json:"metadata"`
		Status   struct {
			Conditions []Condition `json:"conditions"` // merged by type
		} `json:"status"`
	}
	body.Metadata.ResourceVersion = base.ResourceVersion
	body.Status.Conditions = []Condition{Condition(p)}
	return nodeRequest{
		what: "write the condition of the node", subresource: "/status", contentType: strategicMergePatch, body: body,
	}
}

// A TaintPatch adds a taint to the Node, or removes it. Other taints stay unchanged.
type TaintPatch struct {
	Taint OwnTaint
	// Wanted is true to add the taint, at the time Now.
	Wanted bool
	Now    time.Time
}

func (p TaintPatch) encode(base Node) nodeRequest {
	taints := slices.DeleteFunc(slices.Clone(base.Taints), p.Taint.matches)
	if p.Wanted {
		taints = append(taints, Taint{Key: p.Taint.key, Effect: p.Taint.effect,
			TimeAdded: p.Now.UTC().Truncate(time.Second)})
	}
	var body struct {
		Metadata versioned `json:"metadata"`
		Spec     struct {
			Taints []Taint `json:"taints"` // replaces the list
		} `json:"spec"`
	}
	body.Metadata.ResourceVersion, body.Spec.Taints = base.ResourceVersion, taints
	return nodeRequest{what: "change the taints of the node", contentType: mergePatch, body: body}
}

// versioned is the metadata of a patch that requires a version of the object.
type versioned struct {
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

// A conditionRemoval removes the condition of a type from the Node.
type conditionRemoval string

func (p conditionRemoval) encode(Node) nodeRequest {
	type deletion struct {
		Patch string `json:"$patch"`
		Type  string `json:"type"`
	}
	var body struct {
		Status struct {
			Conditions []deletion `json:"conditions"`
		} `json:"status"`
	}
	body.Status.Conditions = []deletion{{"delete", string(p)}}
	return nodeRequest{
		what: "remove the condition of the node", subresource: "/status", contentType: strategicMergePatch, body: body,
	}
}

// After reports whether n is a later version of the same Node than other. It reports false if the
// cluster was restored from a backup between the two.
func (n Node) After(other Node) bool {
	return n.UID == other.UID && n.restores == other.restores && isBefore(other.ResourceVersion, n.ResourceVersion)
}

// isBefore reports whether version is earlier than other. It reports false if one of them is not a
// number.
func isBefore(version, other string) bool {
	earlier, err := strconv.ParseUint(version, 10, 64)
	later, otherErr := strconv.ParseUint(other, 10, 64)
	return err == nil && otherErr == nil && earlier < later
}
