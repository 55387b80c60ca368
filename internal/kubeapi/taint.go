package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// taintTries is how often a change of a taint is made anew because another writer was faster; kubelet writes often, and so do we.
const taintTries = 4

// SetTaint adds a taint to the own node, or removes it. A taint is known by its key and effect. The others stay as they are: the request
// names the version of the node that it was made for, and is made anew a few times if another writer was faster. Nothing is written if
// the node is as it is to be.
func (c *Client) SetTaint(ctx context.Context, key, effect string, wanted bool, now time.Time) error {
	for try := 1; ; try++ {
		err := c.setTaint(ctx, key, effect, wanted, now)
		if try == taintTries || !IsCode(err, http.StatusConflict) {
			return err
		}
	}
}

func (c *Client) setTaint(ctx context.Context, key, effect string, wanted bool, now time.Time) error {
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
		if t.Key == key && t.Effect == effect {
			there = true
		} else {
			others = append(others, raw)
		}
	}
	if there == wanted {
		return nil
	}
	if wanted {
		ours, err := json.Marshal(Taint{Key: key, Effect: effect, TimeAdded: now.UTC().Truncate(time.Second)})
		if err != nil {
			return fmt.Errorf("encode a taint: %w", err)
		}
		others = append(others, ours)
	}
	node.Spec.Taints = others
	_, err = c.patchNode(ctx, "", mergePatch, node)
	return err
}
