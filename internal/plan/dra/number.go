package dra

import (
	"maps"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Numbers are the N of "gpu-N" by the UUIDs of GPUs.
type Numbers map[string]int

// maxNumber is the highest number of a GPU. No driver has more minors.
const maxNumber = 255

// With returns the numbers, extended by GPUs without a number. A GPU gets the minor, or the lowest
// free number if the minor is taken or invalid. A missing GPU keeps the number until a new GPU has
// that minor.
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
