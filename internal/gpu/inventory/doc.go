// Package inventory has the types that all packages of the daemon share: the GPUs of the node,
// their connections, and the health of each device. It knows nothing of NVML, kubelet or
// configuration, starts nothing and reads nothing.
//
// A Snapshot is immutable once published: its owner (package monitor) replaces it whole, and
// readers never write to it.
package inventory
