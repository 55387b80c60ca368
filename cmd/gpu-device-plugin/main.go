// Command gpu-device-plugin offers the NVIDIA GPUs of a Kubernetes node to the
// kubelet.
package main

import (
	"os"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
)

func main() { os.Exit(cli.DevicePlugin().Main()) }
