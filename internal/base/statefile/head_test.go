package statefile_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

func TestHead(t *testing.T) {
	t.Parallel()
	h := statefile.NewHead(5)
	for _, part := range []string{"", "abc", "defgh", strings.Repeat("x", 1000)} {
		if n, err := fmt.Fprint(h, part); n != len(part) || err != nil {
			t.Errorf("%.10q: %d, %v", part, n, err)
		}
	}
	if h.String() != "abcde" || string(h.Bytes()) != "abcde" {
		t.Errorf("kept %q", h)
	}
}
