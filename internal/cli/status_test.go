package cli

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

func TestPrintStatus(t *testing.T) {
	t.Parallel()
	at := status.Moment(time.Date(2026, 11, 22, 1, 2, 3, 0, time.UTC))
	s := status.Status{
		Version: "v1", Driver: "580", Readiness: status.Readiness{Reason: "kubelet is not there"},
		GPUs:  []status.Device{{Index: "0", UUID: "GPU-0", Model: "T4", State: "Lost", Since: at, Reason: "gone", Cure: "reboot"}},
		Holds: []status.Hold{{Device: "GPU-1", Resource: "a/b", Reason: "busy", Listed: true}, {Device: "GPU-2", Resource: "a/b", Reason: "no file"}},
		Resources: []status.Resource{
			{Name: "a/b", Devices: 2, Healthy: 1, Server: "registering", Problem: "refused"}, {Name: "a/c", Server: "serving"},
		},
	}
	for i := range maxDeparting + 2 {
		s.Resources[1].Departing = append(s.Resources[1].Departing,
			status.Departing{ID: fmt.Sprint("GPU-", i), Reason: "renamed", Waiting: "pod p holds it"})
	}
	var text strings.Builder
	if err := output("table").print(&text, s, func(w io.Writer) { printStatus(w, s) }); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"ready: no: kubelet is not there\n",
		"0     GPU-0   T4      Lost    2026-11-22T01:02:03Z   reboot   gone     -\n",
		"held: a/b GPU-1: busy\n",
		"a/b        2         1         registering   refused\n",
		"no longer offered: a/c GPU-19: renamed; still listed: pod p holds it\n",
		"no longer offered: a/c: 2 devices more, see -o json\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("there is no %q in:\n%s", want, text.String())
		}
	}
	for _, hidden := range []string{"GPU-20:", "held: a/b GPU-2"} {
		if strings.Contains(text.String(), hidden) {
			t.Errorf("%q is printed:\n%s", hidden, text.String())
		}
	}
}
