package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var metricsFigures = []figure{
	{"sampling of 8 GPUs, CPU of 30 samples, beside none", "under 1 ms a second at 15 s", samplingCost},
	{"XID 48 → list, always sampling, beside no samples", "unchanged", xidWhileSampling},
	{"scrape of 16 GPUs × 7 MIG devices with 200 pods", "p99 under 10 ms, under 200 kB", scrapeMany(false)},
	{"the same while the driver hangs", "p99 under 10 ms, under 200 kB", scrapeMany(true)},
}

// pair returns two nodes whose daemons serve metrics; the first has its GPUs measured each second,
// the other not. The caller closes them.
func pair(ctx context.Context, setup node.Setup) (nodes [2]*node.Node, err error) {
	for i, how := range []string{"--gpu-metrics-interval=1s", "--gpu-metrics=false"} {
		at, err := loopback.Free(ctx)
		if err != nil {
			return nodes, err
		}
		setup.Args = []string{"--metrics-address", at, how}
		if nodes[i], err = registered(ctx, setup); err != nil {
			return nodes, errors.Join(err, closeAll(nodes))
		}
	}
	return nodes, nil
}

func closeAll(nodes [2]*node.Node) (err error) {
	for _, n := range nodes {
		if n != nil {
			err = errors.Join(err, n.Close())
		}
	}
	return err
}

// samplingCost compares the CPU time of two daemons over the same time.
func samplingCost(ctx context.Context, daemon string) (_ string, err error) {
	const samples = 30
	nodes, err := pair(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, closeAll(nodes)) }()
	var used [2]time.Duration
	for _, sign := range []time.Duration{-1, 1} {
		for i, n := range nodes {
			now, err := cpu(n.Running().Pid)
			if err != nil {
				return "", err
			}
			used[i] += sign * now
		}
		if sign > 0 {
			break
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(samples * time.Second):
		}
	}
	each := (used[0] - used[1]) / samples
	return fmt.Sprintf("%s a sample of 8 GPUs and its pods, %.3f ms a second at 15 s", ms(each),
		each.Seconds()*1000/15), nil
}

// xidWhileSampling has a driver whose calls take so long that the GPUs of one daemon are always
// being measured.
func xidWhileSampling(ctx context.Context, daemon string) (_ string, err error) {
	nodes, err := pair(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, closeAll(nodes)) }()
	slow := simulator.Fault{Kind: simulator.KindSlow, Call: "DeviceGetPowerUsage", Delay: "130ms"}
	for _, n := range nodes {
		if err := control.Call(ctx, n.ControlSocket(), "simulate.inject", slow, nil); err != nil {
			return "", err
		}
	}
	var took [2][]time.Duration
	for index := range 8 {
		for i, n := range nodes {
			after, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(index), XID: 48})
			if err != nil {
				return "", err
			}
			took[i] = append(took[i], after)
		}
	}
	middle := func(all []time.Duration) string {
		slices.Sort(all)
		return fmt.Sprintf("median %s, worst %s", ms(all[len(all)/2]), ms(all[len(all)-1]))
	}
	return middle(took[0]) + " beside " + middle(took[1]), nil
}

// largeNode returns a node with 16 GPUs, each in seven MIG devices that two pods can share, and 200
// pods. The caller closes it.
func largeNode(ctx context.Context, daemon, at string) (*node.Node, error) {
	profile, err := simulator.Load("h100-mig-1g")
	if err != nil {
		return nil, err
	}
	for i := range 8 {
		g := profile.GPUs[i]
		g.BDF, g.UUID, g.Minor = fmt.Sprintf("0001:%02x:00.0", i+1), "", nil
		profile.GPUs = append(profile.GPUs, g)
	}
	profile.NVSwitches = nil
	text, err := yaml.Marshal(profile)
	if err != nil {
		return nil, err
	}
	n, err := node.Open(node.Setup{Daemon: daemon, Version: standin.V137})
	if err != nil {
		return nil, err
	}
	n.Profile = n.Path("machine.yaml")
	config := n.Path("config.yaml")
	n.Args = []string{"--mig-strategy=single", "--config-file", config, "--metrics-address", at,
		"--gpu-metrics-interval=1s"}
	const sharing = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	for path, text := range map[string]string{n.Profile: string(text), config: sharing} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return nil, errors.Join(err, n.Close())
		}
	}
	if _, err := healthyAfter(ctx, n, 16*7*2); err != nil {
		return nil, fmt.Errorf("%w: %s", err, closed(n))
	}
	for i := range 200 {
		container := standin.Container{Pod: fmt.Sprintf("training-job-worker-%d", i), Name: "main", Resource: gpu, Count: 1}
		if _, err := n.Admit(ctx, container); err != nil {
			return nil, errors.Join(err, n.Close())
		}
	}
	return n, nil
}

// scrapeMany measures scrapes as Prometheus makes them, one after the other.
func scrapeMany(hangs bool) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		at, err := loopback.Free(ctx)
		if err != nil {
			return "", err
		}
		n, err := largeNode(ctx, daemon, at)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if err := until(ctx, func() bool {
			text, _, err := scrape(ctx, at)
			return err == nil && strings.Count(text, "gpu_device_plugin_pod_device{") == 200 &&
				strings.Count(text, "DCGM_FI_DEV_FB_USED{") == 112
		}); err != nil {
			return "", fmt.Errorf("wait for all pods and GPU instances in the metrics: %w", err)
		}
		if hangs {
			if err := control.Call(ctx, n.ControlSocket(), "simulate.inject", simulator.Fault{Kind: simulator.KindHang},
				nil); err != nil {
				return "", err
			}
			if err := n.WaitFor(ctx, func() bool { return n.Allocatable(gpu) == 0 }); err != nil {
				return "", err
			}
		}
		var took []time.Duration
		var text string
		var sent int
		before, err := cpu(n.Running().Pid)
		if err != nil {
			return "", err
		}
		for range 500 {
			began := time.Now()
			if text, sent, err = scrape(ctx, at); err != nil {
				return "", err
			}
			took = append(took, time.Since(began))
		}
		after, err := cpu(n.Running().Pid)
		each := (after - before) / time.Duration(len(took)) // with that of samples meanwhile
		size := fmt.Sprintf("%.0f kB sent, %.0f kB unpacked", float64(sent)/1e3, float64(len(text))/1e3)
		return fmt.Sprintf("%s, CPU %s, %s", spread(took), ms(each), size), err
	}
}

// until waits until something holds that nobody tells of.
func until(ctx context.Context, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// scrape returns the metrics, and how many bytes were sent for them.
func scrape(ctx context.Context, at string) (text string, sent int, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at+"/metrics", http.NoBody)
	if err != nil {
		return "", 0, err
	}
	request.Header.Set("Accept", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3")
	request.Header.Set("Accept-Encoding", "gzip")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", 0, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return "", 0, fmt.Errorf("the answer is %s: %w", answer.Status, err)
	}
	if answer.Header.Get("Content-Encoding") != "gzip" {
		return string(body), len(body), nil
	}
	plain, err := gzip.NewReader(strings.NewReader(string(body)))
	if err != nil {
		return "", 0, err
	}
	unpacked, err := io.ReadAll(plain)
	return string(unpacked), len(body), err
}
