package dra

import (
	"maps"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Numbers are the N of "gpu-N" by the UUIDs of GPUs.
type Numbers map[string]int

// maxNumber is the highest number that a GPU gets. No driver has more minors.
const maxNumber = 255

// With returns the numbers with those of GPUs that had none. A GPU gets its minor, or, where
// another GPU of the node has that number or it is none, the lowest number that no GPU has. A GPU
// that is gone keeps its number until a new GPU has that minor.
func (n Numbers) With(gpus []inventory.GPU) Numbers {
	numbers := maps.Clone(n)
	if numbers == nil {
		numbers = Numbers{}
	}
	owners, present := map[int]string{}, map[string]bool{}
	for uuid, number := range numbers {
		owners[number] = uuid
	}
	for _, g := range gpus {
		present[g.UUID] = true
	}
	for _, g := range gpus {
		if _, known := numbers[g.UUID]; known {
			continue
		}
		number := g.Minor
		if owner, taken := owners[number]; number < 0 || number > maxNumber || taken && present[owner] {
			number = 0
			for owners[number] != "" {
				number++
			}
		}
		delete(numbers, owners[number])
		numbers[g.UUID], owners[number] = number, g.UUID
	}
	return numbers
}
