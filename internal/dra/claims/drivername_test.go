package claims_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const otherName = "gpu.example.com"

// TestPreparedUnderAnotherName: records, CDI specs and CDI devices have the name of the driver, and
// tell a later process under which name claims are prepared, also where the records are lost.
func TestPreparedUnderAnotherName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.DriverName = otherName
	c, stop := r.start()
	prepared, err := ask(t.Context(), c, claim("uid-1", "gpu-0"))
	if err != nil {
		t.Fatal(err)
	}
	if got := prepared[0].CDIDeviceIDs[0]; got != "k8s.gpu.example.com/claim=uid-1-gpu-0" || r.nodes(got) == "" {
		t.Errorf("the CDI device %s has %q", got, r.nodes(got))
	}
	stop()
	want := map[string][]string{otherName: {"default/claim-uid-1"}}
	for _, lost := range []bool{false, true} {
		if lost {
			if err := os.RemoveAll(filepath.Join(r.options.StateDir, "claims")); err != nil {
				t.Fatal(err)
			}
		}
		drivers, err := claims.Drivers(r.options.StateDir, r.options.CDIDir, "gpu.nvidia.com")
		if diff := cmp.Diff(want, drivers); diff != "" || err != nil {
			t.Errorf("%v, with lost records %v (-want +got):\n%s", err, lost, diff)
		}
	}
	c, stop = r.start() // the name is kept
	defer stop()
	r.unprepare(c, "uid-1")
	if drivers, err := claims.Drivers(r.options.StateDir, r.options.CDIDir, "gpu.nvidia.com"); err != nil ||
		len(drivers) > 0 {
		t.Errorf("when the claim was given back: %v, %v", drivers, err)
	}
}

// TestRecordsOfAnotherName: a process that begins to lead under another name than the claims that
// are prepared ends, as kubelet can end their pods only by the driver of that name. Where there are
// claims of both names it serves those of its own.
func TestRecordsOfAnotherName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	r.prepare(c, claim("uid-1", "gpu-0"))
	stop()
	r.options.DriverName = otherName
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := claims.New(r.options).Run(ctx); !errors.Is(err, dra.ErrOtherName) ||
		!strings.Contains(err.Error(), "gpu.nvidia.com: default/claim-uid-1") {
		t.Errorf("with a claim of another name: %v", err)
	}
	if r.record("uid-1") == "" || r.nodes("k8s.gpu.nvidia.com/claim=uid-1-gpu-0") == "" {
		t.Error("the claim has no record or no spec any more")
	}
	beside := newRig(t)
	beside.options.DriverName = otherName
	c, stop = beside.start()
	beside.prepare(c, claim("uid-2", "gpu-2"))
	stop()
	if err := os.Rename(filepath.Join(beside.options.StateDir, "claims", "uid-2.json"),
		filepath.Join(r.options.StateDir, "claims", "uid-2.json")); err != nil {
		t.Fatal(err)
	}
	c, _ = r.start()
	if r.nodes("k8s.gpu.nvidia.com/claim=uid-1-gpu-0") == "" || r.nodes("k8s.gpu.example.com/claim=uid-2-gpu-2") == "" {
		t.Error("a claim has no spec under its own name")
	}
	r.unprepare(c, "uid-2")
	r.unprepare(c, "uid-1")
	if left := files(t, r.options.CDIDir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

// TestBesideNVIDIAsName: under another name nothing is taken over from NVIDIA's driver, and as long
// as that runs or has claims, no claim gets a GPU. What is prepared stays so, and is given back.
func TestBesideNVIDIAsName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.DriverName = otherName
	r.checkpoint(nvidia)
	kubelet := t.TempDir()
	r.options.Checkpoint = filepath.Join(kubelet, "plugins", "gpu.nvidia.com", "checkpoint.json")
	registry := filepath.Join(kubelet, "plugins_registry")
	for _, folder := range []string{filepath.Dir(r.options.Checkpoint), registry} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	c, stop := r.start()
	defer stop()
	r.prepare(c, claim("uid-1", "gpu-0"))
	refused := func(why, want string) {
		t.Helper()
		if _, err := ask(t.Context(), c, claim("uid-2", "gpu-2")); err == nil || !strings.Contains(err.Error(), want) ||
			c.CompetingDriver(t.Context()) != err.Error() {
			t.Errorf("%s: %v; rival %q", why, err, c.CompetingDriver(t.Context()))
		}
		r.prepare(c, claim("uid-1", "gpu-0"))
	}
	socket := filepath.Join(registry, "gpu.nvidia.com-reg.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	refused("while NVIDIA's driver runs", "it listens at "+socket+"; remove that driver from the node")
	_ = l.Close()
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(r.options.Checkpoint, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(nvidia)
	refused("with claims of NVIDIA's driver", "NVIDIA's driver has prepared claims on this node: ns/five, ns/four, ns/one; delete their pods")
	write("garbage")
	refused("with an unreadable checkpoint", "remove the file when no pod has such a claim")
	for why, text := range map[string]string{
		"with claims from before the node was restarted": strings.Replace(nvidia, `"nodeBootID":"one"`, `"nodeBootID":"zero"`,
			1),
		"without claims": `{"v2":{"preparedClaims":{},"nodeBootID":"one"}}`,
	} {
		write(text)
		if _, err := ask(t.Context(), c, claim("uid-2", "gpu-2")); err != nil {
			t.Errorf("%s: %v", why, err)
		}
		r.unprepare(c, "uid-2")
	}
	r.unprepare(c, "uid-1")
	if got := adopted(c); got != "" {
		t.Errorf("taken over: %s", got)
	}
}
