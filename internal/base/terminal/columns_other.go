//go:build !unix

package terminal

import "io"

// Columns returns 0: the width of the terminal is unknown.
func Columns(io.Writer) int { return 0 }
