package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

func newClaimCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "claim", Short: "Check the configuration of GPUs in ResourceClaims", Args: noArguments}
	driver := ""
	check := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check the configuration of GPUs in ResourceClaims, ResourceClaimTemplates and DeviceClasses",
		Long: "check reads manifests and checks their opaque configuration: GpuConfig and MigDeviceConfig of\n" +
			"resource.nvidia.com/v1beta1. It prints the effect of each configuration, with all defaults, or the\n" +
			"problems. The API server does not check this configuration: a driver refuses a wrong configuration\n" +
			"when a pod starts. Other objects are ignored.",
		Example: "  gpu-device-plugin claim check claims.yaml",
		Args:    needs("a file", math.MaxInt),
		RunE: func(cmd *cobra.Command, paths []string) error {
			problems := 0
			for _, path := range paths {
				lines, found, err := (claimCheck{driver}).file(path)
				if err != nil {
					return err
				}
				problems += found
				for _, line := range lines {
					if _, err := fmt.Fprintln(cmd.OutOrStdout(), line); err != nil {
						return err
					}
				}
			}
			if problems > 0 {
				return fmt.Errorf("%s found", wording.Count(problems, "problem"))
			}
			return nil
		},
	}
	check.Flags().StringVar(&driver, "dra-driver-name", dra.Driver, "name of the driver that the configuration is for")
	cmd.AddCommand(check)
	return cmd
}

// maxManifest is the greatest size of a manifest, in bytes.
const maxManifest = 4 << 20

// A claimObject is the checked part of an object with device configuration, in any version of the
// API.
type claimObject struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		claimSpec
		Config []claimConfig // of a DeviceClass
		Spec   claimSpec     // of a ResourceClaimTemplate
	}
	Items []json.RawMessage
}

type claimSpec struct {
	Devices struct {
		Requests []claimRequest
		Config   []claimConfig
	}
}

type claimRequest struct {
	Name           string
	claimDevices   // up to v1beta1, and in alternatives
	Exactly        claimDevices
	FirstAvailable []claimRequest
}

type claimDevices struct {
	DeviceClassName string
	Capacity        claimCapacity
	AllocationMode  string
	Count           int
	AdminAccess     bool
}

// A claimCapacity is the requested parts of devices.
type claimCapacity struct{ Requests map[string]any }

type claimConfig struct {
	Requests []string
	Opaque   struct {
		Driver     string
		Parameters json.RawMessage
	}
}

var documentEnd = regexp.MustCompile(`(?m)^---.*$`)

// A claimCheck checks manifests for the driver of a name.
type claimCheck struct{ driver string }

// file returns a line for each configuration in a file and each problem, and the number of
// problems.
func (k claimCheck) file(path string) (lines []string, problems int, err error) {
	data, err := statefile.Read(path, maxManifest)
	if err != nil {
		return nil, 0, fmt.Errorf("read manifest: %w", err)
	}
	for _, document := range documentEnd.Split(string(data), -1) {
		text, err := yaml.YAMLToJSONStrict([]byte(document))
		if err != nil {
			return nil, 0, fmt.Errorf("read manifest %s: %w", path, err)
		}
		found, bad, err := k.object(text)
		if err != nil {
			return nil, 0, fmt.Errorf("read manifest %s: %w", path, err)
		}
		lines, problems = append(lines, found...), problems+bad
	}
	if len(lines) == 0 {
		lines = []string{path + ": no configuration for " + k.driver}
	}
	return lines, problems, nil
}

// kindOf returns the kind of configuration for devices of the driver's classes; empty for any other
// class.
func (k claimCheck) kindOf(class string) string {
	switch gpu, mig := dra.ClassNames(k.driver); class {
	case gpu:
		return dra.GPUConfig
	case mig:
		return dra.MIGConfig
	}
	return ""
}

