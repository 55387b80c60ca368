package command_test

import (
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// longAgo is an age that is shown as 5h, however long a test takes.
const longAgo = 5*time.Hour + 30*time.Second

// TestRepair: the command shows what the nodes report, also a Lease that somebody else has written,
// and resume ends a stop.
func TestRepair(t *testing.T) {
	s := newStage(t)
	add := func(name string, annotations map[string]string) {
		s.add("leases", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "gpu-system",
			Labels: map[string]string{"gpu-device-plugin.github.io/repair": "true"}, Annotations: annotations}})
	}
	const status = "gpu-device-plugin.github.io/repair.status"
	since := time.Now().Add(-longAgo).UTC().Format(time.RFC3339)
	add(repair.LeasePrefix+"b", map[string]string{status: `{"mode": "idle", "steps": [{"index": 3, "uuid": "GPU-3", "state": "waiting", ` +
		`"reason": "in use: GPU 3 by pod a/b\u001b[2J", "since": "` + since + `"}], "attempts": [{"gpus": ["GPU-1"], "began": "` + since +
		`", "ended": "` + since + `", "before": "GPU 1 Unhealthy", "after": "GPU 1 Healthy", "repaired": true}, ` +
		`{"gpus": ["GPU-2"], "began": "` + since + `", "ended": "` + since + `", "before": "x", "after": "y"}, ` +
		`{"gpus": ["GPU-4"], "began": "` + since + `"}]}`})
	add(repair.LeasePrefix+"a", map[string]string{status: "{"})
	add(repair.LeasePrefix+"c", map[string]string{status: strings.Repeat("x", 1<<17)})
	add(repair.Stopped, map[string]string{"gpu-device-plugin.github.io/repair.reason": "3 of 10 GPU nodes asked"})
	out, problems, code := s.run("repair", "-n", "gpu-system")
	want := strings.Join([]string{
		"NODE   GPU     STATE      SINCE   REASON",
		"a      -       unknown    -       its Lease cannot be read: unexpected end of JSON input",
		"b      3       waiting    5h      in use: GPU 3 by pod a/b^[[2J",
		"b      GPU-1   repaired   5h      GPU 1 Unhealthy → GPU 1 Healthy",
		"b      GPU-2   failed     5h      x → y",
		"c      -       unknown    -       its Lease is too large\n",
	}, "\n")
	if said := "Stopped: 3 of 10 GPU nodes asked. Look for a common cause, and continue with kubectl gpu repair " +
		"resume.\n"; out != want || problems != said || code != 0 {
		t.Errorf("exit status %d\n%s%s\nwant\n%s%s", code, out, problems, want, said)
	}
	for _, said := range []string{"Nodes repair GPUs again within a minute.\n", "Repairs are not stopped.\n"} {
		if out, problems, code := s.run("repair", "resume", "-n", "gpu-system"); out != said || code != 0 {
			t.Errorf("resume: exit status %d, %q, %s", code, out, problems)
		}
	}
	names := ""
	for _, l := range s.server.Leases("gpu-system") {
		if !strings.HasPrefix(l.Name, repair.LeasePrefix) {
			names += l.Name + " "
		}
		if l.Name == repair.Resumed && (l.Spec.RenewTime == nil || time.Since(l.Spec.RenewTime.Time) > time.Minute) {
			t.Errorf("resumed at %v", l.Spec.RenewTime)
		}
	}
	if names != repair.Resumed+" " {
		t.Errorf("left: %s", names)
	}
}
