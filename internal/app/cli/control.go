package cli

import (
	"os"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// addControlFlag adds the flag that names the daemon to talk to, which is read from the same
// variable as the daemon's.
func addControlFlag(flags *pflag.FlagSet) *string {
	socket := config.DefaultControlSocket
	if given, ok := os.LookupEnv("CONTROL_SOCKET"); ok && given != "" {
		socket = given
	}
	return flags.String("control-socket", socket, "control socket of the daemon [$CONTROL_SOCKET]")
}
