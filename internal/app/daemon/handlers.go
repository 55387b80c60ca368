package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func (d *daemon) handlers() map[string]control.Handler {
	return map[string]control.Handler{
		CallStatus: answer(d.statusWith),
		CallReady:  answer(d.ready),
		CallAlive: answer(func(ctx context.Context, _ struct{}) (any, error) {
			return d.report.liveness.Stuck(ctx), nil
		}),
		CallQuiesce: answer(d.quiesce),
		CallResume: answer(func(ctx context.Context, _ struct{}) (any, error) {
			return nil, d.requests().Resume(ctx)
		}),
		CallHealthClear:    answer(d.clearHealth),
		CallMIGApply:       answer(d.mig.apply),
		CallMIGStatus:      answer(func(context.Context, struct{}) (any, error) { return d.mig.progress() }),
		CallRecordStart:    answer(d.gpus.startRecording),
		CallRecordStop:     answer(func(context.Context, struct{}) (any, error) { return nil, d.gpus.recorder.Stop() }),
		CallSimulateInject: answer(d.gpus.inject),
		CallSimulateList:   answer(d.gpus.list),
	}
}

// answer returns a Handler for a function with typed arguments.
func answer[T any](call func(context.Context, T) (any, error)) control.Handler {
	return func(ctx context.Context, encoded json.RawMessage) (any, error) {
		var arguments T
		if err := json.Unmarshal(encoded, &arguments); err != nil {
			return nil, fmt.Errorf("read the call's arguments: %w", err)
		}
		return call(ctx, arguments)
	}
}

// StatusArguments are the arguments of CallStatus.
type StatusArguments struct {
	// Holders adds the containers that hold devices to the answer.
	Holders bool `json:"holders,omitempty"`
}

// holdersTimeout limits the question to the kubelet about containers that hold devices.
const holdersTimeout = 3 * time.Second

func (d *daemon) statusWith(ctx context.Context, a StatusArguments) (any, error) {
	s, err := d.status(ctx)
	if err != nil || !a.Holders {
		return s, err
	}
	ctx, cancel := context.WithTimeout(ctx, holdersTimeout)
	defer cancel()
	devices, err := d.podDevices().ContainerDevices(ctx)
	if err != nil {
		s.HoldersError = err.Error()
	}
	s.Holders = holders(s.GPUs, devices)
	receipts := d.kubelet.unitHolders(ctx, devices)
	for i := range s.Holders {
		h := &s.Holders[i]
		for _, r := range receipts {
			if h.Device == r.Device && h.Namespace == r.Namespace && h.Pod == r.Pod && h.Container == r.Container {
				h.Receipt = r.Receipt
			}
		}
	}
	return s, nil
}

// holders returns the known devices of containers, once for each container. A container
// may have several replicas of a device.
func holders(known []status.Device, devices []kubelet.ContainerDevice) []status.Holder {
	all := []status.Holder{}
	for _, c := range devices {
		uuid, _ := resource.SplitID(c.ID)
		h := status.Holder{Device: uuid, Namespace: c.Namespace, Pod: c.Pod, Container: c.Container,
			Claim: c.Claim.Name}
		if slices.ContainsFunc(known, func(d status.Device) bool { return d.UUID == uuid }) &&
			!slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	return all
}

// QuiesceArguments are the arguments of CallQuiesce.
type QuiesceArguments struct {
	// Allocate lets new pods get GPUs meanwhile.
	Allocate bool `json:"allocate"`
}

func (d *daemon) quiesce(ctx context.Context, a QuiesceArguments) (any, error) {
	return nil, d.requests().Quiesce(ctx, a.Allocate)
}

// ClearArguments are the arguments of CallHealthClear.
type ClearArguments struct {
	// GPU is an index "i" or "i:j", or a UUID.
	GPU string `json:"gpu"`
}

func (d *daemon) clearHealth(ctx context.Context, a ClearArguments) (any, error) {
	uuid := d.gpus.uuidOf(a.GPU)
	d.maintenance.proofs.Again(uuid)
	return nil, d.requests().Clear(ctx, uuid)
}

// uuidOf returns the UUID of the device in a request. An absent device may have recorded faults.
func (w *gpuWing) uuidOf(name string) string {
	for _, g := range w.monitor.Snapshots().Value().GPUs {
		if name == g.UUID || name == fmt.Sprint(g.Index) {
			return g.UUID
		}
		for _, m := range g.MIGDevices {
			if name == m.UUID || name == fmt.Sprintf("%d:%d", g.Index, m.Index) {
				return m.UUID
			}
		}
	}
	return name
}

var errNotSimulated = errors.New("this daemon serves real GPUs: faults can only be injected into one that runs with " +
	"--simulate")

func (w *gpuWing) inject(_ context.Context, fault simulator.Fault) (any, error) {
	if w.node == nil {
		return nil, errNotSimulated
	}
	return nil, w.node.Inject(fault)
}

func (w *gpuWing) list(context.Context, struct{}) (any, error) {
	if w.node == nil {
		return nil, errNotSimulated
	}
	return w.node.List(), nil
}
