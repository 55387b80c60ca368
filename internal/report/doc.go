// Package report publishes the state of the daemon to users and other programs.
//
//   - status: the daemon's state in one value, as printed by the command status.
//   - telemetry: metrics for Prometheus (a new one begins in rows.go, or in gpurows.go for a GPU) and
//     the answers to the kubelet's probes.
//   - doctor: the policy of doctor: from facts of a node to findings with remedies.
//   - findings: the text of findings for people.
//   - nodefacts: the adapter that reads the facts for doctor; changes nothing.
//   - containerdevices: checks that a container got the devices that it requested.
//   - nodeevents: the policy of Events, condition and taint of the Node. Package cluster/keeper writes
//     the Node, and cluster the Events.
//   - unitreport: the policy of reports on containers with units of GPUs.
//   - featurefile: writes labels into a feature file of node-feature-discovery.
//   - recording: records the driver's answers to the monitor, and replays them.
package report
