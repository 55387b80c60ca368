package telemetry

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A gpuMetric is a metric with the values of a measure.
type gpuMetric struct {
	metric
	measure inventory.Measure
	ours    bool // the metric has gpuLabels, not deviceLabels
}

// deviceLabels are the labels of all metrics of dcgm-exporter. A series omits empty labels.
var deviceLabels = []string{
	"gpu", "UUID", "pci_bus_id", "device", "modelName", "DCGM_FI_DRIVER_VERSION", "GPU_I_PROFILE", "GPU_I_ID",
	"Hostname",
	"container", "namespace", "pod",
}

// The greatest number of series of a metric.
const (
	onePerGPU      = "1 a GPU"
	onePerInstance = "1 a GPU, or 1 a GPU instance of a GPU in MIG mode"
)

// dcgm returns a metric with the name and the help text of dcgm-exporter.
func dcgm(name string, k metricType, measure inventory.Measure, unit, help string) gpuMetric {
	return gpuMetric{metric: metric{
		name: "DCGM_FI_" + name, kind: k, unit: unit, help: help, labels: deviceLabels, series: onePerGPU,
	}, measure: measure}
}

// ofInstances marks a metric of GPU instances on GPUs in MIG mode.
func ofInstances(m gpuMetric) gpuMetric {
	m.series = onePerInstance
	return m
}

