package kubeapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const devices = `[{"name":"gpu-0","attributes":{"type":{"string":"gpu"}},"capacity":{"memory":{"value":"80Gi"}}}]`

func slice(generation int64) kubeapi.Slice {
	return kubeapi.Slice{
		Name: "s", Driver: "d", Pool: nodeName, Generation: generation, Count: 1, Devices: json.RawMessage(devices),
		Owners: []kubeapi.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: "u", Controller: true}},
	}
}

// TestSlices makes, changes and removes a slice in each version of the API, and has the watch tell
// of it.
func TestSlices(t *testing.T) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			server := start(t)
			server.SetResourceVersions(version)
			client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
			seen, problem := feed.New(kubeapi.Slices{}), feed.New[error](nil)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				client.WatchSlices(ctx, clock.RealClock{}, "d", "", seen, problem)
			}()
			poll.Latest(t, "a first list", seen, func(s kubeapi.Slices) bool { return s.ResourceVersion != "" })

			created, err := client.CreateSlice(ctx, slice(1))
			if err != nil {
				t.Fatal(err)
			}
			want := slice(1)
			want.UID, want.ResourceVersion, want.Devices = created.UID, created.ResourceVersion, created.Devices
			if diff := cmp.Diff(want, created); diff != "" || created.UID == "" {
				t.Errorf("created (-want +got):\n%s", diff)
			}
			stored := server.Slices()[0]
			if d := stored.Spec.Devices[0]; ptr.Deref(d.Attributes["type"].StringValue, "") != "gpu" ||
				stored.Spec.Pool.ResourceSliceCount != 1 {
				t.Errorf("the API server has %+v", stored.Spec)
			}
			before := created
			if _, err := client.CreateSlice(ctx, slice(1)); !kubeapi.IsStale(err) {
				t.Errorf("a second slice of that name gave %v", err)
			}
			next := created
			next.Generation = 2
			updated, err := client.UpdateSlice(ctx, next)
			if err != nil || updated.Generation != 2 || updated.UID != created.UID {
				t.Errorf("updated %+v, error %v", updated, err)
			}
			if _, err := client.UpdateSlice(ctx, before); !kubeapi.IsStale(err) {
				t.Errorf("an update of an old version gave %v", err)
			}
			got := poll.Latest(t, "the update", seen, func(s kubeapi.Slices) bool { return s.ByName["s"].Generation == 2 })
			if diff := cmp.Diff(updated, got.ByName["s"]); diff != "" || got.IsBefore(updated.ResourceVersion) {
				t.Errorf("the watch sees (-want +got):\n%s", diff)
			}
			var flat []struct {
				Name       string                                 `json:"name"`
				Attributes map[string]resourceapi.DeviceAttribute `json:"attributes"`
			}
			err = json.Unmarshal(updated.Devices, &flat)
			if err != nil || flat[0].Name != "gpu-0" || flat[0].Attributes["type"].StringValue == nil {
				t.Errorf("devices %s, error %v", updated.Devices, err)
			}
			if err := client.DeleteSlice(ctx, "s", "another"); !kubeapi.IsCode(err, http.StatusConflict) {
				t.Errorf("the removal of another slice of that name gave %v", err)
			}
			for range 2 { // the second time it is gone
				if err := client.DeleteSlice(ctx, "s", updated.UID); err != nil {
					t.Error(err)
				}
			}
			poll.Latest(t, "the removal", seen, func(s kubeapi.Slices) bool { return s.ResourceVersion != "" && len(s.ByName) == 0 })
			listed, err := client.Slices(ctx, "d")
			if err != nil || len(listed.ByName) != 0 || listed.IsBefore(updated.ResourceVersion) {
				t.Errorf("listed %+v, error %v", listed, err)
			}
			cancel()
			<-ended
			if seen.Value().ResourceVersion != "" {
				t.Error("slices are known without a watch")
			}
		})
	}
}

