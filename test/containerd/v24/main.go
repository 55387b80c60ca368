// Command v24 prints what the loader of containerd 2.4 makes of a configuration file and its
// imports.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"os"
	"slices"

	"github.com/containerd/containerd/v2/cmd/containerd/server/config"
	_ "github.com/containerd/containerd/v2/plugins/cri/runtime" // registers the CRI plugin
	"github.com/containerd/containerd/v2/version"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
)

const runtimePlugin = "io.containerd.cri.v1.runtime"

func main() {
	if err := load(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// load prints the disabled plugins and the configuration of the CRI plugin.
func load(ctx context.Context, file string) error {
	all := registry.Graph(func(*plugin.Registration) bool { return false })
	loaded := &config.Config{
		Version: version.ConfigVersion, Plugins: map[string]any{}, StreamProcessors: map[string]config.StreamProcessor{},
		ProxyPlugins: map[string]config.ProxyPlugin{}, Timeouts: map[string]string{},
	}
	plugins := func() iter.Seq[plugin.Registration] { return slices.Values(all) }
	if err := config.LoadConfigWithPlugins(ctx, file, plugins, loaded); err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(p plugin.Registration) bool { return p.URI() == runtimePlugin })
	if i < 0 {
		return fmt.Errorf("containerd has no plugin %s", runtimePlugin)
	}
	cri, err := loaded.Decode(ctx, runtimePlugin, all[i].Config)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"disabled": loaded.DisabledPlugins, "cri": cri})
}
