// Package dra serves GPUs by ResourceClaims (Dynamic Resource Allocation).
//
//   - draplugin: the kubelet's DRA plugin API: registration, calls, health. gpu-node-agent alone.
//   - claims: prepares claims: checks them, keeps a record on disk, and has package cdi write the
//     CDI spec.
//   - owner: decides whether the device plugin or the DRA driver offers each GPU, by the rules in
//     package plan/dra.
//   - pool: the devices for ResourceSlices, and which of them may be at the API server.
package dra
