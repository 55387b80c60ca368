package cli

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// allocationLine describes Dynamic Resource Allocation on the node; empty if it is not used.
func allocationLine(s *status.DRA) string {
	if s == nil {
		return ""
	}
	parts := []string{"mode " + s.Mode}
	if s.DriverName != "" {
		parts = append(parts, "driver "+s.DriverName)
	}
	switch {
	case s.Driver.NameConflict != "":
		parts = append(parts, "another driver of the same name registers at "+s.Driver.NameConflict)
	case s.Driver.Registered:
		parts = append(parts, "registered with the kubelet")
	case s.Driver.Problem != "":
		parts = append(parts, "not registered with the kubelet: "+s.Driver.Problem)
	default:
		parts = append(parts, "not registered with the kubelet")
	}
	if s.Slices > 0 {
		parts = append(parts, fmt.Sprintf("slices: %d with %s, generation %d", s.Slices,
			wording.Count(s.Devices, "device"), s.Generation))
	}
	if s.NoTaints {
		parts = append(parts, "the API server drops taints of devices: a GPU that is not healthy leaves its slice")
	}
	if s.NoCounters {
		parts = append(parts, "the API server drops counters of devices: no MIG devices are created for claims")
	}
	if s.NoShares {
		parts = append(parts, "the API server knows no shares of devices: GPUs are given whole")
	}
	for _, problem := range []string{s.Problem, s.Driver.CompetingDriver, s.DriverNameKept} {
		if problem != "" {
			parts = append(parts, problem)
		}
	}
	return strings.Join(parts, "; ")
}

// ownerSentences names the owner of each GPU that the device plugin does not own, and awaited
// conditions.
func ownerSentences(s *status.DRA) []string {
	if s == nil {
		return nil
	}
	words := map[string]string{
		"":                        "not known yet",
		string(dra.LeavesPlugin):  "moves from the device plugin into a ResourceSlice",
		string(dra.OwnedByDRA):    "in a ResourceSlice",
		string(dra.LeavesDRA):     "moves from its ResourceSlice to the device plugin",
		string(dra.OwnedByNobody): "moves to the device plugin",
	}
	var sentences []string
	for _, g := range s.GPUs {
		if g.Owner == string(dra.OwnedByPlugin) {
			continue
		}
		sentence := fmt.Sprintf("GPU %d: %s", g.Index, words[g.Owner])
		if g.Unpublished != "" {
			sentence = fmt.Sprintf("GPU %d: owned by claims, but in no ResourceSlice: %s", g.Index, g.Unpublished)
		}
		if g.Waiting != "" {
			sentence += "; it waits: " + g.Waiting
		}
		sentences = append(sentences, sentence)
	}
	return sentences
}

// claimSentences names the prepared claims, and released claims whose devices still exist.
func claimSentences(s *status.DRA, v view) []string {
	if s == nil {
		return nil
	}
	var sentences []string
	for _, c := range s.Claims {
		sentence := fmt.Sprintf("%s/%s has %s since %s", c.Namespace, c.Name, strings.Join(c.Devices, ", "),
			v.since(c.Since))
		for _, share := range c.Shares {
			limit := "not a limit"
			if share.Limited {
				limit = "a limit by MPS"
			}
			sentence += fmt.Sprintf("; %d MiB of %s, %s", share.MemoryBytes>>20, share.Device, limit)
		}
		if c.Released != "" {
			sentence = fmt.Sprintf("%s/%s was released, but its devices at %s still exist: %s; no claim gets this "+
				"part of the GPU until they are removed; retried every 10 s",
				c.Namespace, c.Name, strings.Join(c.Devices, ", "), c.Released)
		}
		if c.Destroyed {
			sentence = fmt.Sprintf("%s/%s was released, and its MIG devices (%s) are destroyed, but MIG mode is "+
				"still on: %s; the switch off is retried every 10 s",
				c.Namespace, c.Name, strings.Join(c.Devices, ", "), c.Released)
		}
		if c.Problem != "" {
			sentence += "; " + c.Problem
		}
		sentences = append(sentences, sentence)
	}
	return sentences
}
