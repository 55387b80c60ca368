// Package labels decides the labels of a node: the labels of NVIDIA's GPU feature discovery, bit
// for bit, and some of our own. It is the only home of their names; docs/reference.md lists them.
//
// The package is policy: it turns a Snapshot and Options into labels. Package featurefile and the
// tasks of package cluster publish them.
package labels
