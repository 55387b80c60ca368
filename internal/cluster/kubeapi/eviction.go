package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

// Evict asks the API server to evict a pod, within its disruption budgets. If the pod must not end
// now, IsBusy reports true for the error. Evict returns nil if the pod is gone, or if
// another pod has its name now. Without a UID, it evicts any pod with the name. Evict does not wait
// for the pod to end.
func (c *Client) Evict(ctx context.Context, pod Pod) error {
	eviction := map[string]any{
		"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata": map[string]string{"name": pod.Name, "namespace": pod.Namespace},
	}
	if pod.UID != "" {
		eviction["deleteOptions"] = map[string]any{"preconditions": map[string]string{"uid": pod.UID}}
	}
	body, err := json.Marshal(eviction)
	if err != nil {
		return fmt.Errorf("encode an eviction: %w", err)
	}
	path := "/api/v1/namespaces/" + pod.Namespace + "/pods/" + pod.Name + "/eviction"
	_, err = c.send(ctx, request{verb: http.MethodPost, path: path, contentType: "application/json", body: body})
	if err == nil || IsCode(err, http.StatusNotFound) || IsCode(err, http.StatusConflict) {
		return nil
	}
	return fmt.Errorf("evict pod %s/%s: %w", pod.Namespace, pod.Name, err)
}
