package cli_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// modeLibrary is an NVML with one GPU. The variable MODE_ANSWER is the error code for changes of
// its MIG mode: 0 for success, negative for an error of the activation. The library adds a line to
// the file MODE_FILE for each change of the mode.
const modeLibrary = `
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int gpu;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int ret) { (void)ret; return "an error"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "535.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { (void)i; *d = &gpu; return 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { (void)d; snprintf(s, n, "GPU-a"); return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, void *pci) { (void)d; (void)pci; return 0; }
int nvmlDeviceGetMinorNumber(void *d, unsigned *n) { (void)d; *n = 0; return 0; }
int nvmlDeviceGetArchitecture(void *d, unsigned *a) { (void)d; *a = 7; return 0; }
int nvmlDeviceSetMigMode(void *d, unsigned mode, int *activation) {
	(void)d;
	FILE *f = fopen(getenv("MODE_FILE"), "a");
	if (!f) return 999;
	fprintf(f, "%u\n", mode);
	fclose(f);
	int answer = atoi(getenv("MODE_ANSWER"));
	*activation = answer < 0 ? -answer : 0;
	return answer > 0 ? answer : 0;
}
`

// TestMIGModeInASeparateProcess: the daemon starts this program again, which loads the driver's
// library, sets the mode and ends. The driver's reason for a refusal reaches the daemon.
func TestMIGModeInASeparateProcess(t *testing.T) { // not parallel: the process inherits the environment
	root := t.TempDir()
	source, folder := filepath.Join(root, "nvml.c"), filepath.Join(root, "usr/lib64")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(source, []byte(modeLibrary), 0o600); err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(folder, "libnvidia-ml.so.1")
	if out, err := exec.CommandContext(t.Context(), "gcc", "-shared", "-fPIC", "-o", library,
		source).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	t.Setenv("GPU_DEVICE_PLUGIN_TEST_PROGRAM", "1") // see TestMain
	t.Setenv("GOCOVERDIR", t.TempDir())
	asked := filepath.Join(root, "asked")
	t.Setenv("MODE_FILE", asked)
	const noPermission, notSupported, inUse, resetRequired = 4, 3, 19, 16
	m := &daemon.MIGModes{Configs: feed.New(config.Config{}), DriverRoot: root}
	for _, tt := range []struct {
		answer int
		mode   inventory.MIGMode
		want   error
	}{
		{0, inventory.MIGEnabled, nil}, {0, inventory.MIGDisabled, nil},
		{noPermission, inventory.MIGEnabled, inventory.ErrNoPermission}, {notSupported, inventory.MIGEnabled,
			inventory.ErrNotSupported},
		{inUse, inventory.MIGEnabled, inventory.ErrOpenElsewhere}, {-resetRequired, inventory.MIGEnabled,
			inventory.ErrResetRequired},
	} {
		t.Setenv("MODE_ANSWER", strconv.Itoa(tt.answer))
		if err := m.Set(t.Context(), "GPU-a", tt.mode); !errors.Is(err, tt.want) {
			t.Errorf("the driver answers %d: %v, want %v", tt.answer, err, tt.want)
		}
	}
	if err := m.Set(t.Context(), "GPU-b", inventory.MIGEnabled); err == nil {
		t.Error("there is no such GPU")
	}
	text, err := os.ReadFile(asked)
	if diff := cmp.Diff("1\n0\n1\n1\n1\n1\n", string(text)); diff != "" || err != nil {
		t.Errorf("modes that the driver was asked for: %v (-want +got):\n%s", err, diff)
	}
}
