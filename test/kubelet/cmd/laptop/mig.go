package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// third is the resource of the largest MIG device of all-balanced: each GPU has one.
const third = "nvidia.com/mig-3g.40gb"

// demoMIG tells how a node goes from whole GPUs to MIG devices and back under running pods; it
// fails when a step does.
func demoMIG(ctx context.Context, s node.Setup) error {
	s.Args = append(s.Args, "--mig-enabled", "--mig-strategy", "mixed")
	layouts := &layouts{}
	return tell(ctx, s, func(told *story) []chapter {
		layouts.story = told
		return []chapter{
			{"the daemon starts and registers", told.register},
			{"pod train gets one whole GPU", layouts.train},
			{"mig apply --layout all-balanced", layouts.divide},
			{"pod infer gets a MIG device", layouts.infer},
			{"pod train ends", layouts.endTrain},
			{"mig apply --layout all-disabled", layouts.undivide},
			{"pod infer ends", layouts.endInfer},
			{"the daemon is stopped", told.stop},
		}
	})
}

type layouts struct{ *story }

func (l *layouts) train(ctx context.Context) (string, error) {
	got, err := l.Admit(ctx, standin.Container{Pod: "train", Name: "main", Resource: gpu, Count: 1})
	if err != nil {
		return "", err
	}
	l.held = got.IDs
	return got.IDs[0], nil
}

// divide ends when all GPUs but that of train are divided.
func (l *layouts) divide(ctx context.Context) (string, error) {
	if err := l.Do(ctx, "mig", "apply", "--layout", "all-balanced", "--wait", "0"); err != nil {
		return "", err
	}
	if err := l.reach(ctx, 0, l.total-1); err != nil {
		return "", err
	}
	shown, err := l.shown(ctx, "pending", "waiting")
	return l.thirds() + "; the GPU of train waits:" + shown, err
}

func (l *layouts) infer(ctx context.Context) (string, error) {
	got, err := l.Admit(ctx, standin.Container{Pod: "infer", Name: "main", Resource: third, Count: 1})
	if err != nil {
		return "", err
	}
	return got.IDs[0], nil
}

func (l *layouts) endTrain(ctx context.Context) (string, error) {
	l.Remove("train")
	if err := l.reach(ctx, 0, l.total); err != nil {
		return "", err
	}
	shown, err := l.shown(ctx, "success", "done")
	return l.thirds() + ":" + shown, err
}

// undivide ends when all GPUs but that of infer are whole.
func (l *layouts) undivide(ctx context.Context) (string, error) {
	if err := l.Do(ctx, "mig", "apply", "--layout", "all-disabled", "--wait", "0"); err != nil {
		return "", err
	}
	if err := l.reach(ctx, l.total-1, 0); err != nil {
		return "", err
	}
	shown, err := l.shown(ctx, "pending", "waiting")
	return l.thirds() + "; the MIG device of infer stays:" + shown, err
}

func (l *layouts) endInfer(ctx context.Context) (string, error) {
	l.Remove("infer")
	if err := l.reach(ctx, l.total, 0); err != nil {
		return "", err
	}
	shown, err := l.shown(ctx, "success", "done")
	return l.counts() + ":" + shown, err
}

// reach waits until so many whole GPUs and MIG devices can be allocated.
func (l *layouts) reach(ctx context.Context, whole, divided int) error {
	if err := l.WaitFor(ctx, func() bool {
		return l.Allocatable(gpu) == whole && l.Allocatable(third) == divided
	}); err != nil {
		return fmt.Errorf("%d %s and %d %s wanted, there are %d and %d: %w", whole, gpu, divided, third, l.Allocatable(gpu),
			l.Allocatable(third), err)
	}
	return nil
}

func (l *layouts) thirds() string {
	return fmt.Sprintf("allocatable: %d whole GPUs, %d of 3g.40gb", l.Allocatable(gpu), l.Allocatable(third))
}

// statusPoll is how often the status is asked for, whose last change nobody tells.
const statusPoll = 50 * time.Millisecond

// shown waits until mig status has a state, and returns what it says of the first GPU in a phase.
func (l *layouts) shown(ctx context.Context, state, phase string) (string, error) {
	for {
		var out, failed bytes.Buffer
		cmd := exec.CommandContext(ctx, l.Daemon, "mig", "status", "--control-socket", l.ControlSocket())
		cmd.Stdout, cmd.Stderr = &out, &failed
		if err := cmd.Run(); err != nil {
			return "", errors.Join(err, errors.New(failed.String()))
		}
		first, gpus, _ := strings.Cut(out.String(), "\n\n")
		for block := range strings.SplitSeq(gpus, "\n\n") {
			if strings.Contains(first, ": "+state) && strings.Contains(block, "\n  "+phase) {
				return "\n" + indent(block), nil
			}
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("mig status does not say %s: %s", state, out.String())
		case <-time.After(statusPoll):
		}
	}
}

// indent puts lines under the line of a chapter.
func indent(text string) string {
	return "      " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n      ")
}
