// Package scenario is the table of what kubelet's device manager does, written down once and run
// against both the stand-in (test/kubelet) and kubelet's own device manager of two versions
// (test/e2e/devicemanager). Where the versions differ a scenario carries both expectations. It is
// for tests alone.
package scenario
