// Package health decides whether a GPU or MIG device may get new work. It is policy: the XID
// catalog, the operator's overrides, and pure functions that fold a driver event or a reading into
// the state of a GPU. It does no I/O, has no clock and starts no goroutine. Package monitor calls
// the functions.
//
// The state of a device is a list of open faults. Each fault has a source, a device state and a
// remedy. The verdict on the device is the worst fault; a device without faults is Healthy. A fault
// closes when the evidence is gone: see Policy.
package health
