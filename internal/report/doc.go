// Package report publishes the state of the daemon to users and other programs.
//
//   - status: the value that the daemon knows of itself, as status prints it.
//   - telemetry: metrics for Prometheus and the answers to the kubelet's probes.
//   - doctor: the policy of doctor: facts of a node to findings with remedies.
//   - nodefacts: the adapter that reads these facts; changes nothing.
//   - nodeevents: the policy of Events, condition and taint of the Node; package cluster writes
//     them.
//   - unitreport: the policy of reports on containers with units of GPUs.
//   - featurefile: writes labels into a feature file of node-feature-discovery.
//   - recording: records what the driver tells the monitor, and replays it.
package report
