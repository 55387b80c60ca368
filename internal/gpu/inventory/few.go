package inventory

import "fmt"

// Few joins names for a message. A long list is cut after 500 bytes and ends with the number of the
// omitted names: an Event of Kubernetes has room for 1,024 bytes.
func Few(names []string) string {
	const most = 500
	text := ""
	for i, name := range names {
		if i > 0 {
			name = ", " + name
			if len(text)+len(name) > most {
				return fmt.Sprintf("%s and %d more", text, len(names)-i)
			}
		}
		text += name
	}
	return text
}
