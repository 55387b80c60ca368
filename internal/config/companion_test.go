package config_test

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
)

// TestCompanionsOfTheFile: the keys of the file are truth values, as in NVIDIA's, or auto.
func TestCompanionsOfTheFile(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]containeredits.Companion{"true": containeredits.Always,
		"false": containeredits.Never, `"true"`: containeredits.Always, "auto": containeredits.Auto} {
		file := "version: v1\nflags: {gdrcopyEnabled: " + text + ", gdsEnabled: " + text + ", mofedEnabled: " + text + "}\n"
		c, _, err := config.Sources{}.Resolve("f", []byte(file))
		if err != nil || c.Edits.GDRCopy != want || c.Edits.GDS != want || c.Edits.MOFED != want {
			t.Errorf("%s: %s, %s, %s, %v; want %s", text, c.Edits.GDRCopy, c.Edits.GDS, c.Edits.MOFED, err, want)
		}
	}
	if _, _, err := (config.Sources{}).Resolve("f", []byte("version: v1\nflags: {gdsEnabled: perhaps}\n")); err == nil ||
		!strings.Contains(err.Error(), `must be true, false or auto, not "perhaps"`) {
		t.Errorf("perhaps: %v", err)
	}
}
