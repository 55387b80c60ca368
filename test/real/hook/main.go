// Command hook is a stand-in for nvidia-cdi-hook: it does in a container's root what the
// subcommands of NVIDIA's promise.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "hook:", err)
		os.Exit(1)
	}
}

// run does what a subcommand promises. The runtime says on standard input which container is made.
func run(subcommand string, arguments []string) error {
	var state struct {
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(os.Stdin).Decode(&state); err != nil {
		return err
	}
	root := filepath.Join(state.Bundle, "rootfs")
	switch subcommand {
	case "create-symlinks":
		for _, a := range arguments {
			if a == "--link" {
				continue
			}
			target, link, _ := strings.Cut(a, "::")
			link = filepath.Join(root, link)
			if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
				return err
			}
			_ = os.Remove(link)
			if err := os.Symlink(target, link); err != nil {
				return err
			}
		}
	case "update-ldcache":
		command := []string{"-r", root}
		for _, a := range arguments {
			if a != "--folder" {
				command = append(command, a)
			}
		}
		if _, err := os.Stat(filepath.Join(root, "/sbin/ldconfig")); err != nil {
			return nil // an image whose loader has no cache
		}
		if out, err := exec.Command("/sbin/ldconfig", command...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	case "enable-cuda-compat", "disable-device-node-modification", "update-application-profile",
		"apply-cuda-memory-limits":
		// They change nothing that is looked at here.
	default:
		return fmt.Errorf("unknown subcommand %q", subcommand)
	}
	return nil
}
