package status_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestJSON fixes the names that scripts read.
func TestJSON(t *testing.T) {
	t.Parallel()
	at := status.Moment(time.Date(2026, 11, 22, 1, 2, 3, 4, time.FixedZone("", 3600)))
	one := 1
	got, err := json.MarshalIndent(status.Status{
		Summary: status.Summary{State: status.Starting, Text: "x"},
		Version: "v1", Simulated: "t4", Driver: "580", CUDA: "13.0", Generation: 3, Looked: at, Stale: "no answer",
		Node: "all", Hanging: 1,
		Calls: []status.Call{{GPU: &one, Function: "f", Since: at}}, Quiet: true, Quiesced: &status.Quiesced{Since: at,
			Allocate: true},
		Readiness:     status.Readiness{Ready: true, Reason: "why", Since: at},
		KubeletSocket: "k", PodResourcesSocket: "p", ConfigFile: "f", ConfigGeneration: 2, ConfigError: "bad", ConfigLoaded: at, MetricsError: "in use",
		MetricsAbsent: []string{"a"}, APIServerError: "away",
		PodResourcesError: "no socket",
		Reexecutions:      1, Kubelets: 2,
		GPUs: []status.Device{{
			Index: "0", UUID: "GPU-0", Model: "T4", PCI: "0000:1b:00.0", Minor: &one, State: "Unhealthy", Since: at, Reason: "r",
			Remedy: "reset", XID: 79,
			Faults: []status.Fault{{Source: "xid", XID: 79, Remedy: "reset", Since: at}}, Events: []string{"XID 79 × 1"},
		}, {Index: "0:1", UUID: "MIG-0", Model: "MIG 1g.5gb", GPU: "GPU-0", Profile: "1g.5gb", State: "Healthy"}},
		NVSwitches: []string{"n"}, LeftOut: []string{"GPU 1: x"}, Retries: []status.Retry{{Index: 1, Reason: "x",
			Next: at}}, Unwatched: []string{"GPU 2: x"},
		Holds: []status.Hold{{Device: "GPU-3", Resource: "a/b", Reason: "x", Listed: true}},
		Resources: []status.Resource{{
			Name: "a/b", Planned: true, Devices: 2, Healthy: 1, Server: "serving", Agreed: true, Problem: "x",
			Departing: []status.Departing{{ID: "GPU-4", Reason: "x", Waiting: "y"}},
		}},
		Warnings: []string{"w"}, MPS: []string{"m"},
	}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	const want = `{
 "summary": {
  "state": "starting",
  "text": "x"
 },
 "version": "v1",
 "simulated": "t4",
 "driver": "580",
 "cuda": "13.0",
 "generation": 3,
 "looked": "2026-11-22T00:02:03Z",
 "stale": "no answer",
 "node": "all",
 "hanging": 1,
 "calls": [
  {
   "gpu": 1,
   "function": "f",
   "since": "2026-11-22T00:02:03Z"
  }
 ],
 "quiet": true,
 "quiesced": {
  "since": "2026-11-22T00:02:03Z",
  "allocate": true
 },
 "readiness": {
  "ready": true,
  "reason": "why",
  "since": "2026-11-22T00:02:03Z"
 },
 "kubeletSocket": "k",
 "podResourcesSocket": "p",
 "configFile": "f",
 "configGeneration": 2,
 "configError": "bad",
 "configLoaded": "2026-11-22T00:02:03Z",
 "metricsError": "in use",
 "metricsAbsent": [
  "a"
 ],
 "apiServerError": "away",
 "podResourcesError": "no socket",
 "reexecutions": 1,
 "kubelets": 2,
 "gpus": [
  {
   "index": "0",
   "uuid": "GPU-0",
   "model": "T4",
   "pci": "0000:1b:00.0",
   "minor": 1,
   "state": "Unhealthy",
   "since": "2026-11-22T00:02:03Z",
   "reason": "r",
   "cure": "reset",
   "xid": 79,
   "faults": [
    {
     "source": "xid",
     "xid": 79,
     "cure": "reset",
     "since": "2026-11-22T00:02:03Z"
    }
   ],
   "events": [
    "XID 79 × 1"
   ]
  },
  {
   "index": "0:1",
   "uuid": "MIG-0",
   "model": "MIG 1g.5gb",
   "gpu": "GPU-0",
   "profile": "1g.5gb",
   "state": "Healthy"
  }
 ],
 "nvswitches": [
  "n"
 ],
 "leftOut": [
  "GPU 1: x"
 ],
 "retries": [
  {
   "index": 1,
   "reason": "x",
   "next": "2026-11-22T00:02:03Z"
  }
 ],
 "unwatched": [
  "GPU 2: x"
 ],
 "holds": [
  {
   "device": "GPU-3",
   "resource": "a/b",
   "reason": "x",
   "listed": true
  }
 ],
 "resources": [
  {
   "name": "a/b",
   "planned": true,
   "devices": 2,
   "healthy": 1,
   "server": "serving",
   "agreed": true,
   "problem": "x",
   "departing": [
    {
     "id": "GPU-4",
     "reason": "x",
     "waiting": "y"
    }
   ]
  }
 ],
 "warnings": [
  "w"
 ],
 "mps": [
  "m"
 ]
}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
}

// TestJSONOfEmptyStatus fixes the fields that are always present.
func TestJSONOfEmptyStatus(t *testing.T) {
	t.Parallel()
	got, err := json.Marshal(status.Status{Version: "v1", GPUs: status.Devices(inventory.Snapshot{}, nil),
		Resources: []status.Resource{}})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"version":"v1","gpus":[],"resources":[]}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestDevices(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 1, 2, 3, 4, time.UTC)
	lost := inventory.Health{State: inventory.Lost, Reason: "gone", Remedy: inventory.RemedyReboot, XID: 79, Since: at}
	snapshot := inventory.Snapshot{
		GPUs: []inventory.GPU{
			{Index: 0, UUID: "GPU-0", Model: "A100", BDF: "0000:1b:00.0", Minor: 4,
				Health: inventory.Health{State: inventory.Healthy}, MIGDevices: []inventory.MIGDevice{
					{Index: 0, UUID: "MIG-0", Profile: "1g.5gb", Health: lost},
				}},
			{Index: 1, UUID: "GPU-1", Model: "A100", Minor: 4, Health: lost, MIGDevices: []inventory.MIGDevice{
				{Index: 2, UUID: "MIG-1", Profile: "1g.5gb", Health: inventory.Health{State: inventory.Healthy}},
			}},
		},
		LeftOut: []inventory.LeftOut{{Index: 2, Reason: "silent"}},
	}
	known := []health.GPU{
		{UUID: "GPU-0", Instances: []health.Instance{
			{UUID: "MIG-0", Device: health.Device{
				Faults: []health.Fault{{Source: health.SourceXID, XID: 79, Remedy: inventory.RemedyReboot, Since: at}},
				Counts: []health.Count{{Kind: inventory.EventXID, XID: 79, N: 2, Last: at}},
			}},
		}},
		{UUID: "GPU-1"},
	}
	sick := status.Device{State: "Lost", Reason: "gone", Remedy: "reboot", XID: 79, Since: at.Truncate(time.Second)}
	minor := 4
	want := []status.Device{
		{Index: "0", UUID: "GPU-0", Model: "A100", PCI: "0000:1b:00.0", Minor: &minor, State: "Healthy"},
		sick, sick, sick,
	}
	want[1].Index, want[1].UUID, want[1].Model = "0:0", "MIG-0", "MIG 1g.5gb"
	want[1].Events = []string{"XID 79 × 2, last 2026-11-22T01:02:03Z"}
	want[1].GPU, want[1].Profile = "GPU-0", "1g.5gb"
	want[1].Faults = []status.Fault{{Source: "xid", XID: 79, Remedy: "reboot", Since: at.Truncate(time.Second)}}
	want[2].Index, want[2].UUID, want[2].Model, want[2].Minor = "1", "GPU-1", "A100", &minor
	want[3].Index, want[3].UUID, want[3].Model = "1:2", "MIG-1", "MIG 1g.5gb"
	want[3].GPU, want[3].Profile = "GPU-1", "1g.5gb"
	if diff := cmp.Diff(want, status.Devices(snapshot, known)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	plan := resource.Plan{LeftOut: []resource.LeftOut{{Index: "0:1", UUID: "MIG-9", Reason: "excluded"}}}
	if diff := cmp.Diff([]string{"GPU 2: silent", "device 0:1 (MIG-9): excluded"},
		status.LeftOut(snapshot, plan)); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
}

func TestMomentAndStamp(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 1, 2, 3, 4, time.FixedZone("", 3600))
	if got := status.Moment(at); !got.Equal(at.Truncate(time.Second)) || got.Location() != time.UTC ||
		!status.Moment(time.Time{}).IsZero() {
		t.Errorf("moment %v, of no time %v", got, status.Moment(time.Time{}))
	}
	if got := status.Stamp(at) + status.Stamp(time.Time{}); got != "2026-11-22T00:02:03Z" {
		t.Errorf("stamps %q", got)
	}
}

func TestServingAndYielding(t *testing.T) {
	t.Parallel()
	for server, want := range map[string][2]bool{
		"serving": {true, false}, "standing by: another server has registered": {false, true}, "registering": {false, false},
		"standing by: another program has registered": {false, true},
	} {
		r := status.Resource{Server: server}
		if got := [2]bool{r.Serving(), r.Yielding()}; got != want {
			t.Errorf("%s: serving, yielding %v, want %v", server, got, want)
		}
	}
}
