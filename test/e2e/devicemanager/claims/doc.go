// Package claims holds what the scheduler and the API server make of the devices that package dra
// decides on: their slices through the API server's own validation, and real claims through the
// scheduler's own allocator. With -v it logs how well claims are placed. It holds tests alone, and
// runs with the modules of package devicemanager: of Kubernetes 1.37 and 1.36, those with which the
// driver is recommended.
package claims
