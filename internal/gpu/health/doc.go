// Package health decides whether a GPU or MIG device can be given new work. It is policy: the XID
// catalog, the overrides of the operator, and pure functions that fold an event of the driver, or a
// reading of a GPU, into what is known of the GPU. It reads nothing, has no clock and starts no
// goroutine; package monitor calls it.
//
// What is known of a device is a list of open faults. Each fault says how it was found, what state
// it gives the device, and what cures it. The verdict on the device is its worst fault; without
// faults the device is Healthy. A fault closes when its evidence is gone; Policy has the rules.
package health
