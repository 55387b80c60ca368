#include <stddef.h>

// What drv_* return beside the codes of CUDA's driver API.
enum { DRV_UNLOADABLE = -1, DRV_MISSING = -2 };

struct drv_info {
	char name[256];
	unsigned char uuid[16];
	int sms;
};

// drv_open loads libcuda and makes the first GPU's primary context current in the calling thread, which must make all other calls.
int drv_open(const char *ptx);
int drv_info(struct drv_info *out);
int drv_memory(size_t *free, size_t *total);
int drv_allocate(size_t size, unsigned long long *address);
int drv_managed(size_t size, unsigned long long *address);
int drv_free(unsigned long long address);

// drv_launch starts a kernel with two parameters of 64 bits, and drv_wait waits for all that were started.
int drv_launch(const char *kernel, unsigned blocks, unsigned threads, unsigned long long a, unsigned long long b);
int drv_wait(void);

// drv_function names the function that was called last, drv_name and drv_text say what a code means; NULL where nothing is known.
const char *drv_function(void);
const char *drv_name(int code);
const char *drv_text(int code);
