package config_test

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func TestMetricsAddress(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"": "", ":9400": "", "127.0.0.1:9400": "", "[::1]:9400": "", "[10.0.0.1]:9400": "", "[::]:1": "",
		"9400":           "is not host:port, such as :9400",
		"::1:9400":       "is not host:port",
		"localhost:9400": `"localhost" is not an IP address`,
		":0":             `port "0" is not a number from 1 to 65535`,
		":65536":         `port "65536" is not a number from 1 to 65535`,
		":http":          `port "http" is not a number`,
		":":              `port "" is not a number`,
		"[]:9400":        `"[]" is not an IP address`,
	} {
		t.Run(address, func(t *testing.T) {
			t.Parallel()
			flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
			config.AddFlags(flags)
			if err := flags.Parse([]string{"--metrics-address=" + address}); err != nil {
				t.Fatal(err)
			}
			c, _, err := config.Sources{Flags: flags}.Resolve("", nil)
			switch {
			case want == "" && (err != nil || c.MetricsAddress != address):
				t.Errorf("address %q, error %v", c.MetricsAddress, err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("error %v, want %q in it", err, want)
			}
		})
	}
}
