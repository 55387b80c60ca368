// A stand-in for the driver's libcuda: it shows the one device that CUDA_VISIBLE_DEVICES names, and computes what the kernel computes.
// The file "faults" beside the library has lines "UUID FUNCTION ACTION": the action is the number of an error, wrong, hang, crash or
// leak. The file "calls" gets a line "UUID FUNCTION PID" for each call.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int wrong;

static FILE *beside(const char *name, const char *mode) {
	Dl_info info;
	char path[4096];
	if (!dladdr((void *)beside, &info)) abort();
	snprintf(path, sizeof path, "%s", info.dli_fname);
	char *slash = strrchr(path, '/');
	snprintf(slash + 1, sizeof path - (slash + 1 - path), "%s", name);
	return fopen(path, mode);
}

static void leak(void) {
	for (;;) {
		char *p = malloc(16 << 20);
		if (!p) abort();
		memset(p, 1, 16 << 20);
		usleep(2000);
	}
}

static int called(const char *function) {
	const char *uuid = getenv("CUDA_VISIBLE_DEVICES");
	char of[128], name[128], action[32];
	FILE *f = beside("calls", "a");
	if (f) {
		fprintf(f, "%s %s %d\n", uuid, function, (int)getpid());
		fclose(f);
	}
	f = beside("faults", "r");
	while (f && fscanf(f, "%127s %127s %31s", of, name, action) == 3) {
		if (strcmp(of, uuid) || strcmp(name, function)) continue;
		fclose(f);
		if (!strcmp(action, "hang")) for (;;) pause();
		if (!strcmp(action, "crash")) *(volatile int *)8 = 0;
		if (!strcmp(action, "leak")) leak();
		if (!strcmp(action, "wrong")) return wrong = 1, 0;
		return atoi(action);
	}
	if (f) fclose(f);
	return 0;
}

#define CALLED(name) do { int r = called(name); if (r) return r; } while (0)

int cuInit(unsigned flags) { (void)flags; return called("cuInit"); }
int cuDeviceGetCount(int *n) { *n = 1; return called("cuDeviceGetCount"); }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return called("cuDeviceGet"); }

static int identify(unsigned char *bytes) {
	const char *text = getenv("CUDA_VISIBLE_DEVICES") + 4;
	for (int i = 0; i < 16 && *text;) {
		if (*text == '-') { text++; continue; }
		unsigned b;
		sscanf(text, "%2x", &b);
		bytes[i++] = b;
		text += 2;
	}
	if (wrong) bytes[0] ^= 1;
	return 0;
}

int cuDeviceGetUuid(unsigned char *bytes, int d) { (void)d; CALLED("cuDeviceGetUuid"); return identify(bytes); }
#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *bytes, int d) { (void)d; CALLED("cuDeviceGetUuid"); return identify(bytes); }
#endif
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &wrong; return called("cuDevicePrimaryCtxRetain"); }
int cuCtxSetCurrent(void *c) { (void)c; return called("cuCtxSetCurrent"); }
int cuModuleLoadDataEx(void **m, const void *ptx, unsigned n, int *options, void **values) {
	*m = &wrong;
	if (!strstr(ptx, ".entry prove")) return 218;
	int r = called("cuModuleLoadDataEx");
	if (r) for (unsigned i = 0; i < n; i++) if (options[i] == 5) strcpy(values[i], "ptxas: a line of the compiler");
	return r;
}
int cuModuleGetFunction(void **f, void *m, const char *name) { (void)m; (void)name; *f = &wrong; return called("cuModuleGetFunction"); }
int cuMemAlloc_v2(unsigned long long *p, size_t size) { *p = (unsigned long long)malloc(size); return called("cuMemAlloc"); }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { memcpy((void *)to, from, size); return called("cuMemcpyHtoD"); }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
		void **arguments, void **extra) {
	(void)f; (void)y; (void)z; (void)by; (void)bz; (void)shared; (void)stream; (void)extra;
	CALLED("cuLaunchKernel");
	unsigned *from = *(unsigned **)arguments[0], *to = *(unsigned **)arguments[1], n = *(unsigned *)arguments[2];
	for (unsigned i = 0; i < n && i < x * bx; i++) {
		unsigned v = from[i], bits;
		for (int round = 0; round < 64; round++) {
			v = v * 1664525 + 1013904223;
			v ^= v >> 16;
		}
		float f = (float)(i & 65535) * 0.5f + 1.0f;
		memcpy(&bits, &f, sizeof bits);
		to[i] = v ^ bits;
	}
	if (wrong) to[n - 1] ^= 4;
	return 0;
}
#ifndef LACKS
int cuCtxSynchronize(void) { return called("cuCtxSynchronize"); }
#endif
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { memcpy(to, (void *)from, size); return called("cuMemcpyDtoH"); }
int cuMemFree_v2(unsigned long long p) { free((void *)p); return called("cuMemFree"); }

static const struct { int code; const char *name, *text; } errors[] = {
	{2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	{100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
	{218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
	{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	{803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
	{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int cuGetErrorName(int code, const char **s) {
	for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].code == code) return *s = errors[i].name, 0;
	return 1;
}
int cuGetErrorString(int code, const char **s) {
	for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].code == code) return *s = errors[i].text, 0;
	return 1;
}
