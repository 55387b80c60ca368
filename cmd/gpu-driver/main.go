// Command gpu-driver packs NVIDIA drivers into folders and images for the nodes of a cluster, and
// changes the driver of a node.
package main

import (
	"os"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/drivercli"
)

func main() { os.Exit(drivercli.Main()) }
