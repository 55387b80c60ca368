package telemetry

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// sampleLife is how old a sample can be to be shown: as long as Prometheus takes a value for one of
// now. Afterwards only its time is shown.
const sampleLife = 5 * time.Minute

// maxPodDevices bounds the series that say which container holds which device.
const maxPodDevices = 4096

// GPUSettings say which metrics of GPUs there are.
type GPUSettings struct {
	// Every is the time between two samples of the GPUs and two questions to kubelet; 0 for no metrics
	// of GPUs.
	Every time.Duration
	// HostnameLabel is the name of the label with the node's name; empty for none.
	HostnameLabel string
}

// GPUs are what the metrics of GPUs are made of.
type GPUs struct {
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

// send sends the metrics of the GPUs.
func (c *GPUs) send(out *page) {
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
		sendUnits(out, g, pods.Units)
		if s, ok := samples[g.UUID]; ok {
			c.sendSample(out, found{g, s, c.labelsOf(settings, snapshot.Driver, g), whole, instances})
		}
	}
}

// found is a GPU that was measured.
type found struct {
	inventory.GPU
	sample    inventory.Sample
	labels    []label
	holders   []holder
	instances []instance
}

// sendSample sends the values of a sample. Of a GPU that is lost, or that was not measured for
// long, only what still holds.
func (c *GPUs) sendSample(out *page, g found) {
	s, index := &g.sample, strconv.Itoa(g.Index)
	ofGPU := heldBy(g.holders, g.labels)
	ours := newLabels([]label{{"gpu", index}, {"UUID", g.UUID}})
	sampleTime.sendTime(out, s.Taken, index, g.UUID)
	code := strconv.FormatUint(s.LastXID, 10)
	out.add(&lastXID, float64(s.LastXID), heldBy(g.holders, g.labels, label{"err_code", code},
		label{"err_msg", c.xidName(s.LastXID)}))
	if g.Health.State == inventory.Lost || c.Now().Sub(s.Taken) > sampleLife {
		return
	}
	for i := range gpuRows {
		row, labels := &gpuRows[i], ofGPU
		if row.ours {
			labels = ours
		}
		if value, ok := s.Values.Get(row.measure); ok {
			out.add(&row.metric, value, labels)
		}
	}
	if bits, ok := s.Values.Get(inventory.ClockEventReasons); ok {
		for _, by := range slowedBy {
			slowed.send(out, float64(min(uint64(bits)&by.bit, 1)), index, g.UUID, by.reason)
		}
	}
	for _, sampled := range s.Instances {
		at := slices.IndexFunc(g.instances, func(i instance) bool { return i.gi == sampled.GI })
		if at < 0 {
			continue // it was there when it was measured
		}
		i := g.instances[at]
		ofInstance := heldBy(i.holders, g.labels, label{"GPU_I_PROFILE", sampled.Profile}, label{"GPU_I_ID", i.id()})
		for i := range gpuRows {
			if value, ok := sampled.Values.Get(gpuRows[i].measure); ok && gpuRows[i].series == onePerInstance {
				out.add(&gpuRows[i].metric, value, ofInstance)
			}
		}
	}
}

func (c *GPUs) xidName(xid uint64) string {
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
			h.mig = m
			if !slices.ContainsFunc(all[at].holders, h.same) { // a container may hold several MIG devices of a GPU instance
				all[at].holders = append(all[at].holders, h)
			}
		}
	}
	return all
}

// sendPodDevices says which containers hold a device, and returns how many series it sent, which
// are most at most.
func sendPodDevices(out *page, uuid, gi string, holders []holder, most int) int {
	holders = holders[:min(len(holders), most)]
	for _, h := range holders {
		podDevice.send(out, 1, uuid, gi, h.pod, h.namespace, h.container)
	}
	return len(holders)
}

// sendUnits says which containers have units of a GPU, and how many of them are not held to their
// limits.
func sendUnits(out *page, g inventory.GPU, holders []status.Holder) {
	index, inUnits, differences := strconv.Itoa(g.Index), false, 0
	for _, h := range holders[:min(len(holders), maxPodDevices)] {
		if h.Device != g.UUID {
			continue
		}
		inUnits = true
		labels := []string{g.UUID, index, h.Pod, h.Namespace, h.Container, h.Receipt.Layer}
		unitLimit.send(out, float64(h.Receipt.MemoryMiB)*(1<<20), labels...)
		if h.Receipt.Percentage > 0 {
			unitPercentage.send(out, float64(h.Receipt.Percentage), labels...)
		}
		if len(h.Receipt.Differences) > 0 {
			differences++
		}
	}
	if inUnits {
		unitDifferences.send(out, float64(differences), g.UUID, index)
	}
}

// labelsOf returns the labels of a GPU.
func (c *GPUs) labelsOf(settings GPUSettings, d inventory.Driver, g inventory.GPU) []label {
	index := strconv.Itoa(g.Index)
	all := []label{
		{"gpu", index}, {"UUID", g.UUID}, {"pci_bus_id", busID(g.BDF)}, {"device", "nvidia" + index}, {"modelName", g.Model},
	}
	if d.Version != "" {
		all = append(all, label{"DCGM_FI_DRIVER_VERSION", d.Version})
	}
	if settings.HostnameLabel != "" {
		all = append(all, label{settings.HostnameLabel, c.Hostname})
	}
	return all
}

// heldBy returns the labels of a device, more, and those of the container that holds it, with its
// claim as dcgm-exporter names it, if it holds it alone: a device that is shared has the same
// series for all its holders. Containers that hold it by one claim have the labels of that.
func heldBy(holders []holder, device []label, more ...label) *labels {
	all := slices.Concat(device, more)
	if len(holders) == 1 && !holders[0].shared {
		h := holders[0]
		all = append(all, label{"container", h.container}, label{"namespace", h.namespace}, label{"pod", h.pod})
	}
	if len(holders) > 0 && !slices.ContainsFunc(holders, func(h holder) bool { return h.shared || h.claim != holders[0].claim }) {
		claim, m := holders[0].claim, holders[0].mig
		for _, l := range []label{
			{"dra_claim_name", claim.Name}, {"dra_claim_namespace", claim.Namespace}, {"dra_driver_name", claim.Driver},
			{"dra_pool_name", claim.Pool}, {"dra_device_name", claim.Device}, {"dra_mig_profile",
				m.Profile}, {"dra_mig_device_uuid", m.UUID},
		} {
			if claim.Name != "" && l.value != "" {
				all = append(all, l)
			}
		}
	}
	return newLabels(all)
}
