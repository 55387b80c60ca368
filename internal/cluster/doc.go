// Package cluster runs the tasks that send requests to the API server. Only gpu-node-agent imports it.
// The daemon serves the kubelet regardless of the API server.
//
//   - keeper: the one writer of the Node while the program runs. report.go joins its parts: labels,
//     condition, taints and annotations. cleanup.go removes them afterwards.
//   - kubeapi: the adapter to the API server, for requests and watches.
//   - healthevents: sends the health of the GPUs to NVSentinel.
//   - slices.go, slicewrites.go and slicestored.go publish ResourceSlices. claims.go reads claims, and
//     claimstatus.go writes their status.
//   - rollout.go has the slot of this node, by the rules of plan/slots, and repairleases.go the Lease
//     about its repairs.
//   - choice.go and nodeconfig.go choose the configuration file by a label of the Node; manager.go does
//     this for another daemon.
//   - spread.go delays requests that all nodes would send together.
package cluster
