//go:build !race

package field_test

const raceDetector = false
