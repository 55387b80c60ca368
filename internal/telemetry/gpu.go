package telemetry

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// sampleLife is how old a sample can be to be shown: as long as Prometheus takes a value for one of now. Afterwards only its time
// is shown.
const sampleLife = 5 * time.Minute

// maxPodDevices bounds the series that say which container holds which device.
const maxPodDevices = 4096

// GPUSettings say which metrics of GPUs there are.
type GPUSettings struct {
	// Every is the time between two samples of the GPUs and two questions to kubelet; 0 for no metrics of GPUs.
	Every time.Duration
	// HostnameLabel is the name of the label with the node's name; empty for none.
	HostnameLabel string
}

// GPUSources are what the metrics of GPUs are made of.
type GPUSources struct {
	// Settings say which metrics there are, Snapshots which GPUs.
	Settings  *feed.Feed[GPUSettings]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Samples are the measured values, Pods who holds what.
	Samples *feed.Feed[[]inventory.Sample]
	Pods    *feed.Feed[PodDevices]
	// Hostname is the node's name.
	Hostname string
	// XIDName returns what an XID means, in few words; empty if that is not known.
	XIDName func(xid uint64) string
	// Now is the time now.
	Now func() time.Time
}

// NewGPUs returns the metrics of the GPUs.
func NewGPUs(s GPUSources) Collector { return gpus{s} }

type gpus struct{ GPUSources }

// Describe implements prometheus.Collector. What there is depends on the node, so it describes nothing.
func (c gpus) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c gpus) Collect(out chan<- prometheus.Metric) {
	settings, snapshot := c.Settings.Value(), c.Snapshots.Value()
	if settings.Every == 0 {
		return
	}
	samples := map[string]inventory.Sample{}
	for _, s := range c.Samples.Value() {
		samples[s.UUID] = s
	}
	pods := c.Pods.Value()
	podsTime.sendTime(out, pods.Asked)
	held := pods.byDevice()
	left := maxPodDevices
	for _, g := range snapshot.GPUs {
		whole := held[g.UUID]
		left -= sendPodDevices(out, g.UUID, "", whole, left)
		instances := instancesOf(g, held)
		for _, i := range instances {
			left -= sendPodDevices(out, g.UUID, i.id(), i.holders, left)
		}
		if s, ok := samples[g.UUID]; ok {
			c.send(out, found{g, s, c.labels(settings, g), whole, instances})
		}
	}
}

// found is a GPU that was measured.
type found struct {
	inventory.GPU
	sample    inventory.Sample
	labels    labels
	holders   []holder
	instances []instance
}

// send sends the values of a sample. Of a GPU that is lost, or that was not measured for long, only what still holds.
func (c gpus) send(out chan<- prometheus.Metric, g found) {
	s := &g.sample
	own := []string{g.labels.index, g.UUID}
	sampleTime.sendTime(out, s.Taken, own...)
	code := strconv.FormatUint(s.LastXID, 10)
	lastXID.sendPairs(out, float64(s.LastXID), g.labels.of(nil, g.holders, "err_code", code, "err_msg", c.xidName(s.LastXID)))
	if g.Health.State == inventory.Lost || c.Now().Sub(s.Taken) > sampleLife {
		return
	}
	ofGPU := g.labels.of(nil, g.holders)
	for i := range gpuRows {
		row := &gpuRows[i]
		value, ok := s.Values.Get(row.measure)
		switch {
		case !ok:
		case len(row.labels) == len(own):
			row.send(out, value, own...)
		default:
			row.sendPairs(out, value, ofGPU)
		}
	}
	if bits, ok := s.Values.Get(inventory.ClockEventReasons); ok {
		for _, by := range slowedBy {
			slowed.send(out, float64(min(uint64(bits)&by.bit, 1)), g.labels.index, g.UUID, by.reason)
		}
	}
	for _, sampled := range s.Instances {
		at := slices.IndexFunc(g.instances, func(i instance) bool { return i.gi == sampled.GI })
		if at < 0 {
			continue // it was there when it was measured
		}
		ofInstance := g.labels.of(&sampled, g.instances[at].holders)
		for i := range gpuRows {
			if value, ok := sampled.Values.Get(gpuRows[i].measure); ok && gpuRows[i].series == onePerInstance {
				gpuRows[i].sendPairs(out, value, ofInstance)
			}
		}
	}
}

