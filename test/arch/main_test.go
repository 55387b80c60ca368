package arch

import (
	"fmt"
	"os"
	"testing"
)

// TestMain runs the tests at the root of the repository, because they read all of it and their
// messages name paths from there.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
