package daemon

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/gpudriver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// TestUnprovenDriver: while a new driver is not proven, no list that the kubelet gets has a Healthy
// device: whatever ends an agent, beside a standby of a rolling update, which takes over, and while
// gpu-driver does not answer a new process. All of them say so. Once the driver works, pods get GPUs.
func TestUnprovenDriver(t *testing.T) {
	t.Parallel()
	const version = "580.95.05" // of the simulated machine
	s, _ := openAgent(t, "", "--namespace=gpus", "--rollout-slots=1", "--driver-version="+version)
	directory := filepath.Join(s.Path("state"), "driver")
	if err := os.MkdirAll(directory, 0o700); err != nil {
		t.Fatal(err)
	}
	driver := gpudriver.New(gpudriver.Options{Socket: filepath.Join(directory, "driver.sock")})
	driver.Edit(func(d *driverapi.Status) {
		d.Folders[1].Version = version
		d.LoadedDigest, d.LoadedVersion = gpudriver.NewDigest, version
		d.Change = &driverapi.Change{From: gpudriver.OldDigest, To: gpudriver.NewDigest, Step: driverapi.StepUnproven,
			Note: "GPU-that-is-missing"}
	})
	silence := driver.Serve(t)
	journal := `{"version": 1, "change": {"to": "bb", "step": "unproven"}}`
	if err := os.WriteFile(filepath.Join(directory, driverapi.Journal), []byte(journal), 0o600); err != nil {
		t.Fatal(err)
	}
	mark := s.Mark()
	says := func(s *stage, what string, state driverchange.State) {
		t.Helper()
		s.eventually(what, func() bool {
			c := s.status().DriverChange
			return c != nil && c.State == state && c.Withholds
		})
	}
	withheld := func() {
		t.Helper()
		for _, e := range s.Events(mark) {
			if e.Kind != standin.Listed || e.Resource != gpu {
				continue
			}
			for _, d := range e.Devices {
				if d.GetHealth() == "Healthy" {
					t.Fatalf("the kubelet got a list with %s as Healthy", d.GetID())
				}
			}
		}
	}
	s.start()
	s.next(mark, standin.Listed)
	says(s, "it tries the new driver", driverchange.Changing)
	for _, end := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		before, restarted := s.Running(), s.Mark()
		s.signal(before, end)
		<-before.Ended()
		_ = s.StopDaemon() // it has ended
		if end == syscall.SIGKILL {
			silence()
		}
		s.start()
		s.next(restarted, standin.Listed)
		withheld()
		if end == syscall.SIGKILL {
			says(s, "it waits for gpu-driver", driverchange.Waiting)
			driver.Serve(t)
		}
		says(s, "it goes on", driverchange.Changing)
	}
	standby := s.beside(s.Profile, append([]string{"--state-dir", s.Path("state"), "--cdi-dir", s.Path("cdi")}, s.Args...)...)
	standby.start()
	says(standby, "the standby knows what the leader does", driverchange.Changing)
	if err := s.StopDaemon(); err != nil {
		t.Error(err)
	}
	standby.eventually("the standby leads", standby.leads)
	says(standby, "the standby goes on", driverchange.Changing)
	withheld()
	driver.Edit(func(d *driverapi.Status) { d.Change.Note = "" })
	s.shows(8, 8)
	s.admit("work", 8)
}
