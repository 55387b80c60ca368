package kubelet_test

import (
	_ "embed"
	"flag"
)

var (
	daemon   = flag.String("daemon", "", "path of gpu-device-plugin")
	client   = flag.String("client", "", "path of the program of the folder client, built with the C library of this machine or an older one")
	programs = flag.String("programs", "", "folder in whose folders are containerd, ctr and kubelet, as make e2e fills it")
	source   = flag.String("source", "../../..", "folder of the repository")
)

//go:embed testdata/computemode.c
var computeMode string
