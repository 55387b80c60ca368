package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// An OwnTaint is a taint of a Node that this program writes. SetTaint takes nothing else, so OwnTaints has all of them.
type OwnTaint struct{ key string }

// The taints of this program. Their effect is NoSchedule.
var (
	// NoHealthyGPU is on a Node while none of its GPUs is healthy.
	NoHealthyGPU = OwnTaint{"gpu-device-plugin.github.io/no-healthy-gpu"}
	// FewerDevices is on a Node while a change of the configuration takes devices away.
	FewerDevices = OwnTaint{"gpu-device-plugin.github.io/fewer-devices"}
)

const ownEffect = "NoSchedule"

// OwnTaints returns every taint that this program writes. Whatever runs this program must tolerate all of them: a taint stays on
// the Node when its writer is uninstalled, and would keep the next one away.
func OwnTaints() []OwnTaint { return []OwnTaint{NoHealthyGPU, FewerDevices} }

// String returns the key of the taint.
func (o OwnTaint) String() string { return o.key }

// IsOn reports whether a Node has the taint.
func (o OwnTaint) IsOn(n Node) bool { return slices.ContainsFunc(n.Taints, o.is) }

func (o OwnTaint) is(t Taint) bool { return t.Key == o.key && t.Effect == ownEffect }

// taintTries is how often a change of a taint is made anew because another writer was faster; kubelet writes often, and so do we.
const taintTries = 4

// SetTaint adds a taint to the own node, or removes it. The other taints stay as they are: the request
// names the version of the node that it was made for, and is made anew a few times if another writer was faster. Nothing is written if
// the node is as it is to be.
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
		ours, err := json.Marshal(Taint{Key: taint.key, Effect: ownEffect, TimeAdded: now.UTC().Truncate(time.Second)})
		if err != nil {
			return fmt.Errorf("encode a taint: %w", err)
		}
		others = append(others, ours)
	}
	node.Spec.Taints = others
	_, err = c.patchNode(ctx, "", mergePatch, node)
	return err
}
