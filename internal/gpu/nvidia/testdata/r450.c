// A library with the functions that an R450 driver's libnvidia-ml.so.1 has and this project calls, and no others: the
// adapter must live with it. It stands for a node with three A100: GPU 0 has four NVLinks to GPU 1 and two into an
// NVSwitch; GPU 1 has MIG devices, which this driver names in the old way; GPU 2 has minor 7 and two NVLinks into the
// switch. With -DLOST=N, GPU N answers "lost" to everything. With -DFABRIC=V, it has functions of newer drivers too,
// and of the fabric's state it knows version V, and answers REFUSES to others; and it lacks what NVIDIA is about to remove. With -DVERSION="V" it says
// that it is of version V, with -DGPUS=N it has the first N GPUs only, or up to 16, with -DHANGS="F" calls about all but GPU 0 do not return
// while there is a file F, and with -DMODULE="F" it works only while the file F,
// which stands for the kernel module, has its version. With -DBINDINGS it has R575's system events: each set has three, which
// are given two and one. With -DLIES=1 or 2, lists have lengths that cannot be, and with -DMANY=N, N processes are on each GPU.

#define _DEFAULT_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int ret_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25 };

#ifndef LOST
#define LOST -1
#endif
#ifndef VERSION
#define VERSION "450.80.02"
#endif
#ifndef REFUSES
#define REFUSES ARGUMENT_VERSION_MISMATCH
#endif
#ifndef GPUS
#define GPUS 3
#endif

struct device { int gpu, gi, ci; };
enum { MOST = 16 };
#define GPU(n) {n, -1, -1}
static struct device gpus[MOST] = {GPU(0), GPU(1), GPU(2), GPU(3), GPU(4), GPU(5), GPU(6), GPU(7), GPU(8), GPU(9), GPU(10), GPU(11),
                                   GPU(12), GPU(13), GPU(14), GPU(15)};
static struct device migs[2] = {{1, 1, 0}, {1, 2, 0}};
// Of a GPU's UUID, all digits are its number.
static const char *uuid(int gpu, char to[48]) {
	strcpy(to, "GPU-________-____-____-____-____________");
	for (char *c = to; *c; c++)
		if (*c == '_') *c = "0123456789abcdef"[gpu];
	return to;
}
static const unsigned buses[MOST] = {0x07, 0x0f, 0x47, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x8b, 0x8c, 0x8d, 0x8e, 0x8f};
static const unsigned minors[MOST] = {0, 1, 7, 3, 4, 5, 6, 2, 8, 9, 10, 11, 12, 13, 14, 15};
static int event_given, cleared;

typedef struct {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char bus_id[32];
} pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
	unsigned sms, copies, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
	unsigned long long mib;
} attributes_t;
typedef struct { struct device *device; unsigned id, profile, start, size; } gi_info_t;
typedef struct { struct device *device; void *gi; unsigned id, profile; } ci_info_t;
typedef struct {
	unsigned id, p2p, slices, instances, sms, copies, decoders, encoders, jpegs, ofas;
	unsigned long long mib;
} gi_profile_t;
typedef struct { unsigned id, slices, instances, sms, copies, decoders, encoders, jpegs, ofas; } ci_profile_t;
typedef struct { unsigned id, scope; long long at, took; unsigned type, ret; unsigned long long value; } field_t;
typedef struct { struct device *device; unsigned long long type, data; unsigned gi, ci; } event_t;

#ifdef HANGS
#define WAIT(d) while ((d)->gpu > 0 && !access(HANGS, F_OK)) usleep(10000)
#else
#define WAIT(d) (void)0
#endif
#define ASK(d) do { WAIT(d); if ((d)->gpu == LOST) return GPU_IS_LOST; } while (0)

// Whether the kernel module is of the library's version.
static ret_t fits(void) {
#ifdef MODULE
	char version[64] = "";
	FILE *f = fopen(MODULE, "r");
	if (f) {
		if (!fgets(version, sizeof version, f)) version[0] = 0;
		fclose(f);
	}
	if (strcmp(version, VERSION)) return LIB_RM_VERSION_MISMATCH;
#endif
	return SUCCESS;
}

ret_t nvmlInit_v2(void) { return fits(); }
ret_t nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(ret_t ret) { return ret == GPU_IS_LOST ? "GPU is lost" : "something else"; }
ret_t nvmlSystemGetDriverVersion(char *s, unsigned n) { return snprintf(s, n, "%s", VERSION), SUCCESS; }
ret_t nvmlSystemGetCudaDriverVersion(int *v) { return *v = 11000, SUCCESS; }
ret_t nvmlDeviceGetCount_v2(unsigned *n) { return *n = GPUS, fits(); }

