package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var callFigures = []figure{
	{"Allocate, one GPU, beside an empty call", "within 1.5 × the empty call", allocate("")},
	{"Allocate, one of 8 × 1000 replicas", "as of one GPU", allocate(manyReplicas)},
}

// rounds is how often each call is made for one figure, in turn with the empty call.
const rounds = 3000

// allocate measures Allocate of the first device, with the content of a configuration file.
func allocate(configFile string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		setup := node.Setup{Daemon: daemon}
		if configFile != "" {
			folder, err := os.MkdirTemp("", "bench")
			if err != nil {
				return "", err
			}
			defer func() { _ = os.RemoveAll(folder) }()
			path := filepath.Join(folder, "config.yaml")
			if err := os.WriteFile(path, []byte(configFile), 0o600); err != nil {
				return "", err
			}
			setup.Args = []string{"--config-file", path}
		}
		n, err := registered(ctx, setup)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		client, id, closeClient, err := dial(ctx, n)
		if err != nil {
			return "", err
		}
		defer closeClient()
		container := &pluginapi.ContainerAllocateRequest{DevicesIds: []string{id}}
		request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{container}}
		return beside(ctx, client, func() error { _, err := client.Allocate(ctx, request); return err })
	}
}

// dial returns a client of the plugin socket that was registered last, and the ID of its first
// device.
func dial(ctx context.Context, n *node.Node) (client pluginapi.DevicePluginClient, id string, done func(), err error) {
	registered, err := next(ctx, n, 0, standin.Registered)
	if err != nil {
		return nil, "", nil, err
	}
	listed, err := next(ctx, n, 0, standin.Listed)
	if err != nil {
		return nil, "", nil, err
	}
	conn, err := grpc.NewClient("unix://"+registered.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, "", nil, err
	}
	return pluginapi.NewDevicePluginClient(conn), listed.Devices[0].GetID(), func() { _ = conn.Close() }, nil
}

// beside measures a call in turn with an empty one on the same connection.
func beside(ctx context.Context, client pluginapi.DevicePluginClient, call func() error) (string, error) {
	return inTurn(
		func(int) error { _, err := client.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); return err },
		func(int) error { return call() },
	)
}

// inTurn measures a call in turn with one that does nothing, so that both meet the same machine.
func inTurn(empty, call func(i int) error) (string, error) {
	var calls, empties []time.Duration
	for i := range rounds + 200 { // the first 200 warm both ends up
		for _, c := range []struct {
			call  func(i int) error
			times *[]time.Duration
		}{{empty, &empties}, {call, &calls}} {
			began := time.Now()
			if err := c.call(i); err != nil {
				return "", err
			}
			if i >= 200 {
				*c.times = append(*c.times, time.Since(began))
			}
		}
	}
	slices.Sort(calls)
	slices.Sort(empties)
	ratio := func(part int) float64 {
		at := len(calls) * part / 100
		return float64(calls[at]) / float64(empties[at])
	}
	return fmt.Sprintf("p50 %.3f ms = %.2f ×, p99 %.3f ms = %.2f ×",
		float64(calls[len(calls)/2].Nanoseconds())/1e6, ratio(50),
		float64(calls[len(calls)*99/100].Nanoseconds())/1e6, ratio(99)), nil
}
