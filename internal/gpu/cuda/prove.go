// Package cuda checks that CUDA works on a GPU. A new process of this program, limited in time and
// memory, compiles and runs a small kernel with the driver's libcuda, and compares the result. The
// package needs neither the CUDA headers nor the CUDA toolkit.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "prove.h"
*/
import "C"

import (
	"cmp"
	_ "embed"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

// Library is the loader's name of the CUDA library, and compilerName of the PTX compiler.
const (
	Library      = "libcuda.so.1"
	compilerName = "libnvidia-ptxjitcompiler.so.1"
)

// kernel computes the same as want. It uses only instructions of the oldest GPUs supported since
// driver R418: any driver compiles the kernel for any GPU.
//
//go:embed kernel.ptx
var kernel string

const (
	kernelName = "prove"
	numbers    = 1 << 18 // 1 MiB of input and 1 MiB of output
	blockSize  = 256
	rounds     = 64
)

// Kernel returns the PTX for the GPU.
func Kernel() string { return kernel }

// want returns the kernel's result for the number at an index.
func want(i, number uint32) uint32 {
	for range rounds {
		number = number*1664525 + 1013904223
		number ^= number >> 16
	}
	return number ^ math.Float32bits(float32(i&0xffff)*0.5+1)
}

// prove runs the kernel on the device with a UUID in this process. The process can use only this
// device, and may hang or crash. prove writes the name of each function to steps before the call.
func prove(driverRoot string, searchPath []string, uuid string, steps *os.File) *Failure {
	for name, value := range map[string]string{"CUDA_VISIBLE_DEVICES": uuid, "CUDA_CACHE_DISABLE": "1"} {
		if err := os.Setenv(name, value); err != nil {
			return &Failure{Function: "setenv", Text: err.Error()}
		}
	}
	library := cmp.Or(driverroot.Locate(driverRoot, Library, searchPath...), Library)
	var pinner runtime.Pinner
	defer pinner.Unpin()
	source, target := make([]uint32, numbers), make([]uint32, numbers)
	for i := range source {
		source[i] = uint32(i) * 2654435761
	}
	pinner.Pin(&source[0])
	pinner.Pin(&target[0])
	in := C.struct_prove_input{
		library: C.CString(library), ptx: C.CString(kernel), kernel: C.CString(kernelName),
		source: (*C.uint)(unsafe.Pointer(&source[0])), n: numbers, block: blockSize, steps: C.int(steps.Fd()),
	}
	if compiler := driverroot.Locate(driverRoot, compilerName, searchPath...); compiler != "" {
		in.compiler = C.CString(compiler)
	}
	if id, mig, ok := identity(uuid); ok {
		in.has_uuid = 1
		for i, b := range id {
			in.uuid[i] = C.uchar(b)
		}
		if mig {
			in.mig = 1
		}
	}
	out := C.struct_prove_output{target: (*C.uint)(unsafe.Pointer(&target[0]))}
	if C.prove(&in, &out) != 0 { // the end of the process frees the strings
		return failure(int(out.code), C.GoString(out.function), C.GoString(&out.name[0]), C.GoString(&out.text[0]))
	}
	for i, got := range target {
		if w := want(uint32(i), source[i]); got != w {
			return &Failure{Function: "compare", Kind: Wrong, Text: fmt.Sprintf("number %d of %d is %#x and should "+
				"be %#x", i, numbers, got, w)}
		}
	}
	return nil
}

// failure returns the meaning of a failed call of the C function prove.
func failure(code int, function, name, text string) *Failure {
	f := &Failure{Function: function, Code: code, Name: name, Text: text, Kind: Refused}
	switch code {
	case C.PROVE_UNLOADABLE:
		f.Kind, f.Code = NoLibrary, 0
	case C.PROVE_MISSING:
		f.Kind, f.Code, f.Text = NoLibrary, 0, "the driver's "+Library+" lacks "+text
	case C.PROVE_OTHER:
		f.Code, f.Text = 0, "CUDA shows another device than this one, or more than one"
	}
	return f
}

// identity returns the bytes of the UUID of a GPU or MIG device; false for an old MIG device name
// without a UUID.
func identity(uuid string) (id [16]byte, mig, ok bool) {
	digits, gpu := strings.CutPrefix(uuid, "GPU-")
	if !gpu {
		digits, mig = strings.CutPrefix(uuid, "MIG-")
	}
	if !gpu && !mig {
		return id, false, false
	}
	decoded, err := hex.DecodeString(strings.ReplaceAll(digits, "-", ""))
	return [16]byte(append(decoded, id[:]...)[:16]), mig, err == nil && len(decoded) == 16
}
