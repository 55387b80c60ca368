// Package topology decides which devices a container should get: of whole GPUs the set that is best
// connected, of MIG devices and replicas the ones that the sharing policy asks for, with the
// connections as tie-break.
//
// The links of a node are read once, into a Graph: every pair of GPUs has a score (see the table in
// score.go). For whole GPUs the objective is lexicographic:
//
//  1. The highest score within the set: the sum of the scores of its pairs.
//  2. Among equals, the least damage to the remaining GPUs: 8 times the score between the set and
//     the free GPUs, plus the score between the set and the busy GPUs. A set with few neighbours
//     leaves good neighbourhoods whole for later pods, and fills up broken neighbourhoods.
//  3. Among equals, the lowest positions in PCI order. The answer thus never depends on the order
//     of the request.
//
// The search is depth-first over bitmasks with an upper bound, and takes interchangeable GPUs only
// in order. Up to 16 GPUs the search is exact. With more GPUs it ends after a fixed amount of work,
// and the answer has a bound for the score of the best set. The memory of a search has a fixed size.
//
// The package is pure policy: no I/O, clock, goroutine or log.
package topology