// object checks one object like file. An object of another kind has nothing to check.
func (k claimCheck) object(text []byte) (lines []string, problems int, err error) {
	var o claimObject
	kind := struct{ Kind string }{}
	if bytes.Equal(text, []byte("null")) {
		return nil, 0, nil
	}
	if err := json.Unmarshal(text, &kind); err != nil {
		return nil, 0, err
	}
	if !slices.Contains([]string{"ResourceClaim", "ResourceClaimTemplate", "DeviceClass", "List"}, kind.Kind) {
		return nil, 0, nil
	}
	if err := json.Unmarshal(text, &o); err != nil {
		return nil, 0, err
	}
	for _, item := range o.Items {
		found, bad, more := k.object(item)
		lines, problems, err = append(lines, found...), problems+bad, errors.Join(err, more)
	}
	claim := o.Spec.claimSpec
	if o.Kind == "ResourceClaimTemplate" {
		claim = o.Spec.Spec
	}
	var configs []dra.OpaqueConfig
	for i, c := range append(claim.Devices.Config, o.Spec.Config...) {
		if c.Opaque.Driver != k.driver {
			continue
		}
		where := fmt.Sprintf("%s %s, config %d", o.Kind, o.Metadata.Name, i)
		found, wrong := dra.ParseConfig(c.Opaque.Parameters)
		configs = append(configs, dra.OpaqueConfig{Source: dra.FromClaim, Requests: c.Requests,
			Parameters: c.Opaque.Parameters})
		for _, w := range wrong {
			lines = append(lines, where+": "+w)
		}
		problems += len(wrong)
		if len(wrong) == 0 {
			lines = append(lines,
				where+strings.TrimSuffix(" (requests "+strings.Join(c.Requests, ", ")+")", " (requests )")+
					": "+found.String())
		}
	}
	for _, part := range k.partsOf(claim) {
		lines = append(lines, fmt.Sprintf("%s %s, %s", o.Kind, o.Metadata.Name, part))
	}
	if problems > 0 {
		return lines, problems, err
	}
	for _, refused := range k.refusals(claim.Devices.Requests, configs) {
		lines, problems = append(lines, fmt.Sprintf("%s %s: %s", o.Kind, o.Metadata.Name, refused)), problems+1
	}
	return lines, problems, err
}

// partsOf returns a line for each request of a part of a GPU's memory.
func (k claimCheck) partsOf(claim claimSpec) (lines []string) {
	parts := map[string]string{}
	for _, r := range claim.Devices.Requests {
		r.describe(k.driver, "", parts)
	}
	for _, request := range slices.Sorted(maps.Keys(parts)) {
		limit := "nothing keeps processes to it, unless the DeviceClass wants MPS"
		if strategy := k.strategyOf(request, claim.Devices.Config); strategy == dra.MPS {
			limit = "MPS keeps each process to it"
		} else if strategy != "" {
			limit = "nothing keeps processes to it without MPS"
		}
		lines = append(lines, fmt.Sprintf("request %s: %s of the memory of a GPU; %s", request, parts[request], limit))
	}
	return lines
}

// strategyOf returns the sharing strategy of a request from the last configuration for it; empty
// without one.
func (k claimCheck) strategyOf(request string, configs []claimConfig) dra.SharingStrategy {
	parent, _, _ := strings.Cut(request, "/")
	for _, c := range slices.Backward(configs) {
		found, wrong := dra.ParseConfig(c.Opaque.Parameters)
		named := len(c.Requests) == 0 || slices.Contains(c.Requests, request) || slices.Contains(c.Requests, parent)
		if named && c.Opaque.Driver == k.driver && len(wrong) == 0 && found.Kind == dra.GPUConfig {
			return found.Strategy
		}
	}
	return ""
}

// devices returns the devices of a request without alternatives.
func (r claimRequest) devices() claimDevices {
	if r.DeviceClassName != "" {
		return r.claimDevices
	}
	return r.Exactly
}

// describe adds the requested memory of a request and its alternatives, by their names in
// configurations.
func (r claimRequest) describe(class, prefix string, parts map[string]string) {
	of := r.devices()
	if memory, wanted := of.Capacity.Requests[dra.MemoryCapacity]; wanted && of.DeviceClassName == class {
		parts[prefix+r.Name] = fmt.Sprint(memory)
	}
	for _, alternative := range r.FirstAvailable {
		alternative.describe(class, prefix+r.Name+"/", parts)
	}
}

// refusals returns why the claim will not be prepared for any alternative, although each
// configuration is valid by itself.
func (k claimCheck) refusals(requests []claimRequest, configs []dra.OpaqueConfig) (reasons []string) {
	for choice, more := 0, true; more; choice++ {
		var devices []claims.RequestedDevices
		more = false
		for _, r := range requests {
			name, of := r.Name, r.devices()
			if n := len(r.FirstAvailable); n > 0 {
				alternative := r.FirstAvailable[min(choice, n-1)]
				name, of = name+"/"+alternative.Name, alternative.claimDevices
				more = more || choice+1 < n
			}
			_, part := of.Capacity.Requests[dra.MemoryCapacity]
			devices = append(devices, claims.RequestedDevices{
				Name: name, Kind: k.kindOf(of.DeviceClassName), Count: of.count(), Admin: of.AdminAccess, Part: part,
			})
		}
		if err := claims.CheckConfig(devices, configs); err != nil && !slices.Contains(reasons, err.Error()) {
			reasons = append(reasons, err.Error())
		}
	}
	return reasons
}

// maxResults is the greatest number of devices of a claim.
const maxResults = 32

// count returns the greatest number of requested devices.
func (d claimDevices) count() int {
	if d.AllocationMode == "All" {
		return maxResults
	}
	return min(max(d.Count, 1), maxResults)
}
