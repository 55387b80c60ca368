package telemetry

const onePerResource = "1 a resource"

// The metrics of the daemon. A new metric needs three things: a variable here, a place in
// daemonMetrics below, and a call of send in collector.go, or in counters.go for what is counted.
// `go test ./internal/report/telemetry -update` then writes the tables of docs/monitoring.md and
// docs/dev/metrics.md, and the expected page testdata/daemon.txt, which needs a value in full of
// metrics_test.go. TestEveryMetric fails where a step is missing.
var (
	buildInfo = metric{
		name: "gpu_device_plugin_build_info", kind: gauge, labels: []string{"version"}, series: "1",
		help: "The version of the daemon. The value is always 1.",
	}
	driverInfo = metric{
		name: "gpu_device_plugin_driver_info", kind: gauge, labels: []string{"version", "cuda"}, series: "1",
		help: "The version of the driver, and its newest supported CUDA version. The value is always 1. Absent " +
			"before the first answer of the driver.",
	}
	pciGPUs = metric{
		name: "gpu_device_plugin_pci_gpus", kind: gauge, series: "1",
		help: "NVIDIA GPUs on the PCI bus, without GPUs assigned to virtual machines. Needs no driver.",
	}
	pciGPUsGivenAway = metric{
		name: "gpu_device_plugin_pci_gpus_given_away", kind: gauge, series: "1",
		help: "NVIDIA GPUs on the PCI bus and virtual functions assigned to virtual machines. Needs no driver.",
	}
	gpuInfo = metric{
		name: "gpu_device_plugin_gpu_info", kind: gauge, labels: []string{"UUID", "gpu", "pci_bus_id", "model",
			"minor"}, series: onePerGPU,
		help: "The properties of a GPU. The value is always 1.",
	}
	ready = metric{
		name: "gpu_device_plugin_ready", kind: gauge, series: "1",
		help: "1 if the daemon serves no less than what was served on the node before. Once 1, it stays 1.",
	}
	leads = metric{
		name: "gpu_device_plugin_leads", kind: gauge, series: "1",
		help: "1 if this process leads on the node. During a roll-out there are two processes, and one of them leads.",
	}
	leadsSince = metric{
		name: "gpu_device_plugin_leads_since_timestamp_seconds", kind: gauge, unit: "s", series: "1",
		help: "When the leading process of the node began to lead, in seconds since 1970. Absent while unknown.",
	}
	hardwareHeld = metric{
		name: "gpu_device_plugin_hardware_held", kind: gauge, series: "1",
		help: "1 while MIG layouts, MPS and time slices stay unchanged, because a previous leader has not ended.",
	}
	migLayoutState = metric{
		name: "gpu_device_plugin_mig_layout_state", kind: gauge, labels: []string{"state"}, series: "4",
		help: "1 for the state of the MIG layout, else 0: pending, rebooting, success or failed. Absent without one.",
	}
	repairCount = metric{
		name: "gpu_device_plugin_repairs_total", kind: counter, labels: []string{"result"}, series: "2",
		help: "Resets of GPUs by the daemon since its start, by result: repaired or failed. Absent without --repair.",
	}
	repairState = metric{
		name: "gpu_device_plugin_repair_state", kind: gauge, labels: []string{"UUID", "gpu", "state"},
		series: "1 a GPU",
		help: "1 for each GPU that needs a reset, with what the daemon does about it: ready, waiting, repairing or " +
			"manual. Absent without --repair.",
	}
	driverChangeState = metric{
		name: "gpu_device_plugin_driver_change_state", kind: gauge, labels: []string{"state"}, series: "6",
		help: "1 for the state of the change of the driver, else 0: blocked, waiting, changing, next-boot, failed or " +
			"done. Absent without --driver-version.",
	}
	driverChangeSince = metric{
		name: "gpu_device_plugin_driver_change_state_timestamp_seconds", kind: gauge, unit: "s", series: "1",
		help: "When this state began, in seconds since 1970.",
	}
	driverChangePercent = metric{
		name: "gpu_device_plugin_driver_change_percent", kind: gauge, series: "1",
		help: "The progress of a change of the driver under way, 0 to 100.",
	}
	quiesced = metric{
		name: "gpu_device_plugin_quiesced", kind: gauge, series: "1",
		help: "1 while the driver is released: by quiesce, by a request on the Node, or for a change of the driver.",
	}
	reexecutions = metric{
		name: "gpu_device_plugin_reexecutions_total", kind: counter, series: "1",
		help: "How often the process replaced itself by a new one, because the driver was replaced.",
	}

	devices = metric{
		name: "gpu_device_plugin_devices", kind: gauge, labels: []string{"resource", "health"}, series: "2 a resource",
		help: "Devices in the list sent to the kubelet, by health: healthy or unhealthy.",
	}
	devicesHeld = metric{
		name: "gpu_device_plugin_devices_held", kind: gauge, labels: []string{"resource"}, series: onePerResource,
		help: "Planned devices that are temporarily not allocatable.",
	}
	devicesDeparting = metric{
		name: "gpu_device_plugin_devices_departing", kind: gauge, labels: []string{"resource"}, series: onePerResource,
		help: "Devices that left the plan and stay listed until no pod holds them. While a pod holds such a " +
			"device, it has the health of its GPU.",
	}
	resourcePlanned = metric{
		name: "gpu_device_plugin_resource_planned", kind: gauge, labels: []string{"resource"}, series: onePerResource,
		help: "1 if the resource is in the plan of the node.",
	}
	resourceRegistered = metric{
		name: "gpu_device_plugin_resource_registered", kind: gauge, labels: []string{"resource"},
		series: onePerResource,
		help:   "1 if the resource is registered with the kubelet, and the kubelet's ListAndWatch stream is open.",
	}
	resourceAgreed = metric{
		name: "gpu_device_plugin_resource_agreed", kind: gauge, labels: []string{"resource"}, series: onePerResource,
		help: "1 if the last comparison found the kubelet's account of the resource equal to the list that was sent.",
	}
	resourceYielding = metric{
		name: "gpu_device_plugin_resource_yielding", kind: gauge, labels: []string{"resource"}, series: onePerResource,
		help: "1 while no list is sent, because another device plugin serves the resource.",
	}
	leftOut = metric{
		name: "gpu_device_plugin_left_out", kind: gauge, series: "1",
		help: "GPUs that cannot be read, and devices that are not offered. The command status prints the reasons.",
	}
	planWarnings = metric{
		name: "gpu_device_plugin_plan_warnings", kind: gauge, series: "1",
		help: "Warnings of the plan. The command status prints them.",
	}
	labelsWithheld = metric{
		name: "gpu_device_plugin_labels_withheld", kind: gauge, series: "1",
		help: "1 while the labels of the node are not as the daemon wants them. The command status prints the reason.",
	}

	gpuHealth = metric{
		name: "gpu_device_plugin_gpu_health", kind: gauge, labels: []string{"UUID", "gpu", "state"}, series: "5 a GPU",
		help: "1 for the state of a GPU, 0 for the others: Unknown, Healthy, Suspect, Unhealthy, Lost.",
	}
	gpuUnits = metric{
		name: "gpu_device_plugin_gpu_units_memory_bytes", kind: gauge, unit: "B", labels: []string{"UUID",
			"gpu"}, series: onePerGPU,
		help: "Memory of a GPU in units.",
	}
	gpuFault = metric{
		name: "gpu_device_plugin_gpu_fault", kind: gauge,
		labels: []string{"UUID", "gpu", "mig", "source", "xid", "cure"},
		series: "1 for each open fault: 15 a GPU or MIG device, and 1 for each XID",
		help: "1 for each open fault of a GPU, or of its MIG device with the index mig, with its source and its " +
			"remedy (label cure).",
	}
	cudaProven = metric{
		name: "gpu_device_plugin_cuda_proven", kind: gauge, labels: []string{"UUID",
			"index"}, series: "1 a GPU or MIG device",
		help: "1 if CUDA is proven to work on a GPU or MIG device, by its UUID and its index i or i:j. Only with " +
			"--validate.",
	}
	stepReached = metric{
		name: "gpu_device_plugin_step_reached", kind: gauge, labels: []string{"step"}, series: "5",
		help: "1 if a step of `status` is reached, 0 if not.",
	}
	stepChange = metric{
		name: "gpu_device_plugin_step_change_timestamp_seconds", kind: gauge, unit: "s", labels: []string{"step"},
		series: "5",
		help:   "When the state of a step last changed, in seconds since 1970.",
	}
	gpuStateChange = metric{
		name: "gpu_device_plugin_gpu_state_change_timestamp_seconds", kind: gauge, unit: "s", labels: []string{"UUID",
			"gpu"}, series: onePerGPU,
		help: "When the GPU entered its state, in seconds since 1970.",
	}
	migDevices = metric{
		name: "gpu_device_plugin_mig_devices", kind: gauge, labels: []string{"UUID", "gpu", "profile",
			"health"}, series: "14 a GPU",
		help: "MIG devices of a GPU, by profile and health: healthy or unhealthy.",
	}
	xidEvents = metric{
		name: "gpu_device_plugin_xid_events_total", kind: counter, labels: []string{"UUID", "gpu", "xid"},
		series: "33 a GPU",
		help: "XIDs of a GPU and its MIG devices. Critical XIDs are present from the start; after 32 codes, " +
			"further XIDs count as other.",
	}
	xidLast = metric{
		name: "gpu_device_plugin_xid_last_timestamp_seconds", kind: gauge, unit: "s", labels: []string{"UUID", "gpu",
			"xid"}, series: "33 a GPU",
		help: "When an XID of a GPU last occurred, in seconds since 1970. Absent if it never did.",
	}
	recoveries = metric{
		name: "gpu_device_plugin_recoveries_total", kind: counter, labels: []string{"UUID", "gpu", "cure"},
		series: "9 a GPU",
		help: "How often a GPU or one of its MIG devices became Healthy after it was Unhealthy or Lost, by the " +
			"remedy of the fault (label cure).",
	}

	registrations = metric{
		name: "gpu_device_plugin_registrations_total", kind: counter, labels: []string{"resource",
			"result"}, series: "2 a resource",
		help: "Registrations with the kubelet, by result: accepted or failed.",
	}
	streamEnds = metric{
		name: "gpu_device_plugin_stream_ends_total", kind: counter, labels: []string{"resource",
			"cause"}, series: "8 a resource",
		help: "Ends of the kubelet's ListAndWatch stream, by cause. After each end the resource registers again.",
	}
	kubelets = metric{
		name: "gpu_device_plugin_kubelet_incarnations_total", kind: counter, series: "1",
		help: "Kubelets seen since the daemon started. Each restart of the kubelet adds one.",
	}
	rpcDuration = metric{
		name: "gpu_device_plugin_rpc_duration_seconds", kind: histogram, unit: "s", labels: []string{"method", "code"},
		series: "12 for each method and code that occurred: 4 methods, 17 codes",
		help:   "Time to answer a call of the kubelet, by method and gRPC status code.",
	}

	snapshotTime = metric{
		name: "gpu_device_plugin_snapshot_timestamp_seconds", kind: gauge, unit: "s", series: "1",
		help: "When the last successful scan of the node ended, in seconds since 1970. The node is scanned every few " +
			"seconds.",
	}
	snapshotGeneration = metric{
		name: "gpu_device_plugin_snapshot_generation", kind: gauge, series: "1",
		help: "Rises by one whenever the known state of the GPUs changes.",
	}
	snapshotStale = metric{
		name: "gpu_device_plugin_snapshot_stale", kind: gauge, series: "1",
		help: "1 if the last scan of the node failed. The metrics of the GPUs are then from the scan before.",
	}
	callDuration = metric{
		name: "gpu_device_plugin_nvml_call_duration_seconds", kind: histogram, unit: "s", labels: []string{"group"},
		series: "72",
		help: "Duration of calls into the driver, by group: session, inventory, mig, reading, events, use. Waits for " +
			"events are not counted.",
	}
	switchErrors = metric{
		name: "gpu_device_plugin_nvswitch_error_timestamp_seconds", kind: gauge, unit: "s", labels: []string{"nvswitch",
			"sxid", "fatal"},
		series: "1 for each error that occurred, 64 at most",
		help: "When an NVSwitch last reported an error, in seconds since 1970, by its PCI address and SXid. Only " +
			"with --kernel-log, and absent before the first error.",
	}
	callErrors = metric{
		name: "gpu_device_plugin_nvml_errors_total", kind: counter, labels: []string{"group", "code"},
		series: "1 for each group and code that occurred: 6 groups, 30 codes",
		help:   "Calls into the driver that returned an error. Not supported and not found do not count as errors.",
	}
	callsHanging = metric{
		name: "gpu_device_plugin_nvml_calls_stuck", kind: gauge, series: "1",
		help: "Calls into the driver that have not returned within their deadline.",
	}
	callOldest = metric{
		name: "gpu_device_plugin_nvml_oldest_call_timestamp_seconds", kind: gauge, unit: "s", series: "1",
		help: "When the oldest pending call into the driver began, in seconds since 1970. Absent if there is none.",
	}

	configGeneration = metric{
		name: "gpu_device_plugin_config_generation", kind: gauge, series: "1",
		help: "The number of the configuration in force, counted from 1 since the daemon started.",
	}
	configSuccessful = metric{
		name: "gpu_device_plugin_config_last_reload_successful", kind: gauge, series: "1",
		help: "1 if the present contents of the configuration file are in force, or there is no file.",
	}
	configSuccess = metric{
		name: "gpu_device_plugin_config_last_success_timestamp_seconds", kind: gauge, unit: "s", series: "1",
		help: "When the configuration in force was read, in seconds since 1970.",
	}

	sliceCount = metric{
		name: "gpu_device_plugin_slices", kind: gauge, series: "1",
		help: "ResourceSlices of the node at the API server. Absent without Dynamic Resource Allocation.",
	}
	sliceDevices = metric{
		name: "gpu_device_plugin_slice_devices", kind: gauge, series: "1",
		help: "Devices in the ResourceSlices of the node.",
	}
	poolGeneration = metric{
		name: "gpu_device_plugin_pool_generation", kind: gauge, series: "1",
		help: "Generation of the node's pool. It rises when the devices of several slices or the number of slices " +
			"change.",
	}
	slicesPublished = metric{
		name: "gpu_device_plugin_slices_published", kind: gauge, series: "1",
		help: "1 if the API server has the wanted slices. If 0, the command status prints the reason.",
	}
	claimCount = metric{
		name: "gpu_device_plugin_claims", kind: gauge, series: "1",
		help: "ResourceClaims prepared on the node. Absent without Dynamic Resource Allocation.",
	}
	claimDuration = metric{
		name: "gpu_device_plugin_claim_duration_seconds", kind: histogram, unit: "s",
		labels: []string{"call", "result"},
		series: "12 for each call and result that occurred: 2 calls, 10 results",
		help: "Time to prepare or unprepare a ResourceClaim, by call and result: done, or why it failed: " +
			"configuration, device, health, in-use, not-ready, driver, late, disk or malformed.",
	}
	claimsWithoutKubelet = metric{
		name: "gpu_device_plugin_claims_without_kubelet_account_total", kind: counter, series: "1",
		help: "Attempts to prepare a ResourceClaim without the kubelet's account of pods with GPUs as resources. " +
			"They continue if all GPUs of the node are in ResourceSlices.",
	}
	apiRequests = metric{
		name: "gpu_device_plugin_api_requests_total", kind: counter, labels: []string{"verb", "resource", "code"},
		series: "1 for each of 17 kinds of requests and code that occurred",
		help: "Requests to the API server, by the code of the HTTP answer; none if there was no answer. A watch is " +
			"one request. Absent before the first request.",
	}
	eventsDropped = metric{
		name: "gpu_device_plugin_events_dropped_total", kind: counter, labels: []string{"cause"}, series: "4",
		help: "Kubernetes Events that were not written: subject rate and node rate, because of a limit; queue, " +
			"because too many waited for the API server; refused, because the API server rejected them. Absent " +
			"while there was none.",
	}
	healthEvents = metric{
		name: "gpu_device_plugin_health_events_total", kind: counter, labels: []string{"result"}, series: "2",
		help: "Health events in calls to NVSentinel (features.healthEvents): accepted, or failed and tried again. " +
			"Absent while there was none.",
	}
)

// daemonMetrics are the metrics of the daemon, in the order of docs/monitoring.md.
var daemonMetrics = []metric{
	buildInfo, driverInfo, pciGPUs, pciGPUsGivenAway, gpuInfo, ready, leads, leadsSince, hardwareHeld, migLayoutState,
	repairCount, repairState, driverChangeState, driverChangeSince, driverChangePercent, quiesced, reexecutions,
	devices, devicesHeld, devicesDeparting, resourcePlanned, resourceRegistered, resourceAgreed, resourceYielding,
	leftOut,
	planWarnings,
	labelsWithheld,
	gpuHealth, gpuUnits, gpuFault, cudaProven, stepReached, stepChange, gpuStateChange, migDevices, xidEvents, xidLast,
	recoveries,
	switchErrors,
	registrations, streamEnds, kubelets, rpcDuration,
	snapshotTime, snapshotGeneration, snapshotStale, callDuration, callErrors, callsHanging, callOldest,
	configGeneration, configSuccessful, configSuccess,
	sliceCount, sliceDevices, poolGeneration, slicesPublished, claimCount, claimDuration, claimsWithoutKubelet,
	apiRequests, eventsDropped, healthEvents,
}
