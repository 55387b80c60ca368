package nvidia

import (
	"context"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// ListMIG makes the two calls that return lists and that sessions make only on GPUs with MIG, which
// the compiled library has none of.
func (s *Session) ListMIG(ctx context.Context, uuid string) (placements, instances nvml.Return) {
	_, err := ask(ctx, s, "list what MIG has on", uuid, func(gpu device) (struct{}, error) {
		_, placements = gpu.GetGpuInstancePossiblePlacements(nvml.GpuInstanceProfileInfo{})
		_, instances = gpu.GetGpuInstances(nvml.GpuInstanceProfileInfo{InstanceCount: 7})
		return struct{}{}, nil
	})
	if err != nil {
		panic(err)
	}
	return placements, instances
}
