package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Serving judges whether the plugin servers serve no less than was served on the node before.
type Serving struct {
	Configs *feed.Feed[config.Config]
	Monitor *monitor.Monitor
	// Offered is the part of the plan that the servers offer.
	Offered *feed.Feed[resource.Plan]
	Servers func() []serve.Status
	Others  Others
	// Owners are the owners of the GPUs; nil until they are known.
	Owners *feed.Feed[dra.Owners]
	// Leads reports whether this process decides on the owners. Otherwise owners may be
	// missing: the leader publishes only owners of GPUs that it has found.
	Leads func() bool
	// Waiting returns sentences about GPUs whose owner does not change yet. Returning
	// reports whether GPUs from slices will return, or wait for a lasting reason, within a
	// minute. Both are nil if GPUs have one owner.
	Waiting   func() []string
	Returning func() bool
}

// Others knows the devices of all device plugins of the node.
type Others interface {
	// Allocatable returns the IDs of the devices that the kubelet considers healthy, by resource.
	Allocatable(ctx context.Context) (map[string][]string, error)
	// Remembered returns the IDs of the healthy devices in the kubelet's checkpoint, by
	// resource. The kubelet forgets a resource five minutes after its last server ended.
	Remembered() (map[string][]string, error)
	// Listening returns the names of the sockets of other GPU device plugins that accept
	// connections.
	Listening(ctx context.Context) []string
}

// Ready implements Task.Ready for the task of the servers.
func (s *Serving) Ready(ctx context.Context) (ready bool, reason string) {
	state, err := s.Monitor.Status(ctx)
	switch {
	case err != nil:
		return false, err.Error()
	case state.Looked.IsZero() && state.Err == nil && state.Quiesced.IsZero():
		return false, "the first scan of the node has not ended"
	}
	if why := driverMismatch(state); why != "" {
		return false, why
	}
	options := s.Configs.Value().Resource
	owners := s.Owners.Value()
	unknown := func(g inventory.GPU) bool { return owners[g.UUID] == "" }
	switch gpus := state.Snapshot.GPUs; {
	case s.Leads() && slices.ContainsFunc(gpus, unknown):
		return false, "it is not known yet which GPUs belong to Dynamic Resource Allocation" + s.waiting()
	case s.Returning != nil && s.Returning():
		return false, "GPUs come back from Dynamic Resource Allocation" + s.waiting()
	// for example a leader without a driver: this process serves no less, and asks for the lead
	case owners == nil && len(gpus) > 0:
		return true, "the leading process does not say which GPUs belong to Dynamic Resource Allocation"
	}
	options.NotOffered = owners.NotOffered(state.Snapshot.GPUs)
	plan := resource.New(state.Snapshot, options)
	allocatable, err := s.Others.Allocatable(ctx)
	if len(plan.Resources) > 0 {
		reasons := unserved(plan, s.Offered.Value(), s.Servers(), err == nil)
		if len(reasons) == 0 {
			return true, strings.TrimPrefix(s.waiting(), ": ")
		}
		return false, strings.Join(reasons, "; ")
	}
	if i := slices.IndexFunc(plan.LeftOut, func(l resource.LeftOut) bool { return l.Refused }); i >= 0 {
		return false, "the configuration cannot be served on this node: " + plan.LeftOut[i].Reason
	}
	if n := len(options.NotOffered); n > 0 {
		return true, "the device plugin has nothing to serve" +
			cmp.Or(s.waiting(), fmt.Sprintf(": Dynamic Resource Allocation gives out %s, see status",
				wording.Count(n, "GPU")))
	}
	if others := s.others(ctx, allocatable, err); others != "" {
		return false, others + "; this one has nothing to serve: " + why(state)
	}
	for _, server := range s.Servers() {
		if held := len(server.Retiring); held > 0 {
			return false, fmt.Sprintf("%s cannot be offered, and pods hold or may hold %s of it; this daemon has "+
				"nothing to serve: %s",
				server.Resource, wording.Count(held, "device"), why(state))
		}
	}
	return true, "nothing to serve: " + why(state)
}

