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
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

var claimFigures = []figure{
	{"Prepare of a claim with one GPU, beside 7 others", "within 3 × an empty call and an fsync", prepareClaim},
}

// claimRounds is how often a claim is prepared and unprepared.
const claimRounds = 500

// anyClaim reads a claim from its name: the device that it has. It stands for the API server, whose
// time is its own.
type anyClaim struct{}

func (anyClaim) Claim(_ context.Context, namespace, name string) (dra.Claim, error) {
	device := dra.Result{Request: "gpu", Pool: "node", Device: name}
	return dra.Claim{UID: "uid-" + name, Namespace: namespace, Name: name, Results: []dra.Result{device}}, nil
}

// prepareClaim measures Prepare at the driver's socket, in turn with a call without claims and with
// writing and syncing a file as large as a record on the same disk.
func prepareClaim(ctx context.Context, _ string) (_ string, err error) {
	dir, err := os.MkdirTemp("", "claims")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client, err := claimNode(ctx, dir)
	if err != nil {
		return "", err
	}
	prepare := func(device string) error {
		request := &drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{{Uid: "uid-" + device,
			Namespace: "default",
			Name:      device}}}
		answer, err := client.NodePrepareResources(ctx, request)
		if problem := answer.GetClaims()["uid-"+device].GetError(); problem != "" {
			err = errors.Join(err, errors.New(problem))
		}
		return err
	}
	for i := range 7 {
		if err := prepare(fmt.Sprintf("gpu-%d", i+1)); err != nil {
			return "", err
		}
	}
	record, err := os.ReadFile(filepath.Join(dir, "state", "claims", "uid-gpu-1.json"))
	if err != nil {
		return "", err
	}
	unprepare := &drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{{Uid: "uid-gpu-0", Namespace: "default",
		Name: "gpu-0"}}}
	return claimTimes(
		func() error {
			_, err := client.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{})
			return err
		},
		func() error { return synced(filepath.Join(dir, "file"), record) },
		func() error { return prepare("gpu-0") },
		func() error { _, err := client.NodeUnprepareResources(ctx, unprepare); return err })
}

// claimTimes calls all four in turn, and returns how long they took.
func claimTimes(empty, fsync, prepare, unprepare func() error) (string, error) {
	times := make([][]time.Duration, 4)
	for i := range claimRounds + 50 { // the first 50 warm everything up
		for n, call := range []func() error{empty, fsync, prepare, unprepare} {
			began := time.Now()
			if err := call(); err != nil {
				return "", err
			}
			if i >= 50 {
				times[n] = append(times[n], time.Since(began))
			}
		}
	}
	p50 := make([]float64, len(times))
	for n := range times {
		slices.Sort(times[n])
		p50[n] = times[n][claimRounds/2].Seconds() * 1e3
	}
	return fmt.Sprintf("p50 %.3f ms = %.2f × (%.3f + %.3f ms), Unprepare %.3f ms", p50[2], p50[2]/(p50[0]+p50[1]),
		p50[0],
		p50[1], p50[3]), nil
}

// synced writes a file and waits for the disk.
func synced(path string, content []byte) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(content); err != nil {
		return err
	}
	return f.Sync()
}

// claimNode serves a node of eight GPUs with a driver of 60 files, as long as ctx lasts.
func claimNode(ctx context.Context, dir string) (drav1.DRAPluginClient, error) {
	for i := range 60 {
		path := filepath.Join(dir, "root", "usr/lib/x86_64-linux-gnu", fmt.Sprintf("libnvidia-%d.so.580.95.05", i))
		if i == 0 {
			path = filepath.Join(filepath.Dir(path), "libcuda.so.580.95.05")
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			return nil, err
		}
	}
	s := inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05"},
		Control: inventory.NodeControl | inventory.NodeUVM}
	for i := range 8 {
		s.GPUs = append(s.GPUs, inventory.GPU{
			UUID: fmt.Sprintf("GPU-%d", i), Index: i, Minor: i, NUMANode: -1,
			Health: inventory.Health{State: inventory.Healthy},
		})
	}
	pools, snapshots := feed.New(dra.New(s, "node", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)), feed.New(s)
	owner := claims.New(claims.Options{
		Inputs: claims.Inputs{Pools: pools, Snapshots: snapshots,
			Configs: feed.New(config.Config{Live: config.Live{CDI: cdi.Options{DriverRoot: "/",
				ContainerDriverRoot: "/"}}})},
		Files: claims.Files{StateDir: filepath.Join(dir, "state"), CDIDir: filepath.Join(dir, "cdi"),
			Root: os.DirFS(filepath.Join(dir, "root"))},
	})
	registry := filepath.Join(dir, "registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		return nil, err
	}
	driver := draplugin.New(draplugin.Options{RegistryDir: registry, Claims: owner, Reader: anyClaim{}, Pools: pools,
		Snapshots: snapshots})
	go func() { _ = owner.Run(ctx) }()
	go func() { _ = driver.Run(ctx) }()
	for {
		sockets, err := filepath.Glob(filepath.Join(registry, "*.sock"))
		if err != nil {
			return nil, err
		}
		if len(sockets) > 0 {
			conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return nil, err
			}
			context.AfterFunc(ctx, func() { _ = conn.Close() })
			return drav1.NewDRAPluginClient(conn), nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}
