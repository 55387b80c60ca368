// Package gpu observes the GPUs: from NVML, the kernel's log and the driver's files to one
// immutable Snapshot.
//
//   - inventory: the values: Snapshot, GPU, MIGDevice, Link, Health, Event, Reading.
//   - nvidia: the adapter of NVML, /proc and /sys.
//   - kernellog: the adapter of the kernel's log, for XIDs.
//   - cuda: the adapter of the driver's libcuda, in a process of its own.
//   - simulator: a scripted node behind go-nvml's interfaces.
//   - health: the health policy. catalog.go has a row for each XID, and xid.go what an XID does to
//     its GPU; findings.go has the faults that a reading shows, fold.go the order of all inputs, and
//     recovery.go when a fault ends. A new kind of fault also needs a Source in fault.go.
//     The catalog and the findings are those of NVIDIA's driver; there is no place for another vendor.
//   - monitor: the owner of the truth: one loop (loop.go) scans and listens, applies the policy
//     (state.go) and publishes.
//   - ledger: the faults on disk, which a restart must not forget.
//   - topology: the policy of which devices to prefer together.
package gpu