// gpuRows are the metrics from samples.
var gpuRows = []gpuMetric{
	dcgm("DEV_SM_CLOCK", gauge, inventory.SMClock, "MHz", "SM clock frequency (in MHz)."),
	dcgm("DEV_MEM_CLOCK", gauge, inventory.MemoryClock, "MHz", "Memory clock frequency (in MHz)."),
	dcgm("DEV_MEMORY_TEMP", gauge, inventory.MemoryTemperature, "°C", "Memory temperature (in C)."),
	dcgm("DEV_GPU_TEMP", gauge, inventory.Temperature, "°C", "GPU temperature (in C)."),
	dcgm("DEV_POWER_USAGE", gauge, inventory.PowerUsage, "W", "Power draw (in W)."),
	dcgm("DEV_POWER_MGMT_LIMIT", gauge, inventory.PowerLimit, "W", "Power management limit (in W)."),
	dcgm("DEV_ENFORCED_POWER_LIMIT", gauge, inventory.EnforcedPowerLimit, "W", "Power limit in force (in W)."),
	dcgm("DEV_MAX_SM_CLOCK", gauge, inventory.MaxSMClock, "MHz", "Maximum SM clock frequency (in MHz)."),
	dcgm("DEV_MAX_MEM_CLOCK", gauge, inventory.MaxMemoryClock, "MHz", "Maximum memory clock frequency (in MHz)."),
	dcgm("DEV_TOTAL_ENERGY_CONSUMPTION", counter, inventory.EnergyConsumption, "mJ",
		"Total energy consumption since boot (in mJ)."),
	dcgm("DEV_PCIE_REPLAY_COUNTER", counter, inventory.PCIeReplayCount, "", "Total number of PCIe retries."),
	dcgm("DEV_GPU_UTIL", gauge, inventory.GPUUtilization, "%", "GPU utilization (in %)."),
	dcgm("DEV_MEM_COPY_UTIL", gauge, inventory.MemoryUtilization, "%", "Memory utilization (in %)."),
	dcgm("DEV_ENC_UTIL", gauge, inventory.EncoderUtilization, "%", "Encoder utilization (in %)."),
	dcgm("DEV_DEC_UTIL", gauge, inventory.DecoderUtilization, "%", "Decoder utilization (in %)."),
	ofInstances(dcgm("DEV_FB_FREE", gauge, inventory.MemoryFree, "MiB", "Framebuffer memory free (in MiB).")),
	ofInstances(dcgm("DEV_FB_USED", gauge, inventory.MemoryUsed, "MiB", "Framebuffer memory used (in MiB).")),
	ofInstances(dcgm("DEV_FB_RESERVED", gauge, inventory.MemoryReserved, "MiB",
		"Framebuffer memory reserved (in MiB).")),
	ofInstances(dcgm("DEV_FB_TOTAL", gauge, inventory.MemoryTotal, "MiB", "Total Frame Buffer of the GPU (in MiB).")),
	dcgm("DEV_VGPU_LICENSE_STATUS", gauge, inventory.VGPULicense, "", "vGPU License status"),
	dcgm("DEV_UNCORRECTABLE_REMAPPED_ROWS", counter, inventory.UncorrectableRows, "",
		"Number of remapped rows for uncorrectable errors"),
	dcgm("DEV_CORRECTABLE_REMAPPED_ROWS", counter, inventory.CorrectableRows, "",
		"Number of remapped rows for correctable errors"),
	dcgm("DEV_ROW_REMAP_FAILURE", gauge, inventory.RowRemapFailed, "", "Whether remapping of rows has failed"),
	dcgm("DEV_ROW_REMAP_PENDING", gauge, inventory.RowRemapPending, "", "Whether remapping of rows is pending"),
	dcgm("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", counter, inventory.NVLinkReplays, "",
		"Total number of NVLink retries."),
	dcgm("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", counter, inventory.NVLinkRecoveries, "",
		"Total number of NVLink recovery errors."),
	dcgm("DEV_ECC_SBE_VOL_TOTAL", counter, inventory.ECCCorrected, "", "Total number of single-bit volatile ECC "+
		"errors."),
	dcgm("DEV_ECC_DBE_VOL_TOTAL", counter, inventory.ECCUncorrected, "",
		"Total number of double-bit volatile ECC errors."),
	dcgm("DEV_CLOCKS_EVENT_REASONS", gauge, inventory.ClockEventReasons, "", "Current clock event reasons (bitmask)."),
	dcgm("DEV_PCIE_LINK_GEN", gauge, inventory.PCIeGeneration, "", "PCIe current link generation."),
	dcgm("DEV_PCIE_LINK_WIDTH", gauge, inventory.PCIeWidth, "", "PCIe current link width."),
	dcgm("DEV_PCIE_MAX_LINK_GEN", gauge, inventory.PCIeMaxGeneration, "", "PCIe max link generation."),
	dcgm("DEV_PCIE_MAX_LINK_WIDTH", gauge, inventory.PCIeMaxWidth, "", "PCIe max link width."),
	ofInstances(dcgm("PROF_GR_ENGINE_ACTIVE", gauge, inventory.GraphicsActive, "",
		"Ratio of time the graphics engine is active.")),
	ofInstances(dcgm("PROF_PIPE_TENSOR_ACTIVE", gauge, inventory.TensorActive, "",
		"Ratio of cycles the tensor (HMMA) pipe is active.")),
	ofInstances(dcgm("PROF_DRAM_ACTIVE", gauge, inventory.DRAMActive, "",
		"Ratio of cycles the device memory interface is active sending or receiving data.")),
	ofInstances(dcgm("PROF_SM_ACTIVE", gauge, inventory.SMActive, "",
		"The ratio of cycles an SM has at least 1 warp assigned.")),
	ofInstances(dcgm("PROF_SM_OCCUPANCY", gauge, inventory.SMOccupancy, "",
		"The ratio of number of warps resident on an SM.")),
	ofInstances(dcgm("PROF_PIPE_FP64_ACTIVE", gauge, inventory.FP64Active, "",
		"Ratio of cycles the fp64 pipes are active.")),
	ofInstances(dcgm("PROF_PIPE_FP32_ACTIVE", gauge, inventory.FP32Active, "",
		"Ratio of cycles the fp32 pipes are active.")),
	ofInstances(dcgm("PROF_PIPE_FP16_ACTIVE", gauge, inventory.FP16Active, "",
		"Ratio of cycles the fp16 pipes are active.")),
	dcgm("PROF_PCIE_TX_BYTES", gauge, inventory.PCIeTransmit, "B/s",
		"The rate of data transmitted over the PCIe bus in bytes per second."),
	dcgm("PROF_PCIE_RX_BYTES", gauge, inventory.PCIeReceive, "B/s",
		"The rate of data received over the PCIe bus in bytes per second."),
	{metric{
		name: "gpu_device_plugin_nvlink_transmitted_bytes_total", kind: counter, unit: "B", labels: gpuLabels,
		series: onePerGPU,
		help:   "Bytes that a GPU sent over all its NVLinks since the driver was loaded.",
	}, inventory.NVLinkTransmitted, true},
	{metric{
		name: "gpu_device_plugin_nvlink_received_bytes_total", kind: counter, unit: "B", labels: gpuLabels,
		series: onePerGPU,
		help:   "Bytes that a GPU received over all its NVLinks since the driver was loaded.",
	}, inventory.NVLinkReceived, true},
	{metric{
		name: "gpu_device_plugin_nvlinks_down", kind: gauge, labels: gpuLabels, series: onePerGPU,
		help: "Lanes of NVLink that are down; absent in MIG mode.",
	}, inventory.NVLinksDown, true},
}