ret_t nvmlDeviceGetHandleByIndex_v2(unsigned i, struct device **d) {
	if (i >= GPUS) return INVALID_ARGUMENT;
	ASK(&gpus[i]);
	return *d = &gpus[i], SUCCESS;
}
ret_t nvmlDeviceGetUUID(struct device *d, char *s, unsigned n) {
	ASK(d);
	char gpu[48];
	if (d->gi < 0) snprintf(s, n, "%s", uuid(d->gpu, gpu));
	else snprintf(s, n, "MIG-%s/%d/%d", uuid(d->gpu, gpu), d->gi, d->ci);
	return SUCCESS;
}
ret_t nvmlDeviceGetName(struct device *d, char *s, unsigned n) {
	ASK(d);
	return snprintf(s, n, "A100-SXM4-40GB"), SUCCESS;
}
ret_t nvmlDeviceGetMinorNumber(struct device *d, unsigned *n) { ASK(d); return *n = minors[d->gpu], SUCCESS; }
static void fill(pci_t *p, unsigned bus) {
	memset(p, 0, sizeof *p);
	p->bus = bus;
	snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", bus);
}
ret_t nvmlDeviceGetPciInfo_v3(struct device *d, pci_t *p) { ASK(d); return fill(p, buses[d->gpu]), SUCCESS; }
ret_t nvmlDeviceGetMemoryInfo(struct device *d, memory_t *m) {
	ASK(d);
	m->total = 40960ULL << 20;
	return SUCCESS;
}
ret_t nvmlDeviceGetBrand(struct device *d, unsigned *brand) { ASK(d); return *brand = 2, SUCCESS; }
ret_t nvmlDeviceGetArchitecture(struct device *d, unsigned *a) { ASK(d); return *a = 7, SUCCESS; }
ret_t nvmlDeviceGetCudaComputeCapability(struct device *d, int *major, int *minor) {
	ASK(d);
	return *major = 8, *minor = 0, SUCCESS;
}

ret_t nvmlDeviceGetMigMode(struct device *d, unsigned *now, unsigned *pending) {
	ASK(d);
	return *now = *pending = d->gpu == 1, SUCCESS;
}
ret_t nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *n) { ASK(d); return *n = 7, SUCCESS; }
ret_t nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned i, struct device **mig) {
	ASK(d);
	if (i != 0 && i != 3) return NOT_FOUND;
	return *mig = &migs[i / 3], SUCCESS;
}
ret_t nvmlDeviceGetGpuInstanceId(struct device *d, unsigned *id) { ASK(d); return *id = d->gi, SUCCESS; }
ret_t nvmlDeviceGetComputeInstanceId(struct device *d, unsigned *id) { ASK(d); return *id = d->ci, SUCCESS; }
ret_t nvmlDeviceGetAttributes(struct device *d, attributes_t *a) {
	ASK(d);
	memset(a, 0, sizeof *a);
	a->gi_slices = 3, a->ci_slices = d->gi == 1 ? 3 : 1, a->mib = 20096;
	return SUCCESS;
}
ret_t nvmlDeviceGetGpuInstanceById(struct device *d, unsigned id, void **gi) {
	ASK(d);
	return *gi = &migs[id - 1], SUCCESS;
}
ret_t nvmlGpuInstanceGetInfo(struct device *gi, gi_info_t *info) {
	return info->device = &gpus[1], info->id = gi->gi, info->profile = 9, info->start = 4 * (gi->gi - 1), info->size = 4, SUCCESS;
}
ret_t nvmlGpuInstanceGetComputeInstanceById(struct device *gi, unsigned id, void **ci) {
	if ((int)id != gi->ci) return NOT_FOUND;
	return *ci = gi, SUCCESS;
}
ret_t nvmlComputeInstanceGetInfo(struct device *ci, ci_info_t *info) {
	return info->device = &gpus[1], info->gi = ci, info->id = ci->ci, info->profile = ci->gi == 1 ? 2 : 0, SUCCESS;
}
ret_t nvmlDeviceGetGpuInstanceProfileInfo(struct device *d, unsigned number, gi_profile_t *p) {
	static const unsigned ids[5] = {19, 14, 9, 5, 0};
	ASK(d);
	if (number >= 5) return INVALID_ARGUMENT; // newer than this driver
	return memset(p, 0, sizeof *p), p->id = ids[number], SUCCESS;
}
ret_t nvmlGpuInstanceGetComputeInstanceProfileInfo(struct device *gi, unsigned number, unsigned engines,
                                                   ci_profile_t *p) {
	(void)gi, (void)engines;
	if (number >= 5) return INVALID_ARGUMENT;
	return memset(p, 0, sizeof *p), p->id = number, SUCCESS;
}

