package layout

import (
	"fmt"
	"strings"
	"testing"
)

func TestPack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		sizes         []int
		slices, limit int
		want          string // of each instance: start:size
	}{
		"one each":                   {[]int{3, 3}, 3, 2, "0:3 | 0:3"},
		"parts of one":               {[]int{1, 1, 1}, 3, 2, "0:1 1:1 2:1"},
		"small ones fill up":         {[]int{2, 1, 2, 1}, 3, 2, "0:2 2:1 | 0:2 2:1"},
		"a large one and parts":      {[]int{1, 3, 1}, 3, 2, "0:3 | 0:1 1:1"},
		"the large one goes up":      {[]int{3, 2, 2}, 7, 1, "0:2 2:2 4:3"},
		"all sizes":                  {[]int{1, 2, 4}, 7, 1, "0:4 4:2 6:1"},
		"three twos and a one":       {[]int{2, 2, 2, 1}, 7, 1, "0:2 2:2 4:2 6:1"},
		"no room for one more":       {[]int{2, 2, 2, 2}, 7, 1, ""},
		"no place though room":       {[]int{3, 3, 2}, 7, 1, ""},
		"more than may be":           {[]int{1, 1, 1, 1}, 3, 1, ""},
		"more instances than needed": {[]int{2, 2}, 3, 2, "0:2 | 0:2"},
		"a size that is not there":   {[]int{3}, 4, 1, ""},
	} {
		var got []string
		for _, computes := range pack(tt.sizes, tt.slices, tt.limit) {
			var one []string
			for _, c := range computes {
				one = append(one, fmt.Sprintf("%d:%d", c.Start, c.Slices))
			}
			got = append(got, strings.Join(one, " "))
		}
		if all := strings.Join(got, " | "); all != tt.want {
			t.Errorf("%s: got %q, want %q", name, all, tt.want)
		}
	}
}
