// Command laptop runs the daemon on a simulated node with a stand-in kubelet, on any machine with
// Linux: `run` shows what a node would show until it is interrupted; `demo` and `demo-mig` tell
// stories that end by themselves and fail if a step does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal kills
	if err := laptop(ctx, os.Args[1:]); err != nil {
		text := fmt.Sprintf("Error: %v\n", err)
		if columns := terminal.Columns(os.Stderr); columns > 0 {
			text = folded(text, columns)
		}
		fmt.Fprint(os.Stderr, text)
		os.Exit(1)
	}
}

func laptop(ctx context.Context, args []string) error {
	commands := map[string]func(context.Context, node.Setup) error{"run": run, "demo": demo, "demo-mig": demoMIG}
	if len(args) == 0 || commands[args[0]] == nil {
		return errors.New("usage: laptop run|demo|demo-mig [--daemon PATH] [--profile NAME] [--kubelet 1.36|1.37]")
	}
	var s node.Setup
	flags := flag.NewFlagSet("laptop "+args[0], flag.ContinueOnError)
	flags.StringVar(&s.Daemon, "daemon", "bin/gpu-device-plugin", "the daemon's binary")
	flags.StringVar(&s.Profile, "profile", "dgx-h100", "the simulated machine")
	version := flags.String("kubelet", string(standin.V137), "whose rules the stand-in kubelet follows")
	if err := flags.Parse(args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if _, err := simulator.Load(s.Profile); err != nil {
		return err
	}
	s.Version = standin.Version(*version)
	return commands[args[0]](ctx, s)
}
