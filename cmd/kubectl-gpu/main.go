// Command kubectl-gpu is a kubectl plugin: if the file is in a directory of PATH, `kubectl gpu`
// shows the GPUs of a cluster, and runs commands of a node's daemon.
// docs/dev/adr/0057-module-of-kubectl-gpu.md explains why the command is a separate module.
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
