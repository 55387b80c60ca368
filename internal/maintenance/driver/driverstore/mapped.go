package driverstore

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// maxMaps limits what is read of the memory maps of a process, in bytes.
const maxMaps = 8 << 20

// placed returns the time at which a folder was placed.
func placed(f Folder) time.Time {
	info, err := os.Lstat(f.Path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// readTimeout limits the time for reading the memory maps of all processes.
const readTimeout = 5 * time.Second

// isUsed reports whether a process has a file of the folder mapped, or may have: the maps of a process
// that hangs in the kernel cannot be read.
func isUsed(root fs.FS, f Folder) bool {
	found := make(chan bool, 1)
	go func() {
		used, err := isMapped(root, f)
		found <- used || err != nil
	}()
	select {
	case used := <-found:
		return used
	case <-time.After(readTimeout):
		return true
	}
}

// isMapped reports whether a process of the node has a file of the folder mapped. The path in a map
// is that of the process's container, so inodes are compared, with the device or the file's name: some
// file systems show different devices in maps and in stat.
func isMapped(root fs.FS, f Folder) (bool, error) {
	inodes := map[uint64]bool{}
	for _, file := range f.Manifest.Files {
		if !strings.Contains(file.Path, ".so") && !strings.HasPrefix(file.Path, "usr/bin/") {
			continue
		}
		info, err := os.Lstat(path.Join(f.Path, file.Path))
		if err != nil {
			continue // a folder that somebody has changed
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && file.Link == "" {
			inodes[stat.Ino] = true
		}
	}
	names := map[string]bool{}
	for _, file := range f.Manifest.Files {
		names[path.Base(file.Path)] = true
	}
	processes, err := fs.ReadDir(root, "proc")
	if err != nil {
		return false, err
	}
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		if hasMapped(root, "proc/"+p.Name()+"/maps", inodes, names) {
			return true, nil
		}
	}
	return false, nil
}

func hasMapped(root fs.FS, maps string, inodes map[uint64]bool, names map[string]bool) bool {
	file, err := root.Open(maps)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist) // a process that cannot be read may use it
	}
	defer func() { _ = file.Close() }() // only read
	lines := bufio.NewScanner(io.LimitReader(file, maxMaps))
	for lines.Scan() {
		// address permissions offset device inode path
		words := strings.Fields(lines.Text())
		if len(words) < 6 {
			continue
		}
		inode, err := strconv.ParseUint(words[4], 10, 64)
		if err == nil && inodes[inode] && names[path.Base(words[5])] {
			return true
		}
	}
	return false
}
