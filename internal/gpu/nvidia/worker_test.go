package nvidia_test

import (
	"io/fs"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// A slowDisk answers for one file when it is told to.
type slowDisk struct {
	files  fs.FS
	file   string
	answer chan struct{}
}

func (d slowDisk) Open(name string) (fs.File, error) {
	if name == d.file {
		<-d.answer
	}
	return d.files.Open(name)
}

// TestJobWithoutCalls: what takes long between two calls, such as the file system, is waited for as
// long as a call.
func TestJobWithoutCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t, "dgx-h100")
		disk := slowDisk{fstest.MapFS{}, "sys/bus/pci/devices/" + node.List()[3].BDF + "/class", make(chan struct{})}
		began := time.Now()
		s, err := nvidia.New(nvidia.Options{Library: node.NVML(), Root: disk}).Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		look := func(want int) {
			t.Helper()
			snapshot, err := s.Scan(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			compare(t, "GPUs", want, len(snapshot.GPUs))
		}
		look(7)
		compare(t, "the time until the others are there", gpuPatience, time.Since(began))
		close(disk.answer)
		synctest.Wait()
		look(8)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
