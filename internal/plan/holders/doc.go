// Package holders says which pods hold the devices of the device plugin, as far as known. It keeps
// one record of two sources: the devices that this process gave to pods in calls of Allocate, and
// the kubelet's own accounts, which name the pods a moment later.
//
// The package is policy. Package kubelet/serve reads the accounts and records the calls. Evidence
// says what is missing in a reading.
package holders
