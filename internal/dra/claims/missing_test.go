package claims_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// TestDevicesThatAreGone: a container that has a device which is not there any more is not started
// again with what has its device nodes now. The spec of its claim has the device again when that is
// back.
func TestDevicesThatAreGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA, migB0))
		r.prepare(c, claim("uid-2", migB1))
		devices := func(uid string) (names []string) {
			if spec := r.spec(uid); spec != nil {
				for _, d := range spec.Devices {
					names = append(names, strings.TrimPrefix(d.Name, uid+"-"))
				}
			}
			return names
		}
		s := snapshot()
		s.Generation, s.GPUs[1].MIGDevices = 2, nil // the driver was loaded again
		r.publish(s)
		synctest.Wait()
		if one, two := devices("uid-1"), devices("uid-2"); !slices.Equal(one, []string{gpuA}) || two != nil {
			t.Errorf("without MIG devices: %v and %v", one, two)
		}
		if _, err := ask(t.Context(), c, claim("uid-2", migB1)); err == nil ||
			!strings.Contains(err.Error(), "no longer exists") {
			t.Errorf("Prepare() = %v", err)
		}
		if r.record("uid-2") == "" {
			t.Error("the record is gone")
		}
		s = snapshot()
		s.Generation = 3
		r.publish(s)
		synctest.Wait()
		if one, two := devices("uid-1"), devices("uid-2"); !slices.Equal(one, []string{gpuA, migB0}) ||
			!slices.Equal(two, []string{migB1}) {
			t.Errorf("they are back: %v and %v", one, two)
		}
	})
}
