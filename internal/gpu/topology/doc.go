// Package topology decides which devices a container should get: of whole GPUs the set that is best
// connected, of MIG devices and replicas the ones that the sharing policy asks for, with the
// connections as tie-break.
//
// The links of a node are read once, into a Graph: every pair of GPUs has a score (see the table in
// score.go). For whole GPUs the objective is lexicographic:
//
//  1. the highest score within the set: the sum of the scores of its pairs;
//  2. among equals, the least damage to what stays: the least of 8 times the score between the set and the GPUs that
//     stay free, plus the score between the set and the busy GPUs. A set that has few neighbours leaves good
//     neighbourhoods whole for later pods, and fills up those that are broken already;
//  3. among equals, the lowest positions, that is PCI order; so the answer never depends on the order of the request.
//
// The search is exact (depth-first over bitmasks with an upper bound, GPUs that are interchangeable
// taken in order only). Up to 16 GPUs it always runs to its end; beyond, it ends after a fixed
// amount of work, and the answer says how much better the best set could be at most. It allocates
// nothing that grows with the search.
//
// The package is pure policy: no I/O, clock, goroutine or log.
package topology
