// A library in front of NVML that keeps compute modes to itself: a test of MPS changes no setting of a GPU. It is linked with NVML's own
// library, in which all other functions are found.

enum { gpus = 64 };
static struct { void *device; int mode; } set[gpus];

int nvmlDeviceSetComputeMode(void *device, int mode) {
	for (int i = 0; i < gpus; i++) {
		if (set[i].device && set[i].device != device) continue;
		set[i].device = device;
		set[i].mode = mode;
		return 0;
	}
	return 999;
}

int nvmlDeviceGetComputeMode(void *device, int *mode) {
	*mode = 0;
	for (int i = 0; i < gpus; i++) {
		if (set[i].device == device) *mode = set[i].mode;
	}
	return 0;
}
