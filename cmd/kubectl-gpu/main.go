// Command kubectl-gpu is a plugin of kubectl: with the file in a folder of PATH, `kubectl gpu`
// shows the GPUs of a cluster, and runs the commands of the daemon of one node.
// docs/dev/adr/0057-module-of-kubectl-gpu.md says why it is a module of its own.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := command.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}
