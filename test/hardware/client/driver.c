#include "driver.h"

#include <dlfcn.h>

// The functions of CUDA's driver API are found by name at run time. No header of CUDA's is needed to build this.
static void *library, *module;
static int device;
static const char *function = "dlopen", *unloadable;

// CALL calls a function of the library, and returns from the caller when that is missing or fails.
#define CALL(symbol, types, arguments) \
	do { \
		int(*f) types = (int(*) types)dlsym(library, symbol); \
		function = symbol; \
		if (!f) return DRV_MISSING; \
		int code = f arguments; \
		if (code) return code; \
	} while (0)

int drv_open(const char *ptx) {
	void *context = NULL;
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (!library) {
		unloadable = dlerror();
		return DRV_UNLOADABLE;
	}
	CALL("cuInit", (unsigned), (0));
	CALL("cuDeviceGet", (int *, int), (&device, 0));
	CALL("cuDevicePrimaryCtxRetain", (void **, int), (&context, device));
	CALL("cuCtxSetCurrent", (void *), (context));
	CALL("cuModuleLoadData", (void **, const void *), (&module, ptx));
	return 0;
}

int drv_info(struct drv_info *out) {
	enum { multiprocessors = 16 };
	CALL("cuDeviceGetName", (char *, int, int), (out->name, sizeof out->name, device));
	if (dlsym(library, "cuDeviceGetUuid_v2")) // it knows MIG devices; since CUDA 11.4
		CALL("cuDeviceGetUuid_v2", (unsigned char *, int), (out->uuid, device));
	else
		CALL("cuDeviceGetUuid", (unsigned char *, int), (out->uuid, device));
	CALL("cuDeviceGetAttribute", (int *, int, int), (&out->sms, multiprocessors, device));
	return 0;
}

int drv_memory(size_t *free, size_t *total) {
	CALL("cuMemGetInfo_v2", (size_t *, size_t *), (free, total));
	return 0;
}

int drv_allocate(size_t size, unsigned long long *address) {
	CALL("cuMemAlloc_v2", (unsigned long long *, size_t), (address, size));
	return 0;
}

int drv_managed(size_t size, unsigned long long *address) {
	enum { global = 1 };
	CALL("cuMemAllocManaged", (unsigned long long *, size_t, unsigned), (address, size, global));
	return 0;
}

int drv_free(unsigned long long address) {
	CALL("cuMemFree_v2", (unsigned long long), (address));
	return 0;
}

int drv_launch(const char *kernel, unsigned blocks, unsigned threads, unsigned long long a, unsigned long long b) {
	void *handle = NULL, *parameters[] = {&a, &b};
	CALL("cuModuleGetFunction", (void **, void *, const char *), (&handle, module, kernel));
	CALL("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
		(handle, blocks, 1, 1, threads, 1, 1, 0, NULL, parameters, NULL));
	return 0;
}

int drv_wait(void) {
	CALL("cuCtxSynchronize", (void), ());
	return 0;
}

const char *drv_function(void) { return function; }

const char *drv_name(int code) {
	if (code == DRV_UNLOADABLE || code == DRV_MISSING) return NULL;
	const char *s = NULL;
	int (*name)(int, const char **) = (int (*)(int, const char **))dlsym(library, "cuGetErrorName");
	return name && name(code, &s) == 0 ? s : NULL;
}

const char *drv_text(int code) {
	if (code == DRV_UNLOADABLE) return unloadable;
	if (code == DRV_MISSING) return "libcuda.so.1 has no such function";
	const char *s = NULL;
	int (*text)(int, const char **) = (int (*)(int, const char **))dlsym(library, "cuGetErrorString");
	return text && text(code, &s) == 0 ? s : NULL;
}
