//go:build unix

package terminal

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Columns returns the width of the terminal that w writes to, directly or through a Writer; 0 if it
// is none or does not know its width.
func Columns(w io.Writer) int {
	if safe, is := w.(*Writer); is {
		w = safe.To
	}
	file, is := w.(*os.File)
	if !is {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
