// Package inventory has the types shared by all packages of the daemon: the GPUs of the node, the
// links between them, and the health of each device. It does not know NVML, the kubelet or the
// configuration. It does no I/O and starts no goroutine.
//
// A published Snapshot is immutable: the owner (package monitor) replaces the whole Snapshot, and
// readers never write to it.
package inventory