// gpuLabels are the labels of this program's own metrics of GPUs.
var gpuLabels = []string{"gpu", "UUID"}

var lastXID = metric{
	name: "DCGM_FI_DEV_XID_ERRORS", kind: gauge, labels: slices.Concat(deviceLabels, []string{"err_code", "err_msg"}),
	series: onePerGPU, help: "Value of the last XID error encountered.",
}

var slowed = metric{
	name: "gpu_device_plugin_gpu_slowed", kind: gauge, labels: []string{"gpu", "UUID", "reason"}, series: "4 a GPU",
	help: "1 while the clocks of a GPU are low for a reason, else 0: hw_thermal, hw_power_brake, sw_thermal or " +
		"sw_power_cap.",
}

// slowedBy are the reasons for low clocks that operators act on, by bit.
var slowedBy = []struct {
	bit    uint64
	reason string
}{{0x40, "hw_thermal"}, {0x80, "hw_power_brake"}, {0x20, "sw_thermal"}, {0x04, "sw_power_cap"}}

var sampleTime = metric{
	name: "gpu_device_plugin_sample_timestamp_seconds", kind: gauge, unit: "s", labels: gpuLabels, series: onePerGPU,
	help: "When a GPU was last measured. The value stays while the GPU cannot be measured.",
}

var podDevice = metric{
	name: "gpu_device_plugin_pod_device", kind: gauge, labels: []string{"UUID", "GPU_I_ID", "pod", "namespace",
		"container", "pod_uid"},
	series: "1 for each container and its GPU or GPU instance, 4096 at most",
	help:   "A container holds the GPU or the GPU instance, alone or with others. The value is always 1.",
}

var unitHolderLabels = []string{"UUID", "gpu", "pod", "namespace", "container", "layer", "pod_uid"}

var unitLimit = metric{
	name: "gpu_device_plugin_unit_memory_limit_bytes", kind: gauge, unit: "B", labels: unitHolderLabels,
	series: "1 a container with units, 4096 at most",
	help:   "Memory limit of a container with units of a GPU, by layer.",
}

var unitPercentage = metric{
	name: "gpu_device_plugin_unit_thread_percentage", kind: gauge, labels: unitHolderLabels,
	series: "1 a container with units and a percentage, 4096 at most",
	help:   "Share of the GPU's threads that the container may use, in percent.",
}

var unitDifferences = metric{
	name: "gpu_device_plugin_unit_differences", kind: gauge, labels: []string{"UUID", "gpu"}, series: onePerGPU,
	help: "Containers whose units of a GPU differ from their requests: see status --holders.",
}

var podsTime = metric{
	name: "gpu_device_plugin_pod_devices_timestamp_seconds", kind: gauge, unit: "s", series: "1",
	help: "When the kubelet last named the containers that hold devices.",
}

// gpuMetrics are all metrics of GPUs.
func gpuMetrics() []metric {
	all := []metric{lastXID}
	for _, row := range gpuRows {
		all = append(all, row.metric)
	}
	return append(all, slowed, sampleTime, podDevice, unitLimit, unitPercentage, unitDifferences, podsTime)
}
