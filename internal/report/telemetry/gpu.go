package telemetry

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// sampleLife is the greatest age of a shown sample. Prometheus considers a value current for the
// same time. For older samples only the time is shown.
const sampleLife = 5 * time.Minute

// maxPodDevices limits the series about containers and their devices.
const maxPodDevices = 4096

// GPUSettings select the metrics of GPUs.
type GPUSettings struct {
	// Every is the interval of samples and of questions to the kubelet; 0 for no metrics of GPUs.
	Every time.Duration
	// HostnameLabel is the name of the label with the node's name; empty for none.
	HostnameLabel string
	// PodUIDs says that series of pods have the label pod_uid.
	PodUIDs bool
}

// GPUs holds the sources of the metrics of GPUs.
type GPUs struct {
	// Settings select the metrics, and Snapshots the GPUs.
	Settings  *feed.Feed[GPUSettings]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Samples are the measured values, and Pods the holders of devices.
	Samples *feed.Feed[[]inventory.Sample]
	Pods    *feed.Feed[PodDevices]
	// Hostname is the node's name.
	Hostname string
	// XIDName returns a short description of an XID; empty if unknown.
	XIDName func(xid uint64) string
	// Now returns the current time.
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
	held, uids := pods.byDevice(), pods.uids()
	remaining := maxPodDevices
	for _, g := range snapshot.GPUs {
		whole := held[g.UUID]
		remaining -= sendPodDevices(out, g.UUID, "", whole, remaining)
		instances := instancesOf(g, held)
		for _, i := range instances {
			remaining -= sendPodDevices(out, g.UUID, i.id(), i.holders, remaining)
		}
		sendUnits(out, g, pods.Units, uids)
		if s, ok := samples[g.UUID]; ok {
			c.sendSample(out, measuredGPU{g, s, c.labelsOf(settings, snapshot.Driver, g), whole, instances})
		}
	}
}

// measuredGPU is a GPU with a sample.
type measuredGPU struct {
	inventory.GPU
	sample    inventory.Sample
	labels    []label
	holders   []holder
	instances []instance
}

// sendSample sends the values of a sample. For a lost GPU or an old sample, only the time and the
// last XID are sent.
func (c *GPUs) sendSample(out *page, g measuredGPU) {
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
			continue // the instance was destroyed after the measurement
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

// An instance is a GPU instance with the containers that hold its MIG devices.
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
			// a container may hold several MIG devices of a GPU instance
			if !slices.ContainsFunc(all[at].holders, h.same) {
				all[at].holders = append(all[at].holders, h)
			}
		}
	}
	return all
}

// sendPodDevices sends the holders of a device, at most limit series, and returns the number of
// series.
func sendPodDevices(out *page, uuid, gi string, holders []holder, limit int) int {
	holders = holders[:min(len(holders), limit)]
	for _, h := range holders {
		podDevice.send(out, 1, withUID([]string{uuid, gi, h.pod, h.namespace, h.container}, h.uid)...)
	}
	return len(holders)
}

// sendUnits sends the holders of units of a GPU, and the number of holders with differences. The
// UIDs of pods are by namespace and name.
func sendUnits(out *page, g inventory.GPU, holders []status.Holder, uids map[[2]string]string) {
	index, inUnits, differences := strconv.Itoa(g.Index), false, 0
	for _, h := range holders[:min(len(holders), maxPodDevices)] {
		if h.Device != g.UUID {
			continue
		}
		inUnits = true
		labels := withUID([]string{g.UUID, index, h.Pod, h.Namespace, h.Container, h.Receipt.Layer},
			uids[[2]string{h.Namespace, h.Pod}])
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

// withUID returns the values of labels of which pod_uid is the last: a UID that is not known has
// no label.
func withUID(values []string, uid string) []string {
	if uid != "" {
		values = append(values, uid)
	}
	return values
}

// labelsOf returns the labels of a GPU.
func (c *GPUs) labelsOf(settings GPUSettings, d inventory.Driver, g inventory.GPU) []label {
	index := strconv.Itoa(g.Index)
	all := []label{
		{"gpu", index}, {"UUID", g.UUID}, {"pci_bus_id", busID(g.BDF)}, {"device", "nvidia" + index},
		{"modelName", g.Model},
	}
	if d.Version != "" {
		all = append(all, label{"DCGM_FI_DRIVER_VERSION", d.Version})
	}
	if settings.HostnameLabel != "" {
		all = append(all, label{settings.HostnameLabel, c.Hostname})
	}
	return all
}

// heldBy returns the labels of a device, further labels, and the labels of its holder. A container
// is named only as the single holder: a shared device has the same series for all holders. A claim
// is named, in the way of dcgm-exporter, if all holders have the device by the same claim.
func heldBy(holders []holder, device []label, more ...label) *labels {
	all := slices.Concat(device, more)
	if len(holders) == 1 && !holders[0].shared {
		h := holders[0]
		all = append(all, label{"container", h.container}, label{"namespace", h.namespace}, label{"pod", h.pod})
		if h.uid != "" {
			all = append(all, label{"pod_uid", h.uid})
		}
	}
	if len(holders) > 0 && !slices.ContainsFunc(holders,
		func(h holder) bool { return h.shared || h.claim != holders[0].claim }) {
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
