// Package kubelet is the adapter to the node's kubelet: the directory shared with device
// plugins, the Registration service, and the account of devices (PodResources). The package
// knows files and the protocol. Other packages decide what to do.
//
// The packages below serve the kubelet:
//
//   - checkpoint: the format of the kubelet's checkpoint of devices.
//   - serve: one gRPC server for each resource: registration, lists and calls.
//   - yield: what a server does beside the servers of other processes.
//   - offer: makes the plan of each Snapshot and Config, and withholds devices that are changing,
//     not proven or not ready.
package kubelet
