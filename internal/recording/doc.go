// Package recording writes down what a Monitor is told by the driver, and plays it to another Monitor: the same answers at the same times
// lead to the same verdicts. See docs/dev/adr/0056-a-recording-is-what-a-session-answers.md.
package recording