// waiting returns why GPUs are not the device plugin's yet, after a colon; empty if none waits.
func (s *Serving) waiting() string {
	if s.Waiting == nil {
		return ""
	}
	if reasons := s.Waiting(); len(reasons) > 0 {
		return ": " + strings.Join(reasons, "; ")
	}
	return ""
}

// unserved returns why resources of the plan are not served. If the kubelet's account can
// be read, it must agree.
func unserved(plan, offered resource.Plan, servers []serve.Status, accountable bool) []string {
	var reasons []string
	for _, r := range plan.Resources {
		i := slices.IndexFunc(servers, func(s serve.Status) bool { return s.Resource == r.Name })
		if _, isOffered := offered.Resource(r.Name); !isOffered || i < 0 {
			reasons = append(reasons, fmt.Sprintf("%s is not offered: %s", r.Name, withheldReason(r, offered)))
			continue
		}
		problem := servers[i].Problem
		switch {
		case servers[i].Phase != serve.PhaseServing && problem == "":
			problem = string(servers[i].Phase)
		case servers[i].Phase == serve.PhaseServing && accountable && !servers[i].Agreed && problem == "":
			problem = "the kubelet's account has not been compared with the list yet"
		case servers[i].Phase == serve.PhaseServing && (servers[i].Agreed || !accountable):
			continue
		}
		reasons = append(reasons, fmt.Sprintf("%s is not served: %s", r.Name, problem))
	}
	return reasons
}

// withheldReason returns why no device of a resource is offered.
func withheldReason(r resource.Resource, offered resource.Plan) string {
	for _, l := range offered.LeftOut {
		if slices.ContainsFunc(r.Devices, func(d resource.Device) bool { return d.UUID == l.UUID }) {
			return l.Reason
		}
	}
	return "its server is starting"
}

// why returns why there is nothing to serve.
func why(state monitor.Status) string {
	switch {
	case state.ForChange:
		return driverchange.HoldReason
	case !state.Quiesced.IsZero():
		return "the driver is released; to end this, run: gpu-device-plugin resume"
	case state.Err != nil:
		return state.Err.Error()
	case len(state.Snapshot.GPUs)+len(state.Snapshot.LeftOut) == 0:
		return "this node has no GPU"
	}
	return "none of the node's GPUs can be offered, see status"
}

// others names another device plugin that serves GPUs on the node; empty if there is none.
// The sources are the kubelet's account and its checkpoint, which keeps resources until
// five minutes after the end of their last server. Sockets count only if neither source
// can be read: a plugin without devices also has a socket.
func (s *Serving) others(ctx context.Context, allocatable map[string][]string, failed error) string {
	remembered, err := s.Others.Remembered()
	for _, source := range []struct {
		what    string
		devices map[string][]string
	}{
		{"is served by another device plugin", allocatable},
		{"was served until recently, and the kubelet still remembers it",
			remembered},
	} {
		for _, name := range slices.Sorted(maps.Keys(source.devices)) {
			gpus := 0
			for _, id := range source.devices[name] {
				if isGPU(name, id) {
					gpus++
				}
			}
			if gpus > 0 {
				return fmt.Sprintf("%s %s, with %s", name, source.what, wording.Count(gpus, "device"))
			}
		}
	}
	if failed == nil || err == nil {
		return ""
	}
	if sockets := s.Others.Listening(ctx); len(sockets) > 0 {
		return fmt.Sprintf("another device plugin listens at %s, and the kubelet's account cannot be read: %v",
			strings.Join(sockets, ", "), failed)
	}
	return ""
}

// isGPU reports whether a device of a resource is a GPU or MIG device. NVIDIA's resources
// may also contain other kinds of devices, whose IDs are not UUIDs of NVML.
func isGPU(name, id string) bool {
	return name == resource.WholeGPU || strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-")
}