// The remote end of a link: the bus of a GPU, 0xc4 for the switch, 0 for none.
static unsigned remote(int gpu, unsigned link) {
	static const unsigned ends[MOST][12] = {
		{0x0f, 0x0f, 0x0f, 0x0f, 0xc4, 0xc4},
		{0x07, 0x07, 0x07, 0x07},
		{0xc4, 0xc4},
	};
	return ends[gpu][link];
}
ret_t nvmlDeviceGetNvLinkState(struct device *d, unsigned link, unsigned *active) {
	ASK(d);
	if (link >= 12) return INVALID_ARGUMENT;
	return *active = remote(d->gpu, link) != 0, SUCCESS;
}
ret_t nvmlDeviceGetNvLinkVersion(struct device *d, unsigned link, unsigned *version) {
	(void)link;
	ASK(d);
	return *version = 4, SUCCESS;
}
ret_t nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *d, unsigned link, pci_t *p) {
	ASK(d);
	return fill(p, remote(d->gpu, link)), SUCCESS;
}
ret_t nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, unsigned *level) {
	ASK(a);
	ASK(b);
	return *level = a->gpu + b->gpu == 1 ? 20 : 50, SUCCESS;
}

ret_t nvmlDeviceGetSupportedEventTypes(struct device *d, unsigned long long *types) {
	ASK(d);
	return *types = 0x11f, SUCCESS;
}
ret_t nvmlEventSetCreate(void **set) { return *set = gpus, SUCCESS; }
ret_t nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, void *set) {
	(void)set;
	ASK(d);
	return types & ~0x11fULL ? NOT_SUPPORTED : SUCCESS;
}
ret_t nvmlEventSetWait_v2(void *set, event_t *e, unsigned ms) {
	(void)set;
	if (event_given++) return usleep(ms * 1000), TIMEOUT;
	static struct device alias = {1, -1, -1}; // no handle that it has given before
	e->device = &alias, e->type = 8, e->data = 43, e->gi = 2, e->ci = 0xffffffff;
	return SUCCESS;
}
ret_t nvmlEventSetFree(void *set) { return (void)set, SUCCESS; }

ret_t nvmlDeviceGetFieldValues(struct device *d, int n, field_t *f) {
	ASK(d);
	for (int i = 0; i < n; i++) f[i].ret = INVALID_ARGUMENT; // none that it knows is asked for
	return SUCCESS;
}
ret_t nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                unsigned *failed) {
	ASK(d);
	if (d->gpu == 1) return NOT_SUPPORTED;
	return *corrected = *uncorrected = *failed = 0, *pending = 1, SUCCESS;
}
ret_t nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *n) {
	ASK(d);
	return *n = type == 1 && counter == 0 ? 5 - cleared : 99, SUCCESS;
}
ret_t nvmlDeviceClearEccErrorCounts(struct device *d, int counter) {
	ASK(d);
	return counter == 0 ? (cleared = 5, SUCCESS) : INVALID_ARGUMENT;
}

ret_t nvmlDeviceGetRetiredPagesPendingStatus(struct device *d, unsigned *pending) {
	(void)pending;
	ASK(d);
	return NOT_SUPPORTED; // remapped rows have taken their place
}
ret_t nvmlDeviceGetPcieReplayCounter(struct device *d, unsigned *n) { ASK(d); return *n = 7, SUCCESS; }
ret_t nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *reasons) {
	ASK(d);
	return *reasons = 4, SUCCESS;
}

static unsigned compute_mode;
ret_t nvmlDeviceGetComputeMode(struct device *d, unsigned *mode) { ASK(d); return *mode = compute_mode, SUCCESS; }
ret_t nvmlDeviceSetComputeMode(struct device *d, unsigned mode) { ASK(d); return compute_mode = mode, SUCCESS; }

typedef struct { unsigned pid; unsigned long long memory; } process_t;
ret_t nvmlDeviceGetComputeRunningProcesses(struct device *d, unsigned *n, process_t *p) {
	ASK(d);
#ifdef MANY
	if (*n < MANY) return *n = MANY, INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < MANY; i++) p[i] = (process_t){i, 0};
	return *n = MANY, SUCCESS;
#elif LIES == 1
	return *n = 1000, SUCCESS;
