// Package dra serves GPUs by ResourceClaims (Dynamic Resource Allocation).
//
//   - draplugin: the kubelet's DRA plugin API: registration, calls, health. gpu-node-agent alone.
//   - claims: the owner of prepared claims: decides, records on disk, writes CDI specs.
//   - handover: the owner of each GPU's owner: the device plugin or the DRA driver; which devices
//     are in slices.
package dra
