package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var footprintFigures = []figure{
	{"resident memory and CPU, idle for 20 s, 8 GPUs", "under 30 MB, under 2 ms a second", idle},
	{"the same with metrics, scraped every second", "under 30 MB", idleScraped},
	{"resident memory and CPU, idle for 20 s, 8 GPUs, CUDA proven first", "1 MB more than without", idleProven},
	{"resident memory and CPU, idle for 20 s, 7 of 8 × 141 GB in units, counted", "under 2 ms a second", idleUnits},
	{"from the driver's answer to 8 GPUs proven and offered (stand-in libcuda)", "within 15 s", proofs},
	{"binary, stripped", "under 22 MB", size},
}

func idle(ctx context.Context, daemon string) (string, error) {
	return idling(ctx, node.Setup{Daemon: daemon}, 20*time.Second)
}

// idling returns what a daemon uses that has nothing to do but to look and to listen.
func idling(ctx context.Context, setup node.Setup, idleFor time.Duration) (_ string, err error) {
	n, err := registered(ctx, setup)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	return used(ctx, n, idleFor)
}

// used returns what the daemon of a node uses from now on.
func used(ctx context.Context, n *node.Node, idleFor time.Duration) (string, error) {
	pid := n.Running().Pid
	before, err := cpu(pid)
	if err != nil {
		return "", err
	}
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(idleFor):
	}
	after, err := cpu(pid)
	if err != nil {
		return "", err
	}
	resident, err := rss(pid)
	if err != nil {
		return "", err
	}
	perSecond := float64((after - before).Microseconds()) / 1000 / idleFor.Seconds()
	return fmt.Sprintf("%.1f MB, %.2f ms a second", float64(resident)/1e6, perSecond), nil
}

// idleScraped is idle with everything on.
func idleScraped(ctx context.Context, daemon string) (_ string, err error) {
	at, err := loopback.Free(ctx)
	if err != nil {
		return "", err
	}
	scraping, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	scrapes := 0
	group.Go(func() {
		every := time.NewTicker(time.Second)
		defer every.Stop()
		for {
			select {
			case <-scraping.Done():
				return
			case <-every.C:
				if _, _, failed := scrape(scraping, at); failed == nil {
					scrapes++
				}
			}
		}
	})
	result, err := idling(ctx, node.Setup{Daemon: daemon, Args: []string{"--metrics-address", at}}, 20*time.Second)
	stop()
	group.Wait()
	if err == nil && scrapes < 10 {
		err = fmt.Errorf("only %d scrapes succeeded", scrapes)
	}
	return result, err
}

// cpu returns the CPU time that a process has used (proc(5), /proc/pid/schedstat: nanoseconds of
// all its threads are in task/*/schedstat).
func cpu(pid int) (time.Duration, error) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, task := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, task.Name()))
		if err != nil {
			return 0, err
		}
		onCPU, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(onCPU)
	}
	return sum, nil
}

// rss returns the resident memory of a process in bytes.
func rss(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	pages, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

func size(_ context.Context, daemon string) (string, error) {
	info, err := os.Stat(daemon)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%.1f MB", float64(info.Size())/1e6), nil
}
