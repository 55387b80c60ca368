package simulator

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A linkEnd is the device at the other end of an NVLink.
type linkEnd struct {
	exists    bool // the link exists
	device    nvml.IntNvLinkDeviceType
	pci       nvml.PciInfo
	gpu, link int // position of the GPU at the other end, and the number of its NVLink
}

// completeLinks computes the ends of all NVLinks, and refuses invalid wiring.
func (p *Profile) completeLinks() error {
	p.ends = make([][]linkEnd, len(p.GPUs))
	for i, g := range p.GPUs {
		p.ends[i] = make([]linkEnd, g.model.NVLink.Links)
	}
	switch {
	case len(p.NVSwitches) > 0 && len(p.NVLinks) > 0:
		return errors.New("nvlinks and nvswitches are both given: with switches, all NVLinks lead to them")
	case len(p.NVSwitches) > 0:
		return p.wireSwitches()
	case len(p.NVLinks) > 0:
		return p.wireMesh()
	}
	return nil
}

// wireSwitches distributes the NVLinks of each GPU over the switches.
func (p *Profile) wireSwitches() error {
	for s, address := range p.NVSwitches {
		pci, err := parseBDF(address)
		if err != nil {
			return fmt.Errorf("nvswitches[%d]: %w", s, err)
		}
		for _, ends := range p.ends {
			for link := range ends {
				if link*len(p.NVSwitches)/len(ends) == s {
					ends[link] = linkEnd{exists: true, device: nvml.NVLINK_DEVICE_TYPE_SWITCH, pci: pci}
				}
			}
		}
	}
	return nil
}

// wireMesh connects the GPUs with each other, by the lowest free NVLinks of both.
func (p *Profile) wireMesh() error {
	lanes, err := p.parseLanes()
	if err != nil {
		return err
	}
	used := make([]int, len(p.GPUs))
	for i, row := range lanes {
		for j, count := range row[:i] {
			for range count {
				a, b := used[i], used[j]
				if a == len(p.ends[i]) || b == len(p.ends[j]) {
					return fmt.Errorf("nvlinks: GPU %d or GPU %d has more lanes than its model has NVLinks", i, j)
				}
				p.ends[i][a] = linkEnd{exists: true, device: nvml.NVLINK_DEVICE_TYPE_GPU, pci: p.GPUs[j].pci, gpu: j,
					link: b}
				p.ends[j][b] = linkEnd{exists: true, device: nvml.NVLINK_DEVICE_TYPE_GPU, pci: p.GPUs[i].pci, gpu: i,
					link: a}
				used[i]++
				used[j]++
			}
		}
	}
	return nil
}

// parseLanes parses the matrix of direct NVLinks.
func (p *Profile) parseLanes() ([][]int, error) {
	if len(p.NVLinks) != len(p.GPUs) {
		return nil, fmt.Errorf("nvlinks has %d rows for %d GPUs", len(p.NVLinks), len(p.GPUs))
	}
	lanes := make([][]int, len(p.GPUs))
	for i, row := range p.NVLinks {
		cells := strings.Fields(row)
		if len(cells) != len(p.GPUs) {
			return nil, fmt.Errorf("nvlinks[%d] has %d numbers for %d GPUs", i, len(cells), len(p.GPUs))
		}
		for j, cell := range cells {
			n, err := strconv.Atoi(cell)
			if err != nil || n < 0 || i == j && n != 0 {
				return nil, fmt.Errorf("nvlinks[%d]: %q to GPU %d is not a number of lanes (0 to itself)", i, cell, j)
			}
			lanes[i] = append(lanes[i], n)
			if j < i && lanes[j][i] != n {
				return nil, fmt.Errorf("nvlinks[%d] has %d lanes to GPU %d, which has %d back", i, n, j, lanes[j][i])
			}
		}
	}
	return lanes, nil
}

// commonAncestor returns the common ancestor of two GPUs in the PCIe tree. a and b are in the
// format of GPU.PCIe.
func commonAncestor(a, b string) nvml.GpuTopologyLevel {
	x, y := strings.Split(a, "/"), strings.Split(b, "/")
	common := 0
	for common < min(len(x), len(y)) && x[common] == y[common] {
		common++
	}
	switch {
	case common == 0:
		return nvml.TOPOLOGY_SYSTEM
	case common == 1:
		return nvml.TOPOLOGY_NODE
	case common == len(x) && common == len(y) && common > 2:
		return nvml.TOPOLOGY_SINGLE
	case common == 2:
		return nvml.TOPOLOGY_HOSTBRIDGE
	default:
		return nvml.TOPOLOGY_MULTIPLE
	}
}
