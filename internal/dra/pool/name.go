package pool

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// DriverName returns the driver name of a node: the wanted name, or else the name in use.
// A name is in use if claims have devices or GPUs may be in slices, by the files in the
// state directory and the CDI specs in a folder. kept is then the reason, a sentence with
// the remedy. DriverName writes nothing.
func DriverName(stateDir, cdiDir, wanted string) (name, kept string, err error) {
	prepared, err := claims.Drivers(stateDir, cdiDir, wanted)
	if err != nil {
		return wanted, "", err
	}
	const remedy = "set dra.driverName to %[1]s and dra.mode to plugin until no GPU of the node is in a " +
		"ResourceSlice and no claim is prepared, and change the name then"
	for _, driver := range slices.Sorted(maps.Keys(prepared)) {
		if driver == wanted {
			continue
		}
		return driver, fmt.Sprintf("dra.driverName is %[2]s, and the driver keeps the name %[1]s, under which these "+
			"claims have devices: %[3]s; "+
			remedy, driver, wanted, inventory.Few(prepared[driver])), nil
	}
	text, err := statefile.Read(filepath.Join(stateDir, publishedFile), maxFile)
	var published publishedState
	if err == nil {
		err = json.Unmarshal(text, &published)
	}
	if statefile.IsAbsent(err) {
		return wanted, "", nil
	}
	driver := cmp.Or(published.Driver, dra.Driver)
	if err != nil || len(published.GPUs) == 0 || driver == wanted {
		return wanted, "", err
	}
	return driver, fmt.Sprintf("dra.driverName is %[2]s, and the driver keeps the name %[1]s, under which GPUs are in "+
		"ResourceSlices; "+remedy,
		driver, wanted), nil
}
