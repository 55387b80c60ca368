// What a GPU is to compute, and what came of it.
struct prove_input {
	const char *library;  // path or name of libcuda
	const char *compiler; // path of the library that compiles PTX; NULL for the one that the loader finds
	const char *ptx, *kernel;
	const unsigned *source; // n numbers
	unsigned n, block;
	int steps; // descriptor to which the name of each function is written before its call; -1 for none
	int mig;
	int has_uuid;
	unsigned char uuid[16];
};

// Codes beside CUDA's own, which are positive.
enum { PROVE_MISSING = -1, PROVE_UNLOADABLE = -2, PROVE_OTHER = -3 };

struct prove_output {
	unsigned *target; // n numbers
	const char *function;
	int code;
	char name[64], text[512];
};

// prove has the only device that CUDA shows compute. It returns 0 if each call succeeded.
int prove(const struct prove_input *in, struct prove_output *out);
