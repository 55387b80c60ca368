package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// mount mounts a file system on a folder of MPS state until the test ends.
func (m *machine) mount(folder, kind, options string) {
	m.t.Helper()
	if err := unix.Mount("none", folder, kind, 0, options); err != nil {
		m.t.Skipf("only root may mount a file system, which this test needs: %v", err)
	}
	m.t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) }) // if the test has not
}

// fill writes until the disk of MPS state is full, and returns what makes room again.
func (m *machine) fill() (heal func()) {
	m.t.Helper()
	full, err := os.Create(m.Path("mps/full"))
	if err != nil {
		m.t.Fatal(err)
	}
	defer full.Close()
	for err == nil {
		_, err = full.Write(make([]byte, 4096))
	}
	return func() { _ = os.Remove(full.Name()) }
}

// hang has each access to a folder hang: the program of its file system answers nothing. heal gives
// the folder back.
func (m *machine) hang(folder string) (heal func()) {
	m.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		m.t.Skipf("without /dev/fuse this test cannot have a disk hang: %v", err)
	}
	m.t.Cleanup(func() { _ = fuse.Close() }) // ends each access with an error
	m.mount(folder, "fuse", fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd()))
	return func() {
		_ = fuse.Close()
		if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
			m.t.Error(err)
		}
	}
}

// TestUnitsWithADiskThatFails: while the disk of a control daemon is full or hangs, units of its
// GPU are not offered, and status says why and what helps. Whole GPUs and the other GPU in units
// go on, and the units come back with the disk. No process is ended meanwhile: the kernel has one
// wait that looks into a folder which another process looked into first.
func TestUnitsWithADiskThatFails(t *testing.T) {
	if testing.Short() {
		t.Skip("a disk that hangs is noticed after 5 s: make test-all runs it")
	}
	m := newMachine(t, "gpu-device-plugin")
	m.mount(m.Path("mps"), "tmpfs", "size=256k,mode=755")
	m.configure(strings.Replace(unitConfiguration, "reserveMiB", "fit: sum, reserveMiB", 1))
	quantity := func(units int) map[string]standin.Quantity {
		return map[string]standin.Quantity{
			whole: {Capacity: 6, Allocatable: 6}, mem: {Capacity: 2 * 78, Allocatable: units}, cores: {Capacity: 200,
				Allocatable: 200},
		}
	}
	m.startMPS("gpu-device-plugin", "mps-control-daemon")
	m.has(quantity(2 * 78))
	folders, err := filepath.Glob(m.Path("mps/gpu.*"))
	if err != nil || len(folders) != 2 {
		t.Fatalf("folders of GPUs: %q, %v", folders, err)
	}
	mark := m.Mark()

	heal := m.fill()
	m.has(quantity(0))
	m.says(" cannot write its files: the disk is full; make room in " + m.Path("mps") + " (--mps-root)")
	if _, err := m.Admit(t.Context(), standin.Container{Pod: "full", Name: "c", Resource: mem, Count: 1}); err == nil {
		t.Error("a unit is given while the disk is full")
	}
	heal()
	m.has(quantity(2 * 78))

	heal = m.hang(folders[0])
	m.has(quantity(78))
	m.says("the MPS control daemon of " + filepath.Base(folders[0]) +
		" does not answer: the disk does not answer; check the disk of ")
	for _, resource := range []string{mem, whole} {
		if _, err := m.Admit(t.Context(), standin.Container{Pod: resource, Name: "c", Resource: resource,
			Count: 1}); err != nil {
			t.Errorf("while the disk of one GPU hangs: %v", err)
		}
	}
	for _, e := range m.Events(mark) {
		if e.Kind == standin.Listed && e.Resource == whole {
			t.Errorf("kubelet heard of whole GPUs, too: %+v", e)
		}
	}
	heal()
	m.has(quantity(2 * 78))
}
