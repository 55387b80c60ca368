// Package recording records the driver's answers to a Monitor, and plays them to another Monitor:
// the same answers at the same times lead to the same verdicts. See
// docs/dev/adr/0056-recordings.md.
package recording
