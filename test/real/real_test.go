package real_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

// partsFlag names the folder that the script parts has filled.
var partsFlag = flag.String("parts", "", "the folder with NVIDIA's parts, as test/real/parts prints it")

// part returns the path of a part.
func part(t *testing.T, name string) string {
	t.Helper()
	if *partsFlag == "" {
		t.Skip("NVIDIA's parts are not here: make real fetches them")
	}
	path := filepath.Join(*partsFlag, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	return path
}
