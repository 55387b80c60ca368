package config_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestReplaces: a configuration that leaves a node, or a resource of it, without any GPU does not
// replace one that offers some.
func TestReplaces(t *testing.T) {
	t.Parallel()
	gpus := func(count int, change func(*inventory.GPU)) (s inventory.Snapshot) {
		for i := range count {
			g := inventory.GPU{
				Index: i, UUID: fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i), BDF: fmt.Sprintf("0000:%02d:00.0", i),
				Model: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30, ComputeCapability: inventory.ComputeCapability{Major: 9},
			}
			if change != nil {
				change(&g)
			}
			s.GPUs = append(s.GPUs, g)
		}
		return s
	}
	divided := func(count int) func(*inventory.GPU) {
		return func(g *inventory.GPU) {
			g.MIG = inventory.MIGEnabled
			for i := range count {
				g.MIGDevices = append(g.MIGDevices, inventory.MIGDevice{
					Index: i, UUID: strings.Replace(g.UUID, "GPU-", fmt.Sprintf("MIG-%d", i), 1)[:40], Profile: "1g.10gb",
				})
			}
		}
	}
	bad := func(g *inventory.GPU) { g.Health = inventory.Health{State: inventory.Unhealthy, Reason: "XID 79"} }
	const (
		defaults = "version: v1\n"
		shared   = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
		tooMany  = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 16384}]}}\n"
		mps      = "flags: {mpsRoot: /mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}\n"
		none     = "selectors: [{models: ['*'], exclude: true}]\n"
		two      = "selectors: [{indices: [0, 1], rename: nvidia.com/dev, replicas: 2}]\n"
		units    = "selectors: [{models: ['*'], units: true}]\n" +
			"units: {prefix: volcano.sh/gpu-mem, size: 1Gi, enforce: none}\n"
	)
	for name, tt := range map[string]struct {
		running, next string
		node          inventory.Snapshot
		want          string // a part of the error; empty for none
	}{
		"too many replicas": {shared, tooMany, gpus(8, nil),
			"this node: the GPUs offered would fall from 8 to 0: its resource nvidia.com/gpu is not offered: the list of its " +
				"131072 devices would have"},
		"too many for eight GPUs, not for one": {shared, tooMany, gpus(1, nil), ""},
		"too many replicas, all GPUs bad":      {shared, tooMany, gpus(8, bad), "from 8 to 0"},
		"before the first scan":                {shared, tooMany, inventory.Snapshot{}, ""},
		"already nothing":                      {none, tooMany, gpus(8, nil), ""},
		"too many clients of MPS": {defaults, mps, gpus(2, nil),
			"49 replicas are configured, and MPS serves at most 48 clients on it"},
		"all excluded": {defaults, none, gpus(2, nil),
			"it is excluded by selectors[0] of the configuration; if that is intended, restart the daemon"},
		"one excluded": {defaults, "selectors: [{indices: [0], exclude: true}]\n", gpus(2, nil), ""},
		"the only one excluded": {defaults, "selectors: [{indices: [0], exclude: true}]\n", gpus(1, nil),
			"from 1 to 0"},
		"one resource of two is refused": {two, strings.Replace(two, "replicas: 2", "replicas: 100000", 1),
			gpus(4, nil), "no GPU of resource nvidia.com/dev would be offered: its resource nvidia.com/dev is not"},
		"one resource of two is excluded": {two, "selectors: [{indices: [0, 1], exclude: true}]\n", gpus(4, nil), ""},
		"a new resource is refused": {defaults, strings.Replace(two, "replicas: 2", "replicas: 100000", 1),
			gpus(4, nil), ""},
		"another name":                   {two, defaults, gpus(4, nil), ""},
		"units":                          {defaults, units, gpus(2, nil), ""},
		"from units":                     {units, tooMany, gpus(8, nil), "from 8 to 0"},
		"all by claims":                  {defaults, "dra: {mode: dra}\n", gpus(2, nil), ""},
		"from claims, too many replicas": {"dra: {mode: dra}\n", tooMany, gpus(8, nil), "from 8 to 0"},
		"by claims, all excluded": {"dra: {mode: dra}\n", "dra: {mode: dra}\n" + none, gpus(2, nil),
			"from 2 to 0"},
		"half by claims, half refused": {defaults, "dra: {mode: split, gpus: {indices: [0]}}\n" + tooMany,
			gpus(8, nil), ""},
		"single, in MIG mode and empty": {defaults, "flags: {migStrategy: single}\n", gpus(2, divided(0)),
			"the GPUs offered would fall from 2 to 0: MIG is enabled on it, but it has no MIG devices"},
		"the same with a layout to come": {defaults,
			"flags: {migStrategy: single}\nmig: {enabled: true, layout: all-1g.10gb}\n", gpus(2, divided(0)), ""},
		"from whole GPUs to MIG devices": {defaults, "flags: {migStrategy: mixed}\n", gpus(2, divided(2)), ""},
		"MIG devices cannot be shared by MPS": {
			"flags: {migStrategy: single}\n", "flags: {migStrategy: single, mpsRoot: /mps}\n" +
				"sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
			gpus(2, divided(2)), "it is a MIG device, and sharing by MPS is not supported for those",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var loaded [2]config.Config
			for i, text := range []string{tt.running, tt.next} {
				c, _, err := sources(t, "", "").Resolve("/config.yaml", []byte(text))
				if err != nil {
					t.Fatal(err)
				}
				loaded[i] = c
			}
			err := loaded[1].Replaces(loaded[0], tt.node)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			var invalid *config.Invalid
			if err != nil && !errors.As(err, &invalid) {
				t.Errorf("%T is no problem of the configuration", err)
			}
		})
	}
}
