package topology

import (
	"iter"
	"math/bits"
	"strconv"
	"strings"
)

// MaxGPUs is the number of GPUs that a Graph can hold.
const MaxGPUs = 64

// A GPUSet is a set of GPUs of a Graph, by position.
type GPUSet uint64

// SetOf returns the set of the given positions, each from 0 to MaxGPUs-1.
func SetOf(positions ...int) GPUSet {
	var s GPUSet
	for _, p := range positions {
		s |= 1 << p
	}
	return s
}

// Len returns the number of GPUs in the set.
func (s GPUSet) Len() int { return bits.OnesCount64(uint64(s)) }

// Has reports whether the set holds the position.
func (s GPUSet) Has(position int) bool { return s>>position&1 == 1 }

// All yields the positions in ascending order.
func (s GPUSet) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		for ; s != 0; s &= s - 1 {
			if !yield(s.first()) {
				return
			}
		}
	}
}

// String returns the positions: "{0 1 4}".
func (s GPUSet) String() string {
	var b strings.Builder
	b.WriteByte('{')
	for p := range s.All() {
		if b.Len() > 1 {
			b.WriteByte(' ')
		}
		b.WriteString(strconv.Itoa(p))
	}
	b.WriteByte('}')
	return b.String()
}

// first returns the lowest position; the set must not be empty.
func (s GPUSet) first() int { return bits.TrailingZeros64(uint64(s)) }