func (c gpus) xidName(xid uint64) string {
	if xid == 0 {
		return "No Error"
	}
	if name := c.XIDName(xid); name != "" {
		return name
	}
	return "Unknown Error"
}

// An instance is a GPU instance and the containers that hold MIG devices in it.
type instance struct {
	gi      int
	holders []holder
}

func (i instance) id() string { return strconv.Itoa(i.gi) }

// instancesOf returns the GPU instances of a GPU.
func instancesOf(g inventory.GPU, held map[string][]holder) []instance {
	var all []instance
	for _, m := range g.MIGDevices {
		at := slices.IndexFunc(all, func(i instance) bool { return i.gi == m.GI })
		if at < 0 {
			at, all = len(all), append(all, instance{gi: m.GI})
		}
		for _, h := range held[m.UUID] {
			if !slices.Contains(all[at].holders, h) { // a container may hold several MIG devices of a GPU instance
				all[at].holders = append(all[at].holders, h)
			}
		}
	}
	return all
}

// sendPodDevices says which containers hold a device, and returns how many series it sent, which are most at most.
func sendPodDevices(out chan<- prometheus.Metric, uuid, gi string, holders []holder, most int) int {
	holders = holders[:min(len(holders), most)]
	for _, h := range holders {
		podDevice.sendPairs(out, 1, pairs("GPU_I_ID", gi, "UUID", uuid, "container", h.container, "namespace", h.namespace, "pod", h.pod))
	}
	return len(holders)
}

// labels are those of one GPU.
type labels struct {
	index string
	all   []*dto.LabelPair
}

func (c gpus) labels(settings GPUSettings, g inventory.GPU) labels {
	index := strconv.Itoa(g.Index)
	all := pairs("gpu", index, "UUID", g.UUID, "pci_bus_id", busID(g.BDF), "device", "nvidia"+index, "modelName", g.Model)
	if settings.HostnameLabel != "" {
		all = append(all, pairs(settings.HostnameLabel, c.Hostname)...)
	}
	return labels{index, all}
}

// of returns the labels of the GPU, or of an instance of it, sorted. The container that holds it is among them if it holds it alone: a
// device that is shared has the same series whoever holds it.
func (l labels) of(i *inventory.InstanceSample, holders []holder, more ...string) []*dto.LabelPair {
	all := slices.Concat(l.all, pairs(more...))
	if i != nil {
		all = append(all, pairs("GPU_I_PROFILE", i.Profile, "GPU_I_ID", strconv.Itoa(i.GI))...)
	}
	if len(holders) == 1 && !holders[0].shared {
		h := holders[0]
		all = append(all, pairs("container", h.container, "namespace", h.namespace, "pod", h.pod)...)
	}
	slices.SortFunc(all, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
	return all
}

// pairs returns labels from names that are each followed by its value.
func pairs(namesAndValues ...string) []*dto.LabelPair {
	all := make([]*dto.LabelPair, 0, len(namesAndValues)/2)
	for pair := range slices.Chunk(namesAndValues, 2) {
		all = append(all, &dto.LabelPair{Name: &pair[0], Value: &pair[1]})
	}
	return all
}

// sendPairs sends a value with sorted labels, which need not be those of every series.
func (m *metric) sendPairs(out chan<- prometheus.Metric, value float64, labels []*dto.LabelPair) {
	out <- series{metric: m, value: value, labels: labels}
}

// A series is a value of a metric.
type series struct {
	metric *metric
	value  float64
	labels []*dto.LabelPair
}

// Desc implements prometheus.Metric.
func (s series) Desc() *prometheus.Desc { return s.metric.desc() }

// Write implements prometheus.Metric.
func (s series) Write(out *dto.Metric) error {
	out.Label = s.labels
	if s.metric.kind == counter {
		out.Counter = &dto.Counter{Value: &s.value}
		return nil
	}
	out.Gauge = &dto.Gauge{Value: &s.value}
	return nil
}
