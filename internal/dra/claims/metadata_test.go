package claims_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// withMetadata says whether containers get metadata files.
func (r *rig) withMetadata(wanted bool) {
	c := r.configs.Value()
	c.DRA.Metadata = wanted
	r.configs.Publish(c)
}

// metadata returns the names of the metadata files.
func (r *rig) metadata() (all []string) {
	for _, name := range files(r.tb, r.options.CDIDir) {
		if strings.HasSuffix(name, ".metadata") {
			all = append(all, name)
		}
	}
	return all
}

// seen returns what containers with CDI devices find, by the path in the container.
func (r *rig) seen(uid string) map[string]string {
	r.tb.Helper()
	all := map[string]string{}
	for _, d := range r.spec(uid).Devices {
		for _, m := range d.ContainerEdits.Mounts {
			if !strings.HasPrefix(m.ContainerPath, "/var/run/kubernetes.io/") {
				continue
			}
			text, err := os.ReadFile(m.HostPath)
			if err != nil {
				r.tb.Fatal(err)
			}
			if info, err := os.Stat(m.HostPath); err != nil || info.Mode() != 0o644 || !slices.Contains(m.Options, "ro") {
				r.tb.Errorf("%s has the mode %v and the options %v", m.HostPath, info, m.Options)
			}
			all[m.ContainerPath] = string(text)
		}
	}
	return all
}

// TestMetadata: containers of a claim find for each request which devices they have, where the
// configuration wants that. What is there stays the same over changes of the configuration and
// restarts, comes back where it was lost, and goes with the claim.
func TestMetadata(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withMetadata(true)
	c, stop := r.start()
	wanted := claim("uid-1", gpuA, migB0, migB1)
	wanted.PodClaim = "gpus"
	wanted.Results[1].Request, wanted.Results[2].Request = "parts/small", "parts/small"
	r.prepare(c, wanted)
	const folder = "/var/run/kubernetes.io/dra-device-attributes/"
	const whole, parts = folder + "resourceclaimtemplates/gpus/gpu/gpu.nvidia.com-metadata.json", folder +
		"resourceclaimtemplates/gpus/parts/gpu.nvidia.com-metadata.json"
	before := r.seen("uid-1")
	if paths := slices.Sorted(maps.Keys(before)); !slices.Equal(paths, []string{whole, parts}) {
		t.Fatalf("containers find %v", paths)
	}
	of := decoded(t, before[parts])
	if of.Requests[0].Name != "parts/small" || len(of.Requests[0].Devices) != 2 {
		t.Fatalf("%+v", of)
	}
	if a := of.Requests[0].Devices[0].Attributes; a["uuid"].Value != "MIG-b0" || a["parentUUID"].Value != "GPU-b" ||
		a[dra.Domain+"/gpuInstance"].Value != "1" || a["profile"].Value != "3g.40gb" {
		t.Errorf("the MIG device has %v", a)
	}
	r.prepare(c, claim("uid-2", gpuC))
	if _, direct := r.seen("uid-2")[folder+"resourceclaims/claim-uid-2/gpu/gpu.nvidia.com-metadata.json"]; !direct {
		t.Errorf("containers of a claim without template find %v", r.seen("uid-2"))
	}

	r.withMetadata(false)
	stop()
	if err := os.RemoveAll(r.options.CDIDir); err != nil {
		t.Fatal(err)
	}
	c, stop = r.start()
	r.prepare(c, wanted)
	if now := r.seen("uid-1"); !maps.Equal(now, before) {
		t.Errorf("after a restart containers find %v, not %v", now, before)
	}
	r.unprepare(c, "uid-2")
	r.prepare(c, claim("uid-3", gpuC))
	if now := r.seen("uid-3"); len(now) > 0 {
		t.Errorf("without the setting containers find %v", now)
	}
	r.unprepare(c, "uid-1")
	if left := r.metadata(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	stop()
	left := filepath.Join(r.options.CDIDir, "k8s.gpu.nvidia.com-claim_uid-1.gpu.metadata")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.start()
	poll.Until(t, "the file of a claim that is gone is removed", func() bool { return len(r.metadata()) == 0 })
}

// TestMetadataOfShares: what a claim has of a device by MPS is in the file; names that are no
// labels become part of no path.
func TestMetadataOfShares(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withMetadata(true)
	r.pools.Publish(r.pools.Value().Shared(4))
	c, _ := r.start()
	share := partByMPS("uid-1", 20)
	share.PodClaim = "../../../etc"
	r.prepare(c, share)
	for path, text := range r.seen("uid-1") {
		if !strings.HasPrefix(path, "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim-uid-1/") {
			t.Errorf("the file is at %s", path)
		}
		a := decoded(t, text).Requests[0].Devices[0].Attributes
		if a[dra.Domain+"/memory"].Value != "21474836480" || a[dra.Domain+"/memoryIsLimit"] != (dra.Attribute{Type: dra.Bool,
			Value: "true"}) {
			t.Errorf("it says %v", a)
		}
	}
	odd := claim("uid-2", gpuC)
	odd.Results[0].Request = "../x"
	r.prepare(c, odd)
	if now := r.seen("uid-2"); len(now) > 0 {
		t.Errorf("a request that is no label has %v", now)
	}
	long := claim("uid-3", gpuA)
	long.PodClaim = strings.Repeat("a", 64) // the API server takes 256 KiB
	r.unprepare(c, "uid-1")
	r.prepare(c, long)
	const direct = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim-uid-3/gpu/gpu.nvidia.com-metadata.json"
	if now := r.seen("uid-3"); now[direct] == "" {
		t.Errorf("with a name that is too long for a label containers find %v", slices.Sorted(maps.Keys(now)))
	}
}

type metadata struct {
	APIVersion string
	Requests   []struct {
		Name    string
		Devices []struct {
			Name       string
			Attributes map[string]dra.Attribute
		}
	}
}

// decoded returns the first object of a metadata file, of two that differ in their version alone.
func decoded(t *testing.T, text string) (first metadata) {
	t.Helper()
	newer, older, two := strings.Cut(strings.TrimSuffix(text, "\n"), "\n")
	if !two || strings.Replace(newer, "/v1beta1", "/v1alpha1", 1) != older {
		t.Fatalf("the file has %q", text)
	}
	if err := json.Unmarshal([]byte(newer), &first); err != nil {
		t.Fatal(err)
	}
	return first
}
