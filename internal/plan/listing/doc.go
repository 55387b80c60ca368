// Package listing decides which devices each list has, and which of them pods may get. A device
// that leaves the plan retires: the list keeps the device until no pod holds it, because the
// kubelet crashes when the last list lacks a device that a pod holds.
//
// The package is policy. Each event makes the next State out of the last one. Package kubelet/serve
// brings the events, and sends the lists of the latest Decision. A Comparison says what follows
// when the kubelet's account is, or is not, the list that was sent.
package listing
