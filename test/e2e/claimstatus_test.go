package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// tellsDevices: the status of a claim at the API server, and a file in the container of its pod,
// which Kubernetes' own reader takes, say which GPU the claim has, and that it has a limit.
func tellsDevices(ctx context.Context, t *testing.T, n *node.Node, claim, pod, uuid string) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		object, err := n.Client.ResourceV1().ResourceClaims(corev1.NamespaceDefault).Get(ctx, claim, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(object.Status.Devices) != 1 {
			return fmt.Errorf("the status says %+v", object.Status.Devices)
		}
		d := object.Status.Devices[0]
		if d.Driver != "gpu.nvidia.com" || d.Pool != node.Name || d.Data == nil ||
			!strings.Contains(string(d.Data.Raw), uuid) ||
			!meta.IsStatusConditionTrue(d.Conditions, "Ready") || !meta.IsStatusConditionTrue(d.Conditions, "Healthy") {
			return fmt.Errorf("the status says %+v, want GPU %s ready and healthy", d, uuid)
		}
		return nil
	})
	const folder = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/"
	text := shell(ctx, t, n, pod, "cat "+folder+claim+"/gpu/gpu.nvidia.com-metadata.json")
	var told metadata.DeviceMetadata
	var invalid error
	err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(strings.NewReader(text)), &told,
		devicemetadata.DecodeMetadataWithValidationResult(&invalid))
	if err = errors.Join(err, invalid); err != nil || len(told.Requests) != 1 || len(told.Requests[0].Devices) != 1 {
		t.Errorf("the container is told %s: %v", text, err)
		return
	}
	has := told.Requests[0].Devices[0].Attributes
	if got := has["uuid"].StringValue; got == nil || *got != uuid ||
		has["gpu-device-plugin.github.io/memory"].IntValue == nil {
		t.Errorf("the container is told %s, want GPU %s with a limit", text, uuid)
	}
	writesOwnStatusOnly(ctx, t, n, claim)
	if *long { // the daemon looks once a minute
		wait(ctx, t, func(ctx context.Context) error {
			out := daemonExec(ctx, t, n, "status", "-o", "json")
			if !strings.Contains(out, `"same":2`) && !strings.Contains(out, `"same": 2`) || strings.Contains(out, `"differ"`) {
				return fmt.Errorf("the two pods are not seen to have what their claim has: %s", out)
			}
			return nil
		})
	}
}

// writesOwnStatusOnly: the daemon's account may neither say anything of devices of another driver
// or node, nor change which pods have a claim.
func writesOwnStatusOnly(ctx context.Context, t *testing.T, n *node.Node, claim string) {
	t.Helper()
	bound := clientWith(t, kubectl(ctx, t, n, "--namespace", namespace, "create", "token", "gpu-device-plugin",
		"--bound-object-kind", "Pod", "--bound-object-name", theDaemonPod(ctx, t, n).Name))
	claims := bound.ResourceV1().ResourceClaims(corev1.NamespaceDefault)
	now, err := claims.Get(ctx, claim, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*resourceapi.ResourceClaimStatus){
		"what is there":      func(*resourceapi.ResourceClaimStatus) {},
		"nothing":            func(s *resourceapi.ResourceClaimStatus) { s.Devices = nil },
		"of another driver":  func(s *resourceapi.ResourceClaimStatus) { s.Devices[0].Driver = "example.com" },
		"of another pool":    func(s *resourceapi.ResourceClaimStatus) { s.Devices[0].Pool = "other" },
		"other pods":         func(s *resourceapi.ResourceClaimStatus) { s.ReservedFor = nil },
		"another allocation": func(s *resourceapi.ResourceClaimStatus) { s.Allocation = nil },
	} {
		object := now.DeepCopy()
		change(&object.Status)
		_, err := claims.UpdateStatus(ctx, object, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if allowed := name == "nothing" || name == "what is there"; (err == nil) != allowed {
			t.Errorf("the account writes %s: %v", name, err)
		}
	}
	label := []byte(`{"metadata": {"labels": {"a": "b"}}}`)
	if _, err := claims.Patch(ctx, claim, types.MergePatchType, label, metav1.PatchOptions{}); err == nil {
		t.Error("the account may change claims")
	}
	object := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: claim}}
	if _, err := claims.Update(ctx, object, metav1.UpdateOptions{}); err == nil {
		t.Error("the account may replace claims")
	}
}

// uuidOfNode returns the UUID of the simulated GPU with a device node.
func uuidOfNode(all []simulated, name string) string {
	i := slices.IndexFunc(all, func(g simulated) bool { return filepath.Base(g.node()) == name })
	if i < 0 {
		return "none"
	}
	return all[i].UUID
}

// noMetadata asks whether no file is left that told containers of claims which devices they have.
func noMetadata() error {
	left, err := filepath.Glob("/var/run/cdi/*.metadata")
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%v are left", left)
	}
	return err
}
