package serve

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
)

// TestWhatIsForgotten: a registration undoes only what was before it. The answer to a registration
// may come after the question of an earlier process that ends: kubelet has forgotten this one since
// then.
func TestWhatIsForgotten(t *testing.T) {
	for name, tt := range map[string]struct {
		before, during, refused bool
		want                    bool
	}{
		"never":                     {},
		"before":                    {before: true},
		"before, and it is refused": {before: true, refused: true, want: true},
		"during":                    {during: true, want: true},
		"before and during":         {before: true, during: true, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				directory := &sharedDirectory{}
				l := &registration{Collaborators: Collaborators{Registrar: directory, Clock: clock.RealClock{},
					Metrics: noMetrics{}}, list: newList(gpuName), previous: &previous{}, report: func(Phase) {},
					adopt: func(context.Context) {}, session: session{connections: newConnections()}}
				directory.registered = func() {
					if tt.during {
						l.previous.noteForgotten()
					}
				}
				if tt.refused {
					directory.err = errors.New("refused")
				}
				if tt.before {
					l.previous.noteForgotten()
				}
				if proven, err := l.stayRegistered(ctx, 1, "/d/e.sock", newService(l, klog.Background())); proven || err == nil {
					t.Errorf("stayRegistered() = %v, %v, want an error, and nothing proven", proven, err)
				}
				if got := l.previous.endsForgotten(); got != tt.want || l.previous.isForgotten() != tt.want {
					t.Errorf("it ends forgotten: %v, want %v", got, tt.want)
				}
				if l.previous.noteForgotten() || l.previous.isForgotten() != tt.want {
					t.Error("a process that ends promises to register again")
				}
			})
		})
	}
}

// TestTheFarewellAwaitsTheEarlierOne, and no longer than there is time for it.
func TestTheFarewellAwaitsTheEarlierOne(t *testing.T) {
	for name, tt := range map[string]struct{ ends, want time.Duration }{
		"it has ended":    {},
		"it ends":         {ends: 4 * earlierPause, want: 4 * earlierPause},
		"it does not end": {ends: time.Hour, want: leaveTimeout / 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				directory := &sharedDirectory{}
				if tt.ends > 0 {
					directory.earlier = []string{"earlier.sock"}
					defer time.AfterFunc(tt.ends-time.Millisecond, func() { directory.behind() }).Stop()
				}
				l := &registration{Collaborators: Collaborators{Registrar: directory, Clock: clock.RealClock{}},
					list: newList(gpuName)}
				began := time.Now()
				l.awaitEarlier(t.Context())
				if took := time.Since(began); took != tt.want {
					t.Errorf("awaitEarlier() took %v, want %v", took, tt.want)
				}
			})
		})
	}
}

// TestTheEndOfAProcessIsPrepared within the time that it has. Before it registers once more it
// sends no list.
func TestTheEndOfAProcessIsPrepared(t *testing.T) {
	t.Parallel()
	directory := &sharedDirectory{dir: t.TempDir()}
	l := sentList(directory, emptyAccount{})
	asked, silent, served, began := 0, false, false, time.Now()
	directory.asked = func(ctx context.Context, endpoint string) {
		asked++
		if at, limited := ctx.Deadline(); !limited || time.Until(at) > leaveTimeout {
			t.Errorf("question %d may take longer than %v", asked, leaveTimeout)
		}
		if endpoint == "" {
			return
		}
		silent = l.mute.Value() == muteReplaced
		if waited := time.Since(began); waited < leaveTimeout/2 {
			t.Errorf("it waited for %v for the end of the earlier process", waited)
		}
		client, err := grpc.NewClient("unix://"+endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		long, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = pluginapi.NewDevicePluginClient(client).GetDevicePluginOptions(long, &pluginapi.Empty{},
			grpc.WaitForReady(true))
		served = err == nil
	}
	l.detachFromKubelet(t.Context(), 1)
	server := grpc.NewServer()
	defer server.Stop()
	pluginapi.RegisterDevicePluginServer(server,
		newService(&registration{list: l.list, session: session{connections: newConnections()}},
			klog.Background()))
	directory.behind("earlier.sock")
	began = time.Now()
	l.registerBeforeExit(t.Context(), 1, server, nil)
	if asked != 2 || !silent || !served || !directory.locked() {
		t.Errorf("kubelet was asked %d times; silent %v, served %v, registrations locked %v", asked, silent, served,
			directory.locked())
	}
	directory.dir = "/nowhere"
	if l.registerBeforeExit(t.Context(), 1, server, nil); asked != 2 {
		t.Error("it registers a socket that it cannot listen at")
	}
}
