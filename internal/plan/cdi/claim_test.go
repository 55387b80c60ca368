package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
)

// A claim's file has the devices that are known, by the claim's names for them, and is found again
// by its UID and note.
func TestSpecOfAClaim(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	given, err := h.writer.DeviceEdits(w.Snapshot, w.Edits, w.Options)
	if err != nil || !given.Has("GPU-a") || !given.Has("MIG-b0") || given.Has("GPU-z") {
		t.Fatalf("DeviceEdits() = %+v, %v", given, err)
	}
	if _, err := given.Claim("gpu.nvidia.com", "uid", map[string]cdi.ClaimedDevice{"gpu-9": {UUID: "GPU-z"}},
		nil); err == nil || !strings.Contains(err.Error(), "GPU-z") {
		t.Errorf("a claim of an unknown device: %v", err)
	}
	devices := map[string]cdi.ClaimedDevice{"gpu-0": {UUID: "GPU-a"},
		"gpu-1": {UUID: "MIG-b0", MPS: "x", Env: []string{"A=B"}}}
	text, err := given.Claim("gpu.nvidia.com", "uid", devices, []byte("note"))
	if err != nil {
		t.Fatal(err)
	}
	files := cdi.ClaimSpecs{Dir: h.specs, Driver: "gpu.nvidia.com"}
	there := func(when string, want ...cdi.ClaimFile) {
		t.Helper()
		if got, err := cdi.ClaimFiles(h.specs); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: the files of claims are %+v, %v, want %+v", when, got, err, want)
		}
	}
	there("a folder that is not there")
	for range 2 { // the first makes the folder
		if err := files.Write("uid", text); err != nil {
			t.Fatal(err)
		}
	}
	h.apply(t, w) // other specs are no claims
	spec0 := cdi.ClaimFile{Driver: "gpu.nvidia.com", UID: "uid", Path: files.File("uid")}
	there("beside other specs", spec0)
	if note := string(files.Note("uid")) + string(files.Note("other")); note != "note" {
		t.Errorf("note %q", note)
	}
	spec, err := cdilib.ReadSpec(files.File("uid"), 0)
	if err != nil {
		t.Fatal(err)
	}
	gpu, mig := spec.GetDevice("uid-gpu-0"), spec.GetDevice("uid-gpu-1")
	if gpu == nil || mig == nil || gpu.ContainerEdits.DeviceNodes[0].Path != "/dev/nvidia3" {
		t.Fatalf("devices %+v", spec.Devices)
	}
	if env := mig.ContainerEdits.Env; !slices.Contains(env, "A=B") ||
		!slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "CUDA_MPS_PIPE_DIRECTORY=") }) {
		t.Errorf("a client of MPS has the environment %q", env)
	}
	other := cdi.ClaimSpecs{Dir: h.specs, Driver: "gpu.example.com"} // a claim can have devices of two drivers
	text, err = given.Claim(other.Driver, "uid", map[string]cdi.ClaimedDevice{"gpu-0": {UUID: "MIG-b0"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Write("uid", text); err != nil {
		t.Fatal(err)
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(h.specs), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	mine, theirs := cache.GetDevice(other.Device("uid", "gpu-0")), cache.GetDevice(files.Device("uid", "gpu-0"))
	if mine == nil || theirs == nil || mine.GetSpec().GetPath() != other.File("uid") ||
		theirs.GetSpec().GetPath() != files.File("uid") {
		t.Errorf("the devices of a claim by two drivers: %v, %v", mine, theirs)
	}
	described := files.MetadataFile("uid", "request")
	for _, path := range []string{described, described + ".tmp", files.File("x") + "~",
		files.MetadataFile("", "request"),
		filepath.Join(h.specs, "k8s.a.yaml")} {
		if _, err := cdi.WriteMetadata(path, nil); err != nil {
			t.Fatal(err)
		}
	}
	there("with another driver's and with metadata", cdi.ClaimFile{Driver: "gpu.example.com", UID: "uid",
		Path: other.File("uid")},
		cdi.ClaimFile{Driver: "gpu.nvidia.com", UID: "uid", Path: described, Metadata: true}, spec0)
	file := filepath.Join(h.root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (cdi.ClaimSpecs{Dir: file, Driver: "gpu.nvidia.com"}).Write("uid", text); err == nil {
		t.Error("written into a file")
	}
	if found, err := cdi.ClaimFiles(filepath.Join(h.root, "a\x00b")); err == nil {
		t.Errorf("files of claims in a folder that cannot be read: %+v", found)
	}
}
