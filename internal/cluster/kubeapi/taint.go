package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// An OwnTaint is a taint of a Node that this program writes or removes. SetTaint takes nothing
// else, so OwnTaints has all of them.
type OwnTaint struct{ key, effect string }

// The taints of this program.
var (
	// NoHealthyGPU is on a Node while none of its GPUs is healthy.
	NoHealthyGPU = OwnTaint{"gpu-device-plugin.github.io/no-healthy-gpu", "NoSchedule"}
	// FewerDevices is on a Node while a change of the configuration takes devices away.
	FewerDevices = OwnTaint{"gpu-device-plugin.github.io/fewer-devices", "NoSchedule"}
	// Startup is on a Node from its first moment, with any effect, until its GPUs are allocatable.
	// Whoever makes the Node adds the taint; this program only removes it. The cluster autoscaler
	// takes a key with this prefix for a sign that the Node is still starting.
	Startup = OwnTaint{"startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin", ""}
)

// OwnTaints returns every taint that this program writes or removes. Whatever runs this program
// must tolerate all of them: a taint stays on the Node when its writer is uninstalled, and would
// keep the next one away.
func OwnTaints() []OwnTaint { return []OwnTaint{NoHealthyGPU, FewerDevices, Startup} }

// String returns the key of the taint.
func (o OwnTaint) String() string { return o.key }

// IsOn reports whether a Node has the taint.
func (o OwnTaint) IsOn(n Node) bool { return slices.ContainsFunc(n.Taints, o.is) }

func (o OwnTaint) is(t Taint) bool { return t.Key == o.key && (o.effect == "" || t.Effect == o.effect) }

// taintTries is how often a change of a taint is made anew because another writer was faster;
// kubelet writes often, and so do we.
const taintTries = 4

// SetTaint adds a taint to the own node, or removes it. The other taints stay as they are: the
// request names the version of the node that it was made for, and is made anew a few times if
// another writer was faster. Nothing is written if the node is as it is to be.
func (c *Client) SetTaint(ctx context.Context, taint OwnTaint, wanted bool, now time.Time) error {
	for try := 1; ; try++ {
		err := c.setTaint(ctx, taint, wanted, now)
		if try == taintTries || !IsCode(err, http.StatusConflict) {
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
			Taints []json.RawMessage `json:"taints"` // with all their fields, also those that this program does not know
		} `json:"spec"`
	}
	if err := json.Unmarshal(answer, &node); err != nil {
		return fmt.Errorf("read the answer of the API server: %w", err)
	}
	there := false
	others := []json.RawMessage{}
	for _, raw := range node.Spec.Taints {
		var t Taint
		if err := json.Unmarshal(raw, &t); err != nil {
			return fmt.Errorf("read a taint of the node: %w", err)
		}
		if taint.is(t) {
			there = true
		} else {
			others = append(others, raw)
		}
	}
	if there == wanted {
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
