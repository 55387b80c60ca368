package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// An OwnTaint is a taint of a Node that this program writes or removes. SetTaint accepts no other
// type, so OwnTaints is complete.
type OwnTaint struct{ key, effect string }

// The taints of this program.
var (
	// NoHealthyGPU is on a Node while none of its GPUs is healthy.
	NoHealthyGPU = OwnTaint{"gpu-device-plugin.github.io/no-healthy-gpu", "NoSchedule"}
	// FewerDevices is on a Node while a change of the configuration removes devices.
	FewerDevices = OwnTaint{"gpu-device-plugin.github.io/fewer-devices", "NoSchedule"}
	// Startup is on a Node from its creation, with any effect, until its GPUs are allocatable. The
	// creator of the Node adds the taint; this program only removes it. To the cluster autoscaler, a
	// key with this prefix means that the Node is still starting.
	Startup = OwnTaint{"startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin", ""}
)

// OwnTaints returns every taint that this program writes or removes. The pods of this program must
// tolerate all of them: a taint stays on the Node when its writer is uninstalled, and would keep
// the next installation off the Node.
func OwnTaints() []OwnTaint { return []OwnTaint{NoHealthyGPU, FewerDevices, Startup} }

// String returns the key of the taint.
func (o OwnTaint) String() string { return o.key }

// IsOn reports whether a Node has the taint.
func (o OwnTaint) IsOn(n Node) bool { return slices.ContainsFunc(n.Taints, o.matches) }

func (o OwnTaint) matches(t Taint) bool {
	return t.Key == o.key && (o.effect == "" || t.Effect == o.effect)
}

// taintAttempts is how often a change of a taint is attempted if other writers change the Node; the
// kubelet and this program write often.
const taintAttempts = 4

// SetTaint adds a taint to the daemon's own Node, or removes it. Other taints stay unchanged: the
// request has the version of the Node, and is repeated a few times if another program changes the
// Node first. SetTaint writes nothing if the Node is already as wanted.
func (c *Client) SetTaint(ctx context.Context, taint OwnTaint, wanted bool, now time.Time) error {
	for attempt := 1; ; attempt++ {
		err := c.setTaint(ctx, taint, wanted, now)
		if attempt == taintAttempts || !IsCode(err, http.StatusConflict) {
			return err
		}
	}
}

func (c *Client) setTaint(ctx context.Context, taint OwnTaint, wanted bool, now time.Time) error {
	answer, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath + "/" + c.node})
	if err != nil {
		return err
	}
	var node struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Spec struct {
			Taints []json.RawMessage `json:"taints"` // with all fields, including those unknown to this program
		} `json:"spec"`
	}
	if err := json.Unmarshal(answer, &node); err != nil {
		return fmt.Errorf("read the answer of the API server: %w", err)
	}
	exists := false
	others := []json.RawMessage{}
	for _, raw := range node.Spec.Taints {
		var t Taint
		if err := json.Unmarshal(raw, &t); err != nil {
			return fmt.Errorf("read a taint of the node: %w", err)
		}
		if taint.matches(t) {
			exists = true
		} else {
			others = append(others, raw)
		}
	}
	if exists == wanted {
		return nil
	}
	if wanted {
		ours, err := json.Marshal(Taint{Key: taint.key, Effect: taint.effect, TimeAdded: now.UTC().Truncate(time.Second)})
		if err != nil {
			return fmt.Errorf("encode a taint: %w", err)
		}
		others = append(others, ours)
	}
	node.Spec.Taints = others
	_, err = c.patchNode(ctx, "", mergePatch, node)
	return err
}
