// Package faults holds the fault matrix: tests that inject every fault that a node can have into
// the daemon's process, on a simulated node with a stand-in kubelet, before the daemon starts and
// while it runs. A subtest says what kubelet saw, after how long, and what the repair changed; and
// fails if that is not as it has to be. It holds tests alone; `make faults` runs them.
package faults
