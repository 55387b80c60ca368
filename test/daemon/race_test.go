//go:build race

package daemon

// buildFlags build the daemon as these tests are built: with the race detector, a race in the
// daemon fails the test.
var buildFlags = []string{"-race"}
