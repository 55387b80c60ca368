//go:build unix

package terminal

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Columns returns the width of the terminal behind w or a Writer; 0 without a terminal, or if the
// terminal does not know the width.
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
