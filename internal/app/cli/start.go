package cli

import (
	"context"
	"os"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// runDaemon runs the daemon until ctx ends. It handles the signals of the process.
func (p Program) runDaemon(ctx context.Context, flags *pflag.FlagSet, own *ownProcess) error {
	sources := config.Sources{
		Env: os.LookupEnv, Flags: flags, Program: p.kind(),
		OwnPIDNamespace: nodefiles.HasOwnPIDNamespace(os.DirFS("/")),
		NVIDIA:          p.nvidia,
	}
	first, err := p.begin(ctx, &sources, own)
	if err != nil {
		return err
	}
	options := p.options(first, sources, own)
	options.ExtendEnd = extendEnd(ctx)
	return daemon.Run(ctx, options)
}

// options returns the inputs of a long-running program.
func (p Program) options(c config.Config, sources config.Sources, own *ownProcess) daemon.Options {
	return daemon.Options{Config: c, Sources: sources, Cluster: p.Cluster, Signals: own.signals,
		Reexecutions: reexecutions()}
}

// begin returns the configuration of a starting process, sets up its log, and logs the warnings and
// the version of the program. If a label of the node chooses the configuration file, sources follow
// the choice.
func (p Program) begin(ctx context.Context, sources *config.Sources, own *ownProcess) (config.Config, error) {
	early := sources.Early()
	own.logAs(early.LoggingFormat)
	if early.NodeConfig.Dir != "" {
		// Every program: without a client it has no configuration.
		sources.Program = p.kind()
	}
	if p.Cluster != nil {
		sources.Chosen = p.Cluster.Choose(ctx, early.Startup)
	}
	c, warnings, err := config.Load(*sources)
	if err == nil {
		own.logAs(c.LoggingFormat)
	}
	log := klog.FromContext(ctx)
	if args := sources.Flags.Args(); len(args) > 0 {
		log.Info("Ignoring arguments", "arguments", args)
	}
	for _, w := range warnings {
		log.Info("Configuration warning", "warning", w.String())
	}
	if err == nil {
		log.Info("Starting", "program", p.Name, "version", version.String())
	}
	return c, err
}