#elif LIES == 2
	return *n = (1u << 31) - 1, INSUFFICIENT_SIZE;
#endif
	if (*n < 2) return *n = 2, INSUFFICIENT_SIZE;
	p[0] = (process_t){4711, 1 << 20}, p[1] = (process_t){4712, -1ull};
	return *n = 2, SUCCESS;
}

#ifdef LIES // the size of a list that it was asked for, and another one when it is given room
typedef struct { unsigned start, size; } placement_t;
ret_t nvmlDeviceGetGpuInstancePossiblePlacements(struct device *d, unsigned profile, placement_t *p, unsigned *n) {
	ASK(d);
	(void)profile;
	return *n = p ? 1000 : LIES == 1 ? 2 : -1u, SUCCESS;
}
// More instances than there is room for.
ret_t nvmlDeviceGetGpuInstances(struct device *d, unsigned profile, void **instances, unsigned *n) {
	ASK(d);
	(void)profile, (void)instances;
	return *n = -1u, SUCCESS;
}
#endif

#ifndef FABRIC
ret_t nvmlDeviceResetApplicationsClocks(struct device *d) { ASK(d); return NO_PERMISSION; }
#endif

#ifdef FABRIC
typedef struct {
	unsigned version;
	unsigned char cluster[16];
	unsigned status, clique;
	unsigned char state;
	unsigned mask;
	unsigned char summary; // version 3
} fabric_t;
ret_t nvmlDeviceGetGpuFabricInfoV(struct device *d, fabric_t *f) {
	ASK(d);
	if (f->version >> 24 != FABRIC) return REFUSES;
	f->status = 0, f->state = 3, f->clique = 7;
	static const unsigned masks[MOST] = {
		2 << 0 | 1 << 4 | 1 << 8,                   // routes are unhealthy
		// less bandwidth, in no partition, the manager of the fabric is not connected
		1 << 0 | 2 << 2 | 2 << 4 | 2 << 6 | 4 << 8 | 1 << 12 | 2 << 14,
		// all faults of bandwidth and routes, the GPU's state is invalid, not assigned to a partition
		1 << 0 | 1 << 2 | 1 << 4 | 1 << 6 | 8 << 8 | 2 << 12 | 1 << 14,
	};
	f->mask = masks[d->gpu];
	for (int i = 0; i < 16; i++) f->cluster[i] = i + 1;
	if (FABRIC >= 3) f->summary = 2;
	return SUCCESS;
}
ret_t nvmlDeviceGetUnrepairableMemoryFlag_v1(struct device *d, unsigned *flag) { ASK(d); return *flag = 1, SUCCESS; }
ret_t nvmlDeviceGetNumaNodeId(struct device *d, unsigned *node) { ASK(d); return *node = 4, SUCCESS; }
#endif

#ifdef BINDINGS
typedef struct { unsigned version; void *set; } system_set_t;
typedef struct { unsigned version; unsigned long long types; void *set; } system_register_t;
typedef struct { unsigned long long type; unsigned gpu; } system_event_t;
typedef struct { unsigned version, ms; void *set; system_event_t *events; unsigned size, given; } system_wait_t;
static struct { int registered, left; } system_set;

#define VERSION_1(r) do { if ((r)->version != (sizeof *(r) | 1 << 24)) return ARGUMENT_VERSION_MISMATCH; } while (0)

ret_t nvmlSystemEventSetCreate(system_set_t *r) {
	VERSION_1(r);
	if (system_set.left) return INVALID_ARGUMENT;
	return system_set.left = 3, r->set = &system_set, SUCCESS;
}
ret_t nvmlSystemRegisterEvents(system_register_t *r) {
	VERSION_1(r);
	if (r->set != &system_set || r->types != 3) return INVALID_ARGUMENT;
	return system_set.registered = 1, SUCCESS;
}
ret_t nvmlSystemEventSetWait(system_wait_t *r) {
	VERSION_1(r);
	if (r->set != &system_set || !system_set.registered || r->size < 2) return INVALID_ARGUMENT;
	if (!system_set.left) return usleep(r->ms * 1000), TIMEOUT;
	r->given = system_set.left > 2 ? 2 : system_set.left;
	for (unsigned i = 0; i < r->given; i++) r->events[i] = (system_event_t){1 + i % 2, 0x0700};
	return system_set.left -= r->given, SUCCESS;
}
ret_t nvmlSystemEventSetFree(system_set_t *r) {
	VERSION_1(r);
	if (r->set != &system_set) return INVALID_ARGUMENT;
	return system_set.registered = system_set.left = 0, SUCCESS;
}
#endif
