package main

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"
	"unsafe"
)

//go:embed kernels.ptx
var kernels string

// failure is what a function of CUDA's answered.
type failure struct {
	function, name, text string
}

func (f *failure) Error() string {
	return f.function + ": " + strings.TrimSpace(f.name+" "+f.text)
}

// check makes an error of what a function returned.
func check(code C.int) error {
	if code == 0 {
		return nil
	}
	name, text := C.GoString(C.drv_name(code)), C.GoString(C.drv_text(code))
	if name == "" && text == "" {
		text = fmt.Sprintf("error %d", int(code))
	}
	return &failure{strings.TrimSuffix(C.GoString(C.drv_function()), "_v2"), name, text}
}

// open makes the context of the first GPU. The thread that calls it must make all other calls.
func open() error {
	ptx := C.CString(kernels)
	defer C.free(unsafe.Pointer(ptx))
	return check(C.drv_open(ptx))
}

type gpu struct {
	Device string `json:"device"`
	UUID   string `json:"uuid"`
	SMs    int    `json:"sms"`
}

func describe() (gpu, error) {
	var info C.struct_drv_info
	if err := check(C.drv_info(&info)); err != nil {
		return gpu{}, err
	}
	u := C.GoBytes(unsafe.Pointer(&info.uuid[0]), C.int(len(info.uuid)))
	return gpu{
		Device: C.GoString(&info.name[0]),
		UUID:   fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]),
		SMs:    int(info.sms),
	}, nil
}

type memory struct {
	Free  uint64 `json:"free"`
	Total uint64 `json:"total"`
}

func readMemory() (memory, error) {
	var free, total C.size_t
	err := check(C.drv_memory(&free, &total))
	return memory{uint64(free), uint64(total)}, err
}

// allocate has memory of the GPU, or managed memory, and returns its address.
func allocate(size uint64, managed bool) (uint64, error) {
	var address C.ulonglong
	call := func() C.int { return C.drv_allocate(C.size_t(size), &address) }
	if managed {
		call = func() C.int { return C.drv_managed(C.size_t(size), &address) }
	}
	err := check(call())
	return uint64(address), err
}

// release frees memory.
func release(addresses []uint64) error {
	var first error
	for _, a := range addresses {
		first = cmp.Or(first, check(C.drv_free(C.ulonglong(a))))
	}
	return first
}

// launch starts a kernel with two parameters.
func launch(kernel string, blocks, threads uint, a, b uint64) error {
	name := C.CString(kernel)
	defer C.free(unsafe.Pointer(name))
	return check(C.drv_launch(name, C.uint(blocks), C.uint(threads), C.ulonglong(a), C.ulonglong(b)))
}

// wait returns once all kernels that were started have ended.
func wait() error {
	return check(C.drv_wait())
}
