package kubelet_test

import (
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

// TestScenarios runs the table that kubelet's own device manager is run through as well, by
// test/e2e/devicemanager.
func TestScenarios(t *testing.T) {
	for _, version := range []kubelet.Version{kubelet.V136, kubelet.V137} {
		t.Run(string(version), func(t *testing.T) {
			t.Parallel()
			var clocks sync.Map // of a Subject
			scenario.Run(t, scenario.Setup{
				Version: version,
				Start: func(t *testing.T, dir, podResourcesSocket string) scenario.Subject {
					clock := clocktesting.NewFakePassiveClock(time.Now())
					k, err := kubelet.Start(kubelet.Options{
						Dir: dir, PodResourcesSocket: podResourcesSocket, Version: version, Clock: clock,
					})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(k.Stop)
					clocks.Store(k, clock)
					return k
				},
				Pass: func(s scenario.Subject, d time.Duration) {
					clock, _ := clocks.Load(s)
					fake := clock.(*clocktesting.FakePassiveClock)
					fake.SetTime(fake.Now().Add(d))
				},
			})
		})
	}
}
