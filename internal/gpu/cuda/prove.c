#include "prove.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

// The types of CUDA's driver API, of which no header is needed to build this.
typedef int result;
typedef int device;
typedef unsigned long long pointer;
typedef struct { unsigned char bytes[16]; } uuid;

enum { jitErrorLog = 5, jitErrorLogSize = 6 };

// note writes the name of the function that is called next, so that a parent knows where this process hung or crashed.
static void note(const struct prove_input *in, const char *function) {
	if (in->steps >= 0) dprintf(in->steps, "%s\n", function);
}

static int failed(struct prove_output *out, const char *function, int code, const char *text) {
	out->function = function;
	out->code = code;
	snprintf(out->text, sizeof out->text, "%s", text ? text : "");
	return 1;
}

// describe asks the library for the name and the text of an error.
static void describe(void *library, struct prove_output *out) {
	result (*name)(result, const char **) = dlsym(library, "cuGetErrorName");
	result (*text)(result, const char **) = dlsym(library, "cuGetErrorString");
	const char *s = NULL;
	if (name && name(out->code, &s) == 0 && s) snprintf(out->name, sizeof out->name, "%s", s);
	s = NULL;
	if (!out->text[0] && text && text(out->code, &s) == 0 && s) snprintf(out->text, sizeof out->text, "%s", s);
}

// CALL calls a function of the library by its symbol, and returns from the caller when that is missing or fails.
#define CALL(function, symbol, types, arguments) \
	do { \
		result(*f) types = dlsym(library, symbol); \
		if (!f) return failed(out, function, PROVE_MISSING, symbol); \
		note(in, function); \
		result r = f arguments; \
		if (r) return failed(out, function, r, log); \
	} while (0)

// sameDevice compares the UUID of the only device that CUDA shows with the wanted one.
static int sameDevice(void *library, const struct prove_input *in, struct prove_output *out, device d) {
	const char *log = NULL;
	uuid got;
	result (*v2)(uuid *, device) = dlsym(library, "cuDeviceGetUuid_v2"); // it knows MIG devices; since CUDA 11.4
	if (in->mig && !v2) return 0;
	CALL("cuDeviceGetUuid", v2 ? "cuDeviceGetUuid_v2" : "cuDeviceGetUuid", (uuid *, device), (&got, d));
	if (in->has_uuid && memcmp(got.bytes, in->uuid, sizeof got.bytes)) return failed(out, "cuDeviceGetUuid", PROVE_OTHER, NULL);
	return 0;
}

static int compute(void *library, const struct prove_input *in, struct prove_output *out) {
	char buffer[sizeof out->text] = "";
	const char *log = NULL;
	int count = 0;
	device d;
	void *context = NULL, *module = NULL, *kernel = NULL;
	pointer source = 0, target = 0;
	size_t size = (size_t)in->n * sizeof *in->source;
	unsigned n = in->n;

	CALL("cuInit", "cuInit", (unsigned), (0));
	CALL("cuDeviceGetCount", "cuDeviceGetCount", (int *), (&count));
	if (count != 1) return failed(out, "cuDeviceGetCount", PROVE_OTHER, NULL);
	CALL("cuDeviceGet", "cuDeviceGet", (device *, int), (&d, 0));
	if (sameDevice(library, in, out, d)) return 1;
	CALL("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", (void **, device), (&context, d));
	CALL("cuCtxSetCurrent", "cuCtxSetCurrent", (void *), (context));

	int options[] = {jitErrorLog, jitErrorLogSize};
	void *values[] = {buffer, (void *)sizeof buffer};
	log = buffer;
	CALL("cuModuleLoadDataEx", "cuModuleLoadDataEx", (void **, const void *, unsigned, int *, void **), (&module, in->ptx, 2, options, values));
	log = NULL;
	CALL("cuModuleGetFunction", "cuModuleGetFunction", (void **, void *, const char *), (&kernel, module, in->kernel));
	CALL("cuMemAlloc", "cuMemAlloc_v2", (pointer *, size_t), (&source, size));
	CALL("cuMemAlloc", "cuMemAlloc_v2", (pointer *, size_t), (&target, size));
	CALL("cuMemcpyHtoD", "cuMemcpyHtoD_v2", (pointer, const void *, size_t), (source, in->source, size));
	void *arguments[] = {&source, &target, &n};
	CALL("cuLaunchKernel", "cuLaunchKernel",
		(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
		(kernel, (n + in->block - 1) / in->block, 1, 1, in->block, 1, 1, 0, NULL, arguments, NULL));
	CALL("cuCtxSynchronize", "cuCtxSynchronize", (void), ());
	CALL("cuMemcpyDtoH", "cuMemcpyDtoH_v2", (void *, pointer, size_t), (out->target, target, size));
	CALL("cuMemFree", "cuMemFree_v2", (pointer), (source));
	CALL("cuMemFree", "cuMemFree_v2", (pointer), (target));
	return 0;
}

int prove(const struct prove_input *in, struct prove_output *out) {
	note(in, "dlopen");
	// libcuda looks for its compiler by this name. One that is loaded already is found wherever it lies.
	if (in->compiler) dlopen(in->compiler, RTLD_LAZY | RTLD_GLOBAL);
	void *library = dlopen(in->library, RTLD_LAZY | RTLD_GLOBAL);
	if (!library) return failed(out, "dlopen", PROVE_UNLOADABLE, dlerror());
	if (!compute(library, in, out)) return 0;
	if (out->code > 0) describe(library, out);
	return 1;
}
