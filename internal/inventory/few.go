package inventory

import (
	"fmt"
	"strings"
)

// Few joins names for people. Of many it has the first eight, as many as most nodes have GPUs, and says how many more there are.
func Few(names []string) string {
	const most = 8
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
