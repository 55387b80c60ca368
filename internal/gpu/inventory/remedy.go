package inventory

// LacksDeviceNodes is the reason for a GPU without a CUDA device in this container. GiveDeviceNodes
// is the remedy. The text is the same for all GPUs of a node, so that it is reported once.
const (
	LacksDeviceNodes = "this container lacks device nodes of the GPU, such as /dev/nvidia-uvm, or may not open them"
	GiveDeviceNodes  = "set hostDev: true in the chart's values, " +
		"or have NVIDIA's container runtime add the device nodes: " +
		"runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=all for the daemon's container"
)
