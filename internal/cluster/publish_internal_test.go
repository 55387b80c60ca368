package cluster

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestSliceThatIsRemovedAtOnce: a slice that is gone as soon as it is written is written again once, for the Node that there is by then, and
// after that with longer and longer pauses. A second without a removal is no calm minute.
func TestSliceThatIsRemovedAtOnce(t *testing.T) {
	s := newStage(t)
	p, timer := ledgerPublisher(t)
	p.client = kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	p.client.Nodes().Publish(kubeapi.Node{Name: nodeName, UID: "gone", ResourceVersion: "1"})
	p.devices.Pools().Publish(dra.Pool{Name: nodeName, Slices: []dra.Slice{sliceOf(device(0))}})
	p.devices.Published().Publish(map[string]bool{})
	p.driver.Publish(draplugin.Status{Registered: true, Registrations: 1})
	version, created, asked := 1_000_000, 0, 0
	watched := func() {
		version++
		p.there.Publish(kubeapi.Slices{ResourceVersion: strconv.Itoa(version)})
	}
	p.client.Count(func(verb, resource string, code int) {
		switch {
		case verb == "GET" && resource == "nodes":
			asked++
		case verb == "POST" && code == 201:
			if created++; created > 20 {
				return // else it would go on for ever
			}
			if err := s.server.WipeSlices(nodeName); err != nil {
				t.Error(err)
			}
			watched()
		}
	})
	watched()
	for _, round := range []struct {
		after time.Duration // since the round before
		want  int           // slices written since the first one
		pause time.Duration // to the next write
	}{{0, 2, time.Second}, {500 * time.Millisecond, 2, 500 * time.Millisecond}, {500 * time.Millisecond, 3, 2 * time.Second}, {2 * time.Second, 4, 4 * time.Second}} {
		timer.Step(round.after)
		if err := p.publish(t.Context()); err != nil {
			t.Fatal(err)
		}
		if pause := p.again.Due().Sub(timer.Now()); created != round.want || asked != created-1 || pause != round.pause {
			t.Errorf("%d slices written, want %d; the Node was read %d times; next in %v, want %v", created, round.want, asked, pause, round.pause)
		}
	}
}

// TestPublishingThatFails: what keeps slices from being written is returned, and nothing is taken for written or removed.
func TestPublishingThatFails(t *testing.T) {
	s := newStage(t)
	wanted := dra.Pool{Name: nodeName, Slices: []dra.Slice{sliceOf(device(0))}}
	name := wanted.SliceName(0)
	there := func(devices string) kubeapi.Slices {
		return kubeapi.Slices{ResourceVersion: "7", ByName: map[string]kubeapi.Slice{name: {
			Name: name, UID: "u", ResourceVersion: "7", Pool: nodeName, Generation: 1, Count: 1, Devices: []byte(devices),
		}}}
	}
	for what, tt := range map[string]struct {
		pool    dra.Pool
		there   kubeapi.Slices
		watch   error
		full    bool // the disk
		node    string
		fault   apiserver.Fault
		problem string
		passing bool // the watch tells when it is over
	}{
		"the watch fails":           {pool: wanted, watch: errors.New("no such API"), problem: "no such API", passing: true},
		"a slice cannot be read":    {pool: wanted, there: there("{"), problem: "ResourceSlice " + name},
		"the disk is full":          {pool: wanted, there: kubeapi.Slices{ResourceVersion: "7"}, full: true, problem: "write which GPUs are in slices"},
		"a slice cannot be removed": {pool: dra.Pool{Name: nodeName}, there: there("[]"), fault: apiserver.Fault{Status: 500}, problem: "500"},
		"the Node cannot be read":   {pool: wanted, there: kubeapi.Slices{ResourceVersion: "7"}, fault: apiserver.Fault{Status: 500}, problem: "500"},
		"the Node is not there":     {pool: wanted, there: kubeapi.Slices{ResourceVersion: "7"}, node: "another", problem: "no Node", passing: true},
	} {
		p, timer := ledgerPublisher(t)
		if tt.full {
			file := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			p.devices = draslices.New(t.Context(), draslices.Options{
				StateDir: filepath.Join(file, "state"), Snapshots: feed.New(inventory.Snapshot{}), Configs: feed.New(config.Config{}), Owners: feed.New(dra.Owners{}),
			})
		}
		p.client = kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: cmp.Or(tt.node, nodeName), Version: "v1"})
		p.devices.Pools().Publish(tt.pool)
		p.devices.Published().Publish(map[string]bool{})
		p.problem.Publish(tt.watch)
		p.there.Publish(tt.there)
		s.server.SetFault(tt.fault)
		err := p.publish(t.Context())
		var notNow *errNotNow
		if err == nil || !strings.Contains(err.Error(), tt.problem) || errors.As(err, &notNow) != tt.passing {
			t.Errorf("%s: %v, want %q", what, err, tt.problem)
		}
		if len(p.ledger.own) > 0 || p.ledger.generation > 0 {
			t.Errorf("%s: own writes %v", what, p.ledger.own)
		}
		if polled := !p.again.Due().IsZero(); polled != (tt.problem == "no Node") || polled && p.again.Due().Sub(timer.Now()) != nodePoll {
			t.Errorf("%s: looked again at %v", what, p.again.Due())
		}
		s.server.SetFault(apiserver.Fault{})
	}
	if slices := s.server.Slices(); len(slices) > 0 {
		t.Errorf("slices %v", slices)
	}
}
