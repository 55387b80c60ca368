// Package gpu observes the GPUs: from NVML, the kernel's log and the driver's files to one
// immutable Snapshot.
//
//   - inventory: the values: Snapshot, GPU, MIGDevice, Link, Health, Event, Reading.
//   - nvidia: the adapter of NVML, /proc and /sys.
//   - kernellog: the adapter of the kernel's log, for XIDs.
//   - cuda: the adapter of the driver's libcuda, in a process of its own.
//   - simulator: a scripted node behind go-nvml's interfaces.
//   - health: the policy: the XID catalogue and the verdict on each device. An XID or another
//     vendor's health rule is a row of it.
//   - monitor: the owner of the truth: one loop scans, listens, applies the policy and publishes.
//   - ledger: the faults on disk, which a restart must not forget.
//   - topology: the policy of which devices to prefer together.
package gpu
