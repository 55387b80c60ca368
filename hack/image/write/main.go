// Command write writes an image of the Dockerfile as an OCI archive, without a container engine:
//
//	write [-target STAGE] REFERENCE ARCHIVE amd64=FOLDER arm64=FOLDER
//
// Each FOLDER is one that deployments/image/layers.sh has filled for that architecture.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "write:", err)
		os.Exit(1)
	}
}

func run() error {
	target := flag.String("target", "", "stage of the Dockerfile; default: the last one")
	flag.Parse()
	if flag.NArg() < 3 {
		return errors.New("give a reference, the path of an archive, and ARCHITECTURE=FOLDER")
	}
	folders := map[string]string{}
	for _, given := range flag.Args()[2:] {
		architecture, folder, ok := strings.Cut(given, "=")
		if !ok {
			return fmt.Errorf("%q: want ARCHITECTURE=FOLDER", given)
		}
		folders[architecture] = folder
	}
	return image.FromDockerfile("Dockerfile", *target, folders, flag.Arg(0), flag.Arg(1))
}
