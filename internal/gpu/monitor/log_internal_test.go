package monitor

import (
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestWhatIsLogged: each change once, by device, and what holds for all GPUs in one line.
func TestWhatIsLogged(t *testing.T) {
	t.Parallel()
	const all = "the driver does not answer"
	good, lost := inventory.Health{State: inventory.Healthy}, inventory.Health{State: inventory.Lost, Reason: "gone"}
	silent := inventory.Health{State: inventory.Unknown, Reason: all}
	node := func(stale string, verdicts ...inventory.Health) inventory.Snapshot {
		s := inventory.Snapshot{Stale: stale}
		for i, h := range verdicts {
			s.GPUs = append(s.GPUs, inventory.GPU{UUID: string(rune('a' + i)), Index: i, Health: h})
		}
		return s
	}
	mig := func(h inventory.Health) inventory.Snapshot {
		s := node("", good)
		s.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "m", Health: good}, {UUID: "n", Health: h}}
		return s
	}
	driver := node("", good)
	driver.Driver = inventory.Driver{Version: "580"}
	later := lost
	later.Since = later.Since.AddDate(1, 0, 0)
	for name, tt := range map[string]struct {
		before, after inventory.Snapshot
		node          string
		want          []string // the beginnings of lines
	}{
		"nothing": {node("", good, lost), node("", good, later), "", nil},
		"the first look": {node(""), node("", good, lost), "",
			[]string{`Health changed" "device"="b" "from"="Healthy" "to"="Lost"`}},
		"a GPU": {node("", good, good), node("", lost, good), "",
			[]string{`Health changed" "device"="a" "from"="Healthy" "to"="Lost"`}},
		"a GPU that is good again": {node("", lost), node("", good), "",
			[]string{`Health changed" "device"="a" "from"="Lost" "to"="Healthy"`}},
		"a MIG device": {mig(good), mig(lost), "",
			[]string{`Health changed" "device"="n" "from"="Healthy" "to"="Lost"`}},
		"a MIG device that came": {node("", good), mig(lost), "",
			[]string{`Health changed" "device"="n" "from"="Healthy" "to"="Lost"`}},
		"a GPU that is gone": {node("", good, good), node("", good), "", []string{`GPU is gone" "gpu"="b"`}},
		"the driver":         {node("", good), driver, "", []string{`Driver" "version"="580"`}},
		"a look that fails": {node("", good), node("no driver", good), "",
			[]string{`Health check of the node failed" "reason"="no driver"`}},
		"another that fails as it did": {node("no driver", good), node("no driver", good), "", nil},
		"another that fails differently": {node("no driver", good), node("no answer", good), "",
			[]string{`Health check of the node failed" "reason"="no answer"`}},
		"a look that succeeds": {node("no driver", good), node("", good), "",
			[]string{`Health check of the node succeeded again"`}},
		"all GPUs": {node("", good, good), node("x", silent, silent), all,
			[]string{`Health check of the node failed"`, `Health changed" "node"="all GPUs" "struck"=2 "reason"="` +
				all}},
		"all GPUs, as before": {node("x", silent, silent), node("x", silent, silent), all, nil},
		"all GPUs but one": {node("", good, good), node("", silent, lost), all,
			[]string{`Health changed" "device"="b"`, `Health changed" "node"="all GPUs" "struck"=1`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			log := funcr.New(func(_, args string) {
				_, line, _ := strings.Cut(args, `"msg"="`)
				got = append(got, line)
			}, funcr.Options{})
			logChanges(klog.NewContext(t.Context(), log), tt.before, tt.after, tt.node)
			if !slices.EqualFunc(tt.want, got, func(want, line string) bool { return strings.HasPrefix(line, want) }) {
				t.Errorf("logged (-want +got):\n%s", cmp.Diff(tt.want, got))
			}
		})
	}
}
