// Package claims holds what the scheduler and the API server make of the devices that package dra
// decides on: their slices through the API server's own validation, and real claims through the
// scheduler's own allocator. With -v it logs how well claims are placed. It holds tests alone. It
// runs with the modules of package devicemanager: of Kubernetes 1.34 to 1.37. Kubernetes 1.34 has
// other rules for counters, and no classes with names of resources by default, so the tests of these
// two are left out there.
package claims
