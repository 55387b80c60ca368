// Package apiserver is a stand-in for the Kubernetes API server on real HTTPS, for tests. It has
// its own certificate authority and bearer token, and writes them with a kubeconfig into a folder.
//
// It serves nodes and nodes/status, pods, ResourceSlices, ResourceClaims, DeviceClasses, events of
// events.k8s.io/v1 and NodeFeatures of node-feature-discovery: get, list, also page by page, watch,
// create and patch; and evictions of pods. What answers pods/exec and pods/proxy can be set.
// Patches are merged by the API machinery's own code, so managed fields, conflicts of server-side
// apply and strategic merges are the real ones. Like the real server it keeps of a write to
// nodes/status all but spec, and of a write to nodes all but status; of an event nothing but the
// series can be changed.
//
// What the server does wrong can be set while it runs: see Faults. Requests are counted by verb and
// resource.
//
// What it leaves out: authorization, admission, answers in protobuf, discovery, updates by PUT and
// deletes by clients.
//
// Only tests may import it; it knows nothing of the daemon.
package apiserver
