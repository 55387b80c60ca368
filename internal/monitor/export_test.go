package monitor

import "github.com/gpu-device-plugin/gpu-device-plugin/internal/ledger"

// HangDisk has what saves that the driver is released wait until disk is closed.
func HangDisk(m *Monitor, disk <-chan struct{}) {
	m.save = func(dir string, r *ledger.Release) error {
		<-disk
		return save(dir, r)
	}
}
