// Command v17 prints what the loader of containerd 1.7 makes of a configuration file and its
// imports.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	cri "github.com/containerd/containerd/pkg/cri/config"
	"github.com/containerd/containerd/plugin"
	"github.com/containerd/containerd/services/server/config"
	"github.com/pelletier/go-toml"
)

func main() {
	if err := load(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// load prints the disabled plugins and the configuration of the CRI plugin.
func load(file string) error {
	loaded := &config.Config{
		Plugins: map[string]toml.Tree{}, StreamProcessors: map[string]config.StreamProcessor{},
		ProxyPlugins: map[string]config.ProxyPlugin{}, Timeouts: map[string]string{}, Version: 1,
	}
	if err := config.LoadConfig(file, loaded); err != nil {
		return err
	}
	disabled := loaded.DisabledPlugins
	if loaded.GetVersion() == 1 { // which names plugins without their types
		for i, name := range disabled {
			disabled[i] = "io.containerd.grpc.v1." + name
		}
	}
	defaults := cri.DefaultConfig()
	decoded, err := loaded.Decode(&plugin.Registration{Type: plugin.GRPCPlugin, ID: "cri", Config: &defaults})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"disabled": disabled, "cri": decoded})
}
