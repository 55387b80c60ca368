// Package health decides how fit a GPU or MIG device is for new work. It is policy: the XID catalog, the overrides of
// the operator, and pure functions that fold what the driver said (an event) or what was read of it (a reading) into
// what is known of the GPU. It reads nothing, keeps no clock and starts nothing; package monitor calls it.
//
// What is known of a device is a list of open faults. Each says what found it, what it means, and what cures it; the
// verdict is the gravest of them, Healthy without any. A fault closes when its own evidence is gone, see Policy.
//
// It imports inventory alone; monitor, config (for Overrides and Policy) and cli (to print what is known) import it.
package health
