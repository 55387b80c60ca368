package monitor

import (
	"context"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// HangDisk has what saves that the driver is released wait until disk is closed.
func HangDisk(m *Monitor, disk <-chan struct{}) {
	m.save = func(dir string, r *ledger.Release) error {
		<-disk
		return save(dir, r)
	}
}

// HangStart has what reads the state directory at the start wait until disk is closed.
func HangStart(m *Monitor, disk <-chan struct{}) {
	m.readState = func(ctx context.Context, o Options) savedState {
		<-disk
		return readSavedState(ctx, o)
	}
}
