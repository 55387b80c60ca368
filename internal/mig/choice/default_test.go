package choice_test

import (
	"strings"
	"testing"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
)

// The label all-disabled is valid only if a user chose it, if it would remove MIG devices; also in
// the next process.
func TestDefaultLabelOfOperator(t *testing.T) {
	t.Parallel()
	const disabled = "all-disabled"
	for name, tt := range map[string]struct {
		labels  []string
		file    string
		whole   bool
		apply   string
		refused bool
	}{
		"the operator's default":       {labels: []string{disabled}, refused: true},
		"the same after no label":      {labels: []string{"all-balanced", "", disabled}, refused: true},
		"no GPU is divided":            {labels: []string{disabled}, whole: true},
		"set to another one and back":  {labels: []string{disabled, "all-balanced", disabled}},
		"chosen after another one":     {labels: []string{"all-balanced", disabled}},
		"the file says so, too":        {labels: []string{disabled}, file: disabled},
		"the file has another layout":  {labels: []string{disabled}, file: "all-balanced", refused: true},
		"mig apply":                    {labels: []string{disabled}, apply: disabled},
		"another default of operators": {labels: []string{"all-enabled"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := false
			configs, dir := feed.New(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, Label: true, Layout: tt.file}}}), t.TempDir()
			start := func() *choice.Chooser {
				known = false // before the first scan
				divided := func() (bool, bool) { return known && !tt.whole, known }
				c := choice.New(t.Context(), configs, dir, func() error { return nil }, divided, clock.RealClock{})
				if got := c.Choices().Value(); tt.refused && got.Desired.Layout == disabled {
					t.Errorf("before the first look the decision is %+v", got)
				}
				known = true
				return c
			}
			c := start()
			for _, label := range tt.labels {
				c.SetLabel(t.Context(), label)
			}
			if tt.apply != "" {
				if _, err := c.Apply(t.Context(), tt.apply, nil); err != nil {
					t.Fatal(err)
				}
			}
			for _, process := range []*choice.Chooser{c, start()} {
				process.SetLabel(t.Context(), tt.labels[len(tt.labels)-1])
				got := process.Choices().Value()
				if refused := got.Err != nil; refused != tt.refused ||
					refused && !strings.Contains(got.Err.Error(), "to confirm it") {
					t.Errorf("the decision is %+v, want refused: %v", got, tt.refused)
				}
				if want := tt.labels[len(tt.labels)-1]; (got.Desired.Layout == want) == tt.refused {
					t.Errorf("the desired layout is %q, refused: %v", got.Desired.Layout, tt.refused)
				}
			}
		})
	}
}