// TestNoResourceAPI: an API server without the API is told as such, and a watch finds the API once
// it is served; also in another version.
func TestNoResourceAPI(t *testing.T) {
	t.Parallel()
	server := start(t)
	server.SetResourceVersions()
	client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
	counted := map[string]int{}
	client.Count(func(verb, resource string, _ int) { counted[verb+" "+resource]++ })
	if _, err := client.CreateSlice(t.Context(), slice(1)); err == nil ||
		!strings.Contains(err.Error(), "resource.k8s.io") {
		t.Errorf("error %v", err)
	}
	if counted["POST resourceslices"] != 3 {
		t.Errorf("requests %v", counted)
	}
	client.Count(nil)
	seen, problem := feed.New(kubeapi.Slices{}), feed.New[error](nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.WatchSlices(ctx, hurried{}, "d", "", seen, problem)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	_ = poll.Latest(t, "a problem", problem, func(err error) bool { return err != nil })
	for _, version := range []string{"v1beta1", "v1"} {
		server.SetResourceVersions(version)
		server.DropWatches()
		if err := server.ChangeSlice(version, func(s *resourceapi.ResourceSlice) {
			s.Spec = resourceapi.ResourceSliceSpec{Driver: "d", NodeName: ptr.To(nodeName),
				Pool: resourceapi.ResourcePool{Name: nodeName}}
		}); err != nil {
			t.Fatal(err)
		}
		poll.Latest(t, "the slice of "+version, seen, func(s kubeapi.Slices) bool { return s.ByName[version].Name != "" })
	}
	server.SetFault(apiserver.Fault{Status: http.StatusForbidden})
	if _, err := client.Slices(ctx, "d"); !kubeapi.IsForbidden(err) {
		t.Errorf("without the right: %v", err)
	}
}

// TestSlicesAreListedFromTheCache: a watch that is begun again, or is refused, reads nothing that an
// API server does not have in its cache. A cluster that was restored from a backup does not know
// the version: then it is the latest list.
func TestSlicesAreListedFromTheCache(t *testing.T) {
	t.Parallel()
	server := start(t)
	client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
	seen := feed.New(kubeapi.Slices{})
	go client.WatchSlices(t.Context(), hurried{}, "d", "", seen, feed.New[error](nil))
	poll.Latest(t, "a first list", seen, func(s kubeapi.Slices) bool { return s.ResourceVersion != "" })
	generation := int64(1)
	last, err := client.CreateSlice(t.Context(), slice(generation))
	if err != nil {
		t.Fatal(err)
	}
	follows := func(after string) {
		t.Helper()
		generation++
		next := slice(generation)
		next.UID, next.ResourceVersion = last.UID, last.ResourceVersion
		if last, err = client.UpdateSlice(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		poll.Latest(t, "the change after "+after, seen, func(s kubeapi.Slices) bool { return s.ByName["s"].Generation == generation })
	}
	server.DropWatches()
	follows("the end of a watch")
	refused := server.Requests()[apiserver.Request{Verb: "watch", Resource: "resourceslices"}]
	server.SetFault(apiserver.Fault{Status: http.StatusTooManyRequests,
		Only: func(r apiserver.Request) bool { return r.Verb == "watch" }})
	server.DropWatches()
	poll.Until(t, "a watch that was refused is tried again", func() bool {
		return server.Requests()[apiserver.Request{Verb: "watch", Resource: "resourceslices"}] >= refused+2
	})
	server.SetFault(apiserver.Fault{})
	follows("watches that were refused")
	follows("a change that the list may have told of") // the watch has begun, at a version of before
	if n := server.LatestLists("resourceslices"); n > 0 {
		t.Errorf("%d lists were to be the latest", n)
	}
	if err := server.Restore(); err != nil {
		t.Fatal(err)
	}
	poll.Latest(t, "the slices of the backup", seen, func(s kubeapi.Slices) bool { return s.ResourceVersion == "1" })
	if n := server.LatestLists("resourceslices"); n != 1 {
		t.Errorf("after a restore %d lists were to be the latest", n)
	}
}

// TestWatchOfSingleSlice: where one slice is to be there, and no other is, that one alone
// is watched.
func TestWatchOfSingleSlice(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ only, there, want string }{
		"the only one":            {only: "s", want: ",metadata.name=s"},
		"it is there":             {only: "s", there: "s", want: ",metadata.name=s"},
		"another one is there":    {only: "s", there: "left"},
		"several are to be there": {},
	} {
		selectors := make(chan string, 10)
		client := answering(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("watch") == "" {
				items := ""
				if tt.there != "" {
					items = fmt.Sprintf(`{"metadata": {"name": %q}}`, tt.there)
				}
				fmt.Fprintf(w, `{"metadata": {"resourceVersion": "5"}, "items": [%s]}`, items)
				return
			}
			selectors <- r.URL.Query().Get("fieldSelector")
		})
		ctx, cancel := context.WithCancel(t.Context())
		go client.WatchSlices(ctx, clock.RealClock{}, "d", tt.only, feed.New(kubeapi.Slices{}), feed.New[error](nil))
		select {
		case got := <-selectors:
			if want := "spec.nodeName=" + nodeName + ",spec.driver=d" + tt.want; got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		case <-time.After(patience):
			t.Errorf("%s: no watch", name)
		}
		cancel()
	}
}

// TestDevicesOfEarlierVersions are read as v1 has them, also beside those that have nothing but a
// name.
func TestDevicesOfEarlierVersions(t *testing.T) {
	t.Parallel()
	for devices, want := range map[string]string{
		`[{"name":"a","basic":{"capacity":{"m":{"value":"1"}}}},{"name":"b"}]`: `[{"capacity":{"m":{"value":"1"}},"name":"a"},{"name":"b"}]`,
		`[{"name":"a","basic":3}]`: "", `{"basic":{}}`: "", // errors
	} {
		client,
			_ := scripted(t, map[string]string{"GET /apis/resource.k8s.io/v1beta1/resourceslices": `200 {"metadata": {"resourceVersion": "1"},
			"items": [{"metadata": {"name": "s"}, "spec": {"devices": ` + devices + `}}]}`})
		found, err := client.Slices(t.Context(), "d")
		if got := string(found.ByName["s"].Devices); got != want || (err == nil) != (want != "") {
			t.Errorf("%s is read as %s (%v), want %s", devices, got, err, want)
		}
	}
}

// TestErrorOfServedVersion: only where a version of the API is not served the next one is
// asked for.
func TestErrorOfServedVersion(t *testing.T) {
	t.Parallel()
	for answer, served := range map[string]bool{
		"500 {}": true, `404 {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`: true, "404 page": false, "404 {}": false,
	} {
		client, asked := scripted(t, map[string]string{"GET /apis/resource.k8s.io/v1/resourceslices": answer})
		if _, err := client.Slices(t.Context(), "d"); err == nil || (len(asked()) == 1) != served {
			t.Errorf("%s: %v, after %d requests", answer, err, len(asked()))
		}
	}
}
