package config_test

import (
	"encoding/json"
	"errors"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// FuzzResolve holds that no file makes a panic, that problems come with a place, and that what is
// accepted here means the same to the decoder of NVIDIA's device plugin: sigs.k8s.io/yaml.
func FuzzResolve(f *testing.F) {
	for _, seed := range []string{
		"", "version: v1\nflags:\n  migStrategy: mixed\n  plugin: {deviceListStrategy: [envvar]}\n",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, '0:1']}]}}",
		"selectors:\n- {models: ['*'], exclude: true}\n", "a: &a {b: *a}\nflags: *a\n", "<<: [{flags: 1}]",
		"flags: {<<: [{migStrategy: mixed}, {migStrategy: single}]}",
		"flags: {<<: {migStrategy: mixed}, migStrategy: null}", "flags: {<<: {migStrategy: null}, migStrategy: mixed}",
		"flags: {<<: [{migStrategy: mixed}, {MigStrategy: null}]}",
		"flags: {<<: [{MigStrategy: null}, {migStrategy: mixed}]}",
		"flags: {migStrategy: mixed, MigStrategy: single}", "flags: {MigStrategy: mixed, migStrategy: null}",
		"flags: {migStrategy: mixed, <<: {MIGSTRATEGY: single}}", "flags: {MigStrategy: null, <<: {migStrategy: mixed}}",
		`{"imex": {"channelIDs": []}}`,
		"selectors:\n- {models: [000], exclude: true}", "selectors:\n- {models: [y, 1.50, 0x10], exclude: true}",
		"health: {xids: {ignore: [1]}, flapWindow: 3m}", "flags: {gfd: {sleepInterval: 1e9}}", "---\nversion: v1\n---\n",
		"{\"version\": \"v1\"} {}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := config.Sources{}.Resolve("", data)
		var invalid *config.Invalid
		if err != nil {
			if !errors.As(err, &invalid) || len(invalid.Problems) == 0 {
				t.Fatalf("error without problems: %v", err)
			}
			for _, p := range invalid.Problems {
				if p.Where == "" || p.Text == "" || p.Line < 0 {
					t.Errorf("problem %+v", p)
				}
			}
			return
		}
		var reference v1.Config
		if yaml.Unmarshal(data, &reference) != nil {
			return // it reads less than we do
		}
		canonical, err := json.Marshal(reference)
		if err != nil {
			t.Fatal(err)
		}
		same, _, err := config.Sources{}.Resolve("", canonical)
		if err != nil {
			t.Fatalf("%q is accepted, and not as the reference reads it, %s: %v", data, canonical, err)
		}
		if !equal(c, same) {
			t.Errorf("%q means %+v; as the reference reads it, %s, it means %+v", data, c, canonical, same)
		}
	})
}
