package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
)

// A claim's file has the devices that are known, by the claim's names for them, and is found again by its UID and note.
func TestSpecOfAClaim(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	given, err := h.writer.Given(w.Snapshot, w.Edits, w.Options)
	if err != nil || !given.Has("GPU-a") || !given.Has("MIG-b0") || given.Has("GPU-z") {
		t.Fatalf("Given() = %+v, %v", given, err)
	}
	if _, err := given.Claim("gpu.nvidia.com", "uid", map[string]cdi.ClaimedDevice{"gpu-9": {UUID: "GPU-z"}}, nil); err == nil || !strings.Contains(err.Error(), "GPU-z") {
		t.Errorf("a claim of an unknown device: %v", err)
	}
	devices := map[string]cdi.ClaimedDevice{"gpu-0": {UUID: "GPU-a"}, "gpu-1": {UUID: "MIG-b0", MPS: "x", Env: []string{"A=B"}}}
	text, err := given.Claim("gpu.nvidia.com", "uid", devices, []byte("note"))
	if err != nil {
		t.Fatal(err)
	}
	files := cdi.ClaimSpecs{Dir: h.specs, Driver: "gpu.nvidia.com"}
	if uids, err := files.Claims(); err != nil || len(uids) > 0 {
		t.Errorf("files of claims in a folder that is not there: %q, %v", uids, err)
	}
	for range 2 { // the first makes the folder
		if err := files.Write("uid", text); err != nil {
			t.Fatal(err)
		}
	}
	h.apply(t, w) // other specs are no claims
	if uids, err := files.Claims(); err != nil || !slices.Equal(uids, []string{"uid"}) {
		t.Errorf("files of the claims %q, %v", uids, err)
	}
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
	if env := mig.ContainerEdits.Env; !slices.Contains(env, "A=B") || !slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "CUDA_MPS_PIPE_DIRECTORY=") }) {
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
	if mine == nil || theirs == nil || mine.GetSpec().GetPath() != other.File("uid") || theirs.GetSpec().GetPath() != files.File("uid") {
		t.Errorf("the devices of a claim by two drivers: %v, %v", mine, theirs)
	}
	if uids, err := files.Claims(); err != nil || !slices.Equal(uids, []string{"uid"}) {
		t.Errorf("files of the claims of one of two drivers: %q, %v", uids, err)
	}
	file := filepath.Join(h.root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (cdi.ClaimSpecs{Dir: file, Driver: "gpu.nvidia.com"}).Write("uid", text); err == nil {
		t.Error("written into a file")
	}
	if uids, err := (cdi.ClaimSpecs{Dir: filepath.Join(h.root, "a\x00b"), Driver: "gpu.nvidia.com"}).Claims(); err == nil {
		t.Errorf("files of claims in a folder that cannot be read: %q", uids)
	}
}
