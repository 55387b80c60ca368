package kubeapi

import (
	"context"
	"net/http"
	"time"
)

// ApplyLabels applies a LabelsPatch to the Node with this UID and version.
func (c *Client) ApplyLabels(ctx context.Context, uid, version string, labels map[string]string) (Node, error) {
	return c.PatchNode(ctx, Node{UID: uid, ResourceVersion: version}, LabelsPatch(labels))
}

// ApplyMIGState applies a MIGStatePatch to the Node with this UID and version.
func (c *Client) ApplyMIGState(
	ctx context.Context, uid, version string, labels, annotations map[string]string,
) (Node, error) {
	return c.PatchNode(ctx, Node{UID: uid, ResourceVersion: version}, MIGStatePatch{labels, annotations})
}

// ApplyReleaseAnswer applies a ReleaseAnswerPatch to the Node with this UID and version.
func (c *Client) ApplyReleaseAnswer(
	ctx context.Context, uid, version string, annotations map[string]string,
) (Node, error) {
	return c.PatchNode(ctx, Node{UID: uid, ResourceVersion: version}, ReleaseAnswerPatch(annotations))
}

// SwapLabels applies a LabelSwap to the Node with this UID.
func (c *Client) SwapLabels(ctx context.Context, uid string, keys []string, from, to string) (Node, error) {
	return c.PatchNode(ctx, Node{UID: uid}, LabelSwap{keys, from, to})
}

// PatchCondition applies a ConditionPatch to the Node with this version.
func (c *Client) PatchCondition(ctx context.Context, version string, condition Condition) (Node, error) {
	return c.PatchNode(ctx, Node{ResourceVersion: version}, ConditionPatch(condition))
}

// taintAttempts is how often a change of a taint is attempted if other writers change the Node; the
// kubelet and this program write often.
const taintAttempts = 4

// SetTaint adds a taint to the daemon's own Node, or removes it. It writes nothing if the Node is
// already as wanted.
func (c *Client) SetTaint(ctx context.Context, taint OwnTaint, wanted bool, now time.Time) error {
	for attempt := 1; ; attempt++ {
		node, err := c.Get(ctx)
		if err == nil && taint.IsOn(node) != wanted {
			_, err = c.PatchNode(ctx, node, TaintPatch{taint, wanted, now})
		}
		if attempt == taintAttempts || !IsCode(err, http.StatusConflict) {
			return err
		}
	}
}
