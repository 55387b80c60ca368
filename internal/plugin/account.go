package plugin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

const (
	// checkSoon is how long after a list was sent kubelet's account is compared with it: kubelet takes a list in within
	// milliseconds, and a second leaves room for a busy node.
	checkSoon = time.Second
	// checkLater is the pace of comparing while nothing changes; it is come to by doubling.
	checkLater = 30 * time.Second
	// accountTimeout bounds one question about kubelet's account.
	accountTimeout = 2 * time.Second
	// patientChecks is how many comparisons in a row must fail for the registration to be given up.
	patientChecks = 3
)

// An Accountant knows kubelet's own account of the devices of this node.
type Accountant interface {
	// Allocatable returns, for each resource, the IDs of the devices that kubelet holds for healthy.
	Allocatable(ctx context.Context) (map[string][]string, error)
	// Held returns the devices that pods hold, as far as kubelet tells.
	Held(ctx context.Context) ([]kubelet.HeldDevice, error)
}

// checkAccount compares kubelet's account with the list, again and again, until ctx ends or the two differ for good. It
// reports whether they ever agreed. Where the account cannot be had, nothing is concluded; the list is then sent again when a
// socket beside ours came or went.
//
// Where kubelet has some devices, another server's list came in between, and ours is sent again. Where it has none any
// more, another server of the resource has ended. Kubelet 1.36 goes by the one that registered last: it has stopped that
// one's endpoint, and would take another list from this stream without giving out a single device. Only registering helps.
func (l *life) checkAccount(ctx context.Context) (agreed bool, err error) {
	log := klog.FromContext(ctx)
	pace := checkSoon
	check := l.Clock.NewTimer(pace)
	defer check.Stop()
	var sent *pluginapi.ListAndWatchResponse
	differed := 0
	visited := false // a socket beside ours came or went since the last question
	for {
		view, changed := l.list.views.Latest()
		if view.response != sent {
			sent, pace = view.response, checkSoon
			check.Reset(pace)
		}
		select {
		case <-ctx.Done():
			return agreed, context.Cause(ctx)
		case <-changed:
			continue
		case <-l.visits:
			visited, pace = true, settleTime
			check.Reset(pace)
			continue
		case <-check.C():
		}
		pace = min(2*pace, checkLater)
		allocatable, err := l.allocatable(ctx)
		switch {
		case err != nil:
			log.V(2).Info("Cannot compare kubelet's account with the list", "reason", err.Error())
			if visited {
				l.list.resend() // kubelet 1.37 goes by the list that it received last, and that may be a farewell
			}
		case l.list.views.Value().response != sent: // the account may be of one list or the other
			pace = checkSoon
		case sameIDs(allocatable, view.healthy()):
			agreed, differed = true, 0
			l.compared("")
		default:
			differed++
			l.compared(fmt.Sprintf("kubelet counts %d healthy devices, and the list has %d", len(allocatable), len(view.healthy())))
			none := len(allocatable) == 0
			if none && agreed || differed == patientChecks {
				return agreed, errDisagrees
			}
			log.Info("Kubelet's account differs from the list", "kubelet", len(allocatable), "list", len(view.healthy()))
			if !none {
				l.list.resend()
			}
			pace = checkSoon
		}
		visited = false
		check.Reset(pace)
	}
}

func (l *life) allocatable(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	all, err := l.Accountant.Allocatable(ctx)
	return all[l.list.name], err
}

// sameIDs reports whether a and b hold the same IDs. It may reorder both.
func sameIDs(a, b []string) bool {
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(slices.Compact(a), b)
}
