package mps_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestClientsStopBeforeServer: a client killed together with its server may block other clients
// and the GPU.
func TestClientsStopBeforeServer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	server := n.tell(one, "start_server -uid 0")
	end()
	log := strings.Join(n.log(one), "\n")
	want := fmt.Sprintf("Cmd:terminate_client %s %d\nCmd:quit -t 5", server, os.Getpid())
	if !strings.HasSuffix(log, want) {
		t.Errorf("the log is\n%s\nwant at its end\n%s", log, want)
	}
}

// TestClientsReachThePipe: a server may run as the user of a client. The user reaches the pipe
// folder through each folder above.
func TestClientsReachThePipe(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, folder := range []string{n.path(one + "/pipe"), n.path(one), n.path("nvidia.com"), n.root} {
		if err := errors.Join(os.MkdirAll(folder, 0o700), os.Chmod(folder, 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	for _, folder := range []string{n.path(one + "/pipe"), n.path(one), n.path("nvidia.com"), n.root} {
		if info, err := os.Stat(folder); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v", folder, info.Mode(), err)
		}
	}
}

// TestSELinuxLabelOfFolders: the label lets containers of any user use the folders.
func TestSELinuxLabelOfFolders(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	_, err := os.Stat("/sys/fs/selinux/enforce")
	for _, folder := range []string{"pipe", "log"} {
		label := make([]byte, 100)
		size, none := unix.Getxattr(n.path(one+"/"+folder), "security.selinux", label)
		text := string(label[:max(0, size)])
		if labelled := none == nil && strings.Contains(text, ":container_file_t:"); labelled != (err == nil) {
			t.Errorf("the folder %s has the label %q (%v) where SELinux enforces: %v", folder, text, none, err == nil)
		}
	}
}
