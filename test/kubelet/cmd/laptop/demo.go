package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	gpu = "nvidia.com/gpu"
	// patience bounds a step of the story; the longest of them waits for the ten seconds that a device
	// is listed as Unhealthy before it is dropped.
	patience = 3 * time.Minute
)

// A chapter is a step of a story, and returns what came of it.
type chapter struct {
	title string
	tell  func(context.Context) (string, error)
}

// demo tells the daemon's story; it fails when a step does.
func demo(ctx context.Context, s node.Setup) error {
	return tell(ctx, s, func(told *story) []chapter {
		return []chapter{
			{"the daemon starts and registers", told.register},
			{"a pod gets two GPUs", told.allocate},
			{"one of them reports XID 48", told.fault},
			{"it is reset and recovers", told.repair},
			{"the kubelet restarts", told.restart},
			{"the pod's other GPU is unplugged", told.unplug},
			{"the pod ends, and the GPU is dropped", told.drop},
			{"the daemon is stopped", told.stop},
		}
	})
}

// tell tells the chapters of a story on a node of its own.
func tell(ctx context.Context, s node.Setup, chapters func(*story) []chapter) (err error) {
	n, err := node.Open(s)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\nthe daemon's log ends with:\n%s", err, n.Logged())
		}
		err = errors.Join(err, n.Close())
	}()
	fmt.Printf("A simulated %s, with a kubelet that follows the rules of %s:\n\n", s.Profile, s.Version)
	told := &story{Node: n, began: time.Now()}
	for _, chapter := range chapters(told) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		began := time.Now()
		result, err := chapter.tell(ctx)
		cancel()
		if err != nil {
			return fmt.Errorf("%s: %w", chapter.title, err)
		}
		fmt.Println(line(chapter.title, time.Since(began), result, columns()))
	}
	fmt.Printf("\nAll of it took %.1f s.\n", time.Since(told.began).Seconds())
	return nil
}

// line returns what a chapter took and what came of it. A result that is too long for so many columns
// has lines of its own.
func line(title string, took time.Duration, result string, columns int) string {
	head := fmt.Sprintf("%-38s %9.1f ms", title, float64(took.Microseconds())/1000)
	if all := head + "   " + result; utf8.RuneCountInString(all) <= columns {
		return all
	}
	return head + "\n" + terminal.Fold(result, columns, "    ")
}

// columns returns the width of standard output.
func columns() int { return cmp.Or(terminal.Columns(os.Stdout), terminal.DefaultColumns) }

type story struct {
	*node.Node
	began time.Time
	total int      // of the GPUs on the node
	held  []string // by the pod
}

// register ends with the first full list at kubelet.
func (s *story) register(ctx context.Context) (string, error) {
	if err := s.StartDaemon(); err != nil {
		return "", err
	}
	event, err := s.Next(ctx, 0, standin.Is(standin.Listed, gpu))
	if err != nil {
		return "", err
	}
	s.total = len(event.Devices)
	return s.counts(), nil
}

func (s *story) allocate(ctx context.Context) (string, error) {
	got, err := s.Admit(ctx, standin.Container{Pod: "train", Name: "main", Resource: gpu, Count: 2})
	if err != nil {
		return "", err
	}
	s.held = got.IDs
	env := got.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"]
	for _, id := range s.held {
		if !strings.Contains(env, id) {
			return "", fmt.Errorf("NVIDIA_VISIBLE_DEVICES is %q, without %s", env, id)
		}
	}
	return "NVIDIA_VISIBLE_DEVICES=" + strings.ReplaceAll(env, ",", ", "), nil
}

func (s *story) fault(ctx context.Context) (string, error) {
	if err := s.Do(ctx, "simulate", "xid", "--gpu", s.held[0], "--xid", "48"); err != nil {
		return "", err
	}
	if err := s.await(ctx, s.total, s.total-1); err != nil {
		return "", err
	}
	if s.PodStatus("train")[gpu][s.held[0]] {
		return "", errors.New("the pod's allocatedResourcesStatus does not say Unhealthy")
	}
	return s.counts() + ", and the pod's allocatedResourcesStatus is Unhealthy", nil
}

func (s *story) repair(ctx context.Context) (string, error) {
	if err := s.Do(ctx, "simulate", "restore", "--gpu", s.held[0]); err != nil {
		return "", err
	}
	if err := s.await(ctx, s.total, s.total); err != nil {
		return "", err
	}
	return s.counts(), nil
}

func (s *story) restart(ctx context.Context) (string, error) {
	mark := s.Mark()
	if err := s.Restart(); err != nil {
		return "", err
	}
	if _, err := s.Next(ctx, mark, standin.Is(standin.Listed, gpu)); err != nil {
		return "", err
	}
	if err := s.await(ctx, s.total, s.total); err != nil {
		return "", err
	}
	registrations := 0
	for _, e := range s.Events(mark) {
		if e.Kind == standin.Registering {
			registrations++
		}
	}
	if registrations != 1 {
		return "", fmt.Errorf("%d registrations at the new kubelet, want 1", registrations)
	}
	return s.counts() + ", one registration", nil
}

func (s *story) unplug(ctx context.Context) (string, error) {
	if err := s.Do(ctx, "simulate", "remove", "--gpu", s.held[1]); err != nil {
		return "", err
	}
	if err := s.Running().Signal(syscall.SIGHUP); err != nil {
		return "", err // the daemon looks now; by itself it looks every 30 s while all is well
	}
	if err := s.await(ctx, s.total, s.total-1); err != nil {
		return "", err
	}
	return s.counts() + ": Unhealthy, and listed while the pod uses it", nil
}

func (s *story) drop(ctx context.Context) (string, error) {
	s.Remove("train")
	if err := s.await(ctx, s.total-1, s.total-1); err != nil {
		return "", err
	}
	return s.counts(), nil
}

func (s *story) stop(context.Context) (string, error) {
	began := time.Now()
	if err := s.StopDaemon(); err != nil {
		return "", err
	}
	if took := time.Since(began); took > 2*time.Second {
		return "", fmt.Errorf("it took %v, more than 2 s", took)
	}
	entries, err := os.ReadDir(s.Path("device-plugins"))
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 && e.Name() != "kubelet.sock" {
			return "", fmt.Errorf("socket %s is left behind", e.Name())
		}
	}
	return "its sockets are gone", nil
}

// await waits until the node shows so many devices.
func (s *story) await(ctx context.Context, capacity, allocatable int) error {
	err := s.WaitFor(ctx, func() bool { return s.Capacity(gpu) == capacity && s.Allocatable(gpu) == allocatable })
	if err != nil {
		devices := s.Devices(gpu)
		return fmt.Errorf("capacity %d and allocatable %d wanted, kubelet has %v: %w",
			capacity, allocatable, slices.Sorted(maps.Keys(devices)), err)
	}
	return nil
}

func (s *story) counts() string {
	return fmt.Sprintf("capacity %d, allocatable %d", s.Capacity(gpu), s.Allocatable(gpu))
}
