//go:build race

package field_test

// raceDetector says that these tests, and so the daemon, have the race detector. It takes several
// times as much time and memory.
const raceDetector = true
