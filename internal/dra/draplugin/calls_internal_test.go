package draplugin

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// hung prepares claims, except one UID, whose call hangs.
type hung struct {
	uid   string
	until chan struct{}
}

func (h hung) Prepare(
	_ context.Context, uid string, _ func(context.Context) (dra.Claim, error),
) ([]dra.Prepared, error) {
	if uid == h.uid {
		<-h.until
	}
	return nil, nil
}

func (h hung) Unprepare(context.Context, string, string, string) error { return nil }

// TestHungPrepare: a call is answered before the kubelet gives up, with the finished answers,
// whatever a claim does.
func TestHungPrepare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := hung{uid: "hung", until: make(chan struct{})}
		s := &service{log: klog.Background(), Plugin: New(Options{Claims: h})}
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
		const late = "it has not ended within 40s"
		if diff := cmp.Diff(map[string]string{"hung": late, "a": "", "b": ""}, prepare("hung", "a", "b")); diff != "" {
			t.Errorf("answers (-want +got):\n%s", diff)
		}
		close(h.until)
		if said := prepare("hung"); said["hung"] != "" {
			t.Error(said)
		}
	})
}
