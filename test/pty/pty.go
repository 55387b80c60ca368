// Package pty shows tests what a program prints at a terminal.
package pty

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Shown returns what show prints at a terminal of so many columns, with ends of lines as in a file.
func Shown(t testing.TB, columns uint16, show func(*os.File)) string {
	t.Helper()
	control, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	number, err := unix.IoctlGetInt(int(control.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(control.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(control.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 25, Col: columns})
	}
	if err != nil {
		t.Fatal(err)
	}
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	var shown strings.Builder
	var reading sync.WaitGroup
	reading.Go(func() {
		for part := make([]byte, 4096); ; {
			n, err := control.Read(part)
			shown.Write(part[:n])
			if err != nil { // the terminal is closed
				return
			}
		}
	})
	show(terminal)
	if err := terminal.Close(); err != nil {
		t.Error(err)
	}
	reading.Wait()
	return strings.ReplaceAll(shown.String(), "\r\n", "\n")
}
