// Command gpu-node-agent offers the NVIDIA GPUs of a Kubernetes node to the
// kubelet, and talks to the API server about the GPUs.
package main

import (
	"os"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
)

func main() { os.Exit(cli.NodeAgent(cluster.New(cluster.Options{})).Main()) }
