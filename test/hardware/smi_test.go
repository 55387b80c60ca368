package hardware_test

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// smiLog is what nvidia-smi -q -x says. A number has its unit behind it, such as "143771 MiB".
type smiLog struct {
	Driver string   `xml:"driver_version"`
	CUDA   string   `xml:"cuda_version"`
	GPUs   []smiGPU `xml:"gpu"`
}

type smiGPU struct {
	Address string `xml:"id,attr"`
	Product string `xml:"product_name"`
	UUID    string `xml:"uuid"`
	Minor   string `xml:"minor_number"`

	Persistence string `xml:"persistence_mode"`
	MIG         string `xml:"mig_mode>current_mig"`
	PendingMIG  string `xml:"mig_mode>pending_mig"`
	Compute     string `xml:"compute_mode"`
	ECC         string `xml:"ecc_mode>current_ecc"`
	PendingECC  string `xml:"ecc_mode>pending_ecc"`
	PowerLimit  string `xml:"gpu_power_readings>current_power_limit"`

	Gen       string `xml:"pci>pci_gpu_link_info>pcie_gen>current_link_gen"`
	MaxGen    string `xml:"pci>pci_gpu_link_info>pcie_gen>max_link_gen"`
	Width     string `xml:"pci>pci_gpu_link_info>link_widths>current_link_width"`
	MaxWidth  string `xml:"pci>pci_gpu_link_info>link_widths>max_link_width"`
	Replays   string `xml:"pci>replay_counter"`
	Total     string `xml:"fb_memory_usage>total"`
	Reserved  string `xml:"fb_memory_usage>reserved"`
	Free      string `xml:"fb_memory_usage>free"`
	Corrected string `xml:"ecc_errors>volatile>dram_correctable"`
	Broken    string `xml:"ecc_errors>volatile>dram_uncorrectable"`
	Remapped  string `xml:"remapped_rows>remapped_row_unc"`
	Temp      string `xml:"temperature>gpu_temp"`
	MemTemp   string `xml:"temperature>memory_temp"`
	Power     string `xml:"gpu_power_readings>average_power_draw"`
	MaxPower  string `xml:"gpu_power_readings>max_power_limit"`
	SM        string `xml:"clocks>sm_clock"`
	MaxSM     string `xml:"max_clocks>sm_clock"`
	Memory    string `xml:"clocks>mem_clock"`
	Recovery  string `xml:"gpu_recovery_action"`
}

// settings are what nobody may change.
func (g smiGPU) settings() []string {
	return []string{g.Persistence, g.MIG, g.PendingMIG, g.Compute, g.ECC, g.PendingECC, g.PowerLimit}
}

// number returns the number at the beginning of a text, and false where there is none, as in "N/A".
func number(text string) (float64, bool) {
	text = strings.TrimRight(text, "x")
	digits, _, _ := strings.Cut(text, " ")
	v, err := strconv.ParseFloat(digits, 64)
	return v, err == nil
}

// smi runs nvidia-smi and returns what it prints.
func smi(t *testing.T, arguments ...string) []byte {
	t.Helper()
	if _, err := exec.LookPath("nvidia-smi"); err != nil {
		t.Skip("nvidia-smi is not in the PATH")
	}
	c := exec.CommandContext(t.Context(), "nvidia-smi", arguments...)
	c.Env = append(os.Environ(), "LC_ALL=C")
	var wrong bytes.Buffer
	c.Stderr = &wrong
	out, err := c.Output()
	if err != nil {
		t.Fatalf("nvidia-smi %s: %v %s%s", strings.Join(arguments, " "), err, wrong.Bytes(), out)
	}
	return out
}

// query runs nvidia-smi -q -x.
func query(t *testing.T) smiLog {
	t.Helper()
	var l smiLog
	if err := xml.Unmarshal(smi(t, "-q", "-x"), &l); err != nil || len(l.GPUs) == 0 {
		t.Fatalf("nvidia-smi names %d GPUs: %v", len(l.GPUs), err)
	}
	return l
}

// parseDmon reads what nvidia-smi dmon prints for one GPU: rows of values by the names of its
// columns. What is no number is left out.
func parseDmon(text string) (rows []map[string]float64) {
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "#"))
		switch {
		case len(fields) == 0:
		case fields[0] == "gpu":
			names = fields
		case strings.HasPrefix(line, "#"): // units
		default:
			row := map[string]float64{}
			for i, f := range fields {
				if v, err := strconv.ParseFloat(f, 64); err == nil && i < len(names) {
					row[names[i]] = v
				}
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// TestParsers: what an H200 with driver 580 says is read as it is meant.
func TestParsers(t *testing.T) {
	t.Parallel()
	var l smiLog
	err := xml.Unmarshal([]byte(`<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd"><nvidia_smi_log>
		<driver_version>580.159.04</driver_version><gpu id="00000000:00:06.0"><uuid>GPU-1</uuid><compute_mode>Default</compute_mode>
		<pci><pci_gpu_link_info><link_widths><current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
		<fb_memory_usage><total>143771 MiB</total></fb_memory_usage></gpu></nvidia_smi_log>`), &l)
	if err != nil || len(l.GPUs) != 1 {
		t.Fatalf("%+v %v", l, err)
	}
	g := l.GPUs[0]
	total, _ := number(g.Total)
	width, _ := number(g.Width)
	_, known := number("N/A")
	if got := fmt.Sprint(l.Driver, g.Address, g.UUID, g.Compute, total, width, known); got !=
		"580.159.0400000000:00:06.0GPU-1Default143771 16 false" {
		t.Error(got)
	}

	rows := parseDmon("# gpu    pwr     sm  gract   fp32 \n# Idx      W      %  GPM:%  GPM:% \n    0     79      0      -      - \n    0    690    100     99     87 \n")
	want := []map[string]float64{{"gpu": 0, "pwr": 79, "sm": 0},
		{"gpu": 0, "pwr": 690, "sm": 100, "gract": 99, "fp32": 87}}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Error(diff)
	}
}
