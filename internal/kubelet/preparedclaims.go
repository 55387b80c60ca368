package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// claimsFile is the checkpoint of the kubelet's manager for Dynamic Resource Allocation,
	// in the kubelet's root directory. The kubelet writes a claim to the file before calling
	// the driver to prepare the claim, and removes the claim after the driver has unprepared
	// it.
	claimsFile = "dra_manager_state"
	// claimsKind is the kind of its data, in kubelet 1.32 and newer.
	claimsKind = "DRACheckpoint"
	// maxClaimsFile bounds the file, in bytes. A claim takes a thousand.
	maxClaimsFile = 16 << 20
)

// A PreparedClaim is a claim that the kubelet has had prepared, or is having prepared.
type PreparedClaim struct {
	UID, Namespace, Name string
	// Devices are the names of its devices, by the name of the driver. A driver without devices has
	// not answered yet.
	Devices map[string][]string
}

// PreparedClaims returns the kubelet's prepared claims, from the checkpoint in the kubelet's
// root directory. It fails if the file is missing, or if the kubelet would not accept the
// file.
func PreparedClaims(root string) ([]PreparedClaim, error) {
	text, err := statefile.Read(filepath.Join(root, claimsFile), maxClaimsFile)
	if err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint of claims: %w", err)
	}
	var file struct {
		Data     string
		Checksum uint32
	}
	var data struct {
		Kind               string `json:"kind"`
		ClaimInfoStateList []struct {
			ClaimUID, ClaimName, Namespace string
			DriverState                    map[string]struct {
				Devices []struct{ DeviceName string }
			}
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint of claims: %w", err)
	}
	if crc32.ChecksumIEEE([]byte(file.Data)) != file.Checksum {
		return nil, errors.New("read the kubelet's checkpoint of claims: the checksum is wrong")
	}
	if err := json.Unmarshal([]byte(file.Data), &data); err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint of claims: %w", err)
	}
	if data.Kind != claimsKind {
		return nil, errors.New("read the kubelet's checkpoint of claims: this version of the kubelet has another " +
			"format")
	}
	claims := make([]PreparedClaim, 0, len(data.ClaimInfoStateList))
	for _, c := range data.ClaimInfoStateList {
		claim := PreparedClaim{UID: c.ClaimUID, Namespace: c.Namespace, Name: c.ClaimName,
			Devices: map[string][]string{}}
		for driver, state := range c.DriverState {
			claim.Devices[driver] = []string{}
			for _, d := range state.Devices {
				claim.Devices[driver] = append(claim.Devices[driver], d.DeviceName)
			}
		}
		claims = append(claims, claim)
	}
	return claims, nil
}
