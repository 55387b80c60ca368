// Package dramanager runs the driver of Dynamic Resource Allocation against kubelet's own plugin
// manager and DRA manager, on real sockets and with the records and CDI specs that it has on a
// node: the table of scenarios names what Kubernetes promises of kubelet in
// test/e2e_node/dra_test.go, and which of that is shown here. It holds tests alone, and runs with
// the modules of package devicemanager: of Kubernetes 1.37 and 1.36. The Go API of kubelet 1.34 and 1.35
// lacks a package that the driver needs, so the driver cannot be built with their modules.
package dramanager
