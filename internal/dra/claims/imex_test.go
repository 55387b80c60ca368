package claims_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const imexNode = "nvidia-caps-imex-channels/channel0"

// connected is a claim that asks for an IMEX channel with its GPUs.
func connected(uid string, devices ...string) dra.Claim {
	c := claim(uid, devices...)
	c.Configs = []dra.OpaqueConfig{{Source: dra.FromClaim, Parameters: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",
"imex":{"channelIDs":[0]}}`)}}
	return c
}

// allowIMEX has the configuration of the node allow IMEX channels, or not.
func (r *rig) allowIMEX(allowed bool) {
	c := r.configs.Value()
	c.Edits.IMEX = allowed
	r.configs.Publish(c)
}

// withIMEX has the node have the channel, and its configuration allow it.
func (r *rig) withIMEX() {
	r.tb.Helper()
	path := filepath.Join(r.driver, "dev", imexNode)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		r.tb.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		r.tb.Fatal(err)
	}
	s := snapshot()
	s.Control |= inventory.NodeIMEXChannel0
	r.publish(s)
	r.allowIMEX(true)
}

// TestIMEXChannel: where the configuration of the node allows it, the claims that ask for the IMEX
// channel get it, and no others. They have it for as long as they are prepared, over restarts and
// changes of the configuration.
func TestIMEXChannel(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withIMEX()
	c, stop := r.start()
	mixed := connected("mixed", gpuC, migB0) // the configuration is for GPUs
	for _, tt := range []struct {
		claim dra.Claim
		want  []string
	}{
		{claim("plain", migB1), []string{"nvidia1 nvidia-caps/nvidia-cap39 nvidia-caps/nvidia-cap40"}},
		{connected("asks", gpuA), []string{"nvidia0 " + imexNode}},
		{mixed, []string{"nvidia2 " + imexNode, "nvidia1 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31"}},
	} {
		prepared, err := ask(t.Context(), c, tt.claim)
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range ids(prepared) {
			if got := r.nodes(id); got != tt.want[i] {
				t.Errorf("the claim %s: device %d has the nodes %s, want %s", tt.claim.UID, i, got, tt.want[i])
			}
		}
	}
	before := text(t, r.spec("asks"))
	r.allowIMEX(false)
	stop()
	c, _ = r.start()
	r.prepare(c, connected("asks", gpuA))
	if now := text(t, r.spec("asks")); now != before {
		t.Errorf("after a restart with another configuration the spec is %s, and was %s", now, before)
	}
	r.unprepare(c, "asks")
	if _, err := ask(t.Context(), c, connected("next", gpuA)); err == nil ||
		!strings.Contains(err.Error(), "imex.channelIDs: this node offers no IMEX channel") {
		t.Errorf("a claim that asks, where the configuration does not allow it: %v", err)
	}
}

// TestIMEXChannelThatIsNotThere: a claim that asks waits for the channel.
func TestIMEXChannelThatIsNotThere(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.allowIMEX(true)
	c, _ := r.start()
	if _, err := ask(t.Context(), c, connected("asks", gpuA)); err == nil ||
		!strings.Contains(err.Error(), "/dev/"+imexNode+" does not exist yet") {
		t.Errorf("without the channel: %v", err)
	}
	r.prepare(c, claim("plain", gpuA))
	r.unprepare(c, "plain")
	r.withIMEX()
	poll.Until(t, "the claim is prepared", func() bool {
		_, err := ask(t.Context(), c, connected("asks", gpuA))
		return err == nil
	})
}
