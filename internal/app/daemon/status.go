package daemon

import (
	"context"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func (d *daemon) status(ctx context.Context) (status.Status, error) {
	state, err := d.gpus.monitor.Status(ctx)
	if err != nil {
		return status.Status{}, err
	}
	offered := d.kubelet.set.Offered().Value()
	s := status.Status{
		Version: version.String(), Simulated: d.startup.Simulate, ConfigFile: d.watcher.Configs().Value().File,
		Driver: state.Snapshot.Driver.Version, DriverMismatch: state.Snapshot.Driver.Mismatch(),
		Looked: status.Moment(state.Looked),
		Stale:  state.Snapshot.Stale,
		Quiet:  !state.Quiesced.IsZero(), Node: state.Node,
		GPUs: status.Devices(state.Snapshot, state.GPUs), LeftOut: status.LeftOut(state.Snapshot, offered),
		Resources: resources(d.kubelet.set.Status()), Warnings: offered.OtherWarnings(),
		DRA: d.claims.allocation(), MIG: d.mig.layout(), Holds: holds(offered.Holds),
		ConfigGeneration: d.watcher.Generation(),
		Readiness:        d.report.readiness.Answer().Value(), Lead: shownLead(d.lead.Statuses().Value()),
		MPS:        slices.Sorted(maps.Values(d.kubelet.mps.Unready().Value())),
		Validation: d.maintenance.validation(state.Snapshot), Reset: d.maintenance.lastReset(),
		Repair: d.maintenance.repairStatus(), DriverChange: d.maintenance.driverChange(),
		CUDA: state.Snapshot.Driver.CUDA, Generation: state.Snapshot.Generation,
		ConfigLoaded: status.Moment(d.watcher.Loaded()),
		Reexecutions: d.reexecutions, NVSwitches: d.gpus.switchFaults.Value(),
		KubeletSocket: d.startup.KubeletSocket, PodResourcesSocket: d.startup.PodResourcesSocket,
	}
	_, s.GivenAway = d.gpus.pci.count()
	addManual(s.GPUs, s.Repair)
	addUnits(s.GPUs, offered)
	addPlan(s.Resources, offered)
	if d.kubelet.directory != nil {
		s.Kubelets = d.kubelet.directory.Kubelets()
	}
	if s.Kubelets > 0 {
		s.PodResourcesError = d.kubelet.account.Missing(os.DirFS(d.startup.Driver.ContainerRoot))
	}
	if err := d.report.metricsProblem.Value(); err != nil {
		s.MetricsError = err.Error()
	}
	s.MetricsAbsent = absent(state.Snapshot, d.gpus.monitor.Samples().Value())
	if err := d.report.labelsProblem.Value(); err != nil {
		s.LabelsError = err.Error()
	}
	if d.cluster != nil {
		if err := d.cluster.Problem(); err != nil {
			s.APIServerError = err.Error()
		}
	}
	if !state.Quiesced.IsZero() {
		s.Quiesced = &status.Quiesced{Since: status.Moment(state.Quiesced), Allocate: state.Allocate,
			ForChange: state.ForChange}
	}
	if err := d.watcher.Errors().Value(); err != nil {
		s.ConfigError = err.Error()
	}
	s.AddUnwatched(state.Unwatched)
	s.AddCalls(d.gpus.driver.Calls())
	for _, r := range state.Retries {
		s.Retries = append(s.Retries, status.Retry{Index: r.Index, Reason: r.Reason, Next: status.Moment(r.Next)})
	}
	d.addSteps(&s, state)
	s.Summary = status.Summarize(s)
	return s, nil
}

// addSteps adds the states on the way to GPUs for pods, if a CUDA check or a range of
// drivers is configured.
func (d *daemon) addSteps(s *status.Status, state monitor.Status) {
	c := d.watcher.Configs().Value()
	if s.Validation == nil && c.Accepted == (config.DriverRange{}) {
		return
	}
	e := status.Evidence{Refused: c.Accepted.Refuses(state.Snapshot.Driver), AnswersSince: state.Answers}
	if state.Snapshot.LacksUVM(!c.Edits.GivesNodes()) {
		e.MissingNode = "/dev/nvidia-uvm"
	}
	for _, r := range d.kubelet.set.Status() {
		if r.Since.After(e.AgreesSince) {
			e.AgreesSince = r.Since
		}
	}
	s.Steps = d.report.progress.Steps(*s, e, time.Now())
}

// absent returns the metrics of GPUs that the driver does not provide, a sentence for each reason.
func absent(s inventory.Snapshot, samples []inventory.Sample) []string {
	refused := map[string][]string{}
	for _, sample := range samples {
		if g, known := s.GPU(sample.UUID); known && sample.Refused != "" {
			refused[sample.Refused] = append(refused[sample.Refused], strconv.Itoa(g.Index))
		}
	}
	var sentences []string
	for _, reason := range slices.Sorted(maps.Keys(refused)) {
		sentences = append(sentences, "DCGM_FI_PROF_* are absent for "+status.GPUList(refused[reason])+": "+reason)
	}
	return sentences
}

// shownLead returns the part of the status about the lead.
func shownLead(s lead.Status) status.Lead {
	return status.Lead{
		This: s.Leads, Name: s.Name, Since: status.Moment(s.Since), Standbys: s.Standbys,
		PreviousLeader: s.PreviousLeader,
		Problem:        s.Problem,
	}
}

func resources(served []serve.Status) []status.Resource {
	resources := make([]status.Resource, 0, len(served))
	for _, r := range served {
		shown := status.Resource{
			Name: r.Resource, Devices: r.Devices, Healthy: r.Healthy, Unoffered: r.Unoffered, Server: string(r.Phase),
			Agreed: r.Agreed, Problem: r.Problem,
		}
		for _, d := range r.Retiring {
			shown.Departing = append(shown.Departing, status.Departing(d))
		}
		resources = append(resources, shown)
	}
	return resources
}

// addPlan adds the plan's data about the resources.
func addPlan(to []status.Resource, plan resource.Plan) {
	for i := range to {
		r, planned := plan.Resource(to[i].Name)
		to[i].Planned = planned
		to[i].MPS = slices.ContainsFunc(r.Devices, func(d resource.Device) bool { return d.MPSDaemon() != "" })
	}
}

func holds(put []resource.Hold) []status.Hold {
	var holds []status.Hold
	for _, h := range put {
		if h.Row.IsRoutine() { // neither a problem nor awaited
			continue
		}
		holds = append(holds, status.Hold{Device: h.UUID, Resource: h.Resource, Reason: h.Reason, Listed: !h.Hidden,
			Node: h.Node, Waits: h.Waits})
	}
	return holds
}
