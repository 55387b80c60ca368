// Package labels decides which labels a node has: those of NVIDIA's GPU feature discovery, bit for
// bit, and some of our own. It is the only home of their names; docs/reference.md has all of them.
//
// It is policy: a Snapshot and Options go in, labels come out. Package featurefile and the
// writers of package kubeapi put labels where others see them.
package labels
