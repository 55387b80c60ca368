package draplugin

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
)

// hung prepares claims, but that of one UID never.
type hung struct {
	uid   string
	until chan struct{}
}

func (h hung) Prepare(_ context.Context, c dra.Claim) ([]dra.Prepared, error) {
	if c.UID == h.uid {
		<-h.until
	}
	return nil, nil
}

func (h hung) Unprepare(context.Context, string, string, string) error { return nil }

func (h hung) Claim(_ context.Context, namespace, name string) (dra.Claim, error) {
	return dra.Claim{UID: name, Namespace: namespace, Name: name, Results: []dra.Result{{}}}, nil
}

// TestHungPrepare: a call is answered before kubelet gives it up, whatever a claim does, with the answers that are there. Until the claim is
// done, further calls for it say what they wait for; then it works.
func TestHungPrepare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := hung{uid: "hung", until: make(chan struct{})}
		s := &service{log: klog.Background(), Plugin: New(Options{Claims: h, Reader: h})}
		prepare := func(uids ...string) map[string]string {
			t.Helper()
			request := &drav1.NodePrepareResourcesRequest{}
			for _, uid := range uids {
				request.Claims = append(request.Claims, &drav1.Claim{Uid: uid, Name: uid})
			}
			began := time.Now()
			response, err := s.NodePrepareResources(t.Context(), request)
			if took := time.Since(began); err != nil || took > 40*time.Second {
				t.Fatalf("%v after %v", err, took)
			}
			said := map[string]string{}
			for uid, a := range response.GetClaims() {
				said[uid] = a.GetError()
			}
			return said
		}
		const late, waits = "it has not ended within 40s", "wait for the end of an earlier call for the claim: it has not ended within 40s"
		if diff := cmp.Diff(map[string]string{"hung": late, "a": "", "b": ""}, prepare("hung", "a", "b")); diff != "" {
			t.Errorf("answers (-want +got):\n%s", diff)
		}
		if said := prepare("hung")["hung"]; said != late && said != waits {
			t.Errorf("the second call: %q", said)
		}
		unprepared, err := s.NodeUnprepareResources(t.Context(), &drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{{Uid: "hung"}}})
		if said := unprepared.GetClaims()["hung"].GetError(); err != nil || said != late && said != waits {
			t.Errorf("Unprepare beside the hung Prepare: %v %q", err, said)
		}
		close(h.until)
		if said := prepare("hung"); said["hung"] != "" {
			t.Error(said)
		}
		synctest.Wait()
		if len(s.locks.held) > 0 {
			t.Errorf("%d locks are left", len(s.locks.held))
		}
	})
}

// TestNoDevices: a claim without devices of this driver is refused.
func TestNoDevices(t *testing.T) {
	t.Parallel()
	s := &service{log: klog.Background(), Plugin: New(Options{Claims: hung{}, Reader: unallocated{}})}
	response, err := s.NodePrepareResources(t.Context(), &drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{{Uid: "a"}}})
	if said := response.GetClaims()["a"].GetError(); err != nil || said != "no device of this driver is allocated to the claim" {
		t.Errorf("%v %q", err, said)
	}
}

// unallocated reads a claim without devices.
type unallocated struct{}

func (unallocated) Claim(context.Context, string, string) (dra.Claim, error) {
	return dra.Claim{UID: "a"}, nil
}
