package view

import (
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// AddMetrics adds the measurements in the text of a daemon's metrics to the rows of its node. It
// ignores invalid text.
func AddMetrics(rows []GPU, node, text string) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return
	}
	for i := range rows {
		row := &rows[i]
		if row.Node != node || strings.Contains(row.Index, ":") {
			continue
		}
		row.Utilization = gaugeValue(families["DCGM_FI_DEV_GPU_UTIL"], row.UUID)
		row.MemoryUsed = gaugeValue(families["DCGM_FI_DEV_FB_USED"], row.UUID)
		row.MemoryTotal = gaugeValue(families["DCGM_FI_DEV_FB_TOTAL"], row.UUID)
	}
}

// gaugeValue returns the value of a GPU itself, not of one of its instances.
func gaugeValue(f *dto.MetricFamily, uuid string) *int64 {
	for _, m := range f.GetMetric() {
		found, ofAll := false, true
		for _, l := range m.GetLabel() {
			found = found || l.GetName() == "UUID" && l.GetValue() == uuid
			ofAll = ofAll && l.GetName() != "GPU_I_ID"
		}
		if found && ofAll {
			value := m.GetGauge().GetValue()
			if value >= 0 && value < 1<<53 { // NaN is not
				whole := int64(value)
				return &whole
			}
			return nil
		}
	}
	return nil
}
