// Package plan decides what the node offers and what a container gets. The packages do no I/O, except
// that cdi and devnodes write files and device nodes.
//
// A device is withheld from pods for one of the reasons in resource/hold.go, in four places: resource
// (its health), kubelet/offer (holds: the driver, MIG, MPS, CUDA checks, files), listing (pods that may
// still use its GPU) and dra (the GPU belongs to claims). At Allocate, mayGive of app/daemon refuses a
// device that was withheld a moment ago.
//
//   - resource: Snapshot and options to the Plan: names, MIG strategy, selection, sharing, health.
//   - holders: grants and the kubelet's accounts to who holds each device.
//   - listing: Plan, events and holders to the lists for the kubelet and the answers to Allocate.
//   - containeredits: devices to what a container gets.
//   - cdi: builds and writes the CDI specs of the plugin's devices, and builds those of claims.
//   - devnodes: creates device nodes on the host.
//   - labels: Snapshot and options to the labels of the Node.
//   - layout: a file of MIG layouts and the GPUs' present division to the steps between them.
//   - slots: whether a node may change now, beside the other nodes of the cluster.
//   - driverchange: what a node does next to change its driver.
//   - repair: which GPU of a node is reset next, and why the others wait.
//   - dra: Snapshot to the devices in ResourceSlices; who owns a GPU.
package plan
